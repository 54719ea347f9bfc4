"""Stored conversations as they go on: their job, what of them has ended, and what they have inherited."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.document.job_document import with_conversations
from service.conversations.document.job_parser import parse_stored
from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import Conversation, Heritage, Job, JobId
from service.conversations.job.wording import ConversationWords
from service.conversations.record.log_fields import of_job
from service.conversations.record.transcript import Turn, UnfinishedTurn
from service.errors import InvalidJob, JobNotFound
from service.store import conversation_rows, heirs, job_rows, turn_rows
from service.store.databases.database import Connection
from service.store.records import GivenUp, MemoryCut
from workers.log_context import line_about

# In a document with an agent that a caller speaks for. Its conversations may be claimed one by one for long; no part
# of the job is kept meanwhile: so only these are read. In another document the words do no harm.
BY_CALLER: Final = '"by":"caller"'
logger = logging.getLogger(__name__)


class ResumedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations of one job, with the turns that have ended and what others have behind them.

    ``whole`` is the job with all its conversations, None where only these were read; ``words`` are those of the
    conversations that have begun.
    """

    whole: Job | None
    job: Job
    ended: Sequence[Turn]
    unfinished: Sequence[UnfinishedTurn]
    words: Mapping[str, ConversationWords]
    is_cancelled: bool
    cuts: Sequence[MemoryCut] = ()
    given_up: Sequence[GivenUp] = ()


def read_resumed_jobs(
    connection: Connection,
    wanted: Mapping[JobId, Sequence[str]],
    known: Mapping[JobId, Job],
    adapters: Mapping[str, str],
) -> list[ResumedJob]:
    """Read conversations of several jobs at one moment; ``known`` are jobs that need not be parsed again.

    ``adapters`` are the names of adapters, each with the model that it stands on.
    A job that is there no more has no share, nor has one that was accepted by another version and means nothing here.
    """
    resumed: list[ResumedJob] = []
    for job_id, names in wanted.items():
        try:
            stored = job_rows.job(connection, job_id)
        except JobNotFound:
            logger.warning("job %s was deleted as it was claimed", job_id, extra=line_about(of_job(job_id)))
            continue
        try:
            read, is_whole = known.get(job_id), True
            if read is None:
                document = job_rows.document(connection, job_id)
                is_whole = BY_CALLER not in document
                needed = document if is_whole else with_conversations(document, names, are_named=True).decode()
                read = replace(parse_stored(needed, job_id, adapters), owner=stored.owner)
        except InvalidJob as error:
            line = line_about(of_job(job_id))
            logger.error("job %s waits for a version of Roundhouse that can read it: %s", job_id, error, extra=line)  # noqa: TRY400
            continue
        mine = frozenset(names)
        heritages = heirs.heritages(connection, job_id, mine)
        before = heirs.inherited(connection, job_id, heritages) if heritages else []
        posted = conversation_rows.posted(connection, job_id, mine)
        conversations = (_with_its_rows(each, heritages, posted) for each in read.conversations if each.id in mine)
        resumed.append(
            ResumedJob(
                whole=read if is_whole else None,
                job=replace(read, conversations=tuple(conversations)),
                ended=[*before, *turn_rows.ended(connection, job_id, names)],
                unfinished=turn_rows.unfinished(connection, job_id, names),
                words=conversation_rows.words(connection, job_id, names),
                is_cancelled=stored.is_cancel_requested,
                cuts=turn_rows.memory_cuts(connection, job_id, mine),
                given_up=job_rows.given_up(connection, job_id),
            )
        )
    return resumed


def _with_its_rows(
    conversation: Conversation, heritages: Mapping[str, Heritage], posted: Mapping[str, PostedRequest]
) -> Conversation:
    heritage, request = heritages.get(conversation.id), posted.get(conversation.id)
    if request is not None:
        conversation = conversation.with_posted(request)
    return conversation if heritage is None else replace(conversation, heritage=heritage)
