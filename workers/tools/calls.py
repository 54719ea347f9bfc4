"""The calls of one message: checked, run at the same time, and turned into the model's next input.

Specification, "Tool failures": a timeout, an exception, malformed arguments, a result that is not JSON and an unknown
name end the request, each with its own reason; a disappointing outcome never does.
"""

import asyncio
import json
import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import anyio
import msgspec
from msgspec.structs import replace

from transport.request import ToolCall
from workers.errors import JournalClosed, UnknownTool
from workers.outcome import FailureReason, RequestFailed
from workers.tools.call_journal import CallJournal, Unverified
from workers.tools.call_parser import Fallback, read_json
from workers.tools.definition import ToolDefinition
from workers.tools.results import ResultTooLarge, encode_bounded, encode_result
from workers.tools.runner import ToolRunner, ToolUse

DETAIL_CHARS: Final = 500
MOST_SAID_CHARS: Final = 64 * 1024  # longest error of a tool that is logged whole
STUCK: Final = 3  # iterations in which nothing new was asked or returned
logger = logging.getLogger(__name__)


class WrongArguments(StrEnum):
    """The treatment of a call with an unknown name, or with arguments that are malformed or break the tool's schema."""

    FAIL = "fail"  # it ends the request (specification, "Tool failures")
    TELL = "tell"  # the model gets the fault, and may call again within its budget


class ToolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of tools: iterations of one request, seconds of one call, and the form of calls.

    ``fallback`` lets a model write a call as text if it gives no structured one. ``arguments`` is the treatment of
    calls with wrong arguments. After ``stuck`` iterations in a row with the same calls and results no more calls are
    allowed; None allows them always.
    """

    iterations: int = 8
    stuck: int | None = STUCK
    timeout_s: float = 60.0
    fallback: bool = True
    arguments: WrongArguments = WrongArguments.FAIL


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an exit tool: recorded and never run. ``raw`` is the model's text if that is no JSON object."""

    name: str
    arguments: Mapping[str, object] | None
    raw: str | None = None


class ToolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one tool call: its arguments and its result, in the iteration counted from 0.

    ``said`` is the model's text in the message with the call; ``reason`` is None if the call has a result.
    """

    iteration: int
    id: str
    name: str
    arguments: Mapping[str, object] | str
    result: object = None
    reason: FailureReason | None = None
    detail: str | None = None
    said: str = ""
    duration_s: float = 0.0


class ToolTrouble(Exception):
    """A call that ends its request; caught where the calls of its message are run."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments that a model wrote, None if they are no JSON object; empty text is an empty object."""
    if not text.strip():
        return {}
    try:
        arguments = read_json(text)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def signal_of(call: ToolCall) -> Signal:
    """Return the signal that a call of an exit tool stands for; a malformed call is a signal too."""
    arguments = read_arguments(call.arguments)
    return Signal(name=call.name, arguments=arguments, raw=call.arguments if arguments is None else None)


