"""Tools end to end: a model that makes calls, real MCP servers, and the end of the request."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from tests.conftest import SpecFactory
from tests.harness.processes import running_program
from tests.harness.programs import PROGRAMS
from tests.harness.waiting import LIMIT_S, is_alive, wait_until
from tests.harness.working import ask, submit, working
from workers import PythonTools, RequestResult, RequestState, ToolLimits, Verdict, WorkerSpec
from workers.errors import ToolRunFailed
from workers.tools import mcp
from workers.tools.mcp import McpServer, McpState, McpTools
from workers.tools.runner import ToolUse

SERVER = PROGRAMS / "mcp_server.py"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}
DONE = {"type": "function", "function": {"name": "done"}}
CALL_ADD = {"tool_calls": [{"id": "x", "name": "add", "arguments": '{"a": 2, "b": 3}'}]}
ANSWER = {"content": "It is five."}


async def _wait() -> object:
    await anyio.sleep_forever()
    return None


RUNNER = PythonTools({"add": lambda a, b: a + b, "wait": _wait})


class Scripted:
    """A model that answers with the entries of a script, and the requests it got."""

    def __init__(self, folder: Path, make: SpecFactory, script: list[object], **limits: float | bool) -> None:
        self.record = folder / "record"
        (folder / "script").write_text(json.dumps(script))
        base = make(script=str(folder / "script"), record=str(self.record))
        fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
        fields |= {
            "tools": [ADD, WAIT],
            "exit_tools": [DONE],
            "tool_runner": RUNNER,
            "tool_limits": ToolLimits(**limits),  # type: ignore[arg-type]
        }
        self.spec = WorkerSpec(**fields)

    def sent(self) -> list[list[dict[str, object]]]:
        """Return the messages of each request."""
        return [json.loads(line)["request"]["messages"] for line in self.record.read_text().splitlines()]

    def bios(self) -> list[str]:
        """Return the BIOS of each request."""
        return [str(messages[0]["content"]) for messages in self.sent()]


Script = Callable[..., Scripted]


@pytest.fixture
def scripted(tmp_path: Path, scripted_spec: SpecFactory) -> Script:
    def make(*script: object, **limits: float | bool) -> Scripted:
        return Scripted(tmp_path, scripted_spec, list(script), **limits)

    return make


async def told_by(model: Scripted) -> RequestResult:
    async with working(model.spec) as worker:
        return await ask(worker)


async def test_a_call_makes_its_round_trip(scripted: Script) -> None:
    """Specification, "Tool loop": the call from its fragments, the result as a tool's message, the answer after it."""
    model = scripted({"content": "Let me see.", "reasoning": "hm", **CALL_ADD}, ANSWER)
    told = await told_by(model)
    assert (told.state, told.text, told.thinking) == (RequestState.COMPLETED, "It is five.", "hm")
    (record,) = told.tool_calls
    assert (record.name, record.arguments, record.result, record.said) == ("add", {"a": 2, "b": 3}, 5, "Let me see.")
    first, second = model.sent()
    called = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    assert second[len(first) :] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [called]},
        {"role": "tool", "content": "5", "tool_call_id": "x"},
    ]
    assert "Tool iterations left: 8" in model.bios()[0]
    assert "Tool iterations left: 7" in model.bios()[1]
    assert told.usage.prompt_tokens == 14  # the sum of both generations


async def test_the_budget_counts_messages_and_its_end_fails_unless_the_model_answers(scripted: Script) -> None:
    """A message with two calls is one iteration; after the last the model may answer, but make no call."""
    twice = {"tool_calls": [*CALL_ADD["tool_calls"], {"id": "y", "name": "add", "arguments": '{"a": 1, "b": 1}'}]}
    answered = await told_by(scripted(twice, CALL_ADD, ANSWER, iterations=2))
    assert (answered.state, [each.result for each in answered.tool_calls]) == (RequestState.COMPLETED, [5, 2, 5])
    assert [each.iteration for each in answered.tool_calls] == [0, 0, 1]
    failed = await told_by(scripted(CALL_ADD, {"content": "Once more.", **CALL_ADD}, iterations=1))
    assert (failed.state, failed.reason, failed.text) == (RequestState.FAILED, "tool_budget", "Once more.")
    assert len(failed.tool_calls) == 1


async def test_malformed_arguments_end_the_request_and_never_return_to_the_model(scripted: Script) -> None:
    """Engines would refuse a history with malformed arguments at every later request."""
    model = scripted({"tool_calls": [{"name": "add", "arguments": '{"a": '}]}, ANSWER)
    told = await told_by(model)
    assert (told.state, told.reason, len(model.sent())) == (RequestState.FAILED, "tool_arguments", 1)
    signal = {"id": "s", "name": "done", "arguments": '{"why": '}
    model = scripted({"tool_calls": [signal, *CALL_ADD["tool_calls"]]}, ANSWER)
    model.record.unlink()
    told = await told_by(model)
    assert (told.state, told.signals[0].raw) == (RequestState.COMPLETED, '{"why": ')
    assert '{\\"why\\"' not in json.dumps(model.sent()[1])


