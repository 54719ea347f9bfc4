"""The recorded turns with which a conversation begins, fixed when it is posted (specification, "Begun from a record").

References point to where turns were spoken: what a fork has inherited itself belongs to its original. Pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from service.conversations.job.job import (
    Agent,
    Conversation,
    Former,
    Heritage,
    Job,
    JobId,
    Mode,
    TurnKey,
    TurnKind,
    View,
)
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import INHERITED, NOTHING, TurnDigest
from service.conversations.job.wording import ConversationWords
from service.conversations.record.transcript import Origin, Turn
from service.conversations.talk.discussion import is_visible_later
from service.conversations.talk.turn_failures import digest_of_failure


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted part of a recorded conversation: all, its first ``rounds``, or up to a turn of an agent."""

    job: JobId
    conversation: str
    rounds: int | None = None
    before: tuple[str, int] | None = None


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded part of a job's conversation, with its own inherited turns, and the words around it."""

    job: Job
    conversation: Conversation
    state: ConversationState
    turns: Sequence[Turn]
    words: ConversationWords | None = None

    @property
    def speakers(self) -> dict[str, Agent]:
        """The agents that have spoken or may speak in it, by id, including those that its job lacks."""
        return {agent.id: agent for agent in with_formers(self.job, self.conversation.heritage).agents}


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of one agent where they were spoken: those of rounds below ``rounds``."""

    job: JobId
    conversation: str
    agent: str
    rounds: int
    kind: TurnKind = TurnKind.TURN


class CutFault(Exception):
    """The wanted part does not exist; ``field`` of ``from`` names the reason."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def ends_of(cut: Cut, recorded: Recorded) -> dict[str, int]:
    """Return, for each agent of a source, the round below which its turns are inherited.

    Raises:
        CutFault: a round is not recorded yet, or there is no such turn.
    """
    ends, left = _recorded_ends(recorded)
    spoken = max(ends.values(), default=0)
    if cut.before is not None:
        agent, number = cut.before
        if agent not in recorded.speakers:
            raise CutFault("before.agent", f"{agent!r} is no agent of {cut.job}/{cut.conversation}")
        keys = (turn.key for turn in recorded.turns if turn.kind is TurnKind.TURN)
        if not any(key.agent_id == agent and key.round == number for key in keys):
            raise CutFault("before", f"a turn of {agent!r} in round {number} is not recorded")
        _check_rounds("before.round", number, ends, left, recorded)
        behind = _behind(recorded, agent)
        return {name: min(end, number + (name not in behind)) for name, end in ends.items()}
    if cut.rounds is not None:
        if cut.rounds > spoken:
            raise CutFault("rounds", f"{spoken} rounds are recorded")
        _check_rounds("rounds", cut.rounds, ends, left, recorded)
        return {name: min(end, cut.rounds) for name, end in ends.items()}
    return ends


def _recorded_ends(recorded: Recorded) -> tuple[dict[str, int], set[str]]:
    """Return how far each agent was heard before the conversation ended, and the agents that have left."""
    joined = recorded.conversation.heritage.first  # an agent that joined later has not missed earlier rounds
    ends = {name: joined.get(name, 0) for name in recorded.speakers}
    heard = list(_heard(recorded))
    left = {turn.key.agent_id for turn in heard if turn.leaves}
    for turn in heard:
        ends[turn.key.agent_id] = max(ends[turn.key.agent_id], turn.key.round + 1)
    return ends, left


def _heard(recorded: Recorded) -> Iterable[Turn]:
    """Yield the turns after which the conversation went on.

    Turns that ended it are asked for again: an end that a leader named, and the turn with which the last agent left.
    """
    speakers = recorded.speakers
    turns = [turn for turn in recorded.turns if turn.kind is TurnKind.TURN]
    spoken = {turn.key.round for turn in turns if turn.key.agent_id != recorded.job.leader}
    last_leave = _last_leave(recorded, turns)
    for turn in turns:
        if turn is last_leave:
            continue
        is_last_choice = turn.key.agent_id == recorded.job.leader and turn.key.round not in spoken
        if is_last_choice and recorded.state is ConversationState.COMPLETED and recorded.job.mode is Mode.LED:
            continue
        is_silence = turn.state is TurnState.FAILED and (
            turn.inherited is not None or digest_of_failure(speakers[turn.key.agent_id], turn.reason) is not None
        )
        if turn.state is TurnState.COMPLETED or is_silence:
            yield turn


def _last_leave(recorded: Recorded, turns: Sequence[Turn]) -> Turn | None:
    leaving = [turn for turn in turns if turn.leaves]
    is_deserted = {agent.id for agent in recorded.job.agents} <= {turn.key.agent_id for turn in leaving}
    return leaving[-1] if is_deserted and recorded.state is ConversationState.FAILED else None


