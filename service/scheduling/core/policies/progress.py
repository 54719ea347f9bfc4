"""The order of seed 000: conversations that are further, then older ones, then earlier rounds."""

from service.scheduling.core.queue.ready_queue import Rank, RankedQueue, ReadyTurn


class Policy(RankedQueue):
    """The seed's tuple; re-prompts, its first element, stand ahead of every policy."""

    def rank(self, turn: ReadyTurn) -> Rank:
        """Order as the seed's section "Priority Ordering" does."""
        return (
            -turn.job_priority,
            -turn.rounds_completed,
            turn.conversation_order,
            turn.key.round,
            turn.ready_order,
        )
