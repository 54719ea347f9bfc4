"""The conversations with the most progress first, then older conversations, then earlier rounds."""

from service.scheduling.core.queue.ready_queue import Rank, RankedQueue, ReadyTurn


class MostProgress(RankedQueue):
    """Specification, "Scheduling policies"; re-prompts stand ahead of every policy."""

    def rank(self, turn: ReadyTurn) -> Rank:
        """Order by priority, rounds completed and age."""
        return (
            -turn.job_priority,
            -turn.rounds_completed,
            turn.conversation_order,
            turn.key.round,
            turn.ready_order,
        )
