"""The stored part of a prompt: only what job, words and turns do not determine."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from transport.request import Thought, ToolCall
from workers.requests.prompts.stack import RECORDED, ToolExchange
from workers.tools.call_parser import Fallback
from workers.tools.calls import ToolRecord
from workers.tools.results import encode_result


class ExchangeRecord(Struct, frozen=True, omit_defaults=True):
    """A message of the model with calls; their results are in the records of the calls."""

    written: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    fallback: Fallback | None = None
    note: str = ""


class PromptRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt's prompt.

    ``heard`` is the number of visible turns (free mode), ``rejected`` the number of rejected answers. ``is_told`` says
    that the demand on the answer was said in words, ``addition`` is what was said at the end. ``iterations``,
    ``has_fallback`` and ``stuck`` are the model's limits on tools, ``defaults`` its parameters, ``changes`` those that
    a retry changed. ``thought`` is what could come before a constrained answer. ``from_round`` is the first round of
    the memory window; ``is_summed`` says that a summary replaced the rounds before it. ``made_at`` is set for an
    attempt that goes on with the prompt of an earlier one.
    """

    heard: int | None = None
    rejected: int = 0
    is_told: bool = False
    addition: str | None = None
    iterations: int = 0
    has_fallback: bool = False
    stuck: int | None = 3
    defaults: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    from_round: int = 0
    is_summed: bool = False
    exchanges: tuple[ExchangeRecord, ...] = ()
    thought: Thought = Thought.NONE
    made_at: datetime | None = None


def keep_exchanges(exchanges: Iterable[ToolExchange]) -> tuple[ExchangeRecord, ...]:
    """Return exchanges without the results of their calls."""
    return tuple(
        ExchangeRecord(
            written=exchange.written if exchange.fallback is not None else "",
            text=exchange.text if exchange.fallback is None else "",
            calls=exchange.calls,
            fallback=exchange.fallback,
            note=exchange.note,
        )
        for exchange in exchanges
    )


def restore_exchanges(
    kept: Sequence[ExchangeRecord], calls: Sequence[ToolRecord], exit_names: frozenset[str]
) -> tuple[ToolExchange, ...]:
    """Return exchanges with the results of their calls, as in the prompt."""
    results = iter([encode_result(call.result) for call in calls])
    return tuple(
        ToolExchange(
            written=record.written,
            text=record.text,
            calls=record.calls,
            results=tuple(RECORDED if call.name in exit_names else next(results) for call in record.calls),
            fallback=record.fallback,
            note=record.note,
        )
        for record in kept
    )
