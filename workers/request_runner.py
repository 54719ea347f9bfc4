"""Runs the requests of one worker: each is asked, recovered from where its engine failed, and ended once."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

from transport.client import EngineClient
from workers.engine.launch import takes_tools
from workers.engine.supervisor import Supervisor
from workers.health.recovery import Recovery
from workers.health.watch import Watch
from workers.loaded_weights import HeldWeights
from workers.outcome import Completed, EngineFailed, Outcome
from workers.requests.answer import Answer
from workers.requests.in_flight import Flight
from workers.requests.request import Request
from workers.requests.tool_loop import Manner, converse
from workers.spec import ANSWER_BOUNDS, WorkerSpec

logger = logging.getLogger(__name__)


class RequestRunner:
    """The request half of a worker; ``adapted`` gives the model's name and parameters for an adapter."""

    def __init__(
        self,
        spec: WorkerSpec,
        client: EngineClient,
        supervisor: Supervisor,
        watch: Watch,
        recovery: Recovery,
        adapted: Callable[[str | None], tuple[str, Mapping[str, object]]],
        weights: HeldWeights | None,
    ) -> None:
        self._spec = spec
        self._client = client
        self._supervisor = supervisor
        self._watch = watch
        self._recovery = recovery
        self._flights = recovery.flights
        self._weights = weights
        self._manner = Manner(
            adapted=adapted,
            bios=spec.bios,
            tool_limits=spec.tool_limits,
            runner=spec.tool_runner,
            repetition=spec.repetition,
            request_s=spec.timeouts.request_s,
            sends_tools=takes_tools(spec),
            now=lambda: datetime.now().astimezone(),
            cache_scope=lambda: weights.scope if weights else None,
        )

    def __repr__(self) -> str:
        """State whose requests."""
        return f"<RequestRunner {self._spec.id} {self._flights!r}>"

    def prepare(self, request: Request, answer: Answer) -> Flight:
        """Return a request with its id, not yet in flight."""
        job_name = request.job_name.encode("utf-8", "replace").decode()  # it stands in logs, incidents and answers
        return Flight(self._flights.next_id(), job_name, answer)

    async def perform(self, request: Request, answer: Answer, flight: Flight) -> Outcome:
        """Run one request to its ending; ``answer`` holds what came."""
        worker, incarnation = self._spec.id, self._supervisor.now.incarnation
        asked = replace(request, params=self._params_of(request))
        logger.debug("worker %s: request %d of %s begins", worker, flight.id, flight.job_name)
        with self._flights.admit(flight):
            try:
                with flight.scope:
                    outcome = await converse(self._client, self._manner, asked, answer)
                    self._watch.signs.learn(flight)
                    if isinstance(outcome, EngineFailed):
                        outcome = await self._recovery.recover(incarnation, flight, outcome)
                    elif isinstance(outcome, Completed):
                        self._recovery.note_answer(incarnation, flight)
                        self._supervisor.note_answer(incarnation)
                    flight.end(outcome)
            finally:
                self._watch.note_end(flight)
                if self._weights is not None:
                    self._weights.note_end(flight)
        assert flight.ending is not None  # noqa: S101 - the scope is left by an ending or by an error
        self._log_ending(flight)
        return flight.ending

    def _params_of(self, request: Request) -> dict[str, object]:
        is_bounded = not ANSWER_BOUNDS.isdisjoint(request.params)
        return {**(self._spec.params if is_bounded else self._spec.bounded_params), **request.params}

    def _log_ending(self, flight: Flight) -> None:
        told, worker = flight.ending, self._spec.id
        if not isinstance(told, EngineFailed):
            logger.debug("worker %s: request %d of %s: %s", worker, flight.id, flight.job_name, told)
            return
        name = flight.job_name
        logger.warning("worker %s: request %d of %s: %s: %s", worker, flight.id, name, told.reason, told.detail)
