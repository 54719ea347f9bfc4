"""First ready, first served, within a job's priority."""

from service.scheduling.core.queue.ready_queue import Rank, RankedQueue, ReadyTurn


class Fifo(RankedQueue):
    """Orders turns by the time at which they became ready."""

    def rank(self, turn: ReadyTurn) -> Rank:
        """Order by priority and age."""
        return (-turn.job_priority, turn.ready_order)
