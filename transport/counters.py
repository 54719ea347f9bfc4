"""An engine's reports of its own work, apart from its streams."""

import msgspec


class SlotWork(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one slot with the task ``task``: prompt tokens read and answer tokens written.

    A task is one request's, and its number is never reused; an idle slot may still show its last task. An engine that
    reports no slots appears as one task with the ``steps`` that it has made.
    """

    task: int
    prompt_tokens: int
    output_tokens: int
    is_busy: bool = True
    steps: int = 0


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's KV cache: its size and use in tokens, and how often requests were preempted.

    Each request holds whole blocks of ``block`` tokens.
    """

    tokens: int
    used: int
    preemptions: int
    block: int = 1


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's slots at one moment."""

    work: tuple[SlotWork, ...]
    running: int | None = None  # running requests, from an engine that reports them instead of slots

    @property
    def busy_work(self) -> tuple[SlotWork, ...]:
        """The slots that have a task."""
        return tuple(work for work in self.work if work.is_busy and work.task >= 0)

    def advances_since(self, earlier: "EngineCounters") -> int:
        """Count the slots that began a task, or read or wrote a token; ending a task is no advance."""
        return sum(map(_has_advanced, earlier.work, self.work))

    def __str__(self) -> str:
        """Describe it in words."""
        engines = ", ".join(f"{work.prompt_tokens}+{work.output_tokens}" for work in self.work)
        if self.running is not None:
            return f"{self.running} requests run, {sum(work.steps for work in self.work)} steps, tokens {engines}"
        busy = sum(work.is_busy for work in self.work)
        return f"{busy} slots busy, tokens read+written: {engines or 'none'}"


def _has_advanced(before: SlotWork, after: SlotWork) -> bool:
    if after.task != before.task:
        return after.task >= 0
    return (
        after.prompt_tokens > before.prompt_tokens
        or after.output_tokens > before.output_tokens
        or after.steps > before.steps
    )
