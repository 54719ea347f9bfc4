"""Tools without an engine: reading calls from a message, running them, and failures that end a request.

Source: specification, "Tool loop" and "Tool failures".
"""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

import anyio
import anyio.lowlevel
import httpx
import pytest
import respx

from tests.harness.waiting import LIMIT_S, wait_until
from transport.events import ToolCallDelta
from transport.request import ToolCall
from workers.errors import InvalidTool, ToolRunFailed, UnknownTool
from workers.outcome import FailureReason, RequestFailed
from workers.tools.call_journal import Begun, Unverified
from workers.tools.call_parser import Fallback, join_fragments, read_message
from workers.tools.calls import MessageTools, Signal, ToolLimits, ToolRecord, signal_of
from workers.tools.definition import ToolDefinition, check_names
from workers.tools.http import http_tools
from workers.tools.runner import PythonTools, ToolRunner, ToolRunners, ToolThreads, ToolUse

NAMES = ("add", "find")


def tool(name: str, **properties: object) -> ToolDefinition:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return ToolDefinition.parse({"type": "function", "function": {"name": name, "parameters": parameters}})


def call(name: str, arguments: str, call_id: str = "c0") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


class TestDefinitions:
    @pytest.mark.parametrize(
        ("document", "told"),
        [
            ("add", "a tool is"),
            ({"function": {}}, "needs a name"),
            ({"function": {"name": " "}}, "needs a name"),
            ({"type": "retrieval", "function": {"name": "x"}}, "is not 'function'"),
            ({"function": {"name": "x", "description": 3}}, "is not text"),
            ({"function": {"name": "x", "parameters": []}}, None),
            ({"function": {"name": "x", "parameters": "no"}}, "not a JSON schema"),
            ({"function": {"name": "x", "parameters": {"type": "nonsense"}}}, "is no type; there are"),
        ],
    )
    def test_an_invalid_tool_is_refused_with_a_remedy(self, document: object, told: str | None) -> None:
        """A job with a broken tool is refused before anything runs."""
        if told is None:
            assert ToolDefinition.parse(document).parameters == {}
            return
        with pytest.raises(InvalidTool, match=told):
            ToolDefinition.parse(document)

    def test_one_name_means_one_tool(self) -> None:
        """The name of both a tool and an exit tool would be ambiguous."""
        with pytest.raises(InvalidTool, match="'add'"):
            check_names((tool("add"),), (tool("add"),))

    @pytest.mark.anyio
    async def test_no_schema_blocks_the_service(self) -> None:
        """A pattern without end, or a schema that refers to itself, ends the call and not the service."""
        slow = tool("t", q={"type": "string", "pattern": r"(.*),(.*),(.*),(.*),(.*);"})
        assert "took too long" in (await slow.faults_of({"q": "a," * 400}) or "")
        assert await slow.faults_of({"q": ",,,,;"}) is None
        assert "does not match" in (await slow.faults_of({"q": "?"}) or "")
        schema = {"patternProperties": {"^x+$": {"type": "number"}}, "additionalProperties": False}
        named = ToolDefinition.parse({"function": {"name": "t", "parameters": schema}})
        assert await named.faults_of({"xx": 1}) is None
        assert await named.faults_of({"xx": "1"}) is not None
        assert await named.faults_of({"y": 1}) is not None
        nested = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
        endless = ToolDefinition.parse({"function": {"name": "t", "parameters": nested}})
        assert "cannot be applied" in (await endless.faults_of({}) or "")

    @pytest.mark.parametrize(
        ("properties", "text", "arguments"),
        [
            ({"who": {"type": "string"}}, "Bodyguard", {"who": "Bodyguard"}),
            ({"who": {"type": "string"}}, ' "Bodyguard" ', {"who": "Bodyguard"}),
            ({"who": {"type": "string"}}, " 42 ", {"who": "42"}),
            ({"who": {"type": "integer"}}, "42", None),
            ({"who": {"type": "string"}, "why": {"type": "string"}}, "Bodyguard", None),
            ({}, "Bodyguard", None),
        ],
    )
    def test_a_bare_text_is_the_only_argument(
        self, properties: dict[str, object], text: str, arguments: dict[str, object] | None
    ) -> None:
        """Specification, "Fallback calls": with more parameters it would be ambiguous."""
        assert tool("get_role", **properties).of_text(text) == arguments

    def test_a_schema_cannot_make_us_fetch_anything(self) -> None:
        """Definitions come with jobs; a reference out of the schema is refused, and we send no request."""
        document = {"function": {"name": "x", "parameters": {"$ref": "http://127.0.0.1:9/schema"}}}
        with respx.mock(assert_all_called=False) as network, pytest.raises(InvalidTool, match="refers to"):
            ToolDefinition.parse(document)
        assert not network.calls


