"""Whether a refusal is the request's fault: the evidence for it, and each way in which evidence may be missing."""

from collections.abc import Callable, Sequence

import pytest

from transport.errors import EngineError, EngineRejected, RequestAtFault, UnreadableFrame
from workers.requests import asking
from workers.requests.asking import ask_fairly

MISALIGNED = "the frobnicator of this request is misaligned"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again without a pause."""
    monkeypatch.setattr(asking, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(asking, "UNREADABLE_PAUSES_S", (0.0,))


def refused(words: str = MISALIGNED, status: int = 500) -> EngineError:
    return EngineRejected(status, "server_error", words)


async def asked(
    answers: Sequence[EngineError | None],
    *,
    serves: Callable[[], bool] = lambda: True,
    begun: bool = False,
    is_others: bool = False,
    is_passed_on: bool = False,
) -> tuple[EngineError | None, int]:
    """Return how asking fails after these answers, the last one repeated, and how often the engine was asked."""
    count = 0

    async def ask() -> None:
        nonlocal count
        count += 1
        answer = answers[min(count, len(answers)) - 1]
        if answer is not None:
            raise answer

    async def excuse() -> bool:
        return serves()

    error = await ask_fairly(ask, lambda: begun, excuse, is_others=is_others, is_passed_on=is_passed_on)
    return error, count


async def test_the_same_refusal_each_time_is_the_requests_own_fault() -> None:
    """The client gets the engine's words unchanged, with a 4xx status."""
    error, count = await asked([refused()])
    assert isinstance(error, RequestAtFault)
    assert (count, error.status, str(error)) == (4, 400, f"500 server_error: {MISALIGNED}")


@pytest.mark.parametrize(
    ("answers", "count"), [([refused(), None], 2), ([refused(), refused(), refused(), None], 4)], ids=["once", "thrice"]
)
async def test_a_passing_refusal_is_no_fault(answers: list[EngineError | None], count: int) -> None:
    """The engine was in trouble for a moment."""
    assert await asked(answers) == (None, count)


@pytest.mark.parametrize(
    "other",
    [refused("another thing is wrong here"), refused(status=503), EngineError("gone")],
    ids=["words", "503", "x"],
)
async def test_changing_refusals_prove_nothing(other: EngineError) -> None:
    """They are judged as any refusal."""
    error, count = await asked([refused(), other])
    assert (error, count) == (other, 2)


async def test_an_engine_that_also_refuses_its_canary_is_not_excused() -> None:
    """The engine is ill."""
    error, count = await asked([refused()], serves=lambda: False)
    assert (isinstance(error, RequestAtFault), count) == (False, 1)


@pytest.mark.parametrize(
    "words",
    [
        "no", "Internal Server Error", "no body", "CUDA error: out of memory", "llama runner process has terminated",
        "all slots are in use", "queue is full", "model not loaded", "The server is restarting", "database is locked",
        "Compute error.", "unexpected EOF", "NaN in logits", "bad allocation", "litellm.InternalServerError: x y",
        "An error occurred during generation", "no healthy replicas", "socket hang up", "tensor x has another shape",
    ],
)  # fmt: skip
async def test_an_engines_own_trouble_is_no_fault_of_a_request(words: str) -> None:
    """The request is asked again, for minutes."""
    error, count = await asked([refused(words)])
    assert (isinstance(error, RequestAtFault), count) == (False, 1)


@pytest.mark.parametrize("status", [400, 429, 502, 503, 504])
async def test_only_a_500_is_examined(status: int) -> None:
    """Other statuses say whose fault they are."""
    error, count = await asked([refused(status=status)])
    assert (isinstance(error, RequestAtFault), count) == (False, 1)


async def test_a_stream_that_a_client_has_seen_is_not_asked_for_again() -> None:
    """The client would get two answers, one after the other."""
    for failure in (refused(), UnreadableFrame("{]")):
        assert await asked([failure], begun=True, is_passed_on=True) == (failure, 1)
    error, count = await asked([UnreadableFrame("{]")], begun=True)
    assert (isinstance(error, RequestAtFault), count) == (True, 2)


async def test_an_unreadable_attached_server_is_reported_at_once() -> None:
    """It gives every request the same answer, and is never replaced."""
    error, count = await asked([UnreadableFrame("{]")], serves=lambda: False, is_others=True)
    assert (isinstance(error, RequestAtFault), count) == (True, 2)
    error, count = await asked([UnreadableFrame("{]")], serves=lambda: False)
    assert (isinstance(error, RequestAtFault), count) == (False, 1)
