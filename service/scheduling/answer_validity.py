"""Judges answers without holding the event loop."""

from service.conversations.validation import Validation
from workers.offload.pool import judge as judge_offloaded


async def judge(validation: Validation, answer: str) -> str | None:
    """Return what is wrong with an answer, None where nothing is; one that cannot be judged is not valid."""
    try:
        return await judge_offloaded(validation.fault_of, answer, size=max(len(answer), validation.chars))
    except TimeoutError:
        return "its validation did not end in time"
