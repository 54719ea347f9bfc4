"""Engines that break, on a virtual clock: the real core, blame and supervision, and engines that die on request.

Used by the property that innocent turns end whatever an engine does, and that turns that bring it down are convicted.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from msgspec.structs import replace

from service.conversations.job.job import Job, TurnKey
from service.conversations.record.transcript import Charges
from service.scheduling.core import events
from service.scheduling.core.blame import Blame, DeathExplained, DeathUnexplained, Finding, SuspectsCleared
from service.scheduling.core.deaths import refuse
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.worker_findings import LoadLimits
from workers.outcome import EngineFailed, FailureReason
from workers.policy import lifecycle
from workers.policy.lifecycle_state import Lifecycle, LifecycleLimits
from workers.policy.restart import RestartPolicy
from workers.states import Hold, WorkerState

LOAD_S = 2.0  # from a process to its readiness
STALL_S = 10.0  # from a hang to the kill
CANARY_S = 5.0  # between two canaries of an engine that refuses
END_S = 200_000.0


@dataclass
class Engine:
    """One incarnation, as a way of breaking sees it."""

    number: int
    started_at: float
    begun: int = 0  # requests so far
    on_it: list[TurnKey] = field(default_factory=list)
    is_hung: bool = False


@dataclass(frozen=True)
class Break:
    """What happens to an engine: it dies after this many seconds, hangs at once, or refuses the request."""

    dies_after: float | None = None
    hangs: bool = False
    refuses: bool = False
    by_killer: bool = False


Way = Callable[[Engine, TurnKey, float, Random], Break | None]


@dataclass
class Outcome:
    """How a run went."""

    failed: dict[TurnKey, str] = field(default_factory=dict)
    completed: dict[TurnKey, float] = field(default_factory=dict)
    starts: int = 0
    own_deaths: int = 0  # deaths of engines by no turn's fault
    killer_deaths: int = 0
    gave_up: int = 0
    ended_at: float = 0.0


class Worker:
    """A supervised engine: the real decisions, an invented process."""

    def __init__(self, world: "World", name: str, restart: RestartPolicy) -> None:
        self.world = world
        self.name = name
        self.limits = LifecycleLimits(start_s=600, stop_grace_s=10, restart=restart)
        self.now = Lifecycle()
        self.engine: Engine | None = None
        self.slots = world.slots

    def post(self, event: lifecycle.Event) -> None:
        before = self.now
        self.now, actions = lifecycle.decide(before, event, self.world.now, self.limits)
        for action in actions:
            match action:
                case lifecycle.SpawnEngine():
                    self.engine = Engine(number=action.incarnation, started_at=self.world.now)
                    self.world.outcome.starts += 1
                    self.world.after(LOAD_S, partial(self.post, lifecycle.EngineReady(incarnation=action.incarnation)))
                case lifecycle.StartTimer():
                    self.world.after(action.after_s, partial(self.post, lifecycle.TimerElapsed(timer=action.timer)))
                case lifecycle.KillEngine():
                    self.world.after(0.0, partial(self.gone, self.now.incarnation))
                case lifecycle.KeepIncident():
                    pass  # not read here
                case lifecycle.EndRequests():
                    self.world.end_requests(self, action)
                case lifecycle.TerminateEngine():
                    raise AssertionError("nobody stops an engine here")
        if self.now.state is not before.state:
            self.world.outcome.gave_up += self.now.state is WorkerState.FAILED
            self.tell()

    def gone(self, number: int, *, is_outside: bool = False) -> None:
        if self.engine is None or self.engine.number != number:
            return
        event = lifecycle.EngineGone(
            incarnation=number, because="it died", jitter=0.0, is_outside=is_outside,
            is_deferred=bool(self.engine.on_it),
        )  # fmt: skip
        self.post(event)

    def tell(self) -> None:
        if self.now.state is WorkerState.READY:
            self.world.post(events.WorkerReady(worker=self.name, model="m", slots=self.slots))
        else:
            returns = self.now.state in {WorkerState.STARTING, WorkerState.BACKOFF, WorkerState.STOPPING}
            self.world.post(events.WorkerNotReady(worker=self.name, returns=returns))


INNOCENTS = "innocents"
LOOK_S = 0.5


class World:
    """Jobs on workers of model ``m``; with ``is_keyed`` the innocent ones have one key and all others another."""

    def __init__(
        self, jobs: Sequence[Job], way: Way, *, seed: int, workers: int = 2, slots: int = 4, is_keyed: bool = False
    ) -> None:
        self.now, self.slots, self.way = 0.0, slots, way
        self.chance = Random(seed)  # noqa: S311
        self.outcome = Outcome()
        if is_keyed:
            jobs = [replace(each, owner="alice" if each.name == INNOCENTS else "mallory") for each in jobs]
        owners = {each.id: each.owner for each in jobs}
        self.core = SchedulingCore(
            POLICIES["critical_path"], shares={"alice": 1.0, "mallory": 1.0} if is_keyed else None
        )
        self.blame, self.limits = Blame(owners.__getitem__), LoadLimits()
        self.charges: dict[TurnKey, Charges] = {}
        self.at: dict[TurnKey, tuple[Worker, Engine]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._left = sum(len(job.agents) * talk.rounds for job in jobs for talk in job.conversations)
        self.workers = [Worker(self, f"w{number}", RestartPolicy()) for number in range(workers)]
        for job in jobs:
            self.post(events.JobAdmitted(job=job))
        for worker in self.workers:
            worker.post(lifecycle.StartRequested())
        if is_keyed:
            self.after(LOOK_S, self._look)

    def _look(self) -> None:
        """Read the time, as the scheduler does."""
        self.post(events.TimeTold(at=self.now), *self._find(self.blame.expire(self.now)))
        self.after(LOOK_S, self._look)

    def run(self) -> Outcome:
        while self._due and self._left > 0:
            self.now, _, happen = heapq.heappop(self._due)
            assert self.now < END_S, "the jobs do not end"
            happen()
        assert self._left == 0, "nothing is left to happen, and turns wait"
        self.outcome.ended_at = self.now
        return self.outcome

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), happen))

    def kill_from_outside(self) -> None:
        for worker in self.workers:
            if worker.engine is not None and worker.now.state is WorkerState.READY:
                worker.gone(worker.engine.number, is_outside=True)

    def post(self, *happened: events.Event) -> None:
        for action in self.core.handle(*happened):
            if isinstance(action, events.StartTurn):
                self._begin(action.key, self._worker(action.worker))
            elif isinstance(action, events.DeferTurn):
                self.after(action.seconds, partial(self.post, events.DeferralOver(key=action.key)))
            elif isinstance(action, events.ConversationEnded):
                self._left -= len(action.unspoken)
                self.blame.forget(action.unspoken)
            elif isinstance(action, events.CutOffTurn):
                self.after(0.0, partial(self._cut_off, action.key))
            elif isinstance(action, events.JobEnded):
                self.blame.forget_job(action.job_id)

    def end_requests(self, worker: Worker, action: lifecycle.EndRequests) -> None:
        engine = worker.engine
        assert engine is not None
        self.after(0.0, lambda: self._all_died(list(engine.on_it), is_outside=action.is_outside))

    def _begin(self, key: TurnKey, worker: Worker) -> None:
        engine = worker.engine
        assert engine is not None
        assert worker.now.state is WorkerState.READY
        self.blame.start(key, "m", worker.name, engine.number)
        engine.begun += 1
        engine.on_it.append(key)
        self.at[key] = worker, engine
        broken = self.way(engine, key, self.now, self.chance)
        takes = self.chance.uniform(0.5, 2.0)
        number = engine.number
        if broken is not None and broken.refuses:
            self.after(0.1, lambda: self._refused(key, worker, engine))
            return
        if broken is not None and broken.hangs and not engine.is_hung:
            engine.is_hung = True
            self.after(STALL_S, lambda: self._break(worker, number))
        elif broken is not None and broken.dies_after is not None:
            self.after(broken.dies_after, lambda: self._dies(worker, number, by_killer=broken.by_killer))
        if not (broken is not None and broken.by_killer):
            self.after(takes, lambda: self._completes(key, engine))

    def _dies(self, worker: Worker, number: int, *, by_killer: bool) -> None:
        is_up = worker.now.state in {WorkerState.READY, WorkerState.DRAINING}
        if worker.engine is None or worker.engine.number != number or not is_up:
            return
        if by_killer:
            self.outcome.killer_deaths += 1
        else:
            self.outcome.own_deaths += 1
        worker.gone(number)

    def _break(self, worker: Worker, number: int) -> None:
        if worker.engine is not None and worker.engine.number == number:
            self.outcome.own_deaths += 1
            reason = FailureReason.STALLED_PREFILL
            has_suspects = bool(worker.engine.on_it)
            worker.post(lifecycle.EngineBroken(incarnation=number, reason=reason, because="", is_deferred=has_suspects))

    def _completes(self, key: TurnKey, engine: Engine) -> None:
        if self.at.get(key, (None, None))[1] is not engine:
            return
        if engine.is_hung:
            return
        worker = self.at[key][0]
        in_flight = len(engine.on_it)
        self._leave(key)
        findings = self.blame.acquit(key, self.charges.pop(key, Charges()), self.now)
        worker.post(lifecycle.EngineAnswered(incarnation=engine.number))
        raised = self.limits.learn_from_end(worker.name, in_flight, self.slots)
        if raised is not None:
            self._limit(worker, raised)
        self.outcome.completed[key] = self.now
        self._left -= 1
        self.post(events.TurnCompleted(key=key, seconds=1.0), *self._find(findings))

    def _all_died(self, keys: Sequence[TurnKey], *, is_outside: bool) -> None:
        happened: list[events.Event] = []
        for key in keys:
            self._leave(key)
            verdict = self.blame.die(key, self.charges.get(key, Charges()), is_outside=is_outside, at=self.now)
            self.charges[key] = verdict.charges
            if verdict.is_convicted:
                self.outcome.failed[key] = "poisoned"
                self._left -= 1
                happened.append(events.TurnFailed(key=key, reason="poisoned"))
            else:
                happened.append(events.TurnInterrupted(key=key, trial=verdict.trial))
            happened += self._find(verdict.findings)
        self.post(*happened)

    def _refused(self, key: TurnKey, worker: Worker, engine: Engine) -> None:
        if self.at.get(key, (None, None))[1] is not engine:
            return
        canary = self.way(Engine(number=engine.number, started_at=engine.started_at), CANARY, self.now, self.chance)
        is_ill = canary is not None and canary.refuses
        if is_ill:
            worker.post(lifecycle.DrainRequested(because="it refuses", hold=Hold.REFUSING))
            self.after(CANARY_S, lambda: self._ask_again(worker))
        self._leave(key)
        self.blame.end_unproven(key, is_cut_off=False, at=self.now)
        failed = EngineFailed(
            reason=FailureReason.ENGINE_REJECTED, detail="500", brought_down=False, is_proved=not is_ill
        )
        charges, reason = refuse(
            self.charges.get(key, Charges()),
            failed,
            self.now,
            asked_s=1.0,
            refusal_s=300.0,
            record=self.blame.refusals("m"),
        )
        self.charges[key] = charges
        if reason is not None:
            self.outcome.failed[key] = reason
            self._left -= 1
            self.post(events.TurnFailed(key=key, reason=reason))
        else:
            self.after(1.0, lambda: self.post(events.TurnInterrupted(key=key)))

    def _ask_again(self, worker: Worker) -> None:
        canary = self.way(Engine(number=0, started_at=0.0), CANARY, self.now, self.chance)
        if canary is not None and canary.refuses:
            self.after(CANARY_S, lambda: self._ask_again(worker))
        else:
            worker.post(lifecycle.ResumeRequested(because="it answers", hold=Hold.REFUSING))

    def _cut_off(self, key: TurnKey) -> None:
        if key in self.at:
            self._leave(key)
            self.blame.end_unproven(key, is_cut_off=True, at=self.now)
            self.blame.forget([key])
            self._left -= 1
            self.post(events.TurnCutOff(key=key))

    def _leave(self, key: TurnKey) -> None:
        _, engine = self.at.pop(key)
        engine.on_it.remove(key)

    def _find(self, findings: Sequence[Finding]) -> list[events.Suspicion]:
        found: list[events.Suspicion] = []
        for finding in findings:
            if isinstance(finding, DeathExplained):
                self._worker(finding.worker).post(lifecycle.FailureExplained())
                continue
            if isinstance(finding, DeathUnexplained):
                worker = self._worker(finding.worker)
                worker.post(lifecycle.FailureCounted())
                if finding.company > 1:
                    self._limit(worker, self.limits.lower(worker.name, finding.company))
                continue
            if isinstance(finding, SuspectsCleared):
                for key in finding.keys:
                    self.charges.pop(key, None)
            found.append(finding)
        return found

    def _worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def _limit(self, worker: Worker, slots: int) -> None:
        worker.slots = slots
        if worker.now.state is WorkerState.READY:
            worker.tell()


CANARY = TurnKey("", "", "canary", 0)  # type: ignore[arg-type]