class MessageTools:
    """Runs the calls of one message at the same time; the first that fails ends the others."""

    def __init__(
        self,
        tools: Mapping[str, ToolDefinition],
        runner: ToolRunner | None,
        limits: ToolLimits,
        job_name: str,
        journal: CallJournal | None = None,
    ) -> None:
        self._tools = tools
        self._runner = runner
        self._limits = limits
        self._job_name = job_name
        self._journal = journal

    def __repr__(self) -> str:
        return f"<MessageTools {sorted(self._tools)} of {self._job_name}>"

    async def run(
        self,
        calls: Sequence[ToolCall],
        iteration: int,
        said: str,
        records: list[ToolRecord],
        fallback: Fallback | None = None,
        *,
        cut_off: ToolCall | None = None,
    ) -> list[str] | RequestFailed:
        """Return each call's result as JSON, in order; ``records`` takes every call, failed ones too.

        ``fallback`` is how they were read from the message's text, None if the engine gave them. The call that is
        ``cut_off`` at the bound of tokens is never made: some engines report half a call as whole.
        """
        results: list[str | None] = [None] * len(calls)
        kept: dict[int, ToolRecord] = {}
        troubles: list[ToolTrouble] = []
        uses: list[tuple[int, ToolUse]] = []
        for place, call in enumerate(calls):
            try:
                uses.append((place, await self._check(call, fallback, is_cut_off=call is cut_off)))
            except ToolTrouble as trouble:
                if self._limits.arguments is WrongArguments.FAIL:
                    records += [_refused(each, iteration, said, trouble) for each in calls]
                    return RequestFailed(reason=trouble.reason, detail=str(trouble))
                error = {"error": str(trouble).encode("utf-8", "replace").decode()}
                results[place] = encode_result(error)
                kept[place] = replace(_refused(call, iteration, said, trouble), result=error)

        async def run_one(place: int, use: ToolUse) -> None:
            started_at = anyio.current_time()
            record = ToolRecord(iteration=iteration, id=use.call_id, name=use.name, arguments=use.arguments, said=said)
            try:
                results[place] = encoded = await self._run_noted(use)
                record = replace(record, result=json.loads(encoded))
            except ToolTrouble as trouble:
                troubles.append(trouble)
                record = replace(record, reason=trouble.reason, detail=str(trouble))
                tasks.cancel_scope.cancel()
            except BaseException:
                record = replace(record, reason=FailureReason.CANCELLED, detail="cut off")
                raise
            finally:
                kept[place] = replace(record, duration_s=round(anyio.current_time() - started_at, 3))

        try:
            async with anyio.create_task_group() as tasks:
                for place, use in uses:
                    tasks.start_soon(run_one, place, use)
        finally:
            records += [kept[place] for place in sorted(kept)]
        if troubles:
            return RequestFailed(reason=troubles[0].reason, detail=str(troubles[0]))
        known = [result for result in results if result is not None]
        if len(known) < len(calls):
            return RequestFailed(
                reason=FailureReason.TOOL_EXCEPTION, detail="a tool has cancelled the task that ran it"
            )
        return known

    async def _check(self, call: ToolCall, fallback: Fallback | None, *, is_cut_off: bool) -> ToolUse:
        if is_cut_off:
            text = f"{call.name}: the call was cut off: at its limit of tokens (max_tokens), or by a filter"
            raise ToolTrouble(FailureReason.TOOL_ARGUMENTS, text)
        tool = self._tools.get(call.name)
        if tool is None:
            given = ", ".join(self._tools)
            text = f"the model called {call.name!r}, which it was not given; it has {given or 'no tools'}"
            raise ToolTrouble(FailureReason.TOOL_UNKNOWN, text)
        arguments = read_arguments(call.arguments)
        if arguments is None and fallback is Fallback.MARKUP:
            arguments = tool.of_text(call.arguments)
        if arguments is None:
            raise ToolTrouble(
                FailureReason.TOOL_ARGUMENTS, f"{call.name}: no JSON object: {call.arguments[:DETAIL_CHARS]}"
            )
        fault = await tool.faults_of(arguments)
        if fault is not None:
            raise ToolTrouble(FailureReason.TOOL_ARGUMENTS, f"{call.name}: {fault[:DETAIL_CHARS]}")
        return ToolUse(
            call_id=call.id, name=call.name, arguments=arguments, job_name=self._job_name, origin=tool.origin
        )

    async def _run_noted(self, use: ToolUse) -> str:
        """Run a call and record it before and after; one that an earlier attempt began is not simply made again."""
        if self._journal is None:
            return await self._run_one(use)
        policy = self._tools[use.name].unverified
        try:
            begun = await self._journal.begin_call(use.name, use.arguments, policy)
        except JournalClosed as error:
            raise ToolTrouble(FailureReason.SHUTDOWN, f"{use.name}: {error}") from error
        if begun.result is not None:
            return begun.result
        if begun.was_begun and policy is not Unverified.RETRY:
            return _unverified(use, policy)
        use = replace(use, key=begun.key)
        try:
            result = await self._run_one(use)
        except ToolTrouble as trouble:
            await self._journal.end_call(begun.key, result=None, failure=f"{trouble.reason}: {trouble}")
            raise
        await self._journal.end_call(begun.key, result=result, failure=None)
        return result

    async def _run_one(self, use: ToolUse) -> str:
        if self._runner is None:
            raise ToolTrouble(FailureReason.TOOL_UNKNOWN, f"{use.name}: no tool runner is configured for this model")
        result: object = None
        with anyio.move_on_after(self._limits.timeout_s) as limit:
            try:
                result = await self._runner.run(use)
            except UnknownTool as error:
                raise ToolTrouble(FailureReason.TOOL_UNKNOWN, str(error)) from error
            except ResultTooLarge as error:
                raise ToolTrouble(FailureReason.TOOL_RESULT, f"{use.name}: {error}") from error
            except anyio.get_cancelled_exc_class() as error:
                if _is_cancelled():
                    raise
                raise self._failed(use, error) from error  # the tool's own doing, and not asked for
            except BaseException as error:
                raise self._failed(use, error) from error  # the operator's libraries may raise any error
        if limit.cancelled_caught:
            raise ToolTrouble(
                FailureReason.TOOL_TIMEOUT, f"{use.name}: no result within tools.timeout_s = {self._limits.timeout_s:g}"
            )
        return await _encode(use, result)

    def _failed(self, use: ToolUse, error: BaseException) -> ToolTrouble:
        said = str(error)
        if len(said) <= MOST_SAID_CHARS:
            logger.warning("%s: tool %s failed", self._job_name, use.name, exc_info=error)
        else:  # formatting it would hold the event loop
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.warning("%s: tool %s failed: %s...\n%s", self._job_name, use.name, said[:DETAIL_CHARS], where)
        text = f"{use.name}: {type(error).__name__}: {said[:DETAIL_CHARS]}"
        return ToolTrouble(FailureReason.TOOL_EXCEPTION, text.encode("utf-8", "replace").decode()[:DETAIL_CHARS])


def _unverified(use: ToolUse, policy: Unverified) -> str:
    warning = (
        f"{use.name} was called with these arguments before, in an attempt that was interrupted; "
        "whether it took effect is not known"
    )
    if policy is Unverified.FAIL:
        raise ToolTrouble(FailureReason.TOOL_EXCEPTION, f"unverified: {warning}")
    return encode_result({"unverified": warning})


def _is_cancelled() -> bool:
    """Whether the current task was cancelled."""
    task = asyncio.current_task()
    return anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling() > 0)


async def _encode(use: ToolUse, result: object) -> str:
    try:
        return await encode_bounded(result)
    except (TypeError, ValueError, RecursionError) as error:
        text = (
            f"{use.name}: {error}"
            if isinstance(error, ResultTooLarge)
            else f"{use.name}: its result is not JSON: {error}"
        )
        raise ToolTrouble(FailureReason.TOOL_RESULT, text) from error


def _refused(call: ToolCall, iteration: int, said: str, trouble: ToolTrouble) -> ToolRecord:
    return ToolRecord(
        iteration=iteration,
        id=call.id,
        name=call.name,
        arguments=read_arguments(call.arguments) or call.arguments,
        reason=trouble.reason,
        detail=str(trouble),
        said=said,
    )
