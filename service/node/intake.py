"""The node's intake: claims stored conversations, and puts them on the scheduler where they stopped.

A node with its own database claims everything. One of several claims about as much as its slots will need next, so that
waiting turns can go wherever a slot is free first. Claimed conversations stay with it, since its engines have their
prompts cached.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Final

import anyio
from msgspec.structs import replace

from service.conversations.job.job import Job, JobId, SpokenBy
from service.conversations.record.log_fields import of_job
from service.errors import StoreUnavailable
from service.node.resumed_jobs import ParsedJobs, ResumedJob
from service.scheduling.admission import Piece
from service.scheduling.scheduler import Scheduler
from service.scheduling.work import Pause
from service.store import awaited_turns, job_rows
from service.store.databases.database import Claim
from service.store.records import NewJob, StoredJob
from service.store.store import Store
from workers.log_context import line_about
from workers.notifier import Notifier

LOOKAHEAD: Final = 2  # turns per slot: one that runs, and one for its end
POLL_S: Final = 1.0  # seconds; hints may be lost, so it also looks by itself
HOPELESS: Final = 16  # conversations claimed at a time to be ended
JOBS_A_READ: Final = 50  # jobs read and parsed at once in a thread
logger = logging.getLogger(__name__)


class Lookahead:
    """The turns of each model that a node of several should claim ahead; it only reads."""

    def __init__(self, scheduler: Scheduler, models: Sequence[str]) -> None:
        self._scheduler = scheduler
        self._models = models  # a reload changes them

    def __repr__(self) -> str:
        return f"<Lookahead {self._models}>"

    def has_room_for(self, job: Job) -> bool:
        """Whether there is room here for all first turns of a new job."""
        rooms = self.rooms()
        wanted = Counter(chain.from_iterable(job.first_models()))
        return all(rooms.get(model, 0) >= conversations for model, conversations in wanted.items())

    def rooms(self, hopeless: int = 0) -> Mapping[str, int]:
        """Return how many more turns each model should have here, for models that should have any.

        ``hopeless`` is the number for a model that no node will ever serve: its turns are claimed to fail.
        """
        if self._scheduler.pauses.detail is not None:
            return {}
        view = self._scheduler.view
        rooms: dict[str, int] = {}
        for model in self._models:
            slots, coming = view.slots(model), 0
            if not slots:  # a model that is not loaded will be, once it has turns here
                slots = coming = self._scheduler.fleet.lanes.slots_on_demand(model)
            if view.is_hopeless(model):
                rooms[model] = hopeless
            elif slots:
                rooms[model] = view.free(model) + coming + (LOOKAHEAD - 1) * slots
        return {model: room for model, room in rooms.items() if room > 0}


class Intake:
    """Between the store and the scheduler; ``run`` owns its tasks.

    ``adapters`` returns the present adapters with their base models.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        models: Sequence[str],
        adapters: Callable[[], Mapping[str, str]],
        note_new: Callable[[JobId], None] = lambda _: None,
        *,
        is_shared: bool,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._models = models  # shared with its owner, so always up to date
        self._lookahead = Lookahead(scheduler, models)
        self._parsed = ParsedJobs(adapters)
        self._note_new = note_new
        self._is_shared = is_shared
        self._hint = Notifier()
        self._is_starting_over = False
        self._starting_over = anyio.Lock()
        self._claimed: Sequence[Claim] = ()  # claimed before the node served
        self._admitting = 0
        self._admitted = Notifier()
        self._cancelled: set[JobId] = set()  # cancelled while jobs are being admitted, whose read may miss it
        self._epoch = 0  # grows when all claims go to another node
        self._is_hinted = False
        self._has_callers = False  # some job here has, or had, agents that callers speak for
        self._is_drained = False  # the last claim returned less than there was room for
        self._may_end_hopeless = False  # until all that was there has been claimed

    def __repr__(self) -> str:
        return f"<Intake shared={self._is_shared}>"

    # Claiming

    async def claim_first(self) -> None:
        """Claim what the last life left before this one serves, so that no conversation is without a node."""
        if not self._is_shared:
            self._claimed = await self._store.claim(tuple(self._models), None)

    async def run(self) -> None:
        """Claim on each hint and while there is room, and cancel jobs cancelled elsewhere, until the node closes."""
        claimed, self._claimed = self._claimed, ()
        while not self._scheduler.pauses.is_closing:
            hint, is_done = self._hint.next, True
            try:
                await self.admit(claimed, self._epoch)
                await self._cancel_wanted()
                await self._take_words()
                is_done = self._scheduler.pauses.detail is None  # a lone node gets no hint when a pause ends
                if is_done:
                    await self.claim_jobs()
            except StoreUnavailable as error:  # a later claim returns what could not be read
                is_done = False  # a lone node may get no further hint
                logger.debug("nothing is claimed: %s", error)
            claimed = ()
            with anyio.move_on_after(POLL_S if self._is_shared or not is_done else None) as patience:
                await hint.wait()
            self._is_drained &= not patience.cancelled_caught

    def hint(self, *, is_work: bool) -> None:
        """Look again: a slot may be free, or with ``is_work`` there may be something to claim."""
        if is_work or (self._is_shared and not self._is_drained):
            self._is_drained &= not is_work
            self._is_hinted = True
            self._hint.notify()

    def note_neighbours(self) -> None:
        """Claim and end conversations that no node will ever serve, once the other nodes' models are known.

        Before that, a node that has just started might serve a job that is posted here.
        """
        if any(map(self._scheduler.view.is_hopeless, self._models)):
            self._may_end_hopeless = True
            self._hint.notify()

    async def start_over(self) -> None:
        """Drop all claims and claim again: another node has taken over, or this one has left."""
        async with self._starting_over:
            self._is_starting_over = True
            self._epoch += 1
            try:
                await self._scheduler.forget_all()
                # Conversations claimed meanwhile were dropped with the rest, so the next claim must return them again.
                with suppress(StoreUnavailable):  # taken over again, which is handled next
                    await self._store.forget_all_claims()
            finally:
                self._is_starting_over = False
                self._scheduler.pauses.unpause(Pause.LEASE)
                self.hint(is_work=True)

    async def claim_jobs(self, job_id: JobId | None = None) -> None:
        """Claim what there is room for, of all jobs or of one, and go on with it."""
        if self._scheduler.pauses.is_closing or self._is_starting_over:
            return
        if not self._is_shared:
            await self._take(tuple(self._models), None, job_id)
            return
        # A conversation left by another node may name an adapter. Leave out an adapter that a job here takes for
        # another node's, since it was loaded here later: that job would release the conversation again.
        adapters = self._parsed.adapters()
        foreign = self._scheduler.view.models() if adapters else frozenset()
        is_drained, ends_hopeless = True, self._may_end_hopeless
        for model, room in self._lookahead.rooms(HOPELESS if ends_hopeless else 0).items():
            names = [model, *(name for name, base in adapters.items() if base == model and name not in foreign)]
            is_drained &= await self._take(names, room, job_id) < room
        self._is_drained = is_drained
        self._may_end_hopeless &= not (ends_hopeless and is_drained)

    async def _take(self, models: Sequence[str], limit: int | None, job_id: JobId | None) -> int:
        epoch = self._epoch
        claims = await self._store.claim(models, limit, job_id)
        await self.admit(claims, epoch)
        return len(claims)

    def has_room_for(self, job: Job) -> bool:
        """Whether a new job is claimed when it is posted."""
        return not self._is_shared or self._lookahead.has_room_for(job)

    async def go_on(self, jobs: Iterable[JobId]) -> None:
        """Go on with callers' words in these jobs, when ``run`` does not run; called often.

        Raises:
            StoreUnavailable: the store is in trouble.
        """
        if self._is_hinted:
            self._is_hinted = False
            await self._take_words()
            for job_id in jobs:
                await self.claim_jobs(job_id)

    async def _take_words(self) -> None:
        """Let conversations that run here go on with their callers' words."""
        if not self._has_callers:
            return
        said = await self._store.read(awaited_turns.said_to, self._store.node_id)
        heard = [turn for turn in said if self._scheduler.view.waits_for_caller(turn.key)]
        if heard:
            self._store.forget_said_nowait([turn.key for turn in heard])
            self._scheduler.take_words(heard)

    async def _cancel_wanted(self) -> None:
        if not self._is_shared:
            return
        live = set(self._scheduler.view.jobs())
        for job_id in await self._store.read(job_rows.to_cancel):
            if job_id in live:
                self._scheduler.cancel(job_id)
            await self._take([], None, job_id)  # ending unclaimed conversations needs no model

    # Admitting

    async def post(self, new: NewJob, *, claims: bool) -> tuple[StoredJob, bool]:
        """Store a new job, claim it with ``claims``, and put it on the scheduler; return it, and whether it is new.

        Raises:
            ServiceError: the job may not be stored.
        """
        self._note_new(new.job.id)
        epoch = self._epoch
        stored, claimed, is_new = await self._store.post(new, claims=claims)
        if not self._scheduler.pauses.is_closing:  # otherwise the next life admits it
            if claimed and self._may_admit(claimed, epoch):
                self._admit_piece(Piece(job=new.job, inherited=new.inherited, words=new.words))
            self.hint(is_work=not claims)
        return stored, is_new

    async def admit(self, claims: Sequence[Claim], epoch: int) -> None:
        """Put conversations on the scheduler, each where it stopped.

        ``epoch`` is the epoch of the claim. Claims of an earlier epoch are void; the present one claims them again.

        Raises:
            StoreUnavailable: they cannot be read; those that are not on the scheduler come with a later claim.
        """
        if not self._may_admit(claims, epoch):
            return
        wanted: dict[JobId, list[str]] = {}
        for claim in claims:
            wanted.setdefault(claim.job_id, []).append(claim.conversation_id)
        self._admitting += 1
        try:
            while wanted and epoch == self._epoch:
                some = dict(islice(wanted.items(), JOBS_A_READ))
                resumed_jobs = await self._store.read(self._parsed.reading(some))
                if epoch == self._epoch:
                    for resumed in resumed_jobs:
                        self._go_on(resumed)
                    for job_id in some:
                        del wanted[job_id]
        finally:
            self._admitting -= 1
            if not self._admitting:
                self._cancelled.clear()
                self._admitted.notify()
            if wanted and epoch == self._epoch:
                self._store.forget_claims_nowait([(job_id, name) for job_id, names in wanted.items() for name in names])

    async def wait_admitted(self) -> None:
        """Return when all claimed conversations are on the scheduler."""
        await self._admitted.wait_until(lambda: not self._claimed and not self._admitting)
        await self._scheduler.admission.wait_done()

    def _may_admit(self, claims: Sequence[Claim], epoch: int) -> bool:
        if epoch != self._epoch:
            return False
        if self._is_starting_over:
            self._store.forget_claims_nowait([(claim.job_id, claim.conversation_id) for claim in claims])
        return not self._is_starting_over

    def cancel(self, job_id: JobId) -> None:
        """End a job here, on the scheduler or on its way there."""
        if self._admitting or self._claimed:
            self._cancelled.add(job_id)
        self._scheduler.cancel(job_id)
        self.hint(is_work=True)  # some node has to end conversations that no node runs

    def _admit_piece(self, piece: Piece) -> None:
        self._scheduler.admit(piece)
        self._has_callers = self._has_callers or any(agent.by is SpokenBy.CALLER for agent in piece.job.agents)

    def _go_on(self, resumed: ResumedJob) -> None:
        piece = resumed.piece
        job, line = piece.job, line_about(of_job(piece.job.id))
        missing = sorted(set(job.models) - set(self._models))
        if missing and not self._is_shared:
            names = ", ".join(missing)
            text = "job %s waits for models that were removed from the configuration: %s"
            logger.warning(text, job.id, names, extra=line)
        own = [turn for turn in piece.ended if turn.inherited is None]
        if own or piece.unfinished:
            done, total = len(own), job.total_turns
            logger.info("job %s goes on with %d of %d turns done", job.id, done, total, extra=line)
        if said := [turn.key for turn in own if turn.by is SpokenBy.CALLER]:
            self._store.forget_said_nowait(said)  # first: the next facts come after these words
        self._admit_piece(replace(piece, is_cancelled=True) if job.id in self._cancelled else piece)
        if self._is_shared and resumed.whole is not None:  # a lone node has all conversations now
            self._parsed.keep(resumed.whole)