async def test_exit_tools_are_signals_and_change_nothing(scripted: Script) -> None:
    """They are recorded, and never run. Alone they neither end nor start anything, and beside calls they stop none."""
    signal = {"id": "s", "name": "done", "arguments": '{"why": "enough"}'}
    alone = await told_by(scripted({"content": "Farewell.", "tool_calls": [signal]}, ANSWER))
    assert (alone.state, alone.text, alone.tool_calls) == (RequestState.COMPLETED, "Farewell.", ())
    assert [(each.name, each.arguments) for each in alone.signals] == [("done", {"why": "enough"})]
    both = await told_by(scripted({"tool_calls": [signal, *CALL_ADD["tool_calls"]]}, ANSWER))
    assert (both.text, len(both.tool_calls), len(both.signals)) == ("It is five.", 1, 1)


async def test_the_fallback_reads_json_if_it_is_on(scripted: Script) -> None:
    """A model whose template knows no tools answers with the object that the BIOS describes."""
    text = '{"tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}'
    model = scripted({"content": text}, ANSWER)
    told = await told_by(model)
    assert (told.text, told.tool_calls[0].result) == ("It is five.", 5)
    assert model.sent()[1][-2:] == [
        {"role": "assistant", "content": text},
        {"role": "user", "content": '{"tool_results": [{"name": "add", "result": 5}]}'},
    ]
    assert '{"tool_calls": [{"name": "NAME"' in model.bios()[0]
    off = await told_by(scripted({"content": text}, ANSWER, fallback=False))
    assert (off.text, off.tool_calls) == (text, ())


async def test_markup_is_read_for_agents_that_use_it(scripted: Script) -> None:
    """Specification, "Fallback calls"."""
    model = scripted({"content": 'So: <tool_request name="add">{"a": 2, "b": 3}</tool_request>'}, ANSWER)
    async with working(model.spec) as worker:
        request_id = await worker.submit("a job", "", "Go.", markup=True)
        assert isinstance(request_id, int)
        told = await worker.get_result(request_id)
    assert isinstance(told, RequestResult)
    assert (told.text, told.tool_calls[0].result, told.tool_calls[0].said) == ("It is five.", 5, "So:")
    assert model.sent()[1][-1] == {"role": "user", "content": "<observation>5</observation>"}


async def test_a_request_that_waits_for_its_tool_is_not_silent(scripted: Script) -> None:
    """The engine has nothing to do meanwhile: its verdict is tool_wait, and a cancel reaches the tool."""
    model = scripted({"content": "Wait.", "tool_calls": [{"name": "wait", "arguments": "{}"}]}, ANSWER)
    async with working(model.spec) as worker:
        request_id = await submit(worker)
        await wait_until(lambda: worker.snapshot().verdict is Verdict.TOOL_WAIT, "the tool runs")
        await worker.cancel(request_id)
        told = await worker.get_result(request_id)
    assert isinstance(told, RequestResult)
    assert (told.state, told.text, told.tool_calls[0].reason) == (RequestState.CANCELLED, "Wait.", "cancelled")


# MCP


@asynccontextmanager
async def connected(server: McpServer) -> AsyncIterator[McpTools]:
    tools = McpTools(server, dict(os.environ))
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tools.run_connection)
            yield tools
            tasks.cancel_scope.cancel()


def stdio() -> McpServer:
    return McpServer(name="tests", command=(sys.executable, str(SERVER), "stdio"))


def use(name: str, **arguments: object) -> ToolUse:
    return ToolUse(call_id="c", name=name, arguments=arguments, job_name="a job")


async def test_a_model_that_repeats_itself_in_the_arguments_of_a_call_is_stopped(
    tmp_path: Path, scripted_spec: SpecFactory
) -> None:
    """Specification, "Repetition": wherever it does so."""
    arguments = json.dumps({"text": "the same line again\n" * 20})
    model = Scripted(tmp_path, scripted_spec, [{"tool_calls": [{"name": "add", "arguments": arguments}]}, ANSWER])
    async with working(model.spec) as worker:
        assert (await ask(worker)).reason == "repeated_line_loop"


async def test_an_mcp_server_is_started_asked_and_ended() -> None:
    """Over stdio: the program and its descendants end with us."""
    async with connected(stdio()) as tools:
        assert tools.knows("nobody") is None
        assert await tools.run(use("add", a=2, b=3)) == {"result": 5.0}
        assert [tools.knows(name) for name in ("add", "nobody")] == [True, False]
        told = await tools.run(use("fail"))
        assert isinstance(told, dict)
        assert "the cupboard is bare" in str(told["error"])
        left = await tools.run(use("leave"))
        assert isinstance(left, dict)
        pid = left["result"]
        assert is_alive(pid)
    await wait_until(lambda: not is_alive(pid), "what the server left is gone", limit_s=1.0)


@pytest.mark.system
async def test_an_mcp_server_that_dies_fails_its_call_and_is_started_again() -> None:
    """The effect of the call is unknown, so it is not repeated."""
    async with connected(stdio()) as tools:
        with pytest.raises(ToolRunFailed):
            await tools.run(use("end"))
        assert await tools.run(use("add", a=1, b=1)) == {"result": 2.0}


