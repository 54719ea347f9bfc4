"""The sources of forks: recorded conversations, read and fixed when a job is posted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import anyio.to_thread
import msgspec
from msgspec.structs import replace

from service.conversations.callers import Caller, KeyScope
from service.conversations.document.job_document import with_conversations
from service.conversations.document.job_parser import accepted_job
from service.conversations.document.reading import read_stored
from service.conversations.document.spec import JobSpec
from service.conversations.job.job import NO_HERITAGE, Conversation, Heritage, Job, JobId
from service.conversations.job.until import Until
from service.conversations.job.wording import ConversationWords
from service.conversations.record.heritage import (
    Cut,
    CutFault,
    Recorded,
    Share,
    as_inherited,
    inherit,
    shares_of,
    silent_turns,
)
from service.conversations.record.transcript import Turn
from service.conversations.talk.dependencies import dependencies_of
from service.conversations.talk.turn_order import Place, speaking_order
from service.errors import Fault, InvalidJob, JobNotFound
from service.scheduling.asking.prompts import JobPrompts
from service.store import conversation_rows, heirs, job_rows
from service.store.databases.database import Connection
from service.store.store import Store

MOST_SOURCES: Final = 1000  # recorded conversations that one job may fork
Named = tuple[JobId, str]  # a conversation
SourceOf = Mapping[int, "Source"]  # keyed by the conversation's place in its job


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded conversation, with its posted ``prompt`` and ``variables``."""

    recorded: Recorded
    prompt: str
    variables: Mapping[str, object] | None
    is_posted: bool = False  # its turn was asked with a client's body

    @property
    def sizes(self) -> tuple[int, int]:
        """The bytes that a fork takes over: without a prompt of its own, and with one."""
        return len(msgspec.json.encode((self.prompt, self.variables))), len(msgspec.json.encode(self.variables))