class TestReading:
    def test_fragments_become_calls_however_they_are_cut(self) -> None:
        """OpenAI streams send id and name once, arguments in pieces, and several calls interleaved."""
        pieces = [
            ToolCallDelta(0, "a", "add", ""),
            ToolCallDelta(1, "b", "find", '{"q"'),
            ToolCallDelta(0, None, None, '{"a": '),
            ToolCallDelta(1, None, None, ": 1}"),
            ToolCallDelta(0, None, None, "2}"),
        ]
        assert join_fragments(pieces) == (call("add", '{"a": 2}', "a"), call("find", '{"q": 1}', "b"))

    def test_a_new_id_begins_a_new_call_and_a_missing_one_is_generated(self) -> None:
        """Some servers send index 0 for every call, and some send no id."""
        same_index = [ToolCallDelta(0, "a", "add", "{}"), ToolCallDelta(0, "b", "add", "{}")]
        assert [each.id for each in join_fragments(same_index)] == ["a", "b"]
        assert join_fragments([ToolCallDelta(0, None, "add", "{}")]) == (call("add", "{}", "call_0"),)

    @pytest.mark.parametrize(
        ("text", "calls"),
        [
            ('{"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}', [("add", '{"a": 1}')]),
            ('```json\n{"tool_calls": [{"name": "add", "arguments": {}}]}\n```', [("add", "{}")]),
            ('<think>hm</think>\n{"tool_calls": [{"name": "add", "arguments": {}}]}', [("add", "{}")]),
            ('{"tool_calls": [{"name": "nobody", "arguments": {}}]}', [("nobody", "{}")]),
            ('{"tool_calls": [{"function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]}', [("add", '{"a": 1}')]),
            ('{"name": "find", "arguments": {"q": "x"}}', [("find", '{"q": "x"}')]),
            ('[{"name": "add", "arguments": {}}, {"name": "find", "arguments": {}}]', [("add", "{}"), ("find", "{}")]),
            ('{"tool_calls": [{"name": "add", "arguments": 7}]}', [("add", "7")]),
            ('{"name": "Ann", "arguments": {}}', []),
            ('{"name": "add"}', []),
            ('{"answer": 42}', []),
            ('I would call {"tool_calls": [{"name": "add", "arguments": {}}]} here', []),
            ('{"tool_calls": [{"name": "add", ', []),
            ("[[[[", []),
            ("plain words", []),
        ],
    )
    def test_the_json_fallback_is_strict(self, text: str, calls: list[tuple[str, str]]) -> None:
        """The whole answer is the call, or there is none: an answer about a call, or with data, stays an answer."""
        reading = read_message(text, [], Fallback.JSON, NAMES)
        assert [(each.name, each.arguments) for each in reading.calls] == calls
        assert reading.text == ("" if calls else text)

    def test_calls_without_ids_at_one_index_are_separated(self) -> None:
        """A name after complete arguments begins another call; one repeated within them does not."""
        pieces = [
            ToolCallDelta(0, None, "add", '{"a": '),
            ToolCallDelta(0, None, "add", "1}"),
            ToolCallDelta(0, None, "add", '{"a": 2}'),
            ToolCallDelta(0, None, None, ""),
            ToolCallDelta(0, None, "add", ""),
        ]
        assert [each.arguments for each in join_fragments(pieces)] == ['{"a": 1}', '{"a": 2}']

    def test_a_name_may_come_in_pieces(self) -> None:
        """Some servers stream every field in pieces."""
        pieces = [
            ToolCallDelta(0, None, "fi", ""),
            ToolCallDelta(0, None, "nd", ""),
            ToolCallDelta(0, None, None, "{}"),
        ]
        assert [(each.name, each.arguments) for each in join_fragments(pieces)] == [("find", "{}")]

    def test_markup_calls_stand_among_words(self) -> None:
        """Specification, "Fallback calls"."""
        text = (
            '<thinking><tool_request name="add">{}</tool_request></thinking>Let me see. '
            '<tool_request name="add">{"a": 1}</tool_request> and <tool_request name=\'find\'>{}</tool_request>'
        )
        reading = read_message(text, [], Fallback.MARKUP, NAMES)
        assert [(each.name, each.arguments) for each in reading.calls] == [("add", '{"a": 1}'), ("find", "{}")]
        assert "Let me see." in reading.text
        cut = read_message('Now <tool_request name="add">{"a": ', [], Fallback.MARKUP, NAMES)
        assert [(each.name, each.arguments) for each in cut.calls] == [("add", '{"a":')]

    def test_text_is_read_for_calls_only_without_a_structured_call(self) -> None:
        """Text beside a structured call is text."""
        text = '{"tool_calls": [{"name": "find", "arguments": {}}]}'
        reading = read_message(text, [ToolCallDelta(0, "a", "add", "{}")], Fallback.JSON, NAMES)
        assert (reading.text, [each.name for each in reading.calls], reading.fallback) == (text, ["add"], None)
        assert read_message(text, [], None, NAMES).calls == ()

    def test_a_signal_is_recorded_even_when_malformed(self) -> None:
        """An exit tool never changes what happens next, not even by its own faults."""
        assert signal_of(call("done", '{"ok": true}')) == Signal(name="done", arguments={"ok": True})
        assert signal_of(call("done", "")) == Signal(name="done", arguments={})
        assert signal_of(call("done", "{oops")) == Signal(name="done", arguments=None, raw="{oops")


