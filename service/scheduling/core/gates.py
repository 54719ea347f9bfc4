"""The gates that a turn passes before it is ready: its caller, then its first reader. Pure."""

from collections.abc import Iterable
from enum import StrEnum

from service.conversations.job.job import SpokenBy, TurnKey
from service.conversations.talk.turn_order import Place
from service.scheduling.core.first_readers import FirstReaders
from service.scheduling.core.live import LiveConversation


class TurnGate(StrEnum):
    """A gate at which a turn waits."""

    CALLER = "caller"  # a program or a person speaks it (specification, "Turns of callers")
    FIRST_READER = "first_reader"  # another turn reads the prompt that both begin with ("Begun from a record")


class Gates:
    """The gates of all turns; written by the core alone. A turn that was on a slot before passes all gates."""

    def __init__(self) -> None:
        self.readers = FirstReaders()

    def __repr__(self) -> str:
        return f"<Gates {self.readers!r}>"

    def closed_gate(self, conversation: LiveConversation, place: Place) -> TurnGate | None:
        """Return the first closed gate for a turn whose order has come, None if it is ready."""
        agent, key = conversation.agents[place.agent], conversation.key(place)
        if agent.by is SpokenBy.CALLER:
            conversation.awaited |= {key}
            return TurnGate.CALLER
        if conversation.is_started or key in conversation.live.suspects:
            return None
        job = conversation.live.job
        waits = self.readers.hold(key, (job.priority, job.owner), agent, conversation.definition)
        return TurnGate.FIRST_READER if waits else None

    def waiting_in(self, conversation: LiveConversation) -> Iterable[TurnKey]:
        """Return the turns of a conversation that wait at gates."""
        held = self.readers.held_of(conversation.live.job.id, conversation.definition.id)
        return (*conversation.awaited, *held)

    def needs_callers_alone(self, conversation: LiveConversation) -> bool:
        """Whether a conversation waits for callers only."""
        if not conversation.awaited or conversation.open:
            return False
        return not self.readers.held_of(conversation.live.job.id, conversation.definition.id)
