"""How much of a pending turn's prompt could be read beforehand, in tokens. Pure.

Known is what others have said since the agent spoke last; where its engine has forgotten that turn, all before as well.
An engine is taken to remember as many agents as it has slots, those that it has read for last (llama.cpp gives a new
prompt the slot that was idle for longest).
"""

from collections.abc import Mapping

from service.conversations.job import Conversation, Job, JobId, TurnKey, View
from service.conversations.turn_order import Place
from service.conversations.visibility import audible_before
from service.scheduling.core.capacity.turn_needs import TOKENS_A_CHAR
from service.scheduling.core.live import LiveConversation

Talk = tuple[JobId, str]  # a conversation of a job
Speaker = tuple[JobId, str, str]  # an agent of a conversation


class KnownPrompts:
    """Told of all that is said and read; forgets a conversation with its end, and a worker with its engine."""

    def __init__(self) -> None:
        self._said: dict[Talk, dict[tuple[str, int], int]] = {}
        self._remembered: dict[str, dict[Speaker, None]] = {}  # of each worker: the one that was read for last is last
        self._slots: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<KnownPrompts talks={len(self._said)} workers={len(self._slots)}>"

    def open(self, worker: str, slots: int) -> None:
        """Take a worker's slots."""
        self._slots[worker] = slots
        self._remembered.setdefault(worker, {})

    def close(self, worker: str) -> None:
        """Note that an engine is gone."""
        self._slots.pop(worker, None)
        self._remembered.pop(worker, None)

    def note_read(self, key: TurnKey, worker: str) -> None:
        """Note that an engine reads a turn's prompt."""
        remembered = self._remembered.get(worker)
        if remembered is None:
            return
        remembered.pop(key[:3], None)
        remembered[key[:3]] = None
        while len(remembered) > self._slots[worker]:
            del remembered[next(iter(remembered))]

    def note_said(self, key: TurnKey, tokens: int) -> None:
        """Note how long a turn's answer is; what was said two rounds before is in everybody's prompt."""
        said = self._said.setdefault(key[:2], {})
        said[key.agent_id, key.round] = tokens
        for turn in [turn for turn in said if turn[1] < key.round - 1]:
            del said[turn]

    def forget(self, talk: Talk) -> None:
        """Forget a conversation that is over, or elsewhere."""
        self._said.pop(talk, None)

    def unread(self, conversation: LiveConversation, place: Place) -> int:
        """Return how much of a turn's prompt is known by now that no engine has read, as far as can be told."""
        job, definition = conversation.live.job, conversation.definition
        said, cached = self._said.get((job.id, definition.id), {}), conversation.cached(place.agent)
        if cached is None:
            return _from_the_beginning(job, definition, place) + _known(job, place, said, 0)
        speaker = (job.id, definition.id, job.agents[place.agent].id)
        is_remembered = speaker in self._remembered.get(cached.worker, ())
        return _known(job, place, said, place.round - 1) + (0 if is_remembered else cached.tokens)


def _from_the_beginning(job: Job, definition: Conversation, place: Place) -> int:
    chars = len(job.system) + len(definition.prompt)
    if job.view is View.OWN:  # in a shared view an agent's own words come last
        chars += len(job.agents[place.agent].system)
    return round(chars * TOKENS_A_CHAR)


def _known(job: Job, place: Place, said: Mapping[tuple[str, int], int], since: int) -> int:
    """Return what was said from a round on that the agent's prompt in it did not hold, up to what is yet to come."""
    listener, tokens = job.agents[place.agent], 0
    for speaker, number in audible_before(job, listener, place.round, max(0, since)):
        if (speaker, number) not in said:
            if number < place.round - 1:
                continue  # long ago, or in an earlier life: of these nothing is known
            break
        is_read = number < place.round and number == since and speaker in listener.waits_for
        if speaker != listener.id and not is_read:
            tokens += said[speaker, number]
    return tokens