class Odd(BaseException):
    """Exceptions that test frameworks and event loops raise outside ``Exception``."""


ERRORS = (SystemExit(3), asyncio.CancelledError("mine"), StopIteration(1), Odd("odd"), KeyboardInterrupt())


async def _sleep() -> object:
    await anyio.sleep_forever()
    return None


def _raise() -> object:
    raise ZeroDivisionError("no")


async def _add(a: float, b: float) -> float:
    return a + b


RUNNER = PythonTools(
    {
        "add": _add,
        "find": lambda q: {"found": False, "q": q},
        "sleep": _sleep,
        "raise": _raise,
        "object": object,
        "nan": lambda: math.nan,
    }
)
TOOLS = {
    name: tool(name, **{key: {} for key in keys})
    for name, keys in {"find": "q", "sleep": "", "raise": "", "object": "", "nan": "", "nobody": ""}.items()
} | {"add": tool("add", a={"type": "number"}, b={"type": "number"})}


async def run(
    *calls: ToolCall, runner: ToolRunner | None = RUNNER, timeout_s: float = 5.0
) -> tuple[list[str] | RequestFailed, list[ToolRecord]]:
    records: list[ToolRecord] = []
    tools = MessageTools(TOOLS, runner, ToolLimits(timeout_s=timeout_s), "a job")
    return await tools.run(calls, 2, "words", records), records


