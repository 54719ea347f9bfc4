"""Recorded conversations with which those of a posted job begin: looked up, and fixed as it is posted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import anyio.to_thread
import msgspec
from msgspec.structs import replace

from service.conversations.callers import Caller, KeyScope
from service.conversations.dependencies import dependencies_of
from service.conversations.heritage import (
    Cut,
    CutFault,
    Recorded,
    Share,
    as_inherited,
    inherit,
    shares_of,
    silent_turns,
)
from service.conversations.job import Conversation, Heritage, Job, JobId
from service.conversations.job_document import with_conversations
from service.conversations.job_parser import parse_stored
from service.conversations.spec import FromSpec
from service.conversations.transcript import Turn
from service.conversations.turn_order import Place, speaking_order
from service.conversations.until import Until
from service.conversations.wording import ConversationWords
from service.errors import Fault, InvalidJob, JobNotFound
from service.scheduling.jobs.prompts import JobPrompts
from service.store import heirs, queries
from service.store.databases.database import Connection
from service.store.store import Store

MOST_SOURCES: Final = 1000  # conversations that one job begins with
Named = tuple[JobId, str]  # a conversation
SourceOf = Mapping[int, "Source"]  # by the place of the conversation in its job


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded conversation, and how it was posted: ``prompt`` and ``variables`` as they were written."""

    recorded: Recorded
    prompt: str
    variables: Mapping[str, object] | None

    @property
    def size(self) -> int:
        """The bytes of what a conversation takes over."""
        return len(msgspec.json.encode((self.prompt, self.variables)))