async def test_an_idle_mcp_server_that_answers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It supports no ping, as servers of 2026-07-28 do not, but its error is an answer."""
    monkeypatch.setattr(mcp, "PING_AFTER_S", 0.0)
    async with connected(stdio()) as tools:
        pids = [await tools.run(use("own_pid")) for _ in range(3)]
        assert pids == [pids[0]] * 3
        assert (tools.state.name, tools.state.tools, tools.state.trouble) == ("tests", 7, None)


@pytest.mark.system
async def test_an_mcp_server_with_a_new_tool_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers get the current tools; the server is not asked while a listing is valid."""
    monkeypatch.setattr(mcp, "LISTING_S", 2 * LIMIT_S)
    async with connected(stdio()) as tools:
        await tools.run(use("learn", tool="later"))
        await tools.list_again()
        assert tools.knows("later") is False
    monkeypatch.setattr(mcp, "LISTING_S", 0.0)
    async with connected(stdio()) as tools:
        await tools.run(use("learn", tool="later"))
        assert tools.knows("later") is False
        await tools.list_again()
        assert tools.knows("later") is True
        assert tools.state.tools == 8
        assert isinstance(await tools.run(use("later")), dict)


@pytest.mark.system
async def test_an_mcp_server_that_does_not_list_in_time_keeps_its_last_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is busy: it is left alone for a while, and not ended."""
    monkeypatch.setattr(mcp, "LISTING_S", 0.0)
    monkeypatch.setattr(mcp, "LIST_LIMIT_S", 0.1)
    async with connected(stdio()) as tools:
        pid = await tools.run(use("own_pid"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tools.run, use("wait"))
            await wait_until(lambda: tools.calls == 1, "it is at work")
            os.kill(pid["result"], signal.SIGSTOP)  # type: ignore[index]
            await tools.list_again()
            assert tools.state == McpState(name="tests", tools=7, trouble=None)
            monkeypatch.setattr(mcp, "LIST_LIMIT_S", 3 * LIMIT_S)
            with anyio.fail_after(LIMIT_S):
                await tools.list_again()  # no question: there is no user to answer it
            assert mcp.SPARED_S > 20
            os.kill(pid["result"], signal.SIGCONT)  # type: ignore[index]
            tasks.cancel_scope.cancel()


async def test_an_mcp_server_that_died_idle_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is found before the call, and the call waits for the next process."""
    monkeypatch.setattr(mcp, "PING_AFTER_S", 0.0)
    async with connected(stdio()) as tools:
        assert await tools.run(use("add", a=1, b=1)) == {"result": 2.0}
        pid = await tools.run(use("own_pid"))
        assert isinstance(pid, dict)
        os.kill(pid["result"], signal.SIGKILL)
        await wait_until(lambda: not is_alive(pid["result"]), "the server is gone")
        assert await tools.run(use("add", a=2, b=2)) == {"result": 4.0}


@pytest.mark.system
@pytest.mark.parametrize("round_number", range(3))
async def test_an_mcp_server_that_died_idle_costs_none_of_several_calls(
    monkeypatch: pytest.MonkeyPatch, round_number: int
) -> None:
    """Two of three calls in a message once failed each time; later calls now wait for the first one's ping."""
    monkeypatch.setattr(mcp, "PING_AFTER_S", 0.0)
    async with connected(stdio()) as tools:
        pid = await tools.run(use("own_pid"))
        assert isinstance(pid, dict)
        os.kill(pid["result"], signal.SIGKILL)
        await wait_until(lambda: not is_alive(pid["result"]), "the server is gone")
        results: list[object] = []

        async def call(number: int) -> None:
            results.append(await tools.run(use("add", a=number, b=round_number)))

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(call, number)
        assert sorted(map(str, results)) == [f"{{'result': {float(number + round_number)}}}" for number in range(3)]


async def test_a_missing_mcp_server_does_not_prevent_a_start() -> None:
    """A wrong command is reported at the call, by name."""
    async with connected(McpServer(name="wrong", command=("/nowhere/server",))) as tools:
        with pytest.raises(ToolRunFailed, match="MCP server wrong is not connected"):
            await tools.run(use("add"))


async def test_a_remote_mcp_server_is_asked_over_http(free_ports: Callable[[int], int]) -> None:
    """Streamable HTTP, to a server that others run."""
    port = free_ports(1)
    with _serving(port) as pid:
        await wait_until(lambda: _listens(pid, port), "the server listens")
        async with connected(McpServer(name="far", url=f"http://127.0.0.1:{port}/mcp")) as tools:
            assert await tools.run(use("add", a=2, b=3)) == {"result": 5.0}


@contextmanager
def _serving(port: int) -> Iterator[int]:
    with running_program([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL) as process:
        yield process.pid


def _listens(pid: int, port: int) -> bool:
    return any(each.laddr.port == port for each in psutil.Process(pid).net_connections() if each.status == "LISTEN")
