"""What the turns on slots have said last, for whoever watches."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from roundhouse_client.values.node import SpeakingTurn
from service.scheduling.scheduler import Scheduler

FEW: Final = 20  # turns
WORDS: Final = 200  # characters


def speaking(
    scheduler: Scheduler, limit: int = FEW, chars: int = WORDS, is_seen: Callable[[str | None], bool] | None = None
) -> tuple[list[SpeakingTurn], bool]:
    """Return turns of jobs that are on slots, those that started last first, and whether there are more.

    ``is_seen`` tells by their keys of which jobs turns are shown, None is of all.
    """
    runs = [run for run in scheduler.turns.in_flight() if is_seen is None or is_seen(scheduler.owner(run.key.job_id))]
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
                name=scheduler.job_name(key.job_id),
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
