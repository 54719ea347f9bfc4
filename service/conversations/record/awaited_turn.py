"""A turn that a caller is to speak (specification, "Turns of callers"). Pure."""

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
    """All that judges a caller's words, so that a node can take them that knows nothing of the job.

    ``conditions`` may end the conversation, by their places. The caller is waited for ``wait_s`` seconds, or for ever;
    then ``otherwise`` is said, or the turn fails, and with it perhaps its agent ``leaves``.
    """

    role: str
    validation: Validation | None = None
    conditions: Mapping[int, Condition] = {}
    wait_s: float | None = None
    otherwise: str | None = None
    leaves: bool = False

    def said_by_nobody(self, key: TurnKey, fulfils: tuple[int, ...], since: datetime, at: datetime) -> Turn:
        """Return the turn with the words of ``otherwise``; its detail tells it from one that a caller has spoken."""
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
        """Return the turn whose time is over: nobody has said anything."""
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
    """Return the demands on a turn of an agent whose caller is waited for."""
    return AwaitedTurn(
        role=agent.role,
        validation=agent.validation,
        conditions=conditions_of(until, agent.id),
        wait_s=agent.wait_s,
        otherwise=agent.otherwise,
        leaves=leaves(agent, FailureReason.NOT_SAID),
    )
