import gc
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from service.conversations.job.job import Conversation, Job, Mode, TurnKey
from service.conversations.job.memory import Memory
from service.conversations.job.states import TurnState
from service.conversations.record.transcript import Attempt, Charges, TokenUsage, Turn, UnfinishedTurn
from service.conversations.talk.prompt_messages import Rejected
from service.conversations.talk.prompt_record import PromptRecord
from service.scheduling.asking.prompts import JobPrompts
from tests.harness.jobs import agent, job, key
from transport.request import Message
from workers.outcome import FailureReason
from workers.requests.stored_half import StoredHalf
from workers.spec import EngineKind, WorkerSpec

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def second(number: float) -> datetime:
    return BEGIN + timedelta(seconds=number)


def pinned() -> JobPrompts:
    made = job(agent("a"), agent("b"), rounds=2)
    talks = (Conversation(id="c0", prompt="Topic 0.", rounds=2, is_pinned=True),)
    return JobPrompts(replace(made, conversations=talks))


def test_a_jobs_prompts_are_freed_by_reference_counting() -> None:
    """No cycle refers to them: the garbage collector visits old objects too rarely for prompts of megabytes."""
    prompts = JobPrompts(job(agent("a"), rounds=2))
    prompts.discussion("c0")
    freed = weakref.ref(prompts)
    gc.disable()
    try:
        del prompts
        assert freed() is None
    finally:
        gc.enable()


def test_the_first_turn_that_ends_pins_the_weights() -> None:
    """A turn cut off before has made nothing, and is asked again with the current weights."""
    prompts = pinned()
    assert prompts.check_weights(key("a"), 1) is None
    assert prompts.check_weights(key("a"), 2) is None
    assert prompts.pin_weights(key("a"), 2) is None
    assert prompts.check_weights(key("b"), 2) is None
    assert "pinned to weights 2" in (prompts.check_weights(key("b"), 3) or "")
    assert "pinned to weights 2" in (prompts.pin_weights(key("b"), 1) or "")


def attempt(began: float, reason: FailureReason | None = None) -> Attempt:
    return Attempt(
        worker="w",
        incarnation=1,
        started_at=second(began),
        finished_at=second(began + 1),
        outcome=TurnState.FAILED if reason else TurnState.COMPLETED,
        reason=reason,
        detail=None,
        text="No.",
    )


def spoken(agent_id: str, number: int, *attempts: Attempt) -> Turn:
    ended = attempts[-1].finished_at
    return Turn(
        key=key(agent_id, number),
        state=TurnState.COMPLETED,
        text=f"{agent_id}{number}",
        attempts=attempts,
        started_at=attempts[0].started_at,
        finished_at=ended,
        usage=TokenUsage(),
    )


def free(*names: str) -> Job:
    return replace(job(*(agent(name) for name in names), rounds=3), mode=Mode.FREE)


def asked_of(prompts: JobPrompts, turn: TurnKey, rejected: Sequence[Rejected] = ()) -> tuple[Message, ...]:
    spec = WorkerSpec(engine=EngineKind.EMBEDDED)
    prompts.choose_words(turn, spec.bios, BEGIN)
    request, _ = prompts.request(turn, rejected, BEGIN, spec, hears_all=not rejected)
    return request.conversation


def test_an_invalid_answer_is_asked_for_again_with_what_it_heard() -> None:
    """This holds over a restart of Roundhouse: a re-prompt adds the reason, and none of the words since."""
    prompts = JobPrompts(free("a", "b"))
    rejected = UnfinishedTurn(
        key=key("a"),
        attempts=(attempt(0, FailureReason.ENGINE_DIED), attempt(3, FailureReason.INVALID_ANSWER), attempt(9)),
        rejected=(("No.", "too short"),),
        charges=Charges(),
        queued_at=second(0),
        started_at=second(0),
    )
    prompts.hear_again([spoken("b", 0, attempt(1)), spoken("b", 1, attempt(5))], [rejected])
    asked = asked_of(prompts, key("a"), rejected.rejected)
    assert "b0" in asked[0].content
    assert not any("b1" in message.content for message in asked)


def test_half_an_answer_goes_on_with_the_words_of_its_prompt() -> None:
    """This holds over a restart too, also if the last attempt has asked for nothing."""
    prompts = JobPrompts(free("a", "b"))
    spec = WorkerSpec(engine=EngineKind.EMBEDDED)
    prompts.choose_words(key("a"), spec.bios, BEGIN)
    prompts.request(key("a"), (), BEGIN, spec, hears_all=True)
    prompts.discussion("c0").add("b", 0, "b0")
    request, record = prompts.request(key("a"), (), BEGIN, spec, hears_all=False)
    assert not any("b0" in message.content for message in request.conversation)

    again = JobPrompts(free("a", "b"))
    asked = replace(attempt(3, FailureReason.SHUTDOWN), prompt=record)
    half = StoredHalf(asked="", made_at=second(3), counted=None)
    left = UnfinishedTurn(
        key=key("a"), attempts=(asked, attempt(9, FailureReason.SHUTDOWN)), queued_at=second(0), half=half
    )
    again.hear_again([spoken("b", 0, attempt(1))], [left])
    again.choose_words(key("a"), spec.bios, BEGIN)
    request, _ = again.request(key("a"), (), BEGIN, spec, hears_all=False)
    assert not any("b0" in message.content for message in request.conversation)


def test_a_turn_that_was_asked_again_keeps_its_first_place() -> None:
    """Its agent heard what was there when the first, rejected answer was asked for."""
    prompts = JobPrompts(free("a", "b"))
    rejected, stopped = FailureReason.INVALID_ANSWER, FailureReason.SHUTDOWN
    late = spoken("a", 0, attempt(0, rejected), attempt(4, stopped), attempt(6))
    prompts.hear_again([spoken("b", 0, attempt(1)), late])
    told = [message.content for message in asked_of(prompts, key("a", 1))]
    assert [("b0" in words, "a0" in words) for words in told] == [(False, False), (False, True), (True, False)]


def test_the_memory_window_of_a_failed_turn_holds_on() -> None:
    """An heir knows of it from that turn alone; without it a summary of less would stand for more rounds."""
    prompts = JobPrompts(job(replace(agent("a"), memory=Memory(rounds=2)), rounds=9))
    cut = replace(attempt(3, FailureReason.INVALID_ANSWER), prompt=PromptRecord(from_round=4))
    prompts.hear_again([replace(spoken("a", 5, cut), state=TurnState.FAILED)])
    assert prompts.memories.shown_from(key("a", 6)) == 4
