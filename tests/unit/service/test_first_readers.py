"""Of conversations that begin alike one reads first, and the others wait (specification, "Begun from a record")."""

from msgspec.structs import replace

from service.conversations.job.job import Heritage, JobId, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import INHERITED
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    ContinueDispatch,
    ConversationEnded,
    ConversationReleased,
    JobAdmitted,
    JobCancelled,
    ModelLost,
    PromptRead,
    StartTurn,
    TurnCompleted,
    TurnCutOff,
    TurnFailed,
    TurnInterrupted,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading
from tests.harness.jobs import agent, job, key

J = JobId("j")


def core(*, shares: bool, slots: int = 4) -> SchedulingCore:
    made = SchedulingCore(POLICIES["fifo"])
    made.handle(WorkerReady(worker="w", model="m", slots=slots, shares_prefixes=shares))
    return made


def forks(count: int, rounds: int = 2) -> JobAdmitted:
    """Return a job of conversations that have inherited the first round of another."""
    heritage = Heritage(source=(JobId("s"), "c"), ends={"a": 1}, first={"a": 1}, turns=1, speakers=("a",))
    plain = job(agent("a"), conversations=count, rounds=rounds)
    heirs = tuple(replace(each, heritage=heritage, prompt="p") for each in plain.conversations)
    inherited = [key("a", 0, number) for number in range(count)]
    return JobAdmitted(
        job=replace(plain, conversations=heirs),
        ended=dict.fromkeys(inherited, (TurnState.COMPLETED, None)),
        digests=dict.fromkeys(inherited, INHERITED),
    )


def starts(actions: list[Action]) -> list[TurnKey]:
    return [action.key for action in actions if isinstance(action, StartTurn)]


def read(seconds: float) -> PromptReading:
    return PromptReading(fresh_tokens=4000, seconds=seconds, context_tokens=4010, answer_tokens=10)


def first(number: int) -> TurnKey:
    return key("a", 1, number)


def sound(scheduler: SchedulingCore) -> bool:
    return not any(scheduler.check())


def test_the_others_start_on_the_first_readers_worker_after_its_first_token() -> None:
    """Then all its slots are used, on the worker that has the prompt cached."""
    scheduler = core(shares=True)
    assert starts(scheduler.handle(forks(9))) == [first(0)]
    assert scheduler.view.readers == (first(0),)
    assert scheduler.view.queues.pending_heads(1) == [(first(1), ("c0/a",), 1)]
    assert starts(scheduler.handle(PromptRead(key=first(0), seconds=8.0))) == [first(1), first(2), first(3)]
    assert not scheduler.view.readers
    assert sound(scheduler)


def test_as_many_slots_read_as_pays() -> None:
    """Short answers run one after the other in the slot that has read; for long ones each slot reads."""
    short, long = core(shares=False), core(shares=False)
    for scheduler, seconds, more in ((short, 8.5, [first(1)]), (long, 20.0, [first(1), first(2), first(3)])):
        assert starts(scheduler.handle(forks(9))) == [first(0)]
        assert starts(scheduler.handle(PromptRead(key=first(0), seconds=8.0))) == []
        ended = starts(scheduler.handle(TurnCompleted(key=first(0), seconds=seconds, reading=read(8.0))))
        assert [each for each in ended if each.round == 1 and each != first(0)] == more
        assert sound(scheduler)
    assert starts(short.handle(TurnCompleted(key=first(1), seconds=0.5, reading=read(0.0))))[0] == first(2)


def test_the_next_one_reads_if_the_first_does_not() -> None:
    """The first is cut off, fails, or ends without output: no turn waits for ever."""
    scheduler = core(shares=True)
    scheduler.handle(forks(5, rounds=2))
    again = starts(scheduler.handle(TurnInterrupted(key=first(0))))
    assert again == [first(0), first(1)], "it is asked again, and nobody waits for that"
    scheduler.handle(TurnFailed(key=first(0), reason="engine_died"))
    assert starts(scheduler.handle(TurnCompleted(key=first(1)))) == [first(2), first(3), first(4)], "nothing was told"
    assert sound(scheduler)


def test_a_turn_that_waits_for_a_first_reader_ends_with_its_job() -> None:
    """It counts as pending, and leaves nothing behind."""
    scheduler = core(shares=True)
    scheduler.handle(forks(3))
    scheduler.handle(JobCancelled(job_id=J))
    ended = scheduler.handle(TurnCutOff(key=first(0)))
    assert {each.state for each in ended if isinstance(each, ConversationEnded)} <= {ConversationState.CANCELLED}
    assert not scheduler.view.jobs()
    assert not scheduler.view.readers
    assert starts(scheduler.handle(forks(1))) == [first(0)]


def test_all_of_them_are_released_to_the_node_that_has_their_model() -> None:
    """Each becomes ready when the one before it is released."""
    scheduler = SchedulingCore(POLICIES["fifo"])
    scheduler.handle(forks(5))
    left = list[str]()
    actions = scheduler.handle(ModelLost(model="m", is_elsewhere=True))
    while any(isinstance(action, ContinueDispatch) for action in actions):
        left += [each.conversation_id for each in actions if isinstance(each, ConversationReleased)]
        actions = scheduler.handle()
    left += [each.conversation_id for each in actions if isinstance(each, ConversationReleased)]
    assert left == ["c0", "c1", "c2", "c3", "c4"]


def test_no_turn_waits_for_another_key_or_priority() -> None:
    """A first reader of theirs may itself wait for long."""
    scheduler = core(shares=True)
    first_job, second = forks(3), forks(3)
    other = replace(second.job, id=JobId("other"), priority=5)
    keys = [each._replace(job_id=other.id) for each in second.ended]
    started = starts(
        scheduler.handle(
            first_job,
            JobAdmitted(
                job=other,
                ended=dict.fromkeys(keys, (TurnState.COMPLETED, None)),
                digests=dict.fromkeys(keys, INHERITED),
            ),
        )
    )
    assert {each.job_id for each in started} == {J, other.id}


def test_a_different_beginning_does_not_wait() -> None:
    """Another system prompt or another prompt is another beginning."""
    scheduler = core(shares=True)
    event = forks(3)
    one, two, three = event.job.conversations
    other = replace(two, cast={"a": replace(agent("a"), system="Other.")})
    scheduler.handle(replace(event, job=replace(event.job, conversations=(one, other, replace(three, prompt="q")))))
    assert len(scheduler.view.in_flight_by_job()) == 1
    assert scheduler.view.in_flight_by_job()[J] == 3
