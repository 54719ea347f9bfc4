"""A KV cache that requests share, and that runs out of room: through growing answers, long prompts, and errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conftest import SpecFactory
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import submit, working
from transport.client import EngineClient
from transport.dialects.llama_server import LLAMA_SERVER
from transport.errors import EngineRejected, MalformedFrame
from transport.events import TextDelta
from transport.request import ChatRequest, Message, ToolCall
from workers import EngineKind, RequestResult, RequestState, Worker, WorkerSpec, WorkerTimeouts
from workers.health.kv_watch import KvWatch
from workers.outcome import CancelReason, FailureReason
from workers.policy.kv_share import GROW, LEAST
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer
from workers.requests.kv_pool import KvPool, most_tokens
from workers.requests.request import RequestId
from workers.spec import Capacity
from workers.tools.runner import PythonTools

FULL = json.dumps({"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}})
LOOK = {"type": "function", "function": {"name": "look"}}
CALL = {"tool_calls": [{"id": "x", "name": "look", "arguments": "{}"}]}


@pytest.fixture
def real_spec(tiny_model: Path, free_ports: Callable[[int], int]) -> Callable[[int, int], WorkerSpec]:
    """Make a specification of llama.cpp with a pool of this many tokens, and this bound for one request."""

    def make(pool: int, context: int) -> WorkerSpec:
        return WorkerSpec(
            engine=EngineKind.EMBEDDED,
            model=str(tiny_model),
            port=free_ports(1),
            slots=4,
            context=context,
            capacity=Capacity.TOKENS,
            kv_tokens=pool,
            args={"threads": 1},
            params={"ignore_eos": True},
            repetition=RepetitionLimits(lines=None),
            timeouts=WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S),
        )

    return make


def sharing(spec: WorkerSpec, pool: int, context: int = 1000, **fields: object) -> WorkerSpec:
    return replace(spec, capacity=Capacity.TOKENS, kv_tokens=pool, context=context, **fields)  # type: ignore[arg-type]


def pool_of(worker: Worker) -> KvPool:
    assert worker.requests.pool is not None
    return worker.requests.pool


def answer_of(worker: Worker, request: int) -> Answer:
    return worker._submitted[RequestId(request)].running.answer


def holdings(worker: Worker) -> dict[int, int]:
    """Return what each request in flight holds, in tokens."""
    return {running.id: running.answer.held_tokens for running in worker.in_flight}


async def results(worker: Worker, *requests: int) -> list[RequestResult]:
    found = [await worker.get_result(number) for number in requests]
    return [each for each in found if isinstance(each, RequestResult)]


def endings(found: list[RequestResult]) -> list[object]:
    return [each.reason or each.state for each in found]


# The real llama.cpp


@pytest.mark.system
async def test_the_youngest_ends_before_the_pool_is_full_and_the_oldest_completes(
    real_spec: Callable[[int, int], WorkerSpec],
) -> None:
    """Answers grow until there is no room: the engine itself never reports this, and ends no more requests than needed.

    The pool is large enough that both write for seconds: the youngest has begun, and the oldest cannot end before it.
    """
    async with working(real_spec(3000, 2900)) as worker:
        oldest, youngest = [await submit(worker, text, max_tokens=2700) for text in ("Go.", "y" * 100)]
        ended = endings(await results(worker, youngest, oldest))
        assert ended == [CancelReason.CACHE_FULL, RequestState.COMPLETED]
        assert pool_of(worker).given_way == 1
        assert not any("Context size has been exceeded" in line.text for line in worker.supervisor.log.tail(500))
        assert pool_of(worker).used == 0


async def test_a_prompt_is_counted_as_the_engine_counts_it_later(real_spec: Callable[[int, int], WorkerSpec]) -> None:
    """To the token, with template and tools: no prompt is sent that cannot fit."""
    async with working(replace(real_spec(2000, 2000), tools=[LOOK])) as worker:
        for prompt in ("x" * 600, "ä€😀" * 60, "two words " * 60):
            request = await submit(worker, prompt, max_tokens=3)
            answer = answer_of(worker, request)
            (found,) = await results(worker, request)
            assert found.state is RequestState.COMPLETED
            assert answer.counted_tokens == found.usage.prompt_tokens
            assert answer.told_prompt_tokens == found.usage.prompt_tokens


async def test_an_uncounted_prompt_is_held_at_its_upper_bound(
    real_spec: Callable[[int, int], WorkerSpec],
) -> None:
    """One token a byte, until the engine reports its count."""
    async with working(real_spec(4000, 1000)) as worker:
        request = await submit(worker, "ä€😀", max_tokens=3)
        answer = answer_of(worker, request)
        (found,) = await results(worker, request)
        assert answer.counted_tokens is None
        assert found.usage.prompt_tokens is not None
        assert 0 < found.usage.prompt_tokens <= answer.prompt_tokens <= 1000
        assert answer.told_prompt_tokens == found.usage.prompt_tokens


async def test_a_prompt_longer_than_allowed_is_refused_before_it_is_sent(
    real_spec: Callable[[int, int], WorkerSpec],
) -> None:
    """With one token less it goes to the engine, which gives the same figure."""
    async with working(real_spec(1600, 800)) as worker:
        first = await submit(worker, "x" * 300, max_tokens=1)
        counted = answer_of(worker, first)
        await results(worker, first)
        assert counted.counted_tokens is not None
        room = 800 - counted.counted_tokens
        lengths = [await submit(worker, "x" * (300 + more), max_tokens=1) for more in (room - 1, room)]
        found = [answer_of(worker, number) for number in lengths]
        fits, refused = await results(worker, *lengths)
        assert (found[0].counted_tokens, fits.state) == (799, RequestState.COMPLETED)
        assert (refused.reason, refused.usage.prompt_tokens) == (FailureReason.CONTEXT_OVERFLOW, None)
        assert refused.detail == "the prompt has 800 tokens, and one request may hold 800"
        assert found[1].held_tokens == 0


@pytest.mark.parametrize(
    ("chat", "least"),
    [
        ({"content": "word " * 10}, 50),
        ({"content": "工" * 50}, 150),
        ({"content": "", "calls": (ToolCall(id="x", name="n" * 64, arguments="工" * 20),)}, 64 + 60),
        ({"content": "", "tools": ({"function": {"name": "look", "description": "工" * 100}},)}, 300),
    ],
)
def test_a_token_is_at_least_one_byte_everywhere(chat: dict[str, Any], least: int) -> None:
    """In words, calls and tools; a tool described in Chinese has three bytes for each character."""
    tools = chat.pop("tools", ())
    request = ChatRequest(model="m", messages=(Message(role="user", **chat),), tools=tools)
    assert least <= most_tokens(request) <= least + 200


def test_a_generation_that_was_not_admitted_yet_holds_no_tokens() -> None:
    """The hold of the one before ended with it; a later generation gets its own."""
    answer = Answer(lambda: 0.0)
    for _ in range(2):
        generation = answer.begin_generation(RepetitionLimits(), 0)
        assert (answer.held_tokens, answer.told_prompt_tokens) == (0, None)
        answer.prompt_tokens, answer.counted_tokens = 90, 80
        generation.receive(TextDelta("a"))
        assert (answer.held_tokens, answer.told_prompt_tokens) == (91, 80)


# Engines that hold still


class Held:
    """A worker's engine whose answers wait for a file that each prompt names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = {"hold": r"file=([^ ]+) ", "record": str(folder / "record")}

    def prompt(self, name: str, size: int = 0) -> str:
        """Return a prompt that waits for ``name``, with at least this many bytes."""
        return f"file={self.folder / name} ".ljust(size, "x")

    def release(self, name: str) -> None:
        (self.folder / name).touch()

    def sent(self) -> int:
        """Count the requests to the engine, including counts of prompts."""
        record = self.folder / "record"
        return len(record.read_text().splitlines()) if record.exists() else 0