class TestRunning:
    async def test_results_stand_in_the_order_of_the_calls(self) -> None:
        """There may be any number of concurrent calls; a search without a result is a result."""
        results, records = await run(call("find", '{"q": "x"}', "a"), call("add", '{"a": 1, "b": 2}', "b"))
        assert results == ['{"found": false, "q": "x"}', "3"]
        assert [(each.id, each.result, each.iteration, each.said) for each in records] == [
            ("a", {"found": False, "q": "x"}, 2, "words"),
            ("b", 3, 2, "words"),
        ]

    @pytest.mark.parametrize(
        ("name", "arguments", "reason"),
        [
            ("sleep", "{}", FailureReason.TOOL_TIMEOUT),
            ("raise", "{}", FailureReason.TOOL_EXCEPTION),
            ("add", '{"a": 1, "b": ', FailureReason.TOOL_ARGUMENTS),
            ("add", "[1, 2]", FailureReason.TOOL_ARGUMENTS),
            ("add", '{"a": "one", "b": 2}', FailureReason.TOOL_ARGUMENTS),
            ("add", '{"a": 1}', FailureReason.TOOL_ARGUMENTS),
            ("object", "{}", FailureReason.TOOL_RESULT),
            ("nan", "{}", FailureReason.TOOL_RESULT),
            ("nobody", "{}", FailureReason.TOOL_UNKNOWN),
            ("never_shown", "{}", FailureReason.TOOL_UNKNOWN),
        ],
    )
    async def test_each_failure_of_a_tool_has_its_reason(
        self, name: str, arguments: str, reason: FailureReason
    ) -> None:
        """Each ends the request with its own reason, and the record names the call."""
        results, records = await run(call(name, arguments), timeout_s=0.05)
        assert isinstance(results, RequestFailed)
        assert (results.reason, name in results.detail) == (reason, True)
        assert [(each.name, each.reason) for each in records] == [(name, reason)]

    async def test_calls_run_at_the_same_time_and_the_first_failure_ends_the_others(self) -> None:
        """Two calls that wait for each other can only end together; one that sleeps is cut off by one that fails."""
        met = anyio.Event()

        async def first() -> str:
            await met.wait()
            return "met"

        async def second() -> str:
            met.set()
            return "came"

        runner = PythonTools({"find": lambda q: q, "sleep": first, "nobody": second})
        with anyio.fail_after(5):
            assert (await run(call("sleep", "{}"), call("nobody", "{}"), runner=runner))[0] == ['"met"', '"came"']
            results, records = await run(call("sleep", "{}", "a"), call("raise", "{}", "b"), timeout_s=60)
        assert isinstance(results, RequestFailed)
        assert results.reason is FailureReason.TOOL_EXCEPTION
        assert [(each.id, each.reason) for each in records] == [("a", "cancelled"), ("b", "tool_exception")]

    @pytest.mark.parametrize("arguments", ['{"q": NaN}', '{"q": -Infinity}', r'{"q": "\ud800"}', '{"q":' * 5000])
    async def test_json_that_only_python_accepts_is_malformed(self, arguments: str) -> None:
        """An engine would refuse the whole history that contains it."""
        results, _ = await run(call("find", arguments))
        assert isinstance(results, RequestFailed)
        assert results.reason is FailureReason.TOOL_ARGUMENTS

    @pytest.mark.parametrize(
        "error", [SystemExit(3), asyncio.CancelledError("mine"), StopIteration(1), Odd("odd"), KeyboardInterrupt()]
    )
    @pytest.mark.parametrize("is_async", [False, True])
    async def test_a_tool_that_raises_a_base_exception_ends_only_its_request(
        self, error: BaseException, is_async: bool
    ) -> None:
        """``sys.exit`` in a library must not end the service, nor look like a cancel of ours."""

        def fail() -> object:
            raise error

        async def fail_later() -> object:
            await anyio.lowlevel.checkpoint()
            raise error

        runner = PythonTools({"raise": fail_later if is_async else fail, "find": lambda q: q})
        results, records = await run(call("raise", "{}"), call("find", '{"q": 1}'), runner=runner)
        assert isinstance(results, RequestFailed)
        assert results.reason is FailureReason.TOOL_EXCEPTION
        assert records[0].reason is FailureReason.TOOL_EXCEPTION

    async def test_a_tool_that_cancels_its_own_task_ends_only_its_request(self) -> None:
        """The cancel comes from nowhere else."""

        async def give_up() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await anyio.lowlevel.checkpoint()

        results, _ = await run(call("raise", "{}"), runner=PythonTools({"raise": give_up}))
        assert isinstance(results, RequestFailed)
        assert results.reason is FailureReason.TOOL_EXCEPTION

    async def test_calls_that_hang_are_bounded_and_do_not_hold_up_the_end(self) -> None:
        """A thread cannot be stopped; a bounded number may hang, and the process still ends."""
        threads, hung, free = ToolThreads(limit=2), 0, threading.Event()

        def hang() -> None:
            nonlocal hung
            hung += 1
            free.wait(LIMIT_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(threads.run, "hang", hang)
            tasks.start_soon(threads.run, "hang", hang)
            await wait_until(lambda: hung == 2, "both hang")
            tasks.cancel_scope.cancel()
        with anyio.move_on_after(0.05) as limit:
            await threads.run("third", lambda: 1)
        assert limit.cancelled_caught
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool hang")
        free.set()
        with anyio.fail_after(LIMIT_S):
            assert await threads.run("third", lambda: 1) == 1

    async def test_without_a_runner_no_tool_is_known(self) -> None:
        """The model's operator has configured none."""
        results, _ = await run(call("find", '{"q": 1}'), runner=None)
        assert isinstance(results, RequestFailed)
        assert results.reason is FailureReason.TOOL_UNKNOWN


def use(name: str) -> ToolUse:
    return ToolUse(call_id="c0", name=name, arguments={"q": 1}, job_name="a job")


@asynccontextmanager
async def endpoint(answer: httpx.Response) -> AsyncIterator[tuple[ToolRunner, respx.Route]]:
    with respx.mock(base_url="http://tools.test") as mock:
        route = mock.post("/run").mock(return_value=answer)
        async with http_tools("http://tools.test/run", {"X-Key": "k"}) as tools:
            yield tools, route


class TestHttp:
    async def test_a_call_is_posted_and_the_response_is_its_result(self) -> None:
        """The operator's endpoint gets the whole call, with the operator's headers."""
        async with endpoint(httpx.Response(200, json={"found": False})) as (tools, route):
            assert await tools.run(use("find")) == {"found": False}
        sent = route.calls.last.request
        expected = {"name": "find", "arguments": {"q": 1}, "call_id": "c0", "job_name": "a job"}
        assert (json.loads(sent.content), sent.headers["X-Key"]) == (expected, "k")

    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            (httpx.Response(404), UnknownTool),
            (httpx.Response(500, text="boom"), ToolRunFailed),
            (httpx.Response(302, headers={"Location": "http://elsewhere.test"}), ToolRunFailed),
            (httpx.Response(200, text="<html>"), ValueError),
            (httpx.Response(200, content=b"x" * (5 << 20)), ToolRunFailed),
        ],
        ids=["404", "500", "a redirect", "no JSON", "too much"],
    )
    async def test_an_endpoint_that_fails(self, answer: httpx.Response, error: type[Exception]) -> None:
        """404 means an unknown tool, any other error a failure of the tool; redirects are not followed."""
        async with endpoint(answer) as (tools, _):
            with pytest.raises(error):
                await tools.run(use("find"))

    async def test_the_first_runner_that_knows_a_name_runs_it(self) -> None:
        """Python functions come before the endpoint, which may know any name."""
        async with endpoint(httpx.Response(200, json="far")) as (far, _):
            both = ToolRunners([PythonTools({"find": lambda **_: "near"}), far])
            assert [await both.run(use("find")), await both.run(use("other"))] == ["near", "far"]
        with pytest.raises(UnknownTool):
            await ToolRunners([]).run(use("find"))


