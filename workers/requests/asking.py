"""Asks an engine, and asks again if its refusal may be about the request: the same words each time prove it.

All of this evidence is needed. The refusal gives a reason that is no trouble of the engine's own. It came before any of
the answer, or is an unreadable frame. The engine serves others meanwhile, or a canary. The same request gets the same
words again, over some seconds. An engine that refuses its canary too is ill, and its refusals are judged as usual.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from transport.dialects.refusals import says_why
from transport.errors import EngineError, EngineRejected, RequestAtFault, UnreadableFrame, without_frames

Excuse = Callable[[], Awaitable[bool]]  # whether the engine serves others
PAUSES_S: Final = (
    0.25,
    0.75,
    2.0,
)  # before each repeat: a passing failure does not last through all of them
UNREADABLE_PAUSES_S: Final = (0.25,)


async def ask_fairly(
    ask: Callable[[], Awaitable[None]],
    has_begun: Callable[[], bool],
    excuse: Excuse | None,
    *,
    is_others: bool,
    is_passed_on: bool = False,
) -> EngineError | None:
    """Return the error that asking ended with, None without one.

    ``has_begun`` says whether any of the newest answer has come; if it ``is_passed_on``, it is not asked for again
    then. An attached server (``is_others``) that sends unreadable frames gets no canary: it is never replaced, and
    answers all callers alike.
    """
    first = await _error_of(ask)
    if first is None or excuse is None:
        return first
    words = _words_of(first, has_begun=has_begun(), is_passed_on=is_passed_on)
    if words is None:
        return first
    is_unreadable = isinstance(first, UnreadableFrame)
    for pause_s in UNREADABLE_PAUSES_S if is_unreadable else PAUSES_S:
        if not ((is_others and is_unreadable) or await excuse()):
            return first
        await anyio.sleep(pause_s)
        again = await _error_of(ask)
        if again is None or _words_of(again, has_begun=has_begun(), is_passed_on=is_passed_on) != words:
            return again
    return RequestAtFault(first.kind if isinstance(first, EngineRejected) else "", words, str(first))


async def _error_of(ask: Callable[[], Awaitable[None]]) -> EngineError | None:
    try:
        await ask()
    except EngineError as error:
        return without_frames(error)
    return None


def _words_of(error: EngineError | None, *, has_begun: bool, is_passed_on: bool) -> str | None:
    """Return an engine's words if they may be about the request."""
    if has_begun and (is_passed_on or not isinstance(error, UnreadableFrame)):
        return None
    if isinstance(error, UnreadableFrame):
        return str(error)
    return error.message if isinstance(error, EngineRejected) and says_why(error) else None