@pytest.mark.parametrize(("size", "ended"), [(100, []), (900, [3]), (1800, [3, 2])])
async def test_a_request_whose_tools_took_long_is_older_than_later_requests(
    scripted_spec: SpecFactory, tmp_path: Path, size: int, ended: list[int]
) -> None:
    """It holds no tokens while its tools run, and takes its room back from the youngest; it goes on, and ends."""
    held, goes_on = Held(tmp_path), anyio.Event()
    script = [CALL, {"content": "late"}, {"content": "later"}, {"content": "Done."}]
    (tmp_path / "script").write_text(json.dumps(script))
    engine = scripted_spec(slots=4, script=str(tmp_path / "script"), **held.flags)

    async def look() -> str:
        await goes_on.wait()
        return "r" * size

    spec = sharing(engine, 3600, 3000, tools=[LOOK], tool_runner=PythonTools({"look": look}))
    async with working(spec) as worker:
        oldest = await submit(worker)
        await wait_until(lambda: holdings(worker) == {oldest: 0}, "its tool runs")
        younger = [await submit(worker, held.prompt(name, 200)) for name in ("second", "third")]
        await wait_until(lambda: held.sent() == 3 and all(holdings(worker)[each] for each in younger), "both are read")
        pool_of(worker).size = sum(holdings(worker).values()) + 1000
        goes_on.set()
        (first,) = await results(worker, oldest)
        assert (first.state, first.text) == (RequestState.COMPLETED, "Done.")
        for name in ("second", "third"):
            held.release(name)
        expected = [CancelReason.CACHE_FULL if each in ended else RequestState.COMPLETED for each in younger]
        assert endings(await results(worker, *younger)) == expected


