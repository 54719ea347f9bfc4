"""Stored conversations that go on: their job, their ended turns, and their inherited turns."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.document.job_document import with_conversations
from service.conversations.document.job_parser import parse_stored
from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import Conversation, Heritage, Job, JobId
from service.conversations.record.log_fields import of_job
from service.errors import InvalidJob, JobNotFound
from service.scheduling.admission import Piece
from service.store import conversation_rows, heirs, job_rows, turn_rows
from service.store.databases.database import Connection
from service.store.records import StoredJob
from workers.log_context import line_about

# A document with an agent that a caller speaks for. Its conversations may be claimed one by one for a long time, and
# the job is not cached meanwhile, so only these conversations are read. A false match does no harm.
BY_CALLER: Final = '"by":"caller"'
PARSED_JOBS: Final = 64
logger = logging.getLogger(__name__)


class ResumedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations of one job; ``whole`` is the job with all of them, None if only these were read."""

    whole: Job | None
    piece: Piece


class ParsedJobs:
    """The jobs resumed last: their conversations are claimed a few at a time, and parsing takes long.

    ``names`` returns the present adapters with their base models.
    """

    def __init__(self, names: Callable[[], Mapping[str, str]]) -> None:
        self._names = names
        self._parsed: OrderedDict[JobId, Job] = OrderedDict()
        self._parsed_with: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"<ParsedJobs {len(self._parsed)}>"

    def adapters(self) -> Mapping[str, str]:
        """Return the present adapters; drop jobs that were parsed with others."""
        adapters = dict(self._names())
        if adapters != self._parsed_with:
            self._parsed.clear()
            self._parsed_with = adapters
        return adapters

    def reading(self, wanted: Mapping[JobId, Sequence[str]]) -> Callable[[Connection], list[ResumedJob]]:
        """Return the query for conversations of several jobs."""
        adapters = self.adapters()
        return partial(read_resumed_jobs, wanted=wanted, known=dict(self._parsed), adapters=adapters)

    def keep(self, job: Job) -> None:
        """Keep a whole job; drop the one that was resumed longest ago."""
        self._parsed[job.id] = job
        self._parsed.move_to_end(job.id)
        while len(self._parsed) > PARSED_JOBS:
            self._parsed.popitem(last=False)


def read_resumed_jobs(
    connection: Connection,
    wanted: Mapping[JobId, Sequence[str]],
    known: Mapping[JobId, Job],
    adapters: Mapping[str, str],
) -> list[ResumedJob]:
    """Read conversations of several jobs from one snapshot; ``known`` are jobs that need not be parsed again.

    ``adapters`` holds the names of adapters with their base models. Deleted jobs are left out, and so are jobs of
    another version that this one cannot read.
    """
    resumed: list[ResumedJob] = []
    for job_id, names in wanted.items():
        try:
            stored = job_rows.job(connection, job_id)
        except JobNotFound:
            logger.warning("job %s was deleted as it was claimed", job_id, extra=line_about(of_job(job_id)))
            continue
        try:
            resumed.append(_read(connection, stored, names, known.get(job_id), adapters))
        except (InvalidJob, msgspec.MsgspecError) as error:
            line = line_about(of_job(job_id))
            logger.error("job %s waits for a version of Roundhouse that can read it: %s", job_id, error, extra=line)  # noqa: TRY400
    return resumed


def _read(
    connection: Connection, stored: StoredJob, names: Sequence[str], read: Job | None, adapters: Mapping[str, str]
) -> ResumedJob:
    job_id, mine, is_whole = stored.id, frozenset(names), True
    if read is None:
        document = job_rows.document(connection, job_id)
        is_whole = BY_CALLER not in document
        needed = document if is_whole else with_conversations(document, names, are_named=True).decode()
        read = replace(parse_stored(needed, job_id, adapters), owner=stored.owner)
    heritages = heirs.heritages(connection, job_id, mine)
    before = heirs.inherited(connection, job_id, heritages) if heritages else []
    posted = conversation_rows.posted(connection, job_id, mine)
    conversations = (_with_its_rows(each, heritages, posted) for each in read.conversations if each.id in mine)
    return ResumedJob(
        whole=read if is_whole else None,
        piece=Piece(
            job=replace(read, conversations=tuple(conversations)),
            ended=[*before, *turn_rows.ended(connection, job_id, names)],
            unfinished=turn_rows.unfinished(connection, job_id, names),
            words=conversation_rows.words(connection, job_id, names),
            is_cancelled=stored.is_cancel_requested,
            cuts=turn_rows.memory_cuts(connection, job_id, mine),
            given_up=job_rows.given_up(connection, job_id),
        ),
    )


def _with_its_rows(
    conversation: Conversation, heritages: Mapping[str, Heritage], posted: Mapping[str, PostedRequest]
) -> Conversation:
    heritage, request = heritages.get(conversation.id), posted.get(conversation.id)
    if request is not None:
        conversation = conversation.with_posted(request)
    return conversation if heritage is None else replace(conversation, heritage=heritage)
