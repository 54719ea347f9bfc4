"""A Python tool that returns far more than the bound: the event loop neither keeps nor frees it."""

import threading

from transport.request import ToolCall
from workers.outcome import FailureReason, RequestFailed
from workers.tools.calls import MessageTools, ToolLimits
from workers.tools.definition import ToolDefinition
from workers.tools.runner import PythonTools


class _Rows(list[int]):
    """A result that records which thread freed it: to free millions of objects takes a second."""

    freed_by: list[threading.Thread] = []  # noqa: RUF012 - the one list, of a class for one test

    def __del__(self) -> None:
        self.freed_by.append(threading.current_thread())


def _returned() -> object:
    return _Rows(range(200_000))


async def test_an_oversized_result_never_reaches_the_event_loop() -> None:
    """It is refused, and freed, in the thread that made it; the loop goes on with other requests."""
    _Rows.freed_by.clear()
    runner = PythonTools({"dump": _returned})
    desk = MessageTools({"dump": ToolDefinition.parse({"function": {"name": "dump"}})}, runner, ToolLimits(), "a job")
    told = await desk.run([ToolCall(id="x", name="dump", arguments="{}")], 0, "", [])
    assert isinstance(told, RequestFailed)
    assert told.reason is FailureReason.TOOL_RESULT
    assert _Rows.freed_by, "it is freed before anybody hears of its call"
    assert threading.main_thread() not in _Rows.freed_by
