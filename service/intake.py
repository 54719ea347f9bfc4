"""What this node runs of what is stored: claims conversations, and puts them on the scheduler where they were left.

A node that has its database to itself claims everything. One among several claims about as much as its slots will need
next, so that what waits can go wherever a slot gets free first; what it has claimed stays with it, since its engines
know the prompts.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Final

import anyio
import anyio.to_thread

from service.conversations.job import Job, JobId
from service.conversations.spec import parse_stored
from service.errors import JobNotFound, StoreUnavailable
from service.scheduling.outlet import Pause
from service.scheduling.scheduler import Scheduler
from service.store import reading
from service.store.database import Claim
from service.store.store import Store

LOOKAHEAD: Final = 2  # turns for each slot: one that runs, and one that is there when it ends
POLL_S: Final = 1.0  # hints may be lost; looking is what counts
HOPELESS: Final = 16  # conversations at a time that are claimed to be ended
PARSED_JOBS: Final = 64  # kept, since their conversations are claimed a few at a time
logger = logging.getLogger(__name__)


class Intake:
    """Between the store and the scheduler; its tasks are those of ``run``."""

    def __init__(self, store: Store, scheduler: Scheduler, models: Sequence[str], *, is_shared: bool) -> None:
        self._store = store
        self._scheduler = scheduler
        self._models = tuple(models)
        self._is_shared = is_shared
        self._hint = anyio.Event()
        self._is_starting_over = False
        self.epoch = 0  # grows when everything that was claimed is another node's
        self._is_drained = False  # the last claim brought less than there was room for
        self._parsed: OrderedDict[JobId, Job] = OrderedDict()

    def __repr__(self) -> str:
        """State whether others take a share."""
        return f"<Intake shared={self._is_shared}>"

    # Claiming

    async def run(self) -> None:
        """Claim whenever there is room or a hint, and cancel what was cancelled elsewhere, until nothing is started."""
        while not self._scheduler.is_closing:
            hint = self._hint
            try:
                await self._cancel_wanted()
                if self._scheduler.paused_by is None:
                    await self.take()
            except StoreUnavailable as error:
                logger.debug("nothing is claimed: %s", error)
            if not self._is_shared:
                await hint.wait()
                continue
            with anyio.move_on_after(POLL_S) as patience:
                await hint.wait()
            self._is_drained &= not patience.cancelled_caught

    def hint(self, *, is_work: bool) -> None:
        """Look again: a slot may be free, or (``is_work``) there may be something to claim."""
        if is_work or (self._is_shared and not self._is_drained):
            self._is_drained &= not is_work
            self._hint.set()
            self._hint = anyio.Event()

    async def start_over(self) -> None:
        """Drop everything that was claimed: another node has taken over."""
        self._is_starting_over = True
        self.epoch += 1
        try:
            await self._scheduler.forget_all()
            # What was claimed since, under a new name, was dropped with the rest: the next claim tells it again.
            with suppress(StoreUnavailable):  # taken over again: that comes next
                await self._store.unlearn_all()
        finally:
            self._is_starting_over = False
        self._scheduler.unpause(Pause.LEASE)
        self.hint(is_work=True)

    async def take(self, job_id: JobId | None = None) -> None:
        """Claim what there is room for, or only what is of one job, and go on with it."""
        if self._scheduler.is_closing or self._is_starting_over:
            return
        if not self._is_shared:
            await self._take(self._models, None, job_id)
            return
        is_drained = True
        for model, room in self._rooms().items():
            is_drained &= await self._take([model], room, job_id) < room
        self._is_drained = is_drained

    async def _take(self, models: Sequence[str], limit: int | None, job_id: JobId | None) -> int:
        epoch = self.epoch
        claims = await self._store.claim(models, limit, job_id)
        await self.admit(claims, epoch)
        return len(claims)

    def has_room_for(self, job: Job) -> bool:
        """Whether a new job is claimed as it is posted."""
        if not self._is_shared:
            return True
        rooms = self._rooms()
        turns = len(job.conversations)
        return all(rooms.get(model, 0) >= turns for model in job.first_models)

    def _rooms(self) -> Mapping[str, int]:
        """Return how many turns more each model should have here, where it should have any."""
        if self._scheduler.paused_by is not None:
            return {}
        view = self._scheduler.view
        rooms = {
            # What nobody will ever serve is claimed as well: it is ended here, with the reason.
            model: HOPELESS if view.is_hopeless(model) else view.free(model) + (LOOKAHEAD - 1) * view.slots(model)
            for model in self._models
            if view.slots(model) or view.is_hopeless(model)
        }
        return {model: room for model, room in rooms.items() if room > 0}

    async def _cancel_wanted(self) -> None:
        if not self._is_shared:
            return
        live = set(self._scheduler.view.jobs())
        for job_id in await self._store.read(reading.to_cancel()):
            if job_id in live:
                self._scheduler.cancel(job_id)
            await self._take([], None, job_id)  # what nobody runs needs no model to end

    # Admitting

    async def admit(self, claims: Sequence[Claim], epoch: int, posted: Job | None = None) -> None:
        """Put conversations on the scheduler, each where it was left; ``posted`` is their job, if it is new.

        ``epoch`` is that of the moment when the claim was handed in: of an earlier one nothing is ours any more, and
        what the store knows of it is taken back by whoever has begun the new one.

        Raises:
            StoreUnavailable: they cannot be read; those that are not on the scheduler come with a later claim.
        """
        left = {(claim.job_id, claim.conversation_id) for claim in claims}
        if epoch != self.epoch:
            return
        if self._is_starting_over:
            self._store.unlearn_nowait(left)
            return
        if posted is not None and claims:
            self._scheduler.admit(posted)
            return
        try:
            for job_id, group in groupby(claims, lambda claim: claim.job_id):
                names = [claim.conversation_id for claim in group]
                try:
                    await self._go_on(job_id, names, epoch)
                except JobNotFound:
                    logger.warning("job %s was deleted as it was claimed", job_id)
                left.difference_update((job_id, name) for name in names)
        finally:
            if left:
                self._store.unlearn_nowait(left)

    async def _go_on(self, job_id: JobId, names: Sequence[str], epoch: int) -> None:
        stored = await self._store.read(reading.job(job_id))
        job = await self._job(job_id)
        wanted = frozenset(names)
        share = replace(job, conversations=tuple(talk for talk in job.conversations if talk.id in wanted))
        turns = await self._store.read(reading.turns(job_id, names))
        unfinished = await self._store.read(reading.unfinished_turns(job_id, names))
        missing = sorted(set(job.models) - set(self._models))
        if missing and not self._is_shared:
            logger.warning("job %s waits for models that are configured no more: %s", job_id, ", ".join(missing))
        if epoch != self.epoch:
            return
        if turns or unfinished:
            logger.info("job %s goes on with %d of %d turns done", job_id, len(turns), share.total_turns)
        self._scheduler.admit(share, turns, unfinished, is_cancelled=stored.is_cancel_requested)

    async def _job(self, job_id: JobId) -> Job:
        job = self._parsed.get(job_id)
        if job is None:
            document = await self._store.read(reading.document(job_id))
            job = await anyio.to_thread.run_sync(parse_stored, document, job_id)
            self._parsed[job_id] = job
            while len(self._parsed) > PARSED_JOBS:
                self._parsed.popitem(last=False)
        self._parsed.move_to_end(job_id)
        return job
