"""The effect of a failed turn on its conversation (specification, "Failures of agents"). Pure."""

from typing import Final

from service.conversations.job.job import Agent, OnFailure
from service.conversations.job.until import TurnDigest
from workers.outcome import FailureReason

FATAL: Final = frozenset({FailureReason.CANCELLED, FailureReason.INTERNAL})  # these always end the conversation


def digest_of_failure(agent: Agent, reason: str | None) -> TurnDigest | None:
    """Return the digest of a failed turn, None if its conversation fails with it."""
    if agent.on_failure is OnFailure.END or reason in FATAL:
        return None
    return TurnDigest(leaves=agent.on_failure is OnFailure.LEAVE)


def leaves(agent: Agent, reason: str | None) -> bool:
    """Whether an agent leaves after a failed turn."""
    digest = digest_of_failure(agent, reason)
    return digest is not None and digest.leaves
