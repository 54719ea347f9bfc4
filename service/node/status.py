"""One snapshot of everything that runs or waits, for live displays (specification, "Status snapshot").

Every head of a pool says what it waits for.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import Final

import msgspec

from roundhouse_client.values.node import ConversationsSoFar, PrefixTokens, SpeakingTurn, WaitingTurn
from roundhouse_client.values.workers import Pools
from service.conversations.job.job import GroupBy, TurnKey
from service.conversations.job.states import TurnState
from service.scheduling.scheduler import Scheduler
from workers.fleet import Fleet
from workers.states import WorkerState

FEW: Final = 20  # turns
WORDS: Final = 200  # characters
HEADS: Final = 10
SEARCHED: Final = 500  # heads of all keys that are searched for those of one
GROUPED: Final = {GroupBy.PARAMETERS: "parameters", GroupBy.ADAPTER: "adapters"}


def speaking(
    scheduler: Scheduler, limit: int = FEW, chars: int = WORDS, is_seen: Callable[[str | None], bool] | None = None
) -> tuple[list[SpeakingTurn], bool]:
    """Return job turns on slots, the latest starts first, and whether there are more.

    ``is_seen`` says by key whose turns are shown; None shows all.
    """
    runs = [
        run for run in scheduler.turns.in_flight() if is_seen is None or is_seen(scheduler.works.owner(run.key.job_id))
    ]
    runs.sort(key=lambda run: (run.attempt.started_at, run.key), reverse=True)
    now = datetime.now(UTC)
    shown: list[SpeakingTurn] = []
    for run in runs[:limit]:
        answer, key = run.attempt.answer, run.key
        said = answer.text
        words = said or answer.reasoning
        shown.append(
            SpeakingTurn(
                job=key.job_id,
                name=scheduler.works.job_name(key.job_id),
                conversation=key.conversation_id,
                agent=key.agent_id,
                round=key.round,
                worker=run.attempt.worker,
                running_s=round((now - run.attempt.started_at).total_seconds(), 1),
                output_tokens=answer.output_tokens,
                is_thinking=not said and bool(words),
                words=words[-chars:],
            )
        )
    return shown, len(runs) > limit


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a whole Roundhouse."""

    jobs: int
    conversations: ConversationsSoFar
    ended_turns: int
    pools: Pools
    prefix_tokens: PrefixTokens
    pending: tuple[WaitingTurn, ...]
    ready: tuple[WaitingTurn, ...]


def status_of(
    scheduler: Scheduler, fleet: Fleet, heads: int = HEADS, is_seen: Callable[[str | None], bool] | None = None
) -> Status:
    """Return the present snapshot; ``is_seen`` says by key whose heads are shown, None shows all."""
    counters = scheduler.counters
    looked_at = heads if is_seen is None else SEARCHED

    def is_shown(key: TurnKey) -> bool:
        return is_seen is None or is_seen(scheduler.works.owner(key.job_id))

    pending = (head for head in scheduler.view.queues.pending_heads(looked_at) if is_shown(head[0]))
    ready = (head for head in scheduler.view.queues.ready_heads(looked_at) if is_shown(head[0]))
    return Status(
        jobs=len(scheduler.view.jobs()) - len(scheduler.requests),
        conversations=ConversationsSoFar(
            total=counters.conversations, finished=counters.finished, persisted=counters.persisted
        ),
        ended_turns=counters.ended_turns,
        pools=pools_of(scheduler, fleet),
        prefix_tokens=PrefixTokens(reusable=counters.reusable_tokens, reused=counters.reused_tokens),
        pending=tuple(
            _head(scheduler, fleet, key, f"{', '.join(others)} to speak in round {number}")
            for key, others, number in islice(pending, heads)
        ),
        ready=tuple(
            _head(
                scheduler,
                fleet,
                key,
                _ready_waits_for(scheduler, fleet, key, is_suspect=is_suspect),
                is_suspect=is_suspect,
            )
            for key, is_suspect in islice(ready, heads)
        ),
    )


