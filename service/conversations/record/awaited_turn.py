"""A turn that waits for its caller (specification, "Turns of callers"). Pure."""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from service.conversations.job.job import Agent, SpokenBy, TurnKey
from service.conversations.job.states import TurnState
from service.conversations.job.until import Condition, Until, conditions_of
from service.conversations.job.validation import Validation
from service.conversations.record.transcript import Turn
from service.conversations.talk.turn_failures import leaves
from workers.outcome import FailureReason


class AwaitedTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rules for a caller's words, complete, so that a node without the job can judge them.

    ``conditions``, by index, may end the conversation. The turn waits for ``wait_s`` seconds, or without limit. Then
    ``otherwise`` is said, or the turn fails, and its agent may leave with it (``leaves``).
    """

    role: str
    validation: Validation | None = None
    conditions: Mapping[int, Condition] = {}
    wait_s: float | None = None
    otherwise: str | None = None
    leaves: bool = False

    def said_by_nobody(self, key: TurnKey, fulfils: tuple[int, ...], since: datetime, at: datetime) -> Turn:
        """Return the turn with the words of ``otherwise``; its detail tells it apart from a caller's own words."""
        detail = f"nobody spoke within wait_s = {self.wait_s:g}; the words are those of otherwise"
        return msgspec.structs.replace(self.said(key, self.otherwise or "", fulfils, since, at), detail=detail)

    def said(self, key: TurnKey, text: str, fulfils: tuple[int, ...], since: datetime, at: datetime) -> Turn:
        """Return the turn with a caller's words."""
        return Turn(
            key=key,
            role=self.role,
            state=TurnState.COMPLETED,
            by=SpokenBy.CALLER,
            text=text,
            fulfils=fulfils,
            queued_at=since,
            finished_at=at,
        )

    def unsaid(self, key: TurnKey, since: datetime, at: datetime) -> Turn:
        """Return the failed turn of a caller that has not spoken in time."""
        return Turn(
            key=key,
            role=self.role,
            state=TurnState.FAILED,
            by=SpokenBy.CALLER,
            reason=FailureReason.NOT_SAID,
            detail=f"nobody spoke within wait_s = {self.wait_s:g}",
            queued_at=since,
            finished_at=at,
            leaves=self.leaves,
        )


def await_agent(agent: Agent, until: Until) -> AwaitedTurn:
    """Return the rules for an agent's turn that waits for its caller."""
    return AwaitedTurn(
        role=agent.role,
        validation=agent.validation,
        conditions=conditions_of(until, agent.id),
        wait_s=agent.wait_s,
        otherwise=agent.otherwise,
        leaves=leaves(agent, FailureReason.NOT_SAID),
    )
