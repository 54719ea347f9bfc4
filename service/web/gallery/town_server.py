"""An MCP server with one tool, for tools.yaml, over standard input and output; it needs only Python.

Source: modelcontextprotocol.io, "Specification".
"""

import json
import sys
from typing import Any

TOWNS = {"Zurich": 436_330, "Chur": 38_130}
TOOL = {
    "name": "inhabitants",
    "description": "How many people live in a town.",
    "inputSchema": {"type": "object", "properties": {"town": {"enum": list(TOWNS)}}, "required": ["town"]},
}


def answer(method: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if method == "initialize":
        facts = {"serverInfo": {"name": "towns", "version": "1"}, "capabilities": {"tools": {}}}
        return {"result": {"protocolVersion": asked["protocolVersion"], **facts}}
    if method == "tools/list":
        return {"result": {"tools": [TOOL]}}
    if method == "tools/call" and asked["arguments"].get("town") in TOWNS:
        text = json.dumps({"inhabitants": TOWNS[asked["arguments"]["town"]]})
        return {"result": {"content": [{"type": "text", "text": text}]}}
    if method == "ping":
        return {"result": {}}
    return {"error": {"code": -32601, "message": f"{method}: nothing of that"}}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:  # a notification has no id and gets no answer
        reply = answer(request["method"], request.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)
