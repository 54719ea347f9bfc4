"""What a node goes on with of a job: some of its conversations, and where each was left."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from service.conversations.job import Job, JobId
from service.conversations.job_parser import parse_stored
from service.conversations.log_fields import of_job
from service.conversations.transcript import Turn, UnfinishedTurn
from service.conversations.wording import ConversationWords
from service.errors import InvalidJob, JobNotFound
from service.store import queries
from service.store.databases.database import Connection
from workers.log_context import line_about

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedJob:
    """Conversations of one job, with the turns that have ended and what others have behind them.

    ``whole`` is the job with all its conversations; ``words`` are those of the conversations that have begun.
    """

    whole: Job
    job: Job
    ended: Sequence[Turn]
    unfinished: Sequence[UnfinishedTurn]
    words: Mapping[str, ConversationWords | None]
    is_cancelled: bool


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
            stored = queries.job(job_id)(connection)
        except JobNotFound:
            logger.warning("job %s was deleted as it was claimed", job_id, extra=line_about(of_job(job_id)))
            continue
        try:
            whole = known.get(job_id) or replace(
                parse_stored(queries.document(job_id)(connection), job_id, adapters), owner=stored.owner
            )
        except InvalidJob as error:
            line = line_about(of_job(job_id))
            logger.error("job %s waits for a version of Roundhouse that can read it: %s", job_id, error, extra=line)  # noqa: TRY400
            continue
        mine = frozenset(names)
        resumed.append(
            ResumedJob(
                whole=whole,
                job=replace(
                    whole,
                    conversations=tuple(
                        conversation for conversation in whole.conversations if conversation.id in mine
                    ),
                ),
                ended=queries.turns(job_id, names)(connection),
                unfinished=queries.unfinished_turns(job_id, names)(connection),
                words=queries.words(job_id, names)(connection),
                is_cancelled=stored.is_cancel_requested,
            )
        )
    return resumed
