"""A prompt is read beforehand where a slot is idle, and no turn ever waits for that."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from service.conversations.charges import Charges
from service.conversations.job import Agent, Job, JobId, Mode, TurnKey
from service.scheduling.core.ahead.prewarms import LEAST_TOKENS
from service.scheduling.core.ahead.yields import LEAST, ReadFor, Yields
from service.scheduling.core.blame.blame import Blame, SourceDistrusted, Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    EndPreWarm,
    JobAdmitted,
    JobCancelled,
    Paused,
    PreWarm,
    PreWarmEnded,
    StartTurn,
    TurnCompleted,
    TurnFailed,
    TurnInterrupted,
    Unpaused,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading
from tests.harness.jobs import agent, job, key

_NONE = Charges()
CHAIN = (agent("a"), agent("b", waits=["a"]), agent("c", waits=["b"]))


def long(*agents: Agent, tokens: int = LEAST_TOKENS, rounds: int = 1, name: str = "j", conversations: int = 1) -> Job:
    """Return a job whose conversations begin with prompts of so many tokens; its agents' own words count beside."""
    made = job(*agents, rounds=rounds, name=name, conversations=conversations)
    talks = tuple(replace(each, prompt="x" * 2 * tokens) for each in made.conversations)
    return replace(made, conversations=talks, agents=tuple(replace(each, system="") for each in made.agents))


def ready(worker: str = "w", slots: int = 2, *, reads_ahead: bool = True, model: str = "m") -> WorkerReady:
    return WorkerReady(worker=worker, model=model, slots=slots, reads_ahead=reads_ahead)


def core_of(*jobs: Job, slots: int = 2, reads_ahead: bool = True) -> tuple[SchedulingCore, list[Action]]:
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(ready(slots=slots, reads_ahead=reads_ahead))
    return core, [action for each in jobs for action in core.handle(JobAdmitted(job=each))]


def ahead(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, PreWarm | EndPreWarm)]


def begins(*keys: TurnKey, worker: str = "w") -> list[Action]:
    return [PreWarm(key=each, worker=worker) for each in keys]


def completed(turn: TurnKey, *, fresh: int = 0, cached: int = 0, said: int = 0) -> TurnCompleted:
    reading = PromptReading(fresh_tokens=fresh, seconds=1.0, context_tokens=fresh + cached + said, answer_tokens=said)
    return TurnCompleted(key=turn, seconds=1.0, reading=reading)


def ended(turn: TurnKey, *, cached: int = 0, fresh: int = 0) -> PreWarmEnded:
    return PreWarmEnded(key=turn, worker="w", cached_tokens=cached, fresh_tokens=fresh)


def test_the_next_speaker_s_prompt_is_read_while_the_first_one_speaks() -> None:
    """The second waits for the first alone, the third for one that does not speak yet."""
    core, actions = core_of(long(*CHAIN))
    assert actions[-2:] == [StartTurn(key=key("a"), worker="w"), PreWarm(key=key("b"), worker="w")]
    assert ahead(core.handle(ended(key("b"), fresh=LEAST_TOKENS))) == [], "once"
    assert ahead(core.handle(completed(key("a")))) == begins(key("c"))


def test_nothing_is_read_beforehand_without_leave() -> None:
    """The default."""
    core, actions = core_of(long(*CHAIN), reads_ahead=False)
    assert ahead([*actions, *core.handle(completed(key("a")))]) == []


@pytest.mark.parametrize(("tokens", "is_read"), [(LEAST_TOKENS, True), (LEAST_TOKENS - 1, False)])
def test_a_short_prompt_is_not_worth_it(tokens: int, *, is_read: bool) -> None:
    """Asking costs as much."""
    _, actions = core_of(long(*CHAIN, tokens=tokens))
    assert bool(ahead(actions)) is is_read


def test_a_full_worker_reads_nothing_beforehand() -> None:
    """Slots are for turns."""
    _, actions = core_of(long(*CHAIN), slots=1)
    assert ahead(actions) == []


def test_any_ready_turn_ends_it_at_once_and_goes_first() -> None:
    """The end comes before the start, so no slot has two owners."""
    core, _ = core_of(long(*CHAIN))
    actions = core.handle(JobAdmitted(job=job(agent("x"), name="other")))
    assert actions[0] == EndPreWarm(key=key("b"))
    assert actions[-1] == StartTurn(key=key("x", name="other"), worker="w")
    assert ahead(actions) == [EndPreWarm(key=key("b"))]