def pools_of(scheduler: Scheduler, fleet: Fleet) -> Pools:
    """Count the turns of each pool."""
    pools = scheduler.view.of_all()
    return Pools(
        pending=pools[TurnState.PENDING],
        ready=pools[TurnState.READY],
        in_flight=pools[TurnState.IN_FLIGHT],
        # Turns on a draining worker keep their slots, and no other turn gets these.
        capacity=sum(
            worker.slots.total if worker.now.state is WorkerState.READY else worker.slots.in_use for worker in fleet
        ),
    )


def _ready_waits_for(scheduler: Scheduler, fleet: Fleet, key: TurnKey, *, is_suspect: bool) -> str:
    if scheduler.pauses.is_closing:
        return "the next start of Roundhouse, which is stopping"
    if scheduler.pauses.detail is not None:
        return scheduler.pauses.detail
    deferred_for = scheduler.view.queues.deferred_for(key)
    if deferred_for is not None:
        return f"a slot of {deferred_for}, which has its prompt in its cache: elsewhere it would take longer"
    model = scheduler.works.model_of(key)
    reason = _waits_for_room(scheduler, key, model) or waits_for_slot(model, fleet, scheduler.view.queues.group_by)
    return f"{reason}; it may have brought an engine down, and is tried alone" if is_suspect else reason


def _waits_for_room(scheduler: Scheduler, key: TurnKey, model: str) -> str | None:
    """Return the room that a ready turn waits for beside a free slot; None if it needs none."""
    room = scheduler.view.queues.room_lacked(key)
    if room is None:
        return None
    if room.is_put_behind:
        return f"conversations that have begun: they fill the KV cache of {model}, {room.budget} tokens"
    return f"room in the KV cache of {model}: {room.reserved} of {room.budget} tokens are reserved"


def waits_for_slot(model: str, fleet: Fleet, group_by: GroupBy | None = None) -> str:
    """Return the reason why a ready turn of ``model`` waits."""
    of_model = fleet.workers_of(model)
    serving = [worker for worker in of_model if worker.now.state is WorkerState.READY]
    if serving:
        taken, total = sum(worker.slots.in_use for worker in serving), sum(worker.slots.total for worker in serving)
        reason = f"a slot of {model}: {taken} of {total} in use"
        if group_by is not None and taken < total:
            reason += f", and whose worker runs turns of other {GROUPED[group_by]} until it is empty (group_by)"
        return reason
    if model not in fleet.models():
        return removed(model)
    return f"a worker of {model}: {fleet.trouble_of(model)}"


def removed(model: str) -> str:
    """Return the reason for turns whose model was removed from the configuration."""
    return f"model {model} was removed from the configuration"


def unloaded(model: str) -> str:
    """Return the reason for turns whose model an operator has unloaded."""
    return f"model {model} was unloaded by an operator"


def _head(scheduler: Scheduler, fleet: Fleet, key: TurnKey, waits_for: str, *, is_suspect: bool = False) -> WaitingTurn:
    return WaitingTurn(
        job=key.job_id,
        name=scheduler.works.job_name(key.job_id),
        conversation=key.conversation_id,
        agent=key.agent_id,
        round=key.round,
        model=scheduler.works.model_of(key),
        waits_for=waits_for,
        next_at=_next_at(scheduler, fleet, key, is_suspect=is_suspect),
    )


def _next_at(scheduler: Scheduler, fleet: Fleet, key: TurnKey, *, is_suspect: bool) -> datetime | None:
    """Return when a worker of a turn's model is tried again if none serves; otherwise only an ending turn helps.

    For a suspect that lets others go first, return when it may be tried.
    """
    workers = fleet.workers_of(scheduler.works.model_of(key))
    if any(worker.now.state is WorkerState.READY for worker in workers):
        return scheduler.rests_until(scheduler.works.model_of(key)) if is_suspect else None
    return min((at for at in (worker.next_at for worker in workers) if at is not None), default=None)
