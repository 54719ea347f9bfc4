"""Which turns start ahead of a turn that has no room, how often, and how long the search takes."""

from collections import deque

import pytest
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, GroupBy, JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.kv_budgets import KvNeed
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.policies.critical_path import AGEING_TURNS
from service.scheduling.core.room_keeper import LOOKED_AT, PASSES, RoomKeeper
from tests.harness.capacity import admit, asks, core_of, done, names, ready, reserved, seated, turn

# Turns ahead of one that has no room


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_turn_without_room_is_passed_a_few_times(policy: str) -> None:
    """Others use the room that is left. After a few of them nothing starts before it, whatever the policy's order."""
    core = core_of(ready(), policy=policy, jobs=[asks("base", 200), asks("large", 900), asks("next", 900)])
    for number in range(PASSES):
        assert names(core.handle(admit(asks(f"s{number}", 100)))) == [f"s{number}"]
        core.handle(done(turn(f"s{number}")))
    assert names(core.handle(admit(asks("late", 100, priority=9)))) == []
    for _ in range(2 * AGEING_TURNS):
        assert core.handle() == []
    assert names(core.handle(done(turn("base")))) == ["large"]
    assert names(core.handle(done(turn("large")))) == ["next", "late"]
    assert not core.view.capacity().passed


def test_ageing_still_starts_a_turn_that_waits_for_room() -> None:
    """Turns of higher priority always have room, one at a time: only every sixteenth start passes the oldest turn."""
    core = core_of(ready(), policy="critical_path", jobs=[asks(f"s{number}", 100) for number in range(2)])
    core.handle(admit(asks("large", 950)))
    flying, started = deque([turn("s0"), turn("s1")]), list[TurnKey]()
    while turn("large") not in started:
        fresh = seated(
            core.handle(admit(asks(f"r{len(started)}-{len(flying)}", 100, priority=1)), done(flying.popleft()))
        )
        started += fresh
        flying.extend(fresh)
        assert len(started) <= AGEING_TURNS * (PASSES + 1)


def test_deferred_turns_count_as_passing_a_turn_without_room() -> None:
    """Two conversations alternate on their worker, each deferred for it; the large turn gets its place in between."""
    core = core_of(ready("w", kv=100_000, slots=1), jobs=[asks("t", 200, conversations=2, rounds=60)])
    flying = turn("t")
    for _ in range(2):
        (flying,) = seated(core.handle(done(flying, 2000, 10, 5.0)))
    core.handle(ready("v", kv=100_000, slots=2))
    assert seated(core.handle(admit(asks("long", 95_000)))) == {turn("long"): "v"}
    assert seated(core.handle(admit(asks("large", 50_000)))) == {}
    started = 0
    while flying.job_id != "large":
        ((flying, worker),) = seated(core.handle(done(flying, 2000, 10, 5.0))).items()
        assert worker == "w"
        started += 1
        assert started <= PASSES + 4


def test_a_deferred_turn_waits_for_room_on_its_worker() -> None:
    """A slot of its worker is free without room for the turn. Others that fit do not wait for it."""
    core = core_of(ready("w", kv=5000, slots=2), jobs=[asks("t", 200, rounds=3), asks("y", 1000), asks("x", 3000)])
    assert seated(core.handle(done(turn("t"), 4000, 10, 5.0))) == {turn("x"): "w"}
    held = [each for each in core.handle(ready("v", kv=50_000, slots=2)) if isinstance(each, events.DeferTurn)]
    assert [action.key for action in held] == [turn("t", 1)]
    assert seated(core.handle(done(turn("y")))) == {}
    assert seated(core.handle(admit(asks("z", 100)))) == {turn("z"): "v"}
    assert seated(core.handle(admit(asks("s", 1500)))) == {turn("s"): "w"}
    assert core.view.queues.deferred_for(turn("t", 1)) == "w"
    assert seated(core.handle(done(turn("x")))) == {}
    assert seated(core.handle(events.DeferralOver(key=turn("t", 1)))) == {turn("t", 1): "v"}


def test_a_deferred_turn_starts_when_there_is_room() -> None:
    """It starts on the worker that it waited for."""
    core = core_of(ready("w", kv=5000, slots=2), jobs=[asks("t", 200, rounds=3), asks("x", 1500), asks("y", 1500)])
    core.handle(done(turn("t"), 4000, 10, 5.0))
    core.handle(ready("v", kv=50_000, slots=2))
    assert core.view.queues.deferred_for(turn("t", 1)) == "w"
    for name, expected in (("x", {}), ("y", {turn("t", 1): "w"})):
        assert seated(core.handle(done(turn(name)))) == expected