class JobBegun(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose conversations know what they inherit, whose turns these are, the turns, and the words around them.

    ``inherited`` are turns as their sources have them, by the conversations that begin with them: heirs share them.
    """

    job: Job
    shares: Mapping[str, Sequence[Share]]
    inherited: Mapping[str, Sequence[Turn]]
    words: Mapping[str, ConversationWords]

    @property
    def turns(self) -> int:
        """The number of turns that are inherited, those of several heirs each time."""
        return sum(map(len, self.inherited.values()))


class Sources:
    """Reads recorded conversations; ``adapters`` gives the names of adapters, each with its model."""

    def __init__(self, store: Store, adapters: Callable[[], Mapping[str, str]]) -> None:
        self._store = store
        self._adapters = adapters

    def __repr__(self) -> str:
        return f"<Sources of {self._store!r}>"

    async def read(self, document: object, caller: Caller, most_bytes: int) -> SourceOf:
        """Return the sources of a document's conversations; one that is malformed is left to whoever judges it.

        They are read one job after the other, until they have more than ``most_bytes`` together.

        Raises:
            JobNotFound: a job is not there, or not the caller's to read.
            ConversationNotFound: a job has no such conversation.
            InvalidJob: there are too many, or they are too large.
        """
        wanted = dict(_cuts(document))
        if not wanted:
            return {}
        names = dict.fromkeys((cut.job, cut.conversation) for cut in wanted.values())
        if len(names) > MOST_SOURCES:
            message = f"{len(names)} recorded conversations are more than {MOST_SOURCES}"
            raise InvalidJob([Fault(path="conversations", message=message)])
        for job_id in dict.fromkeys(job_id for job_id, _ in names):
            owner = await self._store.read(queries.owner(job_id))
            if not caller.may(KeyScope.READ) or not caller.sees(owner):
                raise JobNotFound(job_id)
        by_job: dict[JobId, list[str]] = {}
        for job_id, name in names:
            by_job.setdefault(job_id, []).append(name)
        read: dict[Named, Source] = {}
        left = most_bytes
        for job_id, wanted_names in by_job.items():
            query = partial(read_sources, job_id=job_id, names=wanted_names, adapters=dict(self._adapters()), most=left)
            found = await self._store.read(query)
            if found is None:
                place = next(place for place, cut in wanted.items() if cut.job == job_id)
                message = f"recorded conversations have more than limits.body_bytes = {most_bytes} together"
                raise InvalidJob([Fault(path=f"conversations[{place}].from", message=message)])
            left -= found.size
            read |= found.sources
        return {place: read[cut.job, cut.conversation] for place, cut in wanted.items()}

    async def inherit_turns(self, job: Job, document: object, sources: SourceOf, most: int) -> JobBegun:
        """Let the conversations of a job inherit what they are from, at most so many turns together.

        Raises:
            InvalidJob: a round is not recorded yet, nothing is left to say, they do not go together, or it is too much.
        """
        return await anyio.to_thread.run_sync(_inherited, job, dict(_cuts(document)), sources, most)


def with_prompts(document: object, sources: SourceOf, most_bytes: int) -> object:
    """Return a document whose conversations have the prompts and variables of those that they are from, if none.

    Raises:
        InvalidJob: these have more than ``most_bytes`` together: each conversation is stored with its own.
    """
    if not sources or not isinstance(document, dict):
        return document
    conversations = list(document["conversations"])
    sizes = {name: source.size for name, source in {id(each): each for each in sources.values()}.items()}
    taken = 0
    for place, source in sources.items():
        given = conversations[place]
        if given.get("prompt") is None and isinstance(given.get("variables") or {}, dict):
            taken += sizes[id(source)]
            if taken > most_bytes:
                message = f"prompts of recorded conversations have more than limits.body_bytes = {most_bytes} together"
                raise InvalidJob([Fault(path=f"conversations[{place}].from", message=message)])
            variables = {**(source.variables or {}), **(given.get("variables") or {})}
            conversations[place] = {**given, "prompt": source.prompt}
            if variables or source.variables is not None:
                conversations[place]["variables"] = variables
    return {**document, "conversations": conversations}


def _cuts(document: object) -> Iterator[tuple[int, Cut]]:
    conversations = document.get("conversations") if isinstance(document, dict) else None
    for place, given in enumerate(conversations if isinstance(conversations, list) else ()):
        if not isinstance(given, dict) or not isinstance(given.get("from"), dict):
            continue
        try:
            spec = FromSpec.model_validate(given["from"])
        except ValueError:
            continue  # the whole job is told so
        before = None if spec.before is None else (spec.before.agent, spec.before.round)
        yield place, Cut(job=JobId(spec.job), conversation=spec.conversation, rounds=spec.rounds, before=before)


class _SourcesRead(msgspec.Struct, frozen=True):
    """Conversations of one job, and the bytes of its document as far as it is theirs, and of their words."""

    sources: Mapping[Named, Source]
    size: int


def read_sources(
    connection: Connection, job_id: JobId, names: Sequence[str], adapters: Mapping[str, str], most: int
) -> _SourcesRead | None:
    """Read recorded conversations of a job at one moment; None if they have more than ``most`` bytes.

    Raises:
        JobNotFound: the job is not there.
        ConversationNotFound: it has no such conversation.
    """
    alone = with_conversations(queries.document(job_id)(connection), names, are_named=True).decode()
    size = len(alone)
    records = {}
    for name in names:
        if size > most:
            return None
        records[name] = queries.conversation(job_id, name)(connection)
        size += sum(len(turn.text) for turn in records[name].turns)
    if size > most:
        return None
    job, posted = parse_stored(alone, job_id, adapters), {each["id"]: each for each in _posted(alone)}
    conversations = {each.id: each for each in job.conversations}
    heritages = heirs.heritages(job_id, names)(connection)
    words = queries.words(job_id, names)(connection)
    found = {
        (job_id, name): Source(
            recorded=Recorded(
                job=job,
                conversation=replace(conversations[name], heritage=heritages.get(name)),
                state=records[name].state,
                turns=records[name].turns,
                words=words.get(name),
            ),
            prompt=posted[name]["prompt"],
            variables=posted[name].get("variables"),
        )
        for name in names
    }
    return _SourcesRead(found, size)


def _posted(text: str) -> list[dict[str, Any]]:
    conversations: list[dict[str, Any]] = msgspec.json.decode(text)["conversations"]
    return conversations


def _inherited(job: Job, cuts: Mapping[int, Cut], sources: SourceOf, most: int) -> JobBegun:
    begun, conversations = _Begun(job), list(job.conversations)
    shares, inherited = dict[str, Sequence[Share]](), dict[str, Sequence[Turn]]()
    words: dict[str, ConversationWords] = {}
    faults: list[Fault] = []
    count = 0
    for place, source in sources.items():
        conversation, cut = conversations[place], cuts[place]
        try:
            heritage, taken = begun.cut(cut, source.recorded, conversation.rounds)
        except CutFault as fault:
            faults.append(Fault(path=f"conversations[{place}].from.{fault.field}", message=str(fault)))
            continue
        count += len(taken)
        if count > most:
            message = f"more turns are inherited than limits.turns = {most}"
            raise InvalidJob([Fault(path=f"conversations[{place}].from", message=message)])
        speakers = begun.first_speakers(cut, replace(conversation, heritage=heritage), taken)
        if not speakers:
            message = f"nothing is left to say in {conversation.rounds} rounds: ask for more, or for less of the source"
            faults.append(Fault(path=f"conversations[{place}].rounds", message=message))
            continue
        conversations[place] = replace(conversation, heritage=replace(heritage, speakers=speakers))
        shares[conversation.id] = begun.shares(taken)
        inherited[conversation.id] = taken
        if source.recorded.words is not None:
            words[conversation.id] = source.recorded.words
    if faults:
        raise InvalidJob(faults)
    whole = replace(job, conversations=tuple(conversations))
    return JobBegun(job=whole, shares=shares, inherited=inherited, words=words)


class _Begun:
    """The answers about each cut of a source, found once for all heirs that begin with it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._cuts: dict[tuple[Cut, int], tuple[Heritage, Sequence[Turn]]] = {}
        self._shares: dict[int, Sequence[Share]] = {}
        self._speakers: dict[tuple[Cut, int], tuple[Until, tuple[str, ...]]] = {}

    def cut(self, cut: Cut, recorded: Recorded, rounds: int) -> tuple[Heritage, Sequence[Turn]]:
        """Return the heritage of a conversation with so many rounds, and its turns.

        Raises:
            CutFault: they do not go together.
        """
        if (cut, rounds) not in self._cuts:
            self._cuts[cut, rounds] = inherit(cut, recorded, self._job, rounds)
        return self._cuts[cut, rounds]

    def shares(self, taken: Sequence[Turn]) -> Sequence[Share]:
        """Return whose turns these are that were cut here."""
        if id(taken) not in self._shares:
            self._shares[id(taken)] = shares_of(taken)
        return self._shares[id(taken)]

    def first_speakers(self, cut: Cut, heir: Conversation, taken: Sequence[Turn]) -> tuple[str, ...]:
        """Return who speaks first in a conversation that has inherited these turns."""
        known = self._speakers.get((cut, heir.rounds))
        if known is not None and not heir.cast and known[0] == heir.until:
            return known[1]
        turns = [as_inherited(turn, self._job.id, heir.id) for turn in taken]
        speakers = first_speakers(replace(self._job, conversations=(heir,)), turns)
        if known is None and not heir.cast:
            self._speakers[cut, heir.rounds] = heir.until, speakers
        return speakers


def first_speakers(job: Job, inherited: Sequence[Turn]) -> tuple[str, ...]:
    """Return who speaks first in the one conversation of a job that has inherited these turns."""
    (conversation,) = job.conversations
    prompts = JobPrompts(job)
    prompts.hear_again(turn for turn in inherited if turn.is_heard)
    digests = prompts.digests(inherited)
    spoken = {key: digest for key, digest in digests.items() if key.agent_id in prompts.agents}
    spoken |= silent_turns(job, conversation, spoken)
    order = speaking_order(job, tuple(prompts.agents), dependencies_of(job), conversation)
    ready = order.replay({Place(prompts.places[key.agent_id], key.round): digest for key, digest in spoken.items()})
    return tuple(job.agents[place.agent].id for place in ready)
