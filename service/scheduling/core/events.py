"""The scheduler's events and actions: events in the past tense, actions in the imperative. Values only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.conversations.job import Job, JobId, TurnKey
from service.conversations.states import ConversationState, TurnState
from service.scheduling.core.blame import SourceDistrusted, SourceTrusted, SuspectsCleared, Trial
from service.scheduling.core.kv_budgets import KvUse
from service.scheduling.core.queue.affinity import CacheLocation, PromptReading

# Events

Suspicion = SuspectsCleared | SourceDistrusted | SourceTrusted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdmitted:
    """Conversations of a job to run here: all of ``job``, whether others of it are here already or not.

    ``ended`` holds the turns that ended before, in an earlier life of the service or on another node. ``suspects`` are
    turns that have not ended, each of which may have brought down an engine, or the service itself, before; with when
    each is tried. ``cached`` says where prompts
    of first turns are in a cache already.
    """

    job: Job
    ended: Mapping[TurnKey, tuple[TurnState, str | None]] = field(default_factory=dict)
    suspects: Mapping[TurnKey, Trial] = field(default_factory=dict)
    cached: Mapping[TurnKey, CacheLocation] = field(default_factory=dict)
    is_cancelled: bool = False  # a caller asked for its end in that earlier life


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """A caller wants no more of a job."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSpoiled:
    """What has happened in a conversation cannot be stored: it has failed there, and is to end here."""

    job_id: JobId
    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker's slots may be used; ``read_s`` is what a token of a prompt takes its engine, where that is known.

    ``kv_tokens`` is what its KV cache has room for, None where its slots alone bound it; then each turn holds whole
    blocks of ``kv_block`` tokens, ``most_answer`` bounds an answer, in tokens, where its agent does not, and
    ``shares_prefixes`` says that what prompts begin with alike is held once.
    """

    worker: str
    model: str
    slots: int
    read_s: float | None = None
    kv_tokens: int | None = None
    kv_block: int = 1
    most_answer: int = 0
    shares_prefixes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNotReady:
    """A worker's slots may not be used; the turns on them tell their own end.

    ``returns`` says that another engine of it is on its way.
    """

    worker: str
    returns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLost:
    """No worker of a model will ever be ready again unless an operator helps: its turns wait for nothing.

    ``is_elsewhere`` says that another node has one: then conversations that need the model next are left to it.
    """

    model: str
    is_elsewhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRegained:
    """An operator has helped: a worker of the model may get ready."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCompleted:
    """A turn has spoken; ``seconds`` is how long its last attempt held its slot."""

    key: TurnKey
    seconds: float | None = None
    reading: PromptReading | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUseTold:
    """Turns in flight are seen to take that of their workers' KV caches."""

    uses: Mapping[TurnKey, KvUse]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTold:
    """It is so late, in monotonic seconds: told now and then while keys are distrusted."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpent:
    """The attempt of a turn that is about to end has read and written so many tokens; those of a cache not counted.

    It held its slots for so many ``seconds``; without ``is_told`` the engine has not told all of the tokens.
    """

    key: TurnKey
    fresh_tokens: int
    answer_tokens: int
    seconds: float = 0.0
    is_told: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsKept:
    """Slots have stood idle for so many seconds, in all, until a turn on several had them, or waited no longer."""

    owner: str | None
    model: str
    slot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferralOver:
    """A turn was to wait for its worker, and the time for that is over."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnInterrupted:
    """A turn's engine failed; the turn is to run again.

    With a ``trial`` it is a suspect: it may have brought the engine down, and runs alone on a worker that takes nothing
    else meanwhile, so that the next death, if there is one, has one cause.
    """

    key: TurnKey
    trial: Trial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRejected:
    """A turn's answer is not valid; the turn goes ahead of all that waits."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFailed:
    """A turn has failed for good, and its conversation with it."""

    key: TurnKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCutOff:
    """A turn in flight was ended because its conversation was."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Starts stop until further notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpaused:
    """Turns may be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsBegan:
    """A turn in flight asks nothing of its engine: these tools run, for ``model``, and then it goes on.

    ``context_tokens`` is what its engine would have to read again without its cache.
    """

    key: TurnKey
    model: str
    tools: Sequence[str]
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOver:
    """The seconds of a ``KeepSlot`` have passed."""

    key: TurnKey
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsEnded:
    """The tools of a turn in flight have run, for so many seconds; it wants to ask its engine again."""

    key: TurnKey
    tools: Sequence[str]
    seconds: float


SlotEvent = ToolsBegan | KeepOver | ToolsEnded
TurnEvent = TurnCompleted | TurnInterrupted | TurnRejected | TurnFailed | TurnCutOff
WorkerEvent = WorkerReady | WorkerNotReady | ModelLost | ModelRegained
Note = KvUseTold | TimeTold | TurnSpent | SlotsKept | DeferralOver
OfJob = JobAdmitted | JobCancelled | ConversationSpoiled
Event = OfJob | WorkerEvent | TurnEvent | SlotEvent | Note | Paused | Unpaused | Suspicion

# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnIsReady:
    """The turn waits for nothing but a slot."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTurn:
    """Run the turn on a slot of the worker, or on several, and tell its end."""

    key: TurnKey
    worker: str
    slots: int = 1
    is_suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferTurn:
    """Tell when so many seconds have passed: for so long the turn waits for the worker that knows its prompt."""

    key: TurnKey
    worker: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSlot:
    """Tell when so many seconds have passed: for so long a turn whose tools run keeps its slot."""

    key: TurnKey
    number: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LendSlot:
    """Give the turn's slot back while its tools run; it is still in flight."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBackSlot:
    """Take a slot of its worker for a turn that has lent its own, and let it go on."""

    key: TurnKey
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseSlot:
    """Interrupt a turn that has lent its slot: the engine that it was on is not there any more."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonTurn:
    """Fail a ready turn that no worker will ever take."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOffTurn:
    """End the turn that is in flight, since its conversation has ended, and tell when it has."""

    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueCancel:
    """Tell once more that the job is cancelled, when what has followed so far is stored: there is more to end."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueDispatch:
    """Decide once more, after all others have had a moment: there was much to pass over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStarted:
    """The first turn of a conversation is being started."""

    job_id: JobId
    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationEnded:
    """Nothing of the conversation runs or will run; ``unspoken`` are its turns that never ended."""

    job_id: JobId
    conversation_id: str
    state: ConversationState
    reason: str | None
    unspoken: Sequence[TurnKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationReleased:
    """Nothing of the conversation runs here, and what comes next is for another node: it needs one of ``models``."""

    job_id: JobId
    conversation_id: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """All conversations of the job that were here have ended or left."""

    job_id: JobId


Move = ConversationStarted | ConversationEnded | ConversationReleased | JobEnded
OfSlot = KeepSlot | LendSlot | TakeBackSlot | LoseSlot
Step = TurnIsReady | StartTurn | DeferTurn | OfSlot | AbandonTurn | CutOffTurn
Action = Step | ContinueCancel | ContinueDispatch | Move