def _check_rounds(field: str, rounds: int, ends: Mapping[str, int], left: Collection[str], recorded: Recorded) -> None:
    if recorded.state is ConversationState.COMPLETED or recorded.job.mode is Mode.LED:
        return
    behind = [name for name, end in ends.items() if end < rounds and name not in left]
    of_job = {agent.id for agent in recorded.job.agents}
    for name in behind:
        if name in of_job:  # an agent of an older conversation alone does not speak here
            raise CutFault(field, f"{name!r} has spoken {ends[name]} rounds; more are not recorded yet")


def _behind(recorded: Recorded, agent: str) -> set[str]:
    """Return an agent, and those that wait for it in its round."""
    if recorded.job.mode is Mode.FREE:
        return {agent}
    if recorded.job.mode is Mode.LED:
        return {agent} if agent != recorded.job.leader else set(recorded.speakers)
    behind = {agent}
    while True:
        more = {name for name, each in recorded.speakers.items() if each.waits_for & behind} | behind
        if more == behind:
            return behind
        behind = more


def inherit(cut: Cut, recorded: Recorded, heir: Job, rounds: int) -> tuple[Heritage, list[Turn]]:
    """Return the heritage of a new job's conversation of ``rounds`` rounds, and its turns as they were spoken.

    Raises:
        CutFault: a round is not recorded yet, or the conversations do not fit.
    """
    if recorded.conversation.heritage.is_lost:
        raise CutFault("job", "it has lost what it had inherited: that was deleted")
    if (heir.mode, heir.leader) != (recorded.job.mode, recorded.job.leader):
        raise CutFault("job", f"a conversation goes on as it began: mode {recorded.job.mode}, and with its leader")
    ends = {name: min(end, rounds) for name, end in ends_of(cut, recorded).items()}
    taken = _taken(recorded, ends)
    own, spoke = {agent.id for agent in heir.agents}, {turn.key.agent_id for turn in taken}
    if heir.mode is Mode.LED and not spoke <= own:
        raise CutFault("job", f"in mode led whoever was named has to be there: {', '.join(sorted(spoke - own))}")
    first = _first_rounds(cut, recorded, heir, ends, taken)
    turns = [turn for turn in taken if turn.kind is TurnKind.TURN]
    of_formers = [turn for turn in turns if turn.key.agent_id not in own]
    heritage = Heritage(
        source=(cut.job, cut.conversation),
        ends=ends,
        first=first,
        turns=sum(first.values()) or len(turns) - len(of_formers),
        former_tokens=sum(map(_tokens_of, of_formers)),
        origins=tuple(dict.fromkeys((origin.job, origin.conversation) for origin in map(_origin, taken))),
        formers=_formers(recorded.speakers, spoke - own),
    )
    same = _with_same_memory(recorded, heir, heritage, spoke)
    return replace(heritage, alike={name: _own_from(name, cut, recorded, heritage) for name in same}), taken


def _taken(recorded: Recorded, ends: Mapping[str, int]) -> list[Turn]:
    """Return the turns that an heir inherits, with their summaries."""
    heard = {turn.key for turn in _heard(recorded) if turn.key.round < ends[turn.key.agent_id]}
    upto = _summed_upto(recorded, heard)
    return [
        turn
        for turn in recorded.turns
        if (turn.key in heard if turn.kind is TurnKind.TURN else turn.key.round <= upto.get(turn.key.agent_id, -1))
    ]


def _first_rounds(
    cut: Cut, recorded: Recorded, heir: Job, ends: Mapping[str, int], taken: Sequence[Turn]
) -> dict[str, int]:
    """Return the first own round of each of an heir's agents; a new agent begins where all others go on."""
    if heir.mode is Mode.LED:
        return {}
    left = {turn.key.agent_id for turn in taken if turn.leaves}
    there = [ends[agent.id] for agent in recorded.job.agents if agent.id not in left]
    whole = min([*there, cut.before[1]] if cut.before is not None else there, default=0)
    return {agent.id: ends.get(agent.id, whole) for agent in heir.agents}


def _tokens_of(turn: Turn) -> int:
    return turn.usage.completion_tokens or 0 if turn.state is TurnState.COMPLETED else 0


def _own_from(name: str, cut: Cut, recorded: Recorded, heritage: Heritage) -> int:
    """Return the first origin whose memory is an agent's own: a source with new cuts does not pass older ones on."""
    before = recorded.conversation.heritage
    chain = [*before.origins, (cut.job, cut.conversation)]
    own = frozenset(chain[before.alike.get(name, len(before.origins)) :])
    return next((place for place, origin in enumerate(heritage.origins) if origin in own), len(heritage.origins))


def _summed_upto(recorded: Recorded, heard: Collection[TurnKey]) -> dict[str, int]:
    """Return the round up to which summaries are inherited: for each agent, or in a shared view for all readers."""
    upto: dict[str, int] = {}
    for key in heard:
        upto[key.agent_id] = max(upto.get(key.agent_id, -1), key.round)
    last = max(upto.values(), default=-1)
    return dict.fromkeys(recorded.speakers, last) if recorded.job.view is View.SHARED else upto


