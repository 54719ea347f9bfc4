"""The door of jobs: a posted document becomes a stored job, or is refused with all its faults."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import anyio
import msgspec
from msgspec.structs import replace

from service.conversations.callers import ANYBODY, Caller
from service.conversations.document.job_faults import JobRules
from service.conversations.document.job_parser import make_job
from service.conversations.document.reading import check_tools, read_document, rewritten
from service.conversations.document.sampling import has_groups, spread_groups
from service.conversations.document.spec import JobSpec
from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import Agent, Job, new_job_id
from service.conversations.job.wording import DEFAULT_ROLE
from service.errors import Fault, InvalidJob, NoSlotAvailable, ShuttingDown, StoreUnavailable
from service.formats.documents import digest_of
from service.node.intake import Intake
from service.node.large_documents import SMALL_BYTES, LargeDocuments
from service.node.queue_bounds import QueueBounds
from service.node.sources import JobBegun, Sources, with_prompts
from service.node.tool_catalog import ToolCatalog
from service.scheduling.scheduler import Scheduler
from service.store import job_rows
from service.store.records import NewJob, StoredJob
from service.store.store import Store

NO_BODIES: Final[Mapping[str, PostedRequest]] = {}


class JobDoor:
    """Takes jobs until it is closed; each step of a large document runs in a thread."""

    def __init__(
        self, store: Store, scheduler: Scheduler, intake: Intake, rules: Callable[[], JobRules], catalog: ToolCatalog
    ) -> None:
        self.large = LargeDocuments()
        self.bounds = QueueBounds(store, scheduler)
        self._store = store
        self._scheduler = scheduler
        self._intake = intake
        self.rules = rules
        self._catalog = catalog
        self._sources = Sources(store, lambda: rules().adapters)
        self._promised: Counter[str] = Counter()  # by model: slots of jobs that are being stored with queue=false
        self._takings: set[anyio.Event] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<JobDoor closed={self._is_closed} {self._sources!r}>"

    def close(self) -> None:
        """Take no new jobs."""
        self._is_closed = True

    async def post(
        self,
        document: object,
        key: str | None = None,
        *,
        queue: bool = True,
        size: int = SMALL_BYTES,
        caller: Caller = ANYBODY,
        posted: Mapping[str, PostedRequest] = NO_BODIES,
    ) -> tuple[StoredJob, bool]:
        """Take a caller's job, which is durable when this returns; return it, and whether it is new.

        ``size`` is the document's size in bytes: large documents are handled in a thread. ``posted`` holds client
        bodies by conversation id, which replace prompts.

        Raises:
            InvalidJob: with all its faults.
            IdempotencyConflict: the key belongs to another body.
            NoSlotAvailable: with ``queue`` false, if a first turn would have to wait; nothing is stored then.
            ShuttingDown: no new jobs are taken.
            ToolServerDown: an MCP server whose tools it refers to was never reached.
            StoreUnavailable: the store is in trouble.
            TooMuchQueued: the caller already has as many waiting turns as it may.
            JobNotFound: it forks a job that does not exist, or that the caller may not read.
            ConversationNotFound: it forks a conversation that does not exist.
            OffloadCrowded: too many schemas wait for their check.
        """
        text, hashed = await self.large.handle_sized(caller, size, _written, document, posted)
        now = datetime.now(UTC)
        if key is not None:
            key = caller.own_key(key)
            # The key comes first: an accepted job stays accepted, whatever limits and slots are now.
            stored = await self._store.read(job_rows.by_key, key, hashed, now)
            if stored is not None:
                return stored, False
        if self._is_closed:
            raise ShuttingDown("the service is stopping and takes no new jobs")
        if self._store.trouble is not None:
            raise StoreUnavailable(self._store.trouble)
        with self._taking():
            rules = self.rules()
            begun, text = await self._parse(document, text, caller, rules)
            if posted:
                begun = replace(begun, job=_with_bodies(begun.job, posted))
            return await self._take(begun, text, hashed, key, now, caller, queue=queue)

    async def _take(
        self, begun: JobBegun, text: bytes, hashed: str, key: str | None, now: datetime, caller: Caller, *, queue: bool
    ) -> tuple[StoredJob, bool]:
        job, key_s = begun.job, self.rules().key_s
        new = NewJob(
            job=job,
            shares=begun.shares,
            inherited=begun.inherited,
            words=begun.words,
            document=text.decode(),
            body_hash=hashed,
            idempotency_key=key,
            key_until=now + timedelta(seconds=key_s) if key is not None else None,
            created_at=now,
        )
        async with self.bounds.hold(caller, job.total_turns, begun.turns):
            if queue:
                return await self._intake.post(new, claims=self._intake.has_room_for(job))
            with self._promise(job):
                return await self._intake.post(new, claims=True)

    async def _parse(self, document: object, text: bytes, caller: Caller, rules: JobRules) -> tuple[JobBegun, bytes]:
        """Return a document's job with its inherited turns, and the text to store.

        The text is the document's own ``text``, unless it refers to tools or forks recorded conversations: a job keeps
        the schemas and prompts from the time of its post.
        """
        limits, handle = rules.limits, partial(self.large.handle_sized, caller, len(text))
        posted = await read_document(document, limits, handle)
        if has_groups(posted):
            document, text = await handle(spread_groups, document, posted, limits)
            handle = partial(self.large.handle_sized, caller, len(text))
            posted = await read_document(document, limits, handle)
        sources = await self._sources.read(posted, caller, limits.body_bytes)
        spec = with_prompts(await self._catalog.expand(posted), sources, limits.body_bytes)
        if spec is not posted:
            text = await self.large.handle(caller, _rewritten, document, posted, spec)
            handle = partial(self.large.handle_sized, caller, len(text))
            await check_tools(spec, limits, handle)
        job = _owned(await handle(make_job, spec, new_job_id(), rules), caller)
        return await self._sources.inherit_turns(job, spec, sources, limits.turns), text

    @contextmanager
    def _taking(self) -> Iterator[None]:
        taken = anyio.Event()
        self._takings.add(taken)
        try:
            yield
        finally:
            self._takings.discard(taken)
            taken.set()

    async def wait_settled(self) -> None:
        """Return when every job that is being taken or admitted now is on the scheduler, or refused."""
        for taken in list(self._takings):
            await taken.wait()
        await self._intake.wait_admitted()

    @contextmanager
    def _promise(self, job: Job) -> Iterator[None]:
        """Reserve the slots of a job's first turns against other such jobs, from the check to its admission."""
        wanted = job.first_turns
        if not all(self._scheduler.free(model) - self._promised[model] >= count for model, count in wanted.items()):
            raise NoSlotAvailable("not every first turn can start at once")
        self._promised += wanted
        try:
            yield
        finally:
            self._promised -= wanted


