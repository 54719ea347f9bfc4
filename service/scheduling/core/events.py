"""The scheduler's events and actions: events in the past tense, actions in the imperative. Values only."""

from collections.abc import Mapping, Sequence

import msgspec

from service.conversations.job.job import Job, JobId, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import NOTHING, Ending, TurnDigest
from service.scheduling.core.blame import SourceDistrusted, SourceTrusted, SuspectsCleared, Trial
from service.scheduling.core.kv_budgets import KvUse
from service.scheduling.core.queue.affinity import CacheLocation, PromptReading

# Events

EndedBefore = tuple[TurnState, str | None]  # the state of a turn that ended in an earlier life, and its reason
Suspicion = SuspectsCleared | SourceDistrusted | SourceTrusted


class ProgramReturn(msgspec.Struct, frozen=True, kw_only=True):
    """A program asks: it was answered ``last`` so long ago, and ``known_tokens`` of its prompt were in a cache then."""

    last: TurnKey | None = None
    pause_s: float = 0.0
    known_tokens: int = 0


class JobAdmitted(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations of a job to run here: all of ``job``, whether others of it are here already or not.

    ``ended`` holds the turns that ended before, in an earlier life of the service or on another node, in the order in
    which they did; ``digests`` what conditions are judged on of those that have any. ``suspects`` are
    turns that have not ended, each of which may have brought down an engine, or the service itself, before; with when
    each is tried. ``cached`` says where prompts
    of first turns are in a cache already.
    """

    job: Job
    ended: Mapping[TurnKey, EndedBefore] = msgspec.field(default_factory=dict)
    digests: Mapping[TurnKey, TurnDigest] = msgspec.field(default_factory=dict)
    suspects: Mapping[TurnKey, Trial] = msgspec.field(default_factory=dict)
    cached: Mapping[TurnKey, CacheLocation] = msgspec.field(default_factory=dict)
    is_cancelled: bool = False  # a caller asked for its end in that earlier life
    program: ProgramReturn | None = None  # of a client's request

    def ended_by_conversation(self) -> Mapping[str, Mapping[TurnKey, EndedBefore]]:
        """Return the turns that ended before, in their order, by conversation."""
        ended: dict[str, dict[TurnKey, EndedBefore]] = {}
        for key, how in self.ended.items():
            ended.setdefault(key.conversation_id, {})[key] = how
        return ended


class CallerSpoke(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that was awaited is stored: a caller has spoken, or, with a ``reason``, nobody has in time."""

    key: TurnKey
    digest: TurnDigest = NOTHING
    reason: str | None = None


class JobCancelled(msgspec.Struct, frozen=True, kw_only=True):
    """A caller wants no more of a job."""

    job_id: JobId


class ConversationSpoiled(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation cannot be stored: it has failed there, and is to end here."""

    job_id: JobId
    conversation_id: str


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's slots may be used; ``read_s`` is what a token of a prompt takes its engine, where that is known.

    ``kv_tokens`` is what its KV cache has room for, None where its slots alone bound it; then each turn holds whole
    blocks of ``kv_block`` tokens, ``most_answer`` bounds an answer, in tokens, where its agent does not, and
    ``shares_prefixes`` says that what prompts begin with alike is held once, ``has_slot_caches`` that each slot is
    known to keep a cache of its own.
    """

    worker: str
    model: str
    slots: int
    read_s: float | None = None
    kv_tokens: int | None = None
    kv_block: int = 1
    most_answer: int = 0
    shares_prefixes: bool = False
    has_slot_caches: bool = False


class WorkerNotReady(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's slots may not be used; the turns on them tell their own end.

    ``returns`` says that another engine of it is on its way.
    """

    worker: str
    returns: bool = False


class ModelLost(msgspec.Struct, frozen=True, kw_only=True):
    """No worker of a model will ever be ready again unless an operator helps: its turns wait for nothing.

    ``is_elsewhere`` says that another node has one: then conversations that need the model next are left to it.
    """

    model: str
    is_elsewhere: bool = False


class ModelRegained(msgspec.Struct, frozen=True, kw_only=True):
    """An operator has helped: a worker of the model may get ready."""

    model: str


class TurnCompleted(msgspec.Struct, frozen=True, kw_only=True):
    """A turn has spoken; ``seconds`` is how long its last attempt held its slot."""

    key: TurnKey
    seconds: float | None = None
    reading: PromptReading | None = None
    digest: TurnDigest = NOTHING


class KvUseTold(msgspec.Struct, frozen=True, kw_only=True):
    """Turns in flight are seen to take that of their workers' KV caches."""

    uses: Mapping[TurnKey, KvUse]


class TimeTold(msgspec.Struct, frozen=True, kw_only=True):
    """It is so late, in monotonic seconds: told now and then while keys are distrusted."""

    at: float


class TurnSpent(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt of a turn that is about to end has read and written so many tokens; those of a cache not counted.

    It held its slots for so many ``seconds``; without ``is_told`` the engine has not told all of the tokens.
    """

    key: TurnKey
    fresh_tokens: int
    answer_tokens: int
    seconds: float = 0.0
    is_told: bool = True


class SlotsReserved(msgspec.Struct, frozen=True, kw_only=True):
    """Slots have stood idle for so many seconds, in all, until a turn on several had them, or waited no longer."""

    owner: str | None
    model: str
    slot_s: float


class DeferralOver(msgspec.Struct, frozen=True, kw_only=True):
    """A turn was to wait for its worker, and the time for that is over."""

    key: TurnKey


class HoldOver(msgspec.Struct, frozen=True, kw_only=True):
    """The ``seconds`` of a ``HoldSlot`` have passed."""

    key: TurnKey
    seconds: float


class PromptRead(msgspec.Struct, frozen=True, kw_only=True):
    """A turn has its first token, so many seconds after it was asked: its prompt has been read."""

    key: TurnKey
    seconds: float


class TurnInterrupted(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's engine failed; the turn is to run again.

    With a ``trial`` it is a suspect: it may have brought the engine down, and runs alone on a worker that takes nothing
    else meanwhile, so that the next death, if there is one, has one cause.
    """

    key: TurnKey
    trial: Trial | None = None


class TurnRejected(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's answer is not valid; the turn goes ahead of all that waits."""

    key: TurnKey


class TurnFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A turn has failed for good; its conversation fails too, unless the agent's ``on_failure`` lets it go on."""

    key: TurnKey
    reason: str


class TurnCutOff(msgspec.Struct, frozen=True, kw_only=True):
    """A turn in flight was ended because its conversation was."""

    key: TurnKey


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """Starts stop until further notice."""


class Unpaused(msgspec.Struct, frozen=True, kw_only=True):
    """Turns may be started again."""


class ToolsBegan(msgspec.Struct, frozen=True, kw_only=True):
    """A turn in flight asks nothing of its engine: these tools run, for ``model``, and then it goes on.

    ``context_tokens`` is what its engine would have to read again without its cache.
    """

    key: TurnKey
    model: str
    tools: Sequence[str]
    context_tokens: int


class LendingDue(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a ``LendSlotLater`` have passed."""

    key: TurnKey
    number: int


class ToolsEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a turn in flight have run, for so many seconds; it wants to ask its engine again."""

    key: TurnKey
    tools: Sequence[str]
    seconds: float


class AnswerWhole(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a turn in flight is whole, and is judged elsewhere: others may have its slot, for good."""

    key: TurnKey


SlotEvent = ToolsBegan | LendingDue | ToolsEnded | AnswerWhole
TurnEvent = TurnCompleted | TurnInterrupted | TurnRejected | TurnFailed | TurnCutOff
WorkerEvent = WorkerReady | WorkerNotReady | ModelLost | ModelRegained
Note = KvUseTold | PromptRead | TimeTold | TurnSpent | SlotsReserved | DeferralOver | HoldOver
OfJob = JobAdmitted | JobCancelled | ConversationSpoiled | CallerSpoke
Event = OfJob | WorkerEvent | TurnEvent | SlotEvent | Note | Paused | Unpaused | Suspicion

# Actions


class TurnIsReady(msgspec.Struct, frozen=True, kw_only=True):
    """The turn waits for nothing but a slot."""

    key: TurnKey


class AwaitTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The turn waits for nothing but its caller."""

    key: TurnKey


class StartTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Run the turn on a slot of the worker, or on several, and tell its end."""

    key: TurnKey
    worker: str
    slots: int = 1
    is_suspect: bool = False


class DeferTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Tell when so many seconds have passed: for so long the turn waits for the worker that knows its prompt."""

    key: TurnKey
    worker: str
    seconds: float


class LendSlotLater(msgspec.Struct, frozen=True, kw_only=True):
    """Tell when so many seconds have passed: for so long a turn whose tools run keeps its slot."""

    key: TurnKey
    number: int
    seconds: float


class HoldSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Tell when so many seconds have passed: for so long the slot of an ended request waits for its program's next."""

    key: TurnKey
    seconds: float


class LendSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Give the turn's slot back while its tools run; it is still in flight."""

    key: TurnKey


class TakeBackSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Take a slot of its worker for a turn that has lent its own, and let it go on."""

    key: TurnKey
    worker: str


class LoseSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Interrupt a turn that has lent its slot: the engine that it was on is not there any more."""

    key: TurnKey


class AbandonTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Fail a ready turn that no worker will ever take."""

    key: TurnKey


class CutOffTurn(msgspec.Struct, frozen=True, kw_only=True):
    """End the turn that is in flight, since its conversation has ended, and tell when it has."""

    key: TurnKey


class ContinueCancel(msgspec.Struct, frozen=True, kw_only=True):
    """Tell once more that the job is cancelled, when what has followed so far is stored: there is more to end."""

    job_id: JobId


class ContinueDispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Decide once more, after all others have had a moment: there was much to pass over."""


class ConversationStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The first turn of a conversation is being started."""

    job_id: JobId
    conversation_id: str


class ConversationEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of the conversation runs or will run; ``unspoken`` are its turns that never ended.

    ``ending`` is the condition that ended it, None where its rounds were over or it was cut off; ``absent`` is how many
    of the turns that it could have had do not exist because of one.
    """

    job_id: JobId
    conversation_id: str
    state: ConversationState
    reason: str | None
    unspoken: Sequence[TurnKey]
    ending: Ending | None = None
    absent: int = 0


class ConversationReleased(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of the conversation runs here, and what comes next is for another node: it needs one of ``models``.

    One of which only ``awaited`` turns are left is for nobody until a caller has spoken.
    """

    job_id: JobId
    conversation_id: str
    models: tuple[str, ...]
    awaited: frozenset[TurnKey] = frozenset()


class JobEnded(msgspec.Struct, frozen=True, kw_only=True):
    """All conversations of the job that were here have ended or left."""

    job_id: JobId


Move = ConversationStarted | ConversationEnded | ConversationReleased | JobEnded
OfSlot = LendSlotLater | LendSlot | TakeBackSlot | LoseSlot
Later = DeferTurn | HoldSlot | ContinueCancel | ContinueDispatch  # an event follows by itself
Step = TurnIsReady | AwaitTurn | StartTurn | DeferTurn | HoldSlot | OfSlot | AbandonTurn | CutOffTurn
Action = Step | ContinueCancel | ContinueDispatch | Move