class ProcessRegistry:
    """Remembers calls of an earlier attempt, and the records that are made."""

    def __init__(self, **begun: Begun) -> None:
        self.begun = begun
        self.notes: list[object] = []

    async def begin_call(self, name: str, arguments: Mapping[str, object], policy: Unverified) -> Begun:
        self.notes.append((name, dict(arguments), policy))
        return self.begun.get(name, Begun(key="new"))

    async def end_call(self, key: str, *, result: str | None, failure: str | None) -> None:
        self.notes.append((key, result, failure))


class TestLedger:
    """A call is recorded before and after it runs; a call that had begun before is not simply repeated."""

    made: ClassVar[list[str | None]] = []

    async def ask(self, journal: ProcessRegistry, policy: str) -> tuple[list[str] | RequestFailed, list[str | None]]:
        self.made.clear()
        definition = ToolDefinition.parse({"type": "function", "unverified": policy, "function": {"name": "pay"}})
        assert "unverified" not in definition.document

        def pay(idempotency_key: str) -> None:
            self.made.append(idempotency_key)

        runner = PythonTools({"pay": pay})
        tools = MessageTools({"pay": definition}, runner, ToolLimits(), "a job", journal)
        return await tools.run([call("pay", "{}")], 0, "", []), self.made

    async def test_a_call_is_recorded_before_and_after(self) -> None:
        """With the key that the tool gets."""
        journal = ProcessRegistry()
        assert await self.ask(journal, "fail") == (["null"], ["new"])
        assert journal.notes == [("pay", {}, Unverified.FAIL), ("new", "null", None)]

    async def test_a_known_result_is_used(self) -> None:
        """A call whose outcome is known is never repeated."""
        journal = ProcessRegistry(pay=Begun(key="k", was_begun=True, result='{"paid": 1}'))
        assert await self.ask(journal, "retry") == (['{"paid": 1}'], [])

    @pytest.mark.parametrize(("policy", "made"), [("retry", ["k"]), ("ask_model", []), ("fail", [])])
    async def test_an_unverified_call_follows_its_policy(self, policy: str, made: list[str]) -> None:
        """It is repeated with the same key, shown to the model, or ends the turn."""
        result, called = await self.ask(ProcessRegistry(pay=Begun(key="k", was_begun=True)), policy)
        assert called == made
        if policy == "fail":
            assert isinstance(result, RequestFailed)
            assert result.reason is FailureReason.TOOL_EXCEPTION
            assert "whether it took effect is not known" in result.detail
        else:
            assert isinstance(result, list)
            assert ("unverified" in result[0]) is (policy == "ask_model")

    async def test_a_failure_is_recorded_too(self) -> None:
        """The record says why there is no result."""
        journal = ProcessRegistry()
        tools = MessageTools(TOOLS, RUNNER, ToolLimits(), "a job", journal)
        assert isinstance(await tools.run([call("raise", "{}")], 0, "", []), RequestFailed)
        assert str(journal.notes[-1]).startswith("('new', None, 'tool_exception: raise: ")

    def test_an_unknown_policy_is_refused(self) -> None:
        """The message lists the policies."""
        with pytest.raises(InvalidTool, match="retry, ask_model, fail"):
            ToolDefinition.parse({"type": "function", "unverified": "maybe", "function": {"name": "pay"}})
