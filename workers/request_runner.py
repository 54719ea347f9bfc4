"""Runs the requests of one worker: asks each, recovers it if its engine fails, and ends it once."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from msgspec.structs import replace

from transport.client import EngineClient
from transport.errors import EngineError
from transport.request import ChatRequest, Message, Thought
from workers.engine.launch import takes_tools
from workers.engine.supervisor import Supervisor
from workers.health.latency_record import LatencyRecord
from workers.health.recovery import Recovery
from workers.health.watch import HealthWatch
from workers.loaded import LoadedWeights
from workers.outcome import Completed, EngineFailed, Outcome
from workers.policy.continuation import Continuation
from workers.requests.answer import Answer
from workers.requests.answer_begins import AnswerBegins
from workers.requests.constraints import TRIAL_S, TRIAL_WORDS, EngineConstraints
from workers.requests.generation import Generation
from workers.requests.halves import HalfAnswer
from workers.requests.in_flight import InFlightRequest, InFlightRequests
from workers.requests.kv_pool import KvPool
from workers.requests.prompts.bios import CONTEXT, seed_words
from workers.requests.relay import Relay, relay
from workers.requests.request import Request
from workers.requests.tool_loop import RequestSettings, converse
from workers.spec import EngineKind, WorkerSpec

KNOWN: Final = 100  # prompt-shaping parameter sets whose thought is remembered
OWNER_BYTES: Final = 8
MODEL_FILES: Final = frozenset({"chat-template-file", "control-vector", "lora", "lora-scaled", "mmproj", "model-draft"})
logger = logging.getLogger(__name__)


class EngineThoughts:
    """The thoughts before answers of one worker; a failed query is repeated by the next request.

    Each incarnation is asked again, since its template may differ.
    """

    def __init__(self, client: EngineClient, incarnation: Callable[[], int]) -> None:
        self._client = client
        self._incarnation = incarnation
        self._known: dict[tuple[int, bytes], Thought] = {}

    def __repr__(self) -> str:
        return f"<EngineThoughts known={len(self._known)}>"

    async def before_answer(self, params: Mapping[str, object]) -> Thought:
        """Return the thought before the answer to a request with these parameters."""
        query = self._client.dialect.thoughts
        if query is None:
            return Thought.NONE
        shaping = {name: params[name] for name in query.params if name in params}
        key = self._incarnation(), msgspec.json.encode(shaping, order="sorted")
        if key not in self._known:
            try:
                thought = await self._client.read_thought(shaping)
            except EngineError:
                return Thought.NONE
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = thought
        return self._known[key]


class RequestRunner:
    """The request half of a worker; ``adapted`` gives the model's name and parameters for an adapter."""

    def __init__(
        self,
        spec: WorkerSpec,
        client: EngineClient,
        supervisor: Supervisor,
        watch: HealthWatch,
        recovery: Recovery,
        adapted: Callable[[str | None], tuple[str, Mapping[str, object]]],
        weights: LoadedWeights | None,
    ) -> None:
        self._spec = spec
        self._client = client
        self._supervisor = supervisor
        self._watch = watch
        self._recovery = recovery
        self._in_flight = recovery.in_flight
        self._weights = weights
        self._source_of = -1  # the incarnation of ``source``
        self.source = ""  # names the model of the newest engine that was asked
        self.latency = LatencyRecord(watch.observations, spec.max_tokens_per_step)
        self.constraints = EngineConstraints(client.dialect, self._ask_trial, time.monotonic)
        self.pool = _pool_of(spec, client, self._in_flight) if spec.shares_pool else None
        thoughts = EngineThoughts(client, lambda: supervisor.now.incarnation)
        self.begins = AnswerBegins(spec.id, client, lambda: supervisor.now.incarnation)
        self._settings = RequestSettings(
            begins=self.begins,
            version=lambda: weights.version if weights else None,
            adapted=adapted,
            bios=seed_words(spec.bios),
            context=CONTEXT if spec.bios.context is None else spec.bios.context,
            constrain=client.dialect.constrain,
            thought=thoughts.before_answer,
            tool_limits=spec.tool_limits,
            runner=spec.tool_runner,
            repetition=spec.repetition,
            request_s=spec.timeouts.request_s,
            sends_tools=takes_tools(spec),
            forces_calls=spec.engine is EngineKind.EMBEDDED,  # its library ignores tool_choice
            now=lambda: datetime.now().astimezone(),
            cache_scope=partial(_cache_scope, spec.engine, weights),
            is_others=not spec.owns_engine,
            excuse=recovery.is_serving_others,
            admit=self.pool.admit if self.pool else None,
            admit_prompt=self.pool.admit_prompt if self.pool else None,
        )

    def __repr__(self) -> str:
        return f"<RequestRunner {self._spec.id} {self._in_flight!r}>"

    async def try_server(self, *, has_constraint: bool, has_tools: bool) -> None:
        """Find out how a server handles constraints and tools, if that is not known."""
        incarnation = self._supervisor.now.incarnation
        await self.constraints.settle(incarnation, has_constraint=has_constraint, has_tools=has_tools)

    async def _ask_trial(self, params: Mapping[str, object], tools: tuple[Mapping[str, Any], ...]) -> Generation | None:
        model, own = self._settings.adapted(None)
        said = (Message(role="user", content=TRIAL_WORDS),)
        generation = Generation(time.monotonic)
        with anyio.move_on_after(TRIAL_S) as limit:
            try:
                asked = ChatRequest(model=model, messages=said, params={**params, **own}, tools=tools)
                await self._client.stream(asked, generation)
            except EngineError:
                return None
        return None if limit.cancelled_caught else generation

    def may_go_on_with(self, half: HalfAnswer, continuation: Continuation) -> bool:
        """Whether the present engine may go on with half an answer: the same model with the same weights wrote it."""
        incarnation = self._supervisor.now.incarnation
        if incarnation != self._source_of:
            self._source_of, self.source = incarnation, _source(self._spec)
        return half.may_go_on(continuation, self._weights.version if self._weights else None, self.source)

    def prepare(self, job_name: str, answer: Answer) -> InFlightRequest:
        """Return a request with its id, not yet in flight."""
        shown = job_name.encode("utf-8", "replace").decode()  # the name appears in logs, incidents and answers
        return InFlightRequest(self._in_flight.next_id(), shown, answer)

    async def perform(self, request: Request | Relay, answer: Answer, own: InFlightRequest | None = None) -> Outcome:
        """Run one request to its end; the caller holds a lease of this worker meanwhile.

        ``answer`` holds the parts received so far, at any moment and after any end.
        """
        running = own or self.prepare(request.job_name, answer)
        worker, incarnation, began_at = self._spec.id, self._supervisor.now.incarnation, time.monotonic()
        logger.debug("worker %s: request %d of %s begins", worker, running.id, running.job_name)
        if incarnation != self._source_of:
            self._source_of, self.source = incarnation, _source(self._spec)
        answer.source = self.source
        with self._in_flight.admit(running):
            try:
                with running.scope:
                    outcome = await self._ask(request, answer)
                    if isinstance(outcome, Completed) and isinstance(request, Request):
                        self.latency.note_answer(answer, time.monotonic() - began_at)
                    self._watch.observations.learn(running)
                    if isinstance(outcome, EngineFailed):
                        outcome = await self._recovery.recover(incarnation, running, outcome)
                    elif isinstance(outcome, Completed):
                        self._recovery.note_answer(incarnation, running)
                        self._supervisor.note_answer(incarnation)
                    running.come_to_end(outcome)
            finally:
                self._watch.note_end(running)
                if self.pool is not None:
                    self.pool.note_end(running)
                if self._weights is not None:
                    self._weights.note_end(running)
        assert running.ending is not None  # noqa: S101 - an end or an error leaves the scope
        self._log_ending(running)
        return running.ending

    async def _ask(self, request: Request | Relay, answer: Answer) -> Outcome:
        if isinstance(request, Relay):
            return await relay(self._client, self._settings, request, answer)
        asked = replace(request, params=self._spec.params_of(request.params))
        return await converse(self._client, self._settings, asked, answer)

    async def count(self, request: Relay, answer: Answer) -> Outcome:
        """Pass on a request that counts tokens; it holds no slot and no cache, and does not judge its engine."""
        return await relay(self._client, replace(self._settings, admit_prompt=None), request, answer)

    def _log_ending(self, running: InFlightRequest) -> None:
        ending, worker = running.ending, self._spec.id
        if not isinstance(ending, EngineFailed):
            logger.debug("worker %s: request %d of %s: %s", worker, running.id, running.job_name, ending)
            return
        name = running.job_name
        logger.warning("worker %s: request %d of %s: %s: %s", worker, running.id, name, ending.reason, ending.detail)