def _written(document: object, posted: Mapping[str, PostedRequest]) -> tuple[bytes, str]:
    """Return a document's JSON in its author's order, which prompts show, and its order-independent hash.

    The hash includes posted bodies: the same key with another body is another post.
    """
    hashed = digest_of(document)
    for name, request in sorted(posted.items()):
        about = f"{hashed} {name} {request.path} {request.is_streamed} "
        hashed = hashlib.sha256(about.encode() + request.body).hexdigest()
    return msgspec.json.encode(document), hashed


def _with_bodies(job: Job, posted: Mapping[str, PostedRequest]) -> Job:
    """Return a job whose conversations are asked with these bodies.

    Raises:
        InvalidJob: it has anything that a body makes void, or no conversation for a body.
    """
    faults = list(_beside_bodies(job)) or list(_faults_of_bodies(job, posted))
    if faults:
        raise InvalidJob(faults)
    asked = (each.with_posted(posted[each.id]) if each.id in posted else each for each in job.conversations)
    return replace(job, conversations=tuple(asked))


def _beside_bodies(job: Job) -> Iterator[Fault]:
    """Yield the fault of a job that has anything that a body makes void."""
    (agent, *others), rounds = job.agents, max(each.rounds for each in job.conversations)
    plain = Agent(
        id=agent.id, role=DEFAULT_ROLE, model=agent.model, system="", adapter=agent.adapter, slots=agent.slots
    )
    bare = Job(
        id=job.id,
        name=job.name,
        agents=job.agents,
        conversations=job.conversations,
        priority=job.priority,
        metadata=job.metadata,
        webhook=job.webhook,
        owner=job.owner,
    )
    if others or rounds > 1 or agent != plain or job != bare:
        message = "one agent with nothing but a model speaks once, where a body is asked with"
        yield Fault(path="agents", message=message)


def _faults_of_bodies(job: Job, posted: Mapping[str, PostedRequest]) -> Iterator[Fault]:
    known, agent = {each.id: each for each in job.conversations}, job.agents[0]
    for name, request in posted.items():
        place = known.get(name)
        is_plain = place is not None and not (place.until or place.cast or place.variables or place.heritage.source)
        rules = (
            (not is_plain, "a body, for which there is no plain conversation"),
            (request.model != agent.model, f"its body is for {request.model}, and the agent's model is {agent.model}"),
            (request.adapter != agent.adapter, "its body and the agent name two adapters"),
            (request.priority != 0, "the job has the priority of a recorded body"),
            (request.wait_s is not None, "a recorded body waits for as long as it takes"),
        )
        yield from (Fault(path="conversations", message=f"{name}: {fault}") for is_broken, fault in rules if is_broken)


def _rewritten(document: Mapping[str, object], before: JobSpec, after: JobSpec) -> bytes:
    return msgspec.json.encode(rewritten(document, before, after))


def _owned(job: Job, caller: Caller) -> Job:
    """Return a job as the caller's own.

    Raises:
        InvalidJob: its priority is above the caller's maximum.
    """
    if caller.max_priority is not None and job.priority > caller.max_priority:
        message = f"{job.priority} is above this key's max_priority, {caller.max_priority}"
        raise InvalidJob([Fault(path="priority", message=message)])
    return replace(job, owner=caller.name)
