"""Memory cuts: decided and stored before a turn is asked, with a summary of the rounds that leave its window.

A summary is one request on the turn's own slot, after the prompt in its cache.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import anyio
from msgspec.structs import replace

from service.conversations.job.job import TurnKey, TurnKind, View
from service.conversations.record.transcript import Turn
from service.scheduling.asking.prompts import JobPrompts
from service.scheduling.attempt import RunningAttempt, usage_key
from service.scheduling.endings import Proof, ending_of, proof_of
from service.scheduling.turn_record import record_so_far, with_answer
from service.store.records import Record, TurnEnded
from workers.outcome import Cancelled, CancelReason, Completed, Outcome, RequestFailed
from workers.supervised import SupervisedWorker

Append = Callable[[Sequence[Record]], Awaitable[bool]]


async def cut_memory(
    prompts: JobPrompts,
    key: TurnKey,
    attempt: RunningAttempt,
    worker: SupervisedWorker,
    append: Append,
    cache_owner: str | None,
) -> Outcome | None:
    """Decide a turn's memory window, sum up the rounds that leave it, and store both; return the turn's end, if any.

    Its ``attempt`` holds the slot. ``append`` returns when facts are durable; False if another node has them by now.
    The prompt's cache belongs to the key ``cache_owner``.
    """
    memories, memory = prompts.memories, prompts.agent(key).memory
    with anyio.CancelScope() as attempt.scope:
        async with memories.lock(key):
            cut = memories.plan(key, worker.spec)
            if cut is None:
                return None
            made: TurnEnded | None = None
            if memory is not None and memory.summary is not None:
                ended = await _sum_up(prompts, (key, cut.from_round), attempt, worker, cache_owner)
                if not isinstance(ended, TurnEnded):
                    return ended
                made = ended
            # Written even if the attempt is cancelled: without the record the summary would be made again.
            with anyio.CancelScope(shield=True):
                is_stored = await append([cut] if made is None else [cut, made])
            if not is_stored:
                return Cancelled(reason=CancelReason.LEASE_LOST)
            memories.take_cut(cut, None if made is None else made.turn)
            return None
    return attempt.cancelled or Cancelled(reason=CancelReason.LEASE_LOST)


async def _sum_up(
    prompts: JobPrompts,
    what: tuple[TurnKey, int],
    attempt: RunningAttempt,
    worker: SupervisedWorker,
    cache_owner: str | None,
) -> TurnEnded | Outcome:
    """Return the end of a summary, or the outcome that also ends the reader's turn.

    ``what`` is that turn and the round up to which the summary goes.
    """
    memories, job, (key, until) = prompts.memories, prompts.job, what
    own = RunningAttempt(attempt.worker, attempt.incarnation)
    asked, prompt = memories.summary_request(key, until, own.started_at, worker.spec)
    own.answer.own_tokens = None if cache_owner is None else prompts.own_tokens(key)
    asked = replace(asked, cache_owner=cache_owner, owner=job.owner)
    attempt.summary = own
    own.request = attempt.request = worker.requests.prepare(asked.job_name, own.answer)
    outcome = await worker.requests.perform(asked, own.answer, own.request)
    attempt.request = None
    own.end()
    attempt.lent_s += own.seconds  # the summary uses the slot meanwhile, and counts on its own
    # Any other fault of the engine ends the turn too: it may have died while another turn summed up on it.
    is_gone = worker.now.incarnation != attempt.incarnation or not worker.now.is_serving
    is_refused = proof_of(outcome) is Proof.REFUSED and not is_gone
    attempt.loses_summary = not (isinstance(outcome, Completed | RequestFailed) or is_refused)
    if attempt.loses_summary:
        return outcome
    state, reason, detail = ending_of(outcome)
    author, now = memories.summarizer(key), datetime.now(UTC)
    tried = replace(record_so_far(own, prompt), outcome=state, reason=reason, detail=detail)
    turn = Turn(
        key=key._replace(agent_id=author.id) if job.view is View.SHARED else key,
        kind=TurnKind.SUMMARY,
        role=author.role,
        state=state,
        reason=reason,
        detail=detail,
        attempts=(tried,),
        queued_at=own.started_at,
        started_at=own.started_at,
        finished_at=now,
    )
    measures = own.measures(author.model, state, reason)
    return TurnEnded(
        turn=with_answer(turn, own, has_markup=author.markup),
        at=now,
        # A summary is no turn of the job
        used=(usage_key(author, job.owner, key.job_id), replace(measures.used, turns=0)),
        model=author.model,
        measures=measures,
    )
