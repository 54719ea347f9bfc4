"""The recorded state of a piece of a job, for the core: turns that ended, go on, or are suspects. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from service.conversations.job.job import TurnKey, TurnKind
from service.conversations.job.states import TurnState
from service.conversations.job.until import TurnDigest
from service.conversations.record.heritage import as_inherited, silent_turns
from service.conversations.record.transcript import Charges, Turn, UnfinishedTurn
from service.scheduling.admission import Piece
from service.scheduling.core.blame import Trial
from service.scheduling.core.events import EndedBefore
from workers.outcome import FailureReason

MOST_SERVICE_ENDS: Final = 3  # crashes of the service while one turn was at work
SET_ASIDE: Final = f"the service ended by a defect of its own {MOST_SERVICE_ENDS} times while this turn was at work"


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a job, read from its records.

    ``spoken`` holds all recorded turns that have ended, inherited ones first, and ``ended`` their states in the core.
    ``silent`` holds turns that heirs never had. The turns in ``set_aside`` fail: the service crashed repeatedly while
    they ran, and no job may keep it from running. ``suspects`` may have killed an engine or the service.
    """

    spoken: Sequence[Turn]
    ended: Mapping[TurnKey, EndedBefore]
    silent: Mapping[TurnKey, TurnDigest]
    unfinished: Sequence[UnfinishedTurn]
    set_aside: Sequence[TurnKey]
    suspects: Mapping[TurnKey, Trial]


def recovered_from(piece: Piece) -> Recovered:
    """Read the records of a piece."""
    job, spoken = piece.job, [*_as_own(piece), *piece.ended]
    agents = {agent.id for agent in job.agents}
    own = (turn for turn in spoken if turn.kind is TurnKind.TURN and turn.key.agent_id in agents)
    ended: dict[TurnKey, EndedBefore] = {turn.key: (turn.state, turn.reason) for turn in own}
    heirs = [each for each in job.conversations if each.heritage.first]
    silent = silent_turns(job, heirs, ended) if heirs else {}
    ended |= dict.fromkeys(silent, (TurnState.COMPLETED, None))
    left = {turn.key: turn for turn in piece.unfinished if turn.key not in ended}
    set_aside = [key for key, turn in left.items() if turn.charges.service_ends >= MOST_SERVICE_ENDS]
    ended |= dict.fromkeys(set_aside, (TurnState.FAILED, FailureReason.POISONED))
    return Recovered(
        spoken=spoken,
        ended=ended,
        silent=silent,
        unfinished=list(left.values()),
        set_aside=set_aside,
        suspects={key: trial for key, turn in left.items() if (trial := _trial_of(turn.charges)) is not None},
    )


def _trial_of(charges: Charges) -> Trial | None:
    """Return the kind of trial for a turn of an earlier life; None if it is no suspect."""
    if charges.service_ends:
        return Trial.LAST
    return Trial.NEXT if charges.is_suspect else None


def _as_own(piece: Piece) -> Iterator[Turn]:
    """Yield the inherited turns of a piece as turns of its own conversations."""
    for name, turns in piece.inherited.items():
        for turn in turns:
            yield as_inherited(turn, piece.job.id, name)