@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
def test_a_retry_waits_for_room_and_is_passed_only_a_few_times(group_by: GroupBy | None) -> None:
    """Its worker is gone. The other worker has room for it once no more turns may pass."""
    core = core_of(ready("w"), group_by=group_by, jobs=[asks("large", 950)])
    core.handle(ready("v"))
    core.handle(admit(asks("base", 100)))
    core.handle(events.WorkerNotReady(worker="w"))
    assert seated(core.handle(events.TurnInterrupted(key=turn("large")))) == {}
    for number in range(PASSES):
        assert names(core.handle(admit(asks(f"s{number}", 100)))) == [f"s{number}"]
        core.handle(done(turn(f"s{number}")))
    for number in range(3):
        assert names(core.handle(admit(asks(f"late{number}", 100)))) == []
        core.view.queues.ready_heads(5)
    assert names(core.handle(done(turn("base")))) == ["large"]
    assert not core.view.capacity().passed
    assert names(core.handle(done(turn("large")))) == ["late0", "late1", "late2"]
    assert core.view.queues.places_kept("m") == 0


@pytest.mark.parametrize("looks", range(3))
def test_retries_keep_their_order_while_they_wait(looks: int) -> None:
    """The first to be retried starts first, ahead of all other waiting work."""
    core = core_of(ready("w", kv=3000), jobs=[asks(name, 900) for name in ("x", "y", "z")])
    core.handle(ready("v", kv=1000), admit(asks("s", 200)), admit(asks("other", 900)))
    core.handle(events.WorkerNotReady(worker="w"))
    for name in ("x", "y", "z"):
        assert seated(core.handle(events.TurnInterrupted(key=turn(name)))) == {}
    for _ in range(looks):
        assert core.handle() == []
    order, flying = list[str](), "s"
    while len(order) < 4:
        (flying,) = names(core.handle(done(turn(flying))))
        order.append(flying)
    assert order == ["x", "y", "z", "other"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_order_survives_a_wait_for_room(policy: str) -> None:
    """Turns that the search passed over, however often, start in their original order."""
    orders: list[list[TurnKey]] = []
    for looks in (0, 50):
        core = core_of(ready(kv=1000), policy=policy, jobs=[asks("base", 100)])
        for number in range(6):
            core.handle(admit(asks(f"j{number}", 950, conversations=2, rounds=1 + number % 3)))
        for _ in range(looks):
            assert core.handle() == []
        order = [turn("base")]
        while fresh := seated(core.handle(done(order[-1]))):
            order += fresh
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 25


@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_in_free_mode_no_turn_passes_one_of_its_conversation_without_room(
    policy: str, group_by: GroupBy | None
) -> None:
    """The order of speakers decides what the others hear. Turns of other conversations use the room meanwhile."""
    core = core_of(ready(), policy=policy, group_by=group_by, jobs=[asks("base", 300)])
    assert seated(core.handle(admit(asks("f", 950, 100, 100, rounds=2, mode=Mode.FREE)))) == {}
    if group_by is None:
        assert names(core.handle(admit(asks("s", 100)))) == ["s"]
        core.handle(done(turn("s")))
    order, flying = "", deque([turn("base")])
    while flying:
        fresh = seated(core.handle(done(flying.popleft())))
        flying.extend(fresh)
        order += "".join(key.agent_id[1:] for key in fresh if key.job_id == "f")
    assert order == "012" * 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_grouped_turns_start_as_far_as_there_is_room(policy: str) -> None:
    """One signature at a time, within the budget; the next one starts when the worker is empty."""
    core = core_of(ready(), policy=policy, group_by=GroupBy.ADAPTER)
    first = seated(core.handle(admit(asks("x", 300, conversations=4, adapter="x"))))
    assert len(first) == 3
    assert seated(core.handle(admit(asks("y", 300, conversations=4, adapter="y")))) == {}
    flying, most = deque(first), 0
    while flying:
        flying.extend(seated(core.handle(done(flying.popleft()))))
        assert len({key.job_id for key in flying}) <= 1
        assert reserved(core) <= 1000
        most = max(most, sum(key.job_id == "y" for key in flying))
    assert most == 3
    assert set(core.view.of_all().values()) == {0}


def test_a_grouped_turn_without_room_uses_up_no_time_of_its_signature() -> None:
    """Only turns that start count for how long others have to wait."""
    core = core_of(ready(slots=3), group_by=GroupBy.ADAPTER)
    core.handle(admit(asks("x", 300, conversations=2, adapter="x")))
    core.handle(admit(asks("large", 600, adapter="x")), admit(asks("y", 300, adapter="y")))
    for _ in range(50):
        assert core.handle() == []
    assert names(core.handle(done(turn("x")))) == ["large"]


def test_the_room_keeper_forgets_a_dropped_turn() -> None:
    """For a turn that is cancelled or whose model is lost, the count of passes is dropped."""
    for end in (events.JobCancelled(job_id=JobId("large")), events.ModelLost(model="m")):
        core = core_of(ready(), jobs=[asks("base", 200), asks("large", 900), asks("s", 100)])
        assert core.view.capacity().passed == {turn("large"): 1}
        core.handle(end)
        assert not core.view.capacity().passed


# The cost of a decision


@pytest.mark.parametrize("mode", [Mode.ROUNDS, Mode.FREE])
@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_decision_looks_at_few_turns_without_room(
    policy: str, group_by: GroupBy | None, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns wait without room, a decision takes a millisecond at most."""
    looked: list[TurnKey] = []
    need = RoomKeeper.need

    def counting(self: RoomKeeper, key: TurnKey, agent: Agent, conversation: Conversation) -> KvNeed:
        looked.append(key)
        return need(self, key, agent, conversation)

    monkeypatch.setattr(RoomKeeper, "need", counting)
    core = core_of(ready(slots=200), policy=policy, group_by=group_by, jobs=[asks("base", 100)])
    waiting = {
        5: asks("large", *[950] * 4, conversations=50, mode=mode),
        10: asks("s", *[70] * 3, conversations=50, mode=mode),
    }
    flying, most = deque([turn("base")]), 0
    for number in range(150):
        looked.clear()
        fresh = seated(
            core.handle(
                admit(waiting.get(number, asks(f"b{number}", 100))), *([done(flying.popleft())] if number % 3 else [])
            )
        )
        flying.extend(fresh)
        assert len(set(looked)) <= LOOKED_AT + len(fresh)
        assert len(looked) <= LOOKED_AT + 1 + 2 * len(fresh)
        most = max(most, len(set(looked)) - len(fresh))
    if group_by is not None:
        assert most == 1
    elif mode is Mode.ROUNDS:
        assert most == LOOKED_AT
    else:
        assert 1 < most < LOOKED_AT  # the first of each conversation; the others behind it count as well


def test_no_estimate_is_made_where_no_worker_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without budgets the search looks at nothing and learns nothing."""
    monkeypatch.setattr(RoomKeeper, "need", lambda *_: pytest.fail("there is no budget"))
    core = core_of(ready(kv=None, slots=2), jobs=[asks("j", 300, conversations=3, rounds=2)])
    core.handle(done(turn("j"), 300, 10))
    assert core.view.capacity().conversations == 0


@pytest.mark.parametrize("policy", ["fifo", "progress"])
def test_a_search_that_starts_nothing_leaves_no_entries_in_the_order(policy: str) -> None:
    """A free conversation's first turn has no room. Another agent's turn, far ahead in the order, stands for it."""
    large = asks("large", 70, 9950, conversations=30)
    large = replace(large, agents=(large.agents[0], replace(large.agents[1], waits_for=frozenset({"a0"}))))
    core = core_of(ready(kv=10_000, slots=50), policy=policy, jobs=[asks("base", 100), large])
    core.handle(admit(asks("f", *[90] * 3, rounds=9, mode=Mode.FREE)))
    core.handle(done(turn("f", agent="a2"), 100, 10))
    core.handle(done(turn("f", 1, agent="a2"), 9900, 10))
    for number in range(30):
        core.handle(done(turn("large", conversation=number)))
    for agent in ("a1", "a0"):
        core.handle(done(turn("f", agent=agent), 100, 10))
    assert list(core.view.capacity().workers["w"].needs) == [turn("base")]
    for _ in range(1000):
        assert core.handle() == []
    assert core.view.queues.places_kept("m") < 300
    flying = deque([turn("base")])
    while flying:
        flying.extend(seated(core.handle(done(flying.popleft()))))
    assert set(core.view.of_all().values()) == {0}


def test_a_search_that_starts_nothing_leaves_no_entries_in_a_group() -> None:
    """Nor does it leave times at which turns became ready."""
    core = core_of(ready(), group_by=GroupBy.ADAPTER, jobs=[asks("base", 100), asks("large", 950, conversations=2)])
    for _ in range(2000):
        assert core.handle() == []
    assert core.view.queues.places_kept("m") < 100