def _with_same_memory(recorded: Recorded, heir: Job, heritage: Heritage, spoke: Collection[str]) -> frozenset[str]:
    """Return the agents with the same memory window as in the source, for the words of those that ``spoke``.

    Their memory is the same, and they may still read all of these words. A shared view has one window for all: it is
    lost with a new reader, or one that may read less.
    """
    source = with_formers(recorded.job, recorded.conversation.heritage)
    there, here = ({each.id: each for each in job.agents} for job in (source, with_formers(heir, heritage)))
    own = {agent.id for agent in heir.agents}
    if source.view is not heir.view:
        return frozenset()
    if heir.view is View.SHARED:
        of_source = {agent.id for agent in recorded.job.agents}
        is_readable = open_to(there, of_source) & {*spoke} <= open_to(here, own)
        readers = own & of_source if is_readable else set[str]()
    else:
        readers = {name for name in own & there.keys() if _read_by(there, name) & {*spoke} <= _read_by(here, name)}
    return frozenset(name for name in readers if there[name].memory == here[name].memory)


def open_to(speakers: Mapping[str, Agent], readers: Collection[str]) -> set[str]:
    """Return the speakers whose words all of the readers may read."""
    return {name for name, each in speakers.items() if all(is_visible_later(each, reader) for reader in readers)}


def _read_by(speakers: Mapping[str, Agent], reader: str) -> set[str]:
    return {name for name, each in speakers.items() if is_visible_later(each, reader)}


def _formers(speakers: Mapping[str, Agent], names: Collection[str]) -> tuple[Former, ...]:
    return tuple(
        Former(
            id=former.id,
            role=former.role,
            visible_to=former.visible_to,
            waited_for_by=frozenset(name for name, each in speakers.items() if former.id in each.waits_for),
        )
        for former in speakers.values()
        if former.id in names
    )


def shares_of(taken: Iterable[Turn]) -> list[Share]:
    """Return where turns were spoken, and up to which round: from an original, only what its fork had inherited."""
    rounds: dict[tuple[Origin, str, TurnKind], int] = {}
    for turn in taken:
        place = _origin(turn), turn.key.agent_id, turn.kind
        rounds[place] = max(rounds.get(place, 0), turn.key.round + 1)
    return [
        Share(job=origin.job, conversation=origin.conversation, agent=agent, kind=kind, rounds=upto)
        for (origin, agent, kind), upto in rounds.items()
    ]


def _origin(turn: Turn) -> Origin:
    return turn.inherited or Origin(job=turn.key.job_id, conversation=turn.key.conversation_id)


def is_own_memory(turn: Turn, heritage: Heritage) -> bool:
    """Whether a turn had the same memory window that it would have in its conversation."""
    if turn.inherited is None:
        return True
    place = heritage.origins.index((turn.inherited.job, turn.inherited.conversation))
    return place >= heritage.alike.get(turn.key.agent_id, len(heritage.origins))


def as_inherited(turn: Turn, job_id: JobId, conversation_id: str) -> Turn:
    """Return a turn as one of an heir's record."""
    origin = _origin(turn)
    key = TurnKey(job_id, conversation_id, turn.key.agent_id, turn.key.round)
    return replace(turn, key=key, fulfils=(), inherited=origin, recorded=None)


def with_formers(job: Job, heritage: Heritage) -> Job:
    """Return a job with the agents that it lacks but whose words a conversation has inherited.

    Only agents to which they were visible read them.
    """
    if not heritage.formers:
        return job
    formers = (
        Agent(id=each.id, role=each.role, model="", system="", visible_to=each.visible_to) for each in heritage.formers
    )
    return replace(job, agents=(*(waiting_for_formers(agent, heritage) for agent in job.agents), *formers))


def waiting_for_formers(agent: Agent, heritage: Heritage) -> Agent:
    """Return an agent that also hears, within a round, agents that its job lacks and that it heard there before."""
    waited = {each.id for each in heritage.formers if agent.id in each.waited_for_by}
    return replace(agent, waits_for=agent.waits_for | waited) if waited else agent


def silent_turns(job: Job, heirs: Iterable[Conversation], ended: Collection[TurnKey]) -> dict[TurnKey, TurnDigest]:
    """Return the turns that the new agents of heirs lack, since they joined later."""
    places = (
        TurnKey(job.id, heir.id, name, number)
        for heir in heirs
        for name, first in heir.heritage.first.items()
        for number in range(first)
    )
    return {key: INHERITED for key in places if key not in ended}


def digest_of_inherited(turn: Turn, digest: TurnDigest = NOTHING) -> TurnDigest:
    """Return the digest of an inherited turn: its words count, and it fulfils no condition on its own."""
    return replace(digest, fulfils=(), leaves=turn.leaves, is_inherited=True)
