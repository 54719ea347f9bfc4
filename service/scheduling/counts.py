"""What this run of the service has done so far."""


class RunCounters:
    """Written by the scheduler alone; counts since the start.

    Conversations that were taken up, have ended, and are durably so; turns of jobs that have ended; tokens that engines
    could have taken from their caches, and those that they report to have.
    """

    def __init__(self) -> None:
        self.conversations = 0
        self.finished = 0
        self.persisted = 0
        self.ended_turns = 0
        self.reusable_tokens = 0
        self.reused_tokens = 0

    def note_ended(self, turns: int, conversations: int) -> None:
        """Note that so many have ended."""
        self.ended_turns += turns
        self.finished += conversations

    def __repr__(self) -> str:
        return f"<RunCounters conversations={self.finished}/{self.conversations}>"
