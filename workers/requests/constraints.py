"""Whether an engine takes a constraint, as far as it has shown: what it refused, and what it was seen to keep."""

from collections import OrderedDict
from typing import Final

import msgspec

from transport.dialects.dialect import Dialect
from transport.request import Constraint
from workers.tools.call_parser import read_json

KNOWN: Final = 1000  # constraints of which it is known that the engine refuses them


class ConstraintPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for a constraint: the engine is sent it, the model is told of it in words, or both."""

    is_sent: bool
    is_told: bool


class EngineConstraints:
    """The constraints that one engine is known to take; written by the runner of its requests.

    An engine of ours keeps a constraint or refuses it. A server that somebody attached may pass over it in silence: so
    the model is told as well, until an answer has the form that only the constraint gives it.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._is_kept = dialect.always_constrains

    def __repr__(self) -> str:
        return f"<EngineConstraints kept={self._is_kept} refused={len(self._refused)}>"

    def plan(self, constraint: Constraint) -> ConstraintPlan:
        """Plan how to apply a constraint now."""
        if self._dialect.constrain(constraint) is None or _digest(constraint) in self._refused:
            return ConstraintPlan(is_sent=False, is_told=True)
        return ConstraintPlan(is_sent=True, is_told=not self._is_kept)

    def note_refused(self, constraint: Constraint) -> None:
        """Record a constraint that the engine refused: it took the same request without it."""
        self._refused[_digest(constraint)] = None
        while len(self._refused) > KNOWN:
            self._refused.popitem(last=False)

    def note_answer(self, constraint: Constraint, text: str) -> None:
        """Take an answer that was constrained: what its form shows of a server that may pass over constraints.

        A choice in quotes is what no words ask for, so the constraint brought it about. JSON that a schema asks for
        proves nothing, since words may bring it about as well; what is no JSON shows that nothing held the model.
        """
        if self._dialect.always_constrains:
            return
        try:
            value = read_json(text)
        except ValueError:
            self._is_kept = False
        else:
            self._is_kept = value in constraint.choices if constraint.choices else self._is_kept


def _digest(constraint: Constraint) -> bytes:
    return msgspec.json.encode(constraint)
