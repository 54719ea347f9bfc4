"""The interface to the journal of tool calls, which survives crashes: it records each call before and after it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec


class Unverified(StrEnum):
    """The treatment of an earlier call whose outcome is unknown."""

    RETRY = "retry"  # make it again, with the same key: it is idempotent
    ASK_MODEL = "ask_model"  # say so to the model, which may call once more
    FAIL = "fail"  # end the request


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call; ``key`` is the same for the same call in another attempt.

    ``was_begun`` says that an earlier attempt began it; ``result`` is then its result as JSON, None if that is unknown.
    """

    key: str
    was_begun: bool = False
    result: str | None = None


class CallJournal(Protocol):
    """The calls of one request, in one attempt."""

    async def begin_call(self, name: str, arguments: Mapping[str, object], policy: Unverified) -> Begun:
        """Record a call; it may be made once this returns.

        Raises:
            JournalClosed: it must not be made: another node has this request by now.
        """

    async def end_call(self, key: str, *, result: str | None, failure: str | None) -> None:
        """Record the end of a call: its result as JSON, or the reason for having none."""
