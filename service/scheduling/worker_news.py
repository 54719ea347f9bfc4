"""News of workers and models, and findings about engines' deaths, as events for the core."""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from service.scheduling.core import events
from service.scheduling.core.blame import Blame, Finding
from service.scheduling.work import SchedulerStore
from service.scheduling.worker_findings import KvUses, WorkerFindings
from workers.fleet import Fleet, served_models
from workers.spec import EngineKind
from workers.states import WorkerState
from workers.supervised import SupervisedWorker


class PostEvents(Protocol):
    """Hands the events of one moment to the core."""

    def __call__(self, *events_: events.Event) -> None:
        """Handle the events at once."""


class WorkerNews:
    """Reports the fleet's changes to the core; it shares the blame with the scheduler, in the same task."""

    def __init__(
        self,
        fleet: Fleet,
        store: SchedulerStore,
        blame: Blame,
        findings: WorkerFindings,
        uses: KvUses,
        post: PostEvents,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._blame = blame
        self._findings = findings
        self._uses = uses
        self._post = post

    def __repr__(self) -> str:
        return f"<WorkerNews of {self._fleet!r}>"

    def tell_all(self) -> None:
        """Report every worker to a new core."""
        for worker in self._fleet:
            self.note_worker_state(worker)

    def note_worker_state(self, worker: SupervisedWorker) -> None:
        """Report the new state of a worker."""
        spec = worker.spec
        if worker.now.state is WorkerState.READY:
            self._post(
                events.WorkerReady(
                    worker=spec.id,
                    model=spec.name,
                    slots=worker.slots.total,
                    read_s=worker.requests.latency.pace.prefill_s,
                    kv_tokens=worker.kv.budget,
                    kv_block=worker.kv.block,
                    most_answer=spec.most_answer,
                    shares_prefixes=spec.engine is EngineKind.VLLM,
                    has_slot_caches=spec.engine in {EngineKind.LLAMA_SERVER, EngineKind.EMBEDDED},
                )
            )
            return
        self._post(events.WorkerNotReady(worker=spec.id, returns=worker.now.is_coming))
        if worker.now.is_down:
            self._take_findings(self._blame.note_gone(spec.name, spec.id, worker.now.incarnation, time.monotonic()))
        self._note_model(spec.name)

    def look(self) -> None:
        """Report changes that only time brings: trust in keys, and the KV use of turns in flight."""
        now = time.monotonic()
        self._take_findings(self._blame.expire(now))
        if self._blame.trust.distrusted:
            self._post(events.TimeTold(at=now))
        if uses := self._uses.read_changes():
            self._post(events.KvUseTold(uses=uses))

    def look_elsewhere(self) -> None:
        """Report all models again after other nodes have come or gone."""
        for model in self._fleet.models():
            self._note_model(model)

    def lost_elsewhere(self, models: Sequence[str]) -> list[events.ModelLost]:
        """Return the models that only other nodes have."""
        here, is_elsewhere = served_models(self._fleet), self._store.is_elsewhere
        missing = (model for model in models if model not in here and is_elsewhere(model))
        return [events.ModelLost(model=model, is_elsewhere=True) for model in missing]

    def _take_findings(self, findings: Iterable[Finding]) -> None:
        """Apply findings to their workers, and report suspicions to the core."""
        if findings := list(findings):
            self._post(*self._findings.apply_findings(findings))

    def _note_model(self, model: str) -> None:
        is_here, is_elsewhere = model in served_models(self._fleet), self._store.is_elsewhere(model)
        if self._fleet.is_lost(model) if is_here else is_elsewhere:
            self._post(events.ModelLost(model=model, is_elsewhere=is_elsewhere))
        else:
            self._post(events.ModelRegained(model=model))