class JobBegun(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose conversations have their heritage, with the inherited turns, their origins and the words around them.

    ``inherited`` holds source turns by the conversation that begins with them; heirs of one source share the sequence.
    """

    job: Job
    shares: Mapping[str, Sequence[Share]]
    inherited: Mapping[str, Sequence[Turn]]
    words: Mapping[str, ConversationWords]

    @property
    def turns(self) -> int:
        """The number of inherited turns; a turn counts once for each heir."""
        return sum(map(len, self.inherited.values()))


class Sources:
    """Reads recorded conversations; ``adapters`` returns the names of adapters with their base models."""

    def __init__(self, store: Store, adapters: Callable[[], Mapping[str, str]]) -> None:
        self._store = store
        self._adapters = adapters

    def __repr__(self) -> str:
        return f"<Sources of {self._store!r}>"

    async def read(self, spec: JobSpec, caller: Caller, most_bytes: int) -> SourceOf:
        """Return the sources of a job's conversations.

        They are read job by job, and refused once they exceed ``most_bytes`` in total.

        Raises:
            JobNotFound: a job does not exist, or the caller may not read it.
            ConversationNotFound: a job has no such conversation.
            InvalidJob: there are too many, or they are too large.
        """
        wanted = dict(_cuts(spec))
        names = dict.fromkeys((cut.job, cut.conversation) for cut in wanted.values())
        if len(names) > MOST_SOURCES:
            message = f"{len(names)} recorded conversations are more than {MOST_SOURCES}"
            raise InvalidJob([Fault(path="conversations", message=message)])
        for job_id in dict.fromkeys(job_id for job_id, _ in names):
            owner = await self._store.read(job_rows.owner, job_id)
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
        sources = {place: read[cut.job, cut.conversation] for place, cut in wanted.items()}
        posted = [place for place, source in sources.items() if source.is_posted]
        if posted:
            message = "its turn was asked with a client's body, so that there is no prompt to begin with"
            raise InvalidJob([Fault(path=f"conversations[{place}].from", message=message) for place in posted])
        return sources

    async def inherit_turns(self, job: Job, spec: JobSpec, sources: SourceOf, most: int) -> JobBegun:
        """Let the conversations of a job inherit turns of their sources, at most ``most`` in total.

        Raises:
            InvalidJob: a round is not recorded yet, no turn is left, a source does not fit, or there are too many.
        """
        return await anyio.to_thread.run_sync(_inherited, job, dict(_cuts(spec)), sources, most)


def with_prompts(spec: JobSpec, sources: SourceOf, most_bytes: int) -> JobSpec:
    """Return a job whose conversations have the variables of their sources, and their prompts if they have none.

    Their own variables replace those with the same names.

    Raises:
        InvalidJob: they exceed ``most_bytes`` in total; each conversation is stored with its own copy.
    """
    conversations = list(spec.conversations)
    sizes = {name: source.sizes for name, source in {id(each): each for each in sources.values()}.items()}
    taken = 0
    for place, source in sources.items():
        given = conversations[place]
        has_prompt = given.prompt is not None
        if has_prompt and not source.variables:
            continue
        taken += sizes[id(source)][has_prompt]
        if taken > most_bytes:
            message = f"prompts of recorded conversations have more than limits.body_bytes = {most_bytes} together"
            raise InvalidJob([Fault(path=f"conversations[{place}].from", message=message)])
        inherited: dict[str, object] = {} if has_prompt else {"prompt": source.prompt}
        variables = {**(source.variables or {}), **(given.variables or {})}
        if variables or source.variables is not None:
            inherited["variables"] = variables
        conversations[place] = given.model_copy(update=inherited)
    return spec.model_copy(update={"conversations": conversations}) if sources else spec


def _cuts(spec: JobSpec) -> Iterator[tuple[int, Cut]]:
    for place, given in enumerate(each.source for each in spec.conversations):
        if given is not None:
            before = None if given.before is None else (given.before.agent, given.before.round)
            yield place, Cut(job=JobId(given.job), conversation=given.conversation, rounds=given.rounds, before=before)


class _SourcesRead(msgspec.Struct, frozen=True):
    """Conversations of one job, and the bytes of their parts of its document and of their turns."""

    sources: Mapping[Named, Source]
    size: int


def read_sources(
    connection: Connection, job_id: JobId, names: Sequence[str], adapters: Mapping[str, str], most: int
) -> _SourcesRead | None:
    """Read recorded conversations of a job in one transaction; None if they exceed ``most`` bytes.

    Raises:
        JobNotFound: the job does not exist.
        ConversationNotFound: it has no such conversation.
    """
    alone = with_conversations(job_rows.document(connection, job_id), names, are_named=True).decode()
    size = len(alone)
    records = {}
    for name in names:
        if size > most:
            return None
        records[name] = conversation_rows.record(connection, job_id, name)
        size += sum(len(turn.text) for turn in records[name].turns)
    if size > most:
        return None
    spec = read_stored(alone)
    job, posted = accepted_job(spec, job_id, adapters), {each.id: each for each in spec.conversations}
    conversations = {each.id: each for each in job.conversations}
    heritages = heirs.heritages(connection, job_id, names)
    words = conversation_rows.words(connection, job_id, names)
    bodies = conversation_rows.posted(connection, job_id, names)
    found = {
        (job_id, name): Source(
            recorded=Recorded(
                job=job,
                conversation=replace(conversations[name], heritage=heritages.get(name, NO_HERITAGE)),
                state=records[name].state,
                turns=records[name].turns,
                words=words.get(name),
            ),
            prompt=posted[name].prompt or "",
            variables=posted[name].variables,
            is_posted=name in bodies,
        )
        for name in names
    }
    return _SourcesRead(found, size)


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
    """The results for each fork point, computed once for all heirs that begin there."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._cuts: dict[tuple[Cut, int], tuple[Heritage, Sequence[Turn]]] = {}
        self._shares: dict[int, Sequence[Share]] = {}
        self._speakers: dict[tuple[Cut, int], tuple[Until, tuple[str, ...]]] = {}

    def cut(self, cut: Cut, recorded: Recorded, rounds: int) -> tuple[Heritage, Sequence[Turn]]:
        """Return the heritage of a conversation with ``rounds``, and its turns.

        Raises:
            CutFault: the conversation and its source do not fit.
        """
        if (cut, rounds) not in self._cuts:
            self._cuts[cut, rounds] = inherit(cut, recorded, self._job, rounds)
        return self._cuts[cut, rounds]

    def shares(self, taken: Sequence[Turn]) -> Sequence[Share]:
        """Return the origins of turns that ``cut`` returned."""
        if id(taken) not in self._shares:
            self._shares[id(taken)] = shares_of(taken)
        return self._shares[id(taken)]

    def first_speakers(self, cut: Cut, heir: Conversation, taken: Sequence[Turn]) -> tuple[str, ...]:
        """Return the first speakers of a conversation that has inherited these turns."""
        known = self._speakers.get((cut, heir.rounds))
        if known is not None and not heir.cast and known[0] == heir.until:
            return known[1]
        turns = [as_inherited(turn, self._job.id, heir.id) for turn in taken]
        speakers = first_speakers(replace(self._job, conversations=(heir,)), turns)
        if known is None and not heir.cast:
            self._speakers[cut, heir.rounds] = heir.until, speakers
        return speakers


def first_speakers(job: Job, inherited: Sequence[Turn]) -> tuple[str, ...]:
    """Return the first speakers of a job's one conversation, which has inherited these turns."""
    (conversation,) = job.conversations
    prompts = JobPrompts(job)
    prompts.hear_again(inherited)
    digests = prompts.digests(inherited)
    spoken = {key: digest for key, digest in digests.items() if key.agent_id in prompts.agents}
    spoken |= silent_turns(job, job.conversations, spoken)
    order = speaking_order(job, tuple(prompts.agents), dependencies_of(job), conversation)
    ready = order.replay({Place(prompts.places[key.agent_id], key.round): digest for key, digest in spoken.items()})
    return tuple(job.agents[place.agent].id for place in ready)
