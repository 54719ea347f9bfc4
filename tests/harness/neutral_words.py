"""Events, actions and records in words that no rename of a class or a field changes, for frozen digests."""

import hashlib
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Final

import msgspec

from service.conversations.job.job import TurnKey
from service.scheduling.core import events
from service.scheduling.core.blame import SourceDistrusted, SourceTrusted, SuspectsCleared
from service.store import records

# The word of each kind, and the fields that are written after it.
WORDS: Final[Mapping[type, tuple[str, tuple[str, ...]]]] = {
    events.TurnIsReady: ("ready", ("key",)),
    events.AwaitTurn: ("wait for a caller", ("key",)),
    events.StartTurn: ("start", ("key", "worker", "slots", "is_suspect")),
    events.DeferTurn: ("defer", ("key", "worker", "seconds")),
    events.LendSlotLater: ("keep slot", ("key", "number", "seconds")),
    events.HoldSlot: ("hold slot", ("key", "seconds")),
    events.LendSlot: ("lend slot", ("key",)),
    events.TakeBackSlot: ("take back slot", ("key", "worker")),
    events.LoseSlot: ("lose slot", ("key",)),
    events.AbandonTurn: ("abandon", ("key",)),
    events.CutOffTurn: ("cut off", ("key",)),
    events.ContinueCancel: ("go on cancelling", ("job_id",)),
    events.ContinueDispatch: ("go on", ()),
    events.ConversationStarted: ("conversation starts", ("job_id", "conversation_id")),
    events.ConversationEnded: (
        "conversation ends",
        ("job_id", "conversation_id", "state", "reason", "unspoken", "ending", "absent"),
    ),
    events.ConversationReleased: ("conversation leaves", ("job_id", "conversation_id", "models", "awaited")),
    events.JobEnded: ("job ends", ("job_id",)),
    events.JobAdmitted: ("admit", ("job.id", "ended", "suspects", "is_cancelled")),
    events.CallerSpoke: ("is said", ("key", "reason")),
    events.JobCancelled: ("cancel", ("job_id",)),
    events.ConversationSpoiled: ("spoil", ("job_id", "conversation_id")),
    events.WorkerReady: ("worker is ready", ("worker", "model", "slots")),
    events.WorkerNotReady: ("worker is gone", ("worker", "returns")),
    events.ModelLost: ("model is lost", ("model", "is_elsewhere")),
    events.ModelRegained: ("model is there", ("model",)),
    events.TurnCompleted: ("completes", ("key",)),
    events.TurnInterrupted: ("is interrupted", ("key", "trial")),
    events.TurnRejected: ("is rejected", ("key",)),
    events.TurnFailed: ("fails", ("key", "reason")),
    events.TurnCutOff: ("was cut off", ("key",)),
    events.DeferralOver: ("need not wait", ("key",)),
    events.PromptRead: ("is read", ("key",)),
    events.TurnSpent: ("has spent", ("key", "fresh_tokens", "answer_tokens")),
    events.Paused: ("pause", ()),
    events.Unpaused: ("go on", ()),
    SuspectsCleared: ("clear", ("keys",)),
    SourceDistrusted: ("distrust", ("source",)),
    SourceTrusted: ("trust", ("source",)),
    records.ConversationMoved: ("record conversation", ("job_id", "conversation_id", "state", "reason", "most")),
    records.TurnMoved: ("record turn", ("key", "state", "worker", "model")),
    records.TurnEnded: ("record end", ("turn.key", "turn.state", "turn.reason", "turn.text", "model")),
    records.TurnRequeued: ("record retry", ("key", "worker", "reason")),
    records.ConversationWorded: ("record words", ("job_id", "conversation_id")),
}


def line_of(what: object) -> str:
    """Return an event, an action or a record in neutral words."""
    word, fields = WORDS[type(what)]
    return f"{word} {' '.join(_plain(attrgetter(field)(what)) for field in fields)}"


def _plain(value: object) -> str:
    match value:
        case TurnKey():
            plain = "/".join(map(str, value))
        case float():
            plain = f"{value:.6f}"
        case Mapping():
            plain = str([f"{_plain(each)}: {_plain(of)}" for each, of in value.items()])
        case frozenset():
            plain = str(sorted(map(_plain, value)))
        case msgspec.Struct():
            plain = str([getattr(value, field) for field in value.__struct_fields__])
        case str() | int() | None:
            plain = str(value)
        case Iterable():
            plain = str([_plain(each) for each in value])
        case _:
            raise TypeError(value)
    return plain


def digest_of(lines: Iterable[str]) -> str:
    """Return a short digest of lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