async def test_a_request_without_room_is_not_sent_to_the_engine(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """The youngest ends before its engine has read any of it, so this counts as no preemption."""
    held = Held(tmp_path)
    spec = sharing(scripted_spec(slots=4, counts=600, props_slots=4, **held.flags), 1300)
    async with working(spec) as worker:
        oldest = await submit(worker, held.prompt("first", 400))
        await wait_until(lambda: held.sent() == 2, "it was counted, and sent")
        second = await submit(worker, held.prompt("second", 400))
        await wait_until(lambda: held.sent() == 4, "so was the next")
        assert holdings(worker) == {oldest: 600, second: 600}
        assert (pool_of(worker).used, worker.kv.budget) == (1200, 1300)
        third = await submit(worker, held.prompt("third", 400))
        assert endings(await results(worker, third)) == [CancelReason.CACHE_FULL]
        assert held.sent() == 5
        assert pool_of(worker).given_way == 0
        for name in ("first", "second"):
            held.release(name)
        assert endings(await results(worker, oldest, second)) == [RequestState.COMPLETED] * 2


async def test_a_request_without_room_waits_until_another_ends(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """Otherwise its turn would be back in a millisecond.

    It holds no tokens meanwhile, and starts at once when there is room.
    """
    held = Held(tmp_path)
    async with working(sharing(scripted_spec(slots=4, counts=600, **held.flags), 1300)) as worker:
        requests = [await submit(worker, held.prompt(name, 400)) for name in ("first", "second")]
        await wait_until(lambda: held.sent() == 4, "both are counted and sent")
        late = await submit(worker, held.prompt("late", 400))
        await wait_until(lambda: answer_of(worker, late).counted_tokens, "one more is counted")
        assert holdings(worker)[late] == 0
        for name in ("first", "second", "late"):
            held.release(name)
        assert endings(await results(worker, *requests, late)) == [RequestState.COMPLETED] * 3
        assert held.sent() == 6


async def test_only_prompts_with_more_bytes_than_a_slots_part_are_counted(
    scripted_spec: SpecFactory, tmp_path: Path
) -> None:
    """A token is at least one byte, and no template adds more than is allowed for it."""
    held = Held(tmp_path)
    async with working(sharing(scripted_spec(slots=4, counts=5, **held.flags), 4000)) as worker:
        short = await submit(worker, held.prompt("go", 500))
        await wait_until(lambda: held.sent() == 1, "it was sent at once")
        at_most = holdings(worker)[short]
        assert 500 < at_most <= 1000
        longest = await submit(worker, held.prompt("go", 500 + 1000 - at_most))
        await wait_until(lambda: held.sent() == 2, "so was this")
        assert holdings(worker)[longest] == 1000
        longer = await submit(worker, held.prompt("go", 500 + 1001 - at_most))
        await wait_until(lambda: held.sent() == 4, "this was counted before")
        assert holdings(worker)[longer] == 5
        held.release("go")
        assert endings(await results(worker, short, longest, longer)) == [RequestState.COMPLETED] * 3


@pytest.mark.parametrize("status", [404, 500, 200])
async def test_an_engine_that_cannot_count_gets_the_request_all_the_same(
    scripted_spec: SpecFactory, status: int
) -> None:
    """Whatever its fault; the hold never exceeds the bound of one request."""
    async with working(sharing(scripted_spec(count_status=status), 2000, 1000)) as worker:
        request = await submit(worker, "x" * 5000)
        answer = answer_of(worker, request)
        (found,) = await results(worker, request)
        assert found.state is RequestState.COMPLETED
        assert answer.counted_tokens is None
        assert answer.prompt_tokens == 1000


@pytest.mark.parametrize("capacity", Capacity)
@pytest.mark.parametrize("flags", [{"reject": 500, "reject_body": FULL}, {"error_after": 2}])
async def test_a_full_pool_is_no_requests_fault(
    scripted_spec: SpecFactory, flags: dict[str, int | str], capacity: Capacity
) -> None:
    """Before the answer or within it. Without our own accounts the engine would refuse."""
    engine = scripted_spec(error_message="Context size has been exceeded.", reject_first=1, **flags)
    spec = replace(engine, capacity=capacity, kv_tokens=8192 if capacity is Capacity.TOKENS else None)
    async with working(spec) as worker:
        (found,) = await results(worker, await submit(worker))
        if capacity is Capacity.TOKENS:
            assert (found.state, found.reason) == (RequestState.CANCELLED, CancelReason.CACHE_FULL)
        else:
            assert (found.state, found.reason) == (RequestState.FAILED, FailureReason.ENGINE_REJECTED)
            assert "Context size has been exceeded." in str(found.detail)
        has_begun = "error_after" in flags
        assert found.text == ("word0 word1 " if has_begun else "")
        assert worker.now.incarnation == 1
        if capacity is Capacity.TOKENS:
            assert pool_of(worker).given_way == has_begun


async def test_another_error_is_not_mistaken_for_a_full_pool(scripted_spec: SpecFactory) -> None:
    """The request is refused, and the engine is checked."""
    async with working(sharing(scripted_spec(reject=500, reject_first=1), 2000)) as worker:
        (found,) = await results(worker, await submit(worker))
        assert (found.state, found.reason) == (RequestState.FAILED, FailureReason.ENGINE_REJECTED)


# The budget


async def test_the_budget_shrinks_when_requests_had_to_give_way(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """By a fifth for each look with such a request, down to a floor; it grows slowly again without one."""
    held, told = Held(tmp_path), list[int | None]()
    async with working(sharing(scripted_spec(slots=4, **held.flags), 1000)) as worker:
        pool, watch = pool_of(worker), worker.kv
        client = EngineClient(worker.endpoint, LLAMA_SERVER)
        watch = KvWatch(worker.spec, client, pool, lambda: True, lambda: told.append(watch.budget))
        await watch.begin_incarnation()
        assert watch.budget == 1000
        for lent in (800, 640, 512):
            pool.given_way += 3
            await watch.refresh()
            assert watch.budget == lent
        for _ in range(4):
            await watch.refresh()
        assert watch.budget == 512
        await watch.refresh()
        assert watch.budget == int(1000 * (0.512 + 5 * GROW))
        assert told == [800, 640, 512, 562]
        for _ in range(9):
            pool.given_way += 1
            await watch.refresh()
        assert watch.budget == 1000 * LEAST
        request = await submit(worker, held.prompt("go", 100))
        await wait_until(lambda: pool.used, "it holds something")
        await watch.refresh()
        assert watch.cache == pool.cache
        assert watch.cache is not None
        assert (watch.cache.tokens, watch.cache.used) == (1000, holdings(worker)[request])
        held.release("go")
        await results(worker, request)
        await watch.begin_incarnation()
        assert watch.budget == 1000


async def test_a_request_that_ended_for_another_reason_has_not_given_way(
    scripted_spec: SpecFactory, tmp_path: Path
) -> None:
    """Its caller cancelled it."""
    held = Held(tmp_path)
    async with working(sharing(scripted_spec(tokens=100_000, interval=0.01), 900_000, 900_000)) as worker:
        request = await submit(worker, held.prompt("never"))
        await wait_until(lambda: answer_of(worker, request).output_tokens, "it has begun")
        assert await worker.cancel(request)
        assert endings(await results(worker, request)) == [CancelReason.CONVERSATION_ENDED]
        assert pool_of(worker).given_way == 0


# The wire


@pytest.mark.parametrize(
    ("flags", "error"),
    [({}, EngineRejected), ({"count_status": 500}, EngineRejected), ({"count_status": 200}, MalformedFrame)],
)
async def test_an_engine_that_does_not_count_gives_its_reason(
    scripted_spec: SpecFactory, flags: dict[str, int], error: type[Exception]
) -> None:
    """As for any other request."""
    request = ChatRequest(model="m", messages=(Message(role="user", content="Go."),), params={"max_tokens": 9})
    async with working(scripted_spec(**flags)) as worker:
        with pytest.raises(error):
            await EngineClient(worker.endpoint, LLAMA_SERVER).count_prompt(LLAMA_SERVER.encode(request))
