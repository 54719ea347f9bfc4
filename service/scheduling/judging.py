"""Judges answers without holding the event loop: at once where that is quick, else in another process."""

from typing import Final

from service.conversations.validation import Validation
from workers.offload import offload

QUICK_CHARS: Final = 4096  # of an answer, and of a schema
QUICK_CHOICES: Final = 50
QUICK_S: Final = 0.01  # of the event loop
LIMIT_S: Final = 5.0  # of the other process; within it the judgement's own limit is much shorter


async def judge(validation: Validation, answer: str) -> str | None:
    """Return what is wrong with an answer, None where nothing is; one that cannot be judged is not valid."""
    is_small = max(len(answer), validation.schema_chars) <= QUICK_CHARS
    if is_small and len(validation.choices) <= QUICK_CHOICES:
        try:
            return validation.fault_of(answer, QUICK_S)
        except TimeoutError:
            pass  # it may be done in the time that there is elsewhere
    try:
        return await offload(validation.fault_of, answer, limit_s=LIMIT_S)
    except TimeoutError:
        return "it cannot be told in time whether it is valid"
