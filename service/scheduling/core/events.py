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
    """A program's request, ``pause_s`` after its ``last`` answer; ``known_tokens`` of the prompt were cached then."""

    last: TurnKey | None = None
    pause_s: float = 0.0
    known_tokens: int = 0


class JobAdmitted(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations of ``job`` to run here; others of the same job may be here already.

    ``ended`` holds the turns that ended earlier, in an earlier life of the service or on another node, in the order of
    their ends. ``digests`` holds what their conditions are judged on. ``suspects`` are unfinished turns that may have
    killed an engine or the service, each with its kind of trial. ``cached`` locates the cached prompts of first turns.
    """

    job: Job
    ended: Mapping[TurnKey, EndedBefore] = msgspec.field(default_factory=dict)
    digests: Mapping[TurnKey, TurnDigest] = msgspec.field(default_factory=dict)
    suspects: Mapping[TurnKey, Trial] = msgspec.field(default_factory=dict)
    cached: Mapping[TurnKey, CacheLocation] = msgspec.field(default_factory=dict)
    is_cancelled: bool = False  # cancelled in an earlier life of the service
    program: ProgramReturn | None = None  # set for a client's request

    def ended_by_conversation(self) -> Mapping[str, Mapping[TurnKey, EndedBefore]]:
        """Return the turns that ended before, in their order, by conversation."""
        ended: dict[str, dict[TurnKey, EndedBefore]] = {}
        for key, how in self.ended.items():
            ended.setdefault(key.conversation_id, {})[key] = how
        return ended


class CallerSpoke(msgspec.Struct, frozen=True, kw_only=True):
    """An awaited turn is stored: its caller has spoken, or, with a ``reason``, has not spoken in time."""

    key: TurnKey
    digest: TurnDigest = NOTHING
    reason: str | None = None


class JobCancelled(msgspec.Struct, frozen=True, kw_only=True):
    """A caller has cancelled a job."""

    job_id: JobId


class ConversationSpoiled(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation cannot be stored: it has failed in the store, and ends here."""

    job_id: JobId
    conversation_id: str


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's slots may be used; ``read_s`` is its engine's time per prompt token, if known.

    ``kv_tokens`` is the size of its KV cache, None if only its slots bound it. Each turn then takes whole blocks of
    ``kv_block`` tokens. ``most_answer`` bounds answers, in tokens, of agents without a bound. ``shares_prefixes`` says
    that equal beginnings of prompts are stored once, ``has_slot_caches`` that each slot keeps its own cache.
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
    """A worker's slots may not be used; the turns on them report their own end.

    ``returns`` says that its next engine is on its way.
    """

    worker: str
    returns: bool = False


class ModelLost(msgspec.Struct, frozen=True, kw_only=True):
    """No worker of a model will be ready again unless an operator helps, so its turns fail.

    ``is_elsewhere`` says that another node has one: conversations that need the model next are left to it.
    """

    model: str
    is_elsewhere: bool = False


class ModelRegained(msgspec.Struct, frozen=True, kw_only=True):
    """An operator has helped: a worker of the model may become ready."""

    model: str


class TurnCompleted(msgspec.Struct, frozen=True, kw_only=True):
    """A turn has spoken; ``seconds`` is the slot time of its last attempt."""

    key: TurnKey
    seconds: float | None = None
    reading: PromptReading | None = None
    digest: TurnDigest = NOTHING


class KvUseTold(msgspec.Struct, frozen=True, kw_only=True):
    """The measured use of KV caches by turns in flight."""

    uses: Mapping[TurnKey, KvUse]


class TimeTold(msgspec.Struct, frozen=True, kw_only=True):
    """The time in monotonic seconds; reported now and then while keys are distrusted."""

    at: float


class TurnSpent(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that the attempt of an ending turn has read and written; cached tokens are not counted.

    It used its slots for ``seconds``. Without ``is_told`` the engine has not reported all tokens.
    """

    key: TurnKey
    fresh_tokens: int
    answer_tokens: int
    seconds: float = 0.0
    is_told: bool = True


class SlotsReserved(msgspec.Struct, frozen=True, kw_only=True):
    """Slots were idle for ``slot_s`` seconds in all until a turn on several had them or stopped waiting."""

    owner: str | None
    model: str
    slot_s: float


class DeferralOver(msgspec.Struct, frozen=True, kw_only=True):
    """The time for which a turn was to wait for its worker is over."""

    key: TurnKey


class HoldOver(msgspec.Struct, frozen=True, kw_only=True):
    """The ``seconds`` of a ``HoldSlot`` are over."""

    key: TurnKey
    seconds: float


class PromptRead(msgspec.Struct, frozen=True, kw_only=True):
    """A turn has its first token, ``seconds`` after it was asked: its prompt has been read."""

    key: TurnKey
    seconds: float


class TurnInterrupted(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's engine failed; the turn is to run again.

    With a ``trial`` it is a suspect: it may have killed the engine. It runs alone on a worker, so that the next death
    has one cause.
    """

    key: TurnKey
    trial: Trial | None = None


class TurnRejected(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's answer is not valid; the turn goes ahead of all waiting turns."""

    key: TurnKey


class TurnFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A turn has failed for good; its conversation fails too, unless the agent's ``on_failure`` lets it go on."""

    key: TurnKey
    reason: str


class TurnCutOff(msgspec.Struct, frozen=True, kw_only=True):
    """A turn in flight was ended because its conversation has ended."""

    key: TurnKey


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """No turn starts until ``Unpaused``."""


class Unpaused(msgspec.Struct, frozen=True, kw_only=True):
    """Turns may start again."""


class ToolsBegan(msgspec.Struct, frozen=True, kw_only=True):
    """These tools of a turn in flight run, for ``model``; meanwhile it asks nothing of its engine.

    Without its cache the engine would have to read ``context_tokens`` again.
    """

    key: TurnKey
    model: str
    tools: Sequence[str]
    context_tokens: int


class LendingDue(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a ``LendSlotLater`` are over."""

    key: TurnKey
    number: int


class ToolsEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a turn in flight have run for ``seconds``; it is about to ask its engine again."""

    key: TurnKey
    tools: Sequence[str]
    seconds: float


class AnswerWhole(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a turn in flight is complete and is judged elsewhere: other turns may have its slot for good."""

    key: TurnKey


SlotEvent = ToolsBegan | LendingDue | ToolsEnded | AnswerWhole
TurnEvent = TurnCompleted | TurnInterrupted | TurnRejected | TurnFailed | TurnCutOff
WorkerEvent = WorkerReady | WorkerNotReady | ModelLost | ModelRegained
Note = KvUseTold | PromptRead | TimeTold | TurnSpent | SlotsReserved | DeferralOver | HoldOver
OfJob = JobAdmitted | JobCancelled | ConversationSpoiled | CallerSpoke
Event = OfJob | WorkerEvent | TurnEvent | SlotEvent | Note | Paused | Unpaused | Suspicion

# Actions


class TurnIsReady(msgspec.Struct, frozen=True, kw_only=True):
    """The turn waits only for a slot."""

    key: TurnKey


class AwaitTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The turn waits only for its caller."""

    key: TurnKey


class StartTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Run the turn on one or several slots of the worker, and report its end."""

    key: TurnKey
    worker: str
    slots: int = 1
    is_suspect: bool = False


class DeferTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Report when ``seconds`` are over: until then the turn waits for the worker whose cache has its prompt."""

    key: TurnKey
    worker: str
    seconds: float


class LendSlotLater(msgspec.Struct, frozen=True, kw_only=True):
    """Report when ``seconds`` are over: until then a turn whose tools run keeps its slot."""

    key: TurnKey
    number: int
    seconds: float


class HoldSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Report when ``seconds`` are over: until then the slot of an ended request is held for its program's next one."""

    key: TurnKey
    seconds: float


class LendSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Return the turn's slot while its tools run; the turn stays in flight."""

    key: TurnKey


class TakeBackSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Take a slot of its worker for a turn that lent its own, and let the turn go on."""

    key: TurnKey
    worker: str


class LoseSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Interrupt a turn that lent its slot: its engine is gone."""

    key: TurnKey


class AbandonTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Fail a ready turn that no worker will ever take."""

    key: TurnKey


class CutOffTurn(msgspec.Struct, frozen=True, kw_only=True):
    """End the turn in flight, because its conversation has ended, and report its end."""

    key: TurnKey


class ContinueCancel(msgspec.Struct, frozen=True, kw_only=True):
    """Report the cancelled job again once the actions so far are stored: more of it is left to end."""

    job_id: JobId


class ContinueDispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Decide again after other tasks had a moment: too many turns were passed over at once."""


class ConversationStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The first turn of a conversation starts."""

    job_id: JobId
    conversation_id: str


class ConversationEnded(msgspec.Struct, frozen=True, kw_only=True):
    """No turn of the conversation runs or will run; ``unspoken`` are its turns that never ended.

    ``ending`` is the condition that ended it, None if its rounds were over or it ended early. ``absent`` is the number
    of its possible turns that do not exist because of a condition.
    """

    job_id: JobId
    conversation_id: str
    state: ConversationState
    reason: str | None
    unspoken: Sequence[TurnKey]
    ending: Ending | None = None
    absent: int = 0


class ConversationReleased(msgspec.Struct, frozen=True, kw_only=True):
    """No turn of the conversation runs here, and another node takes it: it needs one of ``models`` next.

    With only ``awaited`` turns left, no node takes it until a caller has spoken.
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
