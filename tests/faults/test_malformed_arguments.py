"""Malformed arguments of the commonest kind of tool, with one text: they end the request, and never run the tool.

Source: specification, "Tool failures" and "Fallback calls".
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import SpecFactory
from tests.harness.working import result, working
from workers import PythonTools, RequestResult, RequestState, ToolLimits
from workers.outcome import FailureReason
from workers.tools.calls import WrongArguments

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
ANSWER = {"content": "Done."}


def structured(arguments: str) -> dict[str, object]:
    return {"tool_calls": [{"id": "x", "name": "search", "arguments": arguments}]}


def written(arguments: str) -> dict[str, object]:
    return {"content": f'<tool_request name="search">{arguments}</tool_request>'}


async def told_by(
    folder: Path, make: SpecFactory, message: dict[str, object], arguments: WrongArguments = WrongArguments.FAIL
) -> tuple[RequestResult, list[str]]:
    """Return how a request ends if its model says this first, and the calls that ran the tool."""
    (folder / "script").write_text(json.dumps([message, ANSWER]))
    ran: list[str] = []

    def search(q: str) -> str:
        ran.append(q)
        return "found"

    limits = ToolLimits(arguments=arguments)
    spec = make(script=str(folder / "script"))
    spec = replace(spec, tools=[SEARCH], tool_runner=PythonTools({"search": search}), tool_limits=limits)
    async with working(spec) as worker:
        request_id = await worker.submit("a job", "You are a test.", "Go.", markup="content" in message)
        assert isinstance(request_id, int)
        return await result(worker, request_id), ran


@pytest.mark.parametrize(
    "arguments", ['{"q": "rm -rf /srv/ab', "[1]", '["a"]', "Bodyguard", '"Bodyguard"', "7", "null"]
)
async def test_a_structured_call_whose_arguments_are_no_object_never_runs_a_tool(
    tmp_path: Path, scripted_spec: SpecFactory, arguments: str
) -> None:
    """For example cut off by max_tokens: half a path is another path."""
    told, ran = await told_by(tmp_path, scripted_spec, structured(arguments))
    assert (told.state, told.reason, ran) == (RequestState.FAILED, FailureReason.TOOL_ARGUMENTS, [])
    assert arguments in str(told.detail)


@pytest.mark.parametrize("arguments", ['{"q": "rm -rf /srv/ab', "[1]", ' {"q" ', "[Bodyguard]"])
async def test_text_that_begins_like_json_is_no_bare_text(
    tmp_path: Path, scripted_spec: SpecFactory, arguments: str
) -> None:
    """The model meant arguments, and did not finish them."""
    told, ran = await told_by(tmp_path, scripted_spec, written(arguments))
    assert (told.state, told.reason, ran) == (RequestState.FAILED, FailureReason.TOOL_ARGUMENTS, [])


@pytest.mark.parametrize(("arguments", "given"), [("Bodyguard", "Bodyguard"), ('{"q": "a"}', "a"), (" 42 ", "42")])
async def test_bare_text_in_markup_is_the_only_argument(
    tmp_path: Path, scripted_spec: SpecFactory, arguments: str, given: str
) -> None:
    """Models that have no structured calls write it so."""
    told, ran = await told_by(tmp_path, scripted_spec, written(arguments))
    assert (told.state, told.text, ran) == (RequestState.COMPLETED, "Done.", [given])


async def test_a_model_with_arguments_tell_gets_these_faults_too(tmp_path: Path, scripted_spec: SpecFactory) -> None:
    """It may call again within its budget; the tool runs for none of them."""
    told, ran = await told_by(tmp_path, scripted_spec, structured('{"q": "a'), WrongArguments.TELL)
    assert (told.state, ran) == (RequestState.COMPLETED, [])
    (record,) = told.tool_calls
    assert record.reason is FailureReason.TOOL_ARGUMENTS


@pytest.mark.parametrize(
    "message",
    [
        {**structured('{"q": "rm -rf /srv/ab"}'), "finish": "length"},
        {**structured(""), "finish": "length"},
        {**written('{"q": "rm -rf /srv/ab"}'), "finish": "length"},
        {"content": '<tool_request name="search">{"q": "x"}', "finish": "length"},
        {"content": '<tool_request name="search">{"q": "x"}', "finish": "content_filter"},
        {**structured('{"q": "rm -rf /srv/ab"}'), "finish": "content_filter"},
        {"content": '<tool_request name="search">{"q": "x"}', "finish": "who_knows"},
    ],
)
async def test_a_call_that_was_cut_off_is_never_made(
    tmp_path: Path, scripted_spec: SpecFactory, message: dict[str, object]
) -> None:
    """However much of it arrived: some engines report half a call as complete."""
    told, ran = await told_by(tmp_path, scripted_spec, message)
    assert (told.state, told.reason, ran) == (RequestState.FAILED, FailureReason.TOOL_ARGUMENTS, [])
    assert "the call was cut off" in str(told.detail)
    told, ran = await told_by(tmp_path, scripted_spec, message, WrongArguments.TELL)
    assert (told.state, told.text, ran) == (RequestState.COMPLETED, "Done.", [])


async def test_a_model_may_get_the_error_of_an_unknown_tool(tmp_path: Path, scripted_spec: SpecFactory) -> None:
    """The error lists the tools it has."""
    message: dict[str, object] = {"tool_calls": [{"id": "x", "name": "functions.search", "arguments": '{"q": "a"}'}]}
    told, ran = await told_by(tmp_path, scripted_spec, message)
    assert (told.state, told.reason, ran) == (RequestState.FAILED, FailureReason.TOOL_UNKNOWN, [])
    told, ran = await told_by(tmp_path, scripted_spec, message, WrongArguments.TELL)
    assert (told.state, told.text, ran) == (RequestState.COMPLETED, "Done.", [])
    assert "it has search" in str(told.tool_calls[0].result)