def test_the_newest_reading_ends_first() -> None:
    """The older one has read more."""
    core, actions = core_of(long(*CHAIN, conversations=2), slots=4)
    assert ahead(actions) == begins(key("b"), key("b", 0, 1))
    assert ahead(core.handle(JobAdmitted(job=job(agent("x"), name="o1")))) == [EndPreWarm(key=key("b", 0, 1))]
    assert ahead(core.handle(JobAdmitted(job=job(agent("x"), name="o2")))) == [EndPreWarm(key=key("b"))]


def test_a_turn_takes_over_what_is_read_for_it() -> None:
    """It starts where its prompt is read, and that goes on as its own."""
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(ready("v", 2), ready("w", 3))
    actions = core.handle(JobAdmitted(job=long(*CHAIN)))
    where = next(action.worker for action in actions if isinstance(action, PreWarm))
    other = {"v": "w", "w": "v"}[where]
    core.handle(ready(other, 9))  # it has more free slots
    actions = core.handle(completed(key("a")))
    assert StartTurn(key=key("b"), worker=where) in actions
    assert not any(isinstance(action, EndPreWarm) for action in actions)


def test_a_turn_that_starts_elsewhere_ends_what_is_read_for_it() -> None:
    """Its own worker takes only a suspect now."""
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(ready("w", 2))
    core.handle(JobAdmitted(job=long(*CHAIN)))
    assert ahead(core.handle(WorkerNotReady(worker="w"))) == [EndPreWarm(key=key("b"))]
    core.handle(ready("v", 2))
    assert StartTurn(key=key("b"), worker="v") in core.handle(completed(key("a")))


def test_a_turn_whose_slot_another_takes_at_that_moment_starts_elsewhere() -> None:
    """Two turns of higher priority come as the one before it ends."""
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(ready("w", 2), JobAdmitted(job=long(*CHAIN)))
    assert core.handle(ready("v", 1)) == []
    urgent = job(agent("x"), name="urgent", priority=9, conversations=2)
    actions = core.handle(JobAdmitted(job=urgent), completed(key("a")))
    assert StartTurn(key=key("b"), worker="v") in actions
    assert ahead(actions)[0] == EndPreWarm(key=key("b"))


def test_a_prompt_is_read_once_at_most() -> None:
    """Though it was cut off, and another of those that its turn waits for has ended since."""
    core, actions = core_of(long(agent("a"), agent("d"), agent("b", waits=["a", "d"])), slots=3)
    assert ahead(actions) == begins(key("b"))
    assert ahead(core.handle(JobAdmitted(job=job(agent("x"), name="other")))) == [EndPreWarm(key=key("b"))]
    assert ahead(core.handle(completed(key("x", name="other")), completed(key("d")))) == []


def test_no_more_is_read_than_slots_are_idle() -> None:
    """Two next speakers and one slot, whatever is told next."""
    core, actions = core_of(long(*CHAIN, conversations=2), slots=3)
    assert ahead(actions) == begins(key("b"))
    assert core.handle() == []


def test_nothing_is_read_during_a_pause() -> None:
    """It is made up for after it."""
    core, _ = core_of(long(*CHAIN), slots=1)
    core.handle(Paused())
    assert core.handle(ready(slots=2)) == []
    assert core.handle(Unpaused()) == begins(key("b"))


def test_a_round_that_nears_its_end_is_followed_by_the_next_one_s_first_speakers() -> None:
    """They have heard enough since they spoke; what the last one says ends what is known."""
    core, _ = core_of(long(agent("a"), agent("b"), agent("c"), rounds=2, tokens=1), slots=3)
    assert ahead(core.handle(completed(key("a"), said=LEAST_TOKENS))) == []
    assert ahead(core.handle(completed(key("c"), said=LEAST_TOKENS))) == begins(key("c", 1)), "a hears b first"


def test_what_an_engine_has_forgotten_is_read_again() -> None:
    """A worker of two slots remembers the two agents that it has read for last."""
    core, _ = core_of(long(*CHAIN, rounds=2, tokens=2 * LEAST_TOKENS))
    for turn in (key("a"), key("b")):
        core.handle(completed(turn, fresh=2 * LEAST_TOKENS, said=10))
    actions = core.handle(completed(key("c"), fresh=2 * LEAST_TOKENS, said=10))
    assert ahead(actions) == begins(key("b", 1)), "a, b and c were read since"