def _source(spec: WorkerSpec) -> str:
    """Return a name for the model that an engine has loaded: another file under the same path is another model."""
    facts: list[object] = [spec.engine, spec.model, spec.url, sorted(spec.args.items(), key=str)]
    of_model = (value for name, value in spec.args.items() if name.replace("_", "-") in MODEL_FILES)
    for place in (each for each in (spec.model, *of_model) if isinstance(each, str) and each):
        with suppress(OSError, ValueError):
            found = Path(place).stat()
            facts.append((found.st_size, found.st_mtime_ns))
    return hashlib.blake2b(repr(facts).encode(), digest_size=OWNER_BYTES).hexdigest()


def _cache_scope(engine: EngineKind, weights: LoadedWeights | None, owner: str | None) -> str | None:
    """Return the scope within which an engine shares prefixes; None if it has only one, as all but vLLM have."""
    if engine is not EngineKind.VLLM:
        return None
    salt = None if owner is None else hashlib.blake2b(owner.encode(), digest_size=OWNER_BYTES).hexdigest()
    parts = [part for part in (weights.scope if weights else None, salt) if part is not None]
    return ".".join(parts) or None


def _pool_of(spec: WorkerSpec, client: EngineClient, in_flight: InFlightRequests) -> KvPool:
    return KvPool(spec.id, client, in_flight, size=spec.cache_tokens, slots=spec.slots, most=spec.context)
