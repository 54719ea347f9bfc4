"""Capacity in tokens under any order of events: room and slots are respected, and everything ends."""

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import GroupBy, Job, JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.kv_budgets import KvUse
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.room_keeper import PASSES
from tests.harness.capacity import admit, asks, done, ready, seated, turn


class Load:
    """Random events for one core, and the conditions after each of them."""

    def __init__(self, rng: Random, policy: str, group_by: GroupBy | None, mode: Mode) -> None:
        self.rng = rng
        self.mode = mode
        self.is_fifo = policy == "fifo" and group_by is None
        self.group_by = group_by
        self.core = SchedulingCore(POLICIES[policy], group_by)
        self.slots = {"w0": ("m", 3), "w1": ("m", 6), "w2": ("n", 4)}
        self.budgets: dict[str, int | None] = {}  # budgets of workers that are ready
        self.jobs = 0
        self.flying: dict[TurnKey, str] = {}
        self.cut_off: set[TurnKey] = set()
        self.held: set[TurnKey] = set()
        self.seen: dict[TurnKey, int] = {}  # the first time that a turn got ready, and its place in that order
        self.lines: dict[tuple[str, ...], deque[TurnKey]] = {}  # ready turns that were on no slot
        self.fresh: set[TurnKey] = set()  # ready turns that were on no slot
        self.models: dict[TurnKey, str] = {}
        self.admitted: dict[JobId, Job] = {}
        self.ended: set[JobId] = set()

    def tell(self, *happened: events.Event) -> None:
        waiting, was_seen = self.passed_often() if self.is_fifo else {}, len(self.seen)
        actions = self.core.handle(*happened)
        for action in actions:
            match action:
                case events.TurnIsReady():
                    self.note_ready(action.key)
                case events.StartTurn():
                    self.note_start(action)
                case events.CutOffTurn():
                    self.cut_off.add(action.key)
                    for key in [key for key in self.fresh if key[:2] == action.key[:2]]:  # its conversation is over
                        self.forget(key)
                case events.DeferTurn():
                    self.held.add(action.key)
                case events.ConversationEnded():
                    for key in action.unspoken:
                        self.forget(key)
                case events.JobEnded():
                    self.ended.add(action.job_id)
                case _:
                    pass
        starts = {each.key: each.worker for each in actions if isinstance(each, events.StartTurn)}
        self.audit_passing(waiting, was_seen, starts)
        self.audit()

    def passed_often(self) -> dict[TurnKey, bool]:
        """Return the turns that wait for their first slot, each with whether it was passed as often as allowed."""
        passes = self.core.view.capacity().passed
        return {
            key: passes.get(key, 0) >= PASSES
            for key in self.fresh
            if key not in self.held and not self.core.view.queues.is_put_behind(key)
        }

    def audit_passing(self, waiting: dict[TurnKey, bool], was_seen: int, starts: dict[TurnKey, str]) -> None:
        """Check that a turn passed often enough has a worker reserved.

        Younger ones start on the model's other workers.
        """
        for key in (key for key, is_next in waiting.items() if is_next and key in self.fresh):
            taken = {
                worker
                for other, worker in starts.items()
                if (waiting.get(other) is False or self.seen[other] >= was_seen)
                and self.models[other] == self.models[key]
                and self.seen[other] > self.seen[key]
            }
            there = {worker for worker in self.budgets if self.slots[worker][0] == self.models[key]}
            assert not taken or taken < there

    def note_ready(self, key: TurnKey) -> None:
        if key in self.seen:
            return
        self.seen[key] = len(self.seen)
        agent = self.admitted[key.job_id].agents[int(key.agent_id[1:])]
        self.models[key] = agent.model
        line = (*key[:2], agent.model, (agent.adapter or "") if self.group_by else "")
        self.lines.setdefault(line, deque()).append(key)
        self.fresh.add(key)

    def note_start(self, action: events.StartTurn) -> None:
        key, worker = action.key, action.worker
        assert key not in self.flying
        assert worker in self.budgets
        self.flying[key] = worker
        on = [each for each, at in self.flying.items() if at == worker]
        assert len(on) <= self.slots[worker][1]
        if key in self.fresh:
            for line in self.lines.values():
                if key in line:
                    assert self.mode is not Mode.FREE or line[0] == key, "nobody overtakes in a conversation"
                    line.remove(key)
            self.fresh.remove(key)

    def forget(self, key: TurnKey) -> None:
        self.fresh.discard(key)
        for line in self.lines.values():
            if key in line:
                line.remove(key)

    def audit(self) -> None:
        rooms = self.core.view.capacity().workers
        for worker in self.slots:
            on = {key for key, at in self.flying.items() if at == worker}
            assert (rooms[worker].needs.keys() if worker in rooms else set()) == on
        for model in ("m", "n"):
            workers = [worker for worker in self.budgets if self.slots[worker][0] == model]
            if workers and not any(at in workers for at in self.flying.values()):
                ready_turns = self.core.view.queues.ready_turns(model)
                assert not {*ready_turns.queued, *ready_turns.suspects}, "somebody could start"
        assert not any(self.core.check())

    def audit_room(self, before: set[TurnKey]) -> None:
        """Check that a turn that has started had room, or is alone."""
        for worker in {at for key, at in self.flying.items() if key not in before}:
            budget, on = self.budgets[worker], [key for key, at in self.flying.items() if at == worker]
            assert budget is None or self.core.view.reserved(worker) <= budget or len(on) == 1

    def step(self) -> None:
        before = set(self.flying)
        names = ["admit", "open", "end", "end", "end", "end", "end", "close", "cancel", "hold", "correct", "correct"]
        getattr(self, self.rng.choice(names))()
        self.audit_room(before)

    def admit(self) -> None:
        needs = [self.rng.choice([70, 100, 300, 900, 4000]) for _ in range(self.rng.randint(1, 4))]
        job = asks(
            f"j{self.jobs}", *needs, conversations=self.rng.randint(1, 4), rounds=self.rng.randint(1, 3), mode=self.mode
        )
        agents = tuple(
            replace(each, model=self.rng.choice("mmn"), adapter=self.rng.choice([None, "x"])) for each in job.agents
        )
        self.jobs += 1
        self.admitted[job.id] = replace(job, agents=agents)
        self.tell(admit(self.admitted[job.id]))

    def open(self, worker: str | None = None) -> None:
        worker = worker or self.rng.choice(list(self.slots))
        model, slots = self.slots[worker]
        self.budgets[worker] = self.rng.choice([10, 400, 1000, 1000, 5000, None])
        shares = self.rng.random() < 0.5
        self.tell(replace(ready(worker, self.budgets[worker], slots=slots, model=model), shares_prefixes=shares))

    def close(self) -> None:
        """Lose a worker; usually its turns are reported as interrupted."""
        worker = self.rng.choice(list(self.slots))
        self.budgets.pop(worker, None)
        self.tell(events.WorkerNotReady(worker=worker, returns=self.rng.random() < 0.5))
        for key in [key for key, at in self.flying.items() if at == worker and self.rng.random() < 0.8]:
            self.land(key)
            self.tell(events.TurnInterrupted(key=key, trial=self.rng.choice([None, None, Trial.NEXT])))

    def end(self) -> None:
        if not self.flying:
            return
        key = self.rng.choice(list(self.flying))
        was_cut_off = self.land(key)
        answer = self.rng.choice([5, 50, 300])
        context = answer + self.rng.choice([10, 200, 900, 3000])
        seconds = self.rng.choice([None, 0.1, 5.0])
        self.tell(
            events.TurnCutOff(key=key)
            if was_cut_off
            else self.rng.choice(
                [
                    *[done(key, context, answer, seconds)] * 5,
                    done(key),
                    events.TurnRejected(key=key),
                    events.TurnInterrupted(key=key),
                    events.TurnFailed(key=key, reason="engine_rejected"),
                ]
            )
        )

    def land(self, key: TurnKey) -> bool:
        del self.flying[key]
        was_cut_off = key in self.cut_off
        self.cut_off.discard(key)
        return was_cut_off

    def cancel(self) -> None:
        if self.admitted and self.rng.random() < 0.5:
            self.tell(events.JobCancelled(job_id=self.rng.choice(list(self.admitted))))

    def hold(self) -> None:
        if self.held:
            self.tell(events.DeferralOver(key=self.rng.choice(sorted(self.held))))

    def correct(self) -> None:
        """Report the tokens of turns: some in flight, some that have ended, and some unknown."""
        known = [*self.flying, *self.seen, turn("never")]
        uses = {
            key: KvUse(prompt=self.rng.choice([10, 150, 800, 3000]), answer=self.rng.choice([0, 40, 400]))
            for key in self.rng.sample(known, k=min(4, len(known)))
        }
        seen = uses.keys() & self.flying.keys()
        self.tell(events.KvUseTold(uses=uses))
        for key in seen:
            need = self.core.view.capacity().workers[self.flying[key]].needs[key]
            assert 0 <= need.shared <= need.prompt == uses[key].prompt
            assert need.answer >= uses[key].answer

    def finish(self) -> None:
        """Let every admitted turn end, and check that nothing of them is kept."""
        for worker in self.slots:
            self.open(worker)
        while self.flying:
            before = set(self.flying)
            key = self.rng.choice(list(self.flying))
            self.land(key)
            self.tell(done(key, 50, 10, 1.0))
            self.audit_room(before - {key})
        assert self.ended == set(self.admitted)
        assert set(self.core.view.of_all().values()) == {0}
        left = self.core.view.capacity()
        assert (left.passed, left.conversations, left.agents) == ({}, 0, 0)
        assert not any(room.needs for room in left.workers.values())
        assert (left.idle, left.kept, left.pressed) == ({}, frozenset(), frozenset())


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=25)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(1, 80))
def test_under_any_events_turns_have_room_and_end(
    policy: str, group_by: GroupBy | None, mode: Mode, rng: Random, steps: int
) -> None:
    """No worker is used beyond its room or its slots, no turn waits without reason, and every turn ends."""
    load = Load(rng, policy, group_by, mode)
    load.open("w0")
    for _ in range(steps):
        load.step()
    load.finish()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_budget_that_is_never_reached_changes_no_action(policy: str, group_by: GroupBy | None, mode: Mode) -> None:
    """The actions equal those with workers bounded by slots."""
    count = 0
    for seed in range(12):
        told = []
        for budget in (None, 10**9):
            load = Load(Random(seed), policy, group_by, mode)  # noqa: S311
            told.append(recorded(load, budget))
        assert told[0] == told[1]
        count += sum(len(seated(actions)) for actions in told[0])
    assert count > 500


def recorded(load: Load, budget: int | None) -> list[list[events.Action]]:
    """Return all answers of a core with workers of one budget."""
    told: list[list[events.Action]] = []
    handle = load.core.handle

    def recording(*happened: events.Event) -> list[events.Action]:
        bounded = [
            replace(event, kv_tokens=budget) if isinstance(event, events.WorkerReady) else event for event in happened
        ]
        told.append(handle(*bounded))
        return told[-1]

    load.core.handle = recording  # type: ignore[method-assign]
    load.audit_room = lambda before: None  # type: ignore[method-assign]  # noqa: ARG005
    for worker in load.slots:
        load.open(worker)
    for _ in range(60):
        load.step()
    load.finish()
    return told