def test_an_agent_whose_prompt_is_there_is_not_read_for() -> None:
    """Three slots remember all three."""
    core, _ = core_of(long(*CHAIN, rounds=2, tokens=2 * LEAST_TOKENS), slots=3)
    turns = (key("a"), key("b"), key("c"))
    *_, last = (core.handle(completed(turn, fresh=2 * LEAST_TOKENS, said=10)) for turn in turns)
    assert ahead(last) == []


def test_in_free_mode_there_is_nothing_to_read() -> None:
    """An agent waits for its own words alone."""
    made = replace(long(agent("a"), agent("b"), rounds=3), mode=Mode.FREE)
    core, actions = core_of(made, slots=4)
    assert ahead([*actions, *core.handle(completed(key("a"), said=1000))]) == []


def test_a_pause_ends_all_and_its_end_begins_nothing_twice() -> None:
    """Nothing is started before a stop, or while the store is away."""
    core, _ = core_of(long(*CHAIN))
    assert core.handle(Paused()) == [EndPreWarm(key=key("b"))]
    assert core.handle(Unpaused()) == []


@pytest.mark.parametrize("event", [JobCancelled(job_id=JobId("j")), TurnFailed(key=key("a"), reason="internal")])
def test_nothing_is_read_for_a_conversation_that_ends(event: JobCancelled | TurnFailed) -> None:
    """However it does."""
    core, _ = core_of(long(*CHAIN))
    actions = core.handle(event)
    if isinstance(event, JobCancelled):
        actions += core.handle(TurnFailed(key=key("a"), reason="internal"))
    assert ahead(actions) == [EndPreWarm(key=key("b"))]


def test_a_worker_that_tries_a_suspect_reads_nothing() -> None:
    """The next death is to have one cause."""
    core, _ = core_of(long(*CHAIN), slots=3)
    actions = core.handle(TurnInterrupted(key=key("a"), trial=Trial.NEXT))
    assert ahead(actions) == [EndPreWarm(key=key("b"))]
    assert StartTurn(key=key("a"), worker="w", is_suspect=True) in actions


def test_nothing_is_read_for_turns_that_are_to_be_tried() -> None:
    """A prompt of theirs may bring an engine down as well."""
    core, _ = core_of(long(*CHAIN), slots=1)
    core.handle(SourceDistrusted(source=JobId("j")))
    assert ahead(core.handle(ready(slots=2))) == []


def test_what_a_turn_found_is_told_from_what_was_read_in_vain() -> None:
    """It would have had 100 tokens without, and has found 900 of those 1,000 that were read."""
    core, _ = core_of(long(*CHAIN))
    core.handle(ended(key("b"), cached=100, fresh=1000))
    core.handle(completed(key("a")))
    core.handle(completed(key("b"), cached=1000, fresh=50))
    assert core.view.read_ahead == {("m", ReadFor.USED): 900, ("m", ReadFor.WASTED): 100}
    core.handle(ended(key("c"), fresh=300))
    core.handle(TurnFailed(key=key("c"), reason="internal"))
    assert core.view.read_ahead == {("m", ReadFor.USED): 900, ("m", ReadFor.WASTED): 400}


def test_what_is_told_after_a_conversation_has_ended_was_in_vain() -> None:
    """Its end comes by another way than that of the job."""
    core, _ = core_of(long(*CHAIN))
    core.handle(TurnFailed(key=key("a"), reason="internal"))
    core.handle(ended(key("b"), fresh=300))
    assert core.view.read_ahead == {("m", ReadFor.USED): 0, ("m", ReadFor.WASTED): 300}


def test_an_engine_that_keeps_nothing_is_asked_for_no_more() -> None:
    """Some models read a prompt anew whenever it has changed; the next engine is tried again."""
    yields = Yields()
    for number in range(LEAST):
        assert yields.pays("w"), number
        yields.add("m", "w", read=1000, used=700)
    assert not yields.pays("w")
    yields.forget("w")
    assert yields.pays("w")


def test_a_turn_beside_what_is_read_is_not_charged_with_the_engine_s_death() -> None:
    """It was not alone."""
    for is_read in (False, True):
        blame = Blame()
        blame.start(key("a"), "m", "w", 1)
        if is_read:
            blame.note_company("m", "w", 1)
        verdict = blame.die(key("a"), charges=_NONE, is_outside=False, at=0.0)
        assert (verdict.charges.deaths, verdict.trial) == (0 if is_read else 1, Trial.FIRST)
