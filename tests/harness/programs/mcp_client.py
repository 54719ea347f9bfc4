"""Our MCP client under the conformance suite: runs a scenario with the classes that services use.

``mcp_client.py URL``; the suite names the scenario in ``MCP_CONFORMANCE_SCENARIO``, with further data in
``MCP_CONFORMANCE_CONTEXT``. Exit status: 0 done, 1 a call failed or there was no connection.
"""

import json
import os
import sys
from typing import Any

import anyio

from workers.tools.mcp import McpServer, McpTools
from workers.tools.runner import ToolUse

LIMIT_S = 15.0
SCENARIO = os.environ["MCP_CONFORMANCE_SCENARIO"]
CONTEXT: dict[str, Any] = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
Call = tuple[str, dict[str, Any]]
CALLS: dict[str, list[Call]] = {
    "tools_call": [("add_numbers", {"a": 5, "b": 3})],
    "sse-retry": [("test_reconnection", {})],
    "request-metadata": [("any_tool", {})],
    "http-standard-headers": [("test_headers", {}), ("my-hyphenated-tool", {})],
    "http-custom-headers": [(call["name"], call["arguments"]) for call in CONTEXT.get("toolCalls", ())],
    "http-invalid-tool-headers": [("valid_tool", {"region": "us-west1"})],
}


def calls(tools: McpTools) -> list[Call]:
    """Return the calls of the scenario."""
    if SCENARIO != "json-schema-2020-12-preservation":
        return CALLS.get(SCENARIO, [])
    schemas = {tool.name: tool.parameters for tool in tools.listed or ()}
    return [("json_schema_echo", {"schema": schemas["json_schema_2020_12_tool"]})]


async def main(url: str) -> int:
    """Connect, call, and return the exit status."""
    tools = McpTools(McpServer(name="conformance", url=url), dict(os.environ))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tools.run_connection)
        with anyio.fail_after(LIMIT_S):
            await tools.wait_settled()
            if tools.listed is None:
                print(tools.state.trouble, file=sys.stderr)
                return 1
            for name, arguments in calls(tools):
                use = ToolUse(call_id=f"call-{name}", name=name, arguments=arguments, job_name=SCENARIO, key="key-1")
                print(name, json.dumps(await tools.run(use)), file=sys.stderr)
        tasks.cancel_scope.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(anyio.run(main, sys.argv[-1]))
