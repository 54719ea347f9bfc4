"""Real MCP: the protocol's own conformance suite, and foreign servers, over stdio and HTTP.

Not offered, and so not tested: elicitation, sampling and roots (a turn has no user to ask), OAuth (a server's headers
are configured), and resources and prompts (agents call tools).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.harness.programs
from tests.harness.service import Document, scripted_model, serving
from tests.harness.waiting import wait_for
from tests.system.node import install, node, python, script

NEW, OLD = "2026-07-28", "2025-11-25"  # revisions of the protocol
SCENARIOS = [
    ("initialize", OLD),
    ("tools_call", OLD),
    ("tools_call", NEW),
    ("sse-retry", OLD),
    ("request-metadata", NEW),
    ("http-standard-headers", NEW),
    ("http-custom-headers", NEW),
    ("http-invalid-tool-headers", NEW),
    ("json-schema-ref-no-deref", OLD),
    ("json-schema-ref-no-deref", NEW),
    ("json-schema-2020-12-preservation", OLD),
    ("json-schema-2020-12-preservation", NEW),
]
CLIENT = Path(tests.harness.programs.__file__).with_name("mcp_client.py")
ROOT = CLIENT.parents[3]


@pytest.fixture(scope="module", autouse=True)
def _node() -> None:
    install()


@pytest.mark.parametrize(("scenario", "revision"), SCENARIOS)
def test_the_client_conforms(tmp_path: Path, scenario: str, revision: str) -> None:
    """Every scenario that the client supports; a check that fails or warns fails the suite."""
    program = tmp_path / "client"  # the suite cuts its command at blanks
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{CLIENT}' \"$@\"\n")
    program.chmod(0o755)
    suite = str(script("@modelcontextprotocol/conformance", "dist/index.js"))
    done = subprocess.run(
        [str(node()), suite, "client", "--command", str(program), "--scenario", scenario, "--spec-version", revision],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def servers(folder: Path) -> dict[str, tuple[Document, str, Document, str]]:
    """Return real servers: the command of each, one of its tools with arguments, and a part of the answer."""
    (folder / "note.txt").write_text("The cellar is dry.")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)  # noqa: S607 - wherever this machine has it
    of_npm = {
        name: [str(node()), str(script(f"@modelcontextprotocol/server-{name}", "dist/index.js"))]
        for name in ("filesystem", "everything")
    }
    files = {"command": [*of_npm["filesystem"], str(folder)]}
    everything = {"command": of_npm["everything"]}
    return {
        "time": (
            {"command": [str(python()), "-m", "mcp_server_time"]},
            "get_current_time",
            {"timezone": "Europe/Oslo"},
            "Europe/Oslo",
        ),
        "git": (
            {"command": [str(python()), "-m", "mcp_server_git", "--repository", str(folder)]},
            "git_status",
            {"repo_path": str(folder)},
            "note.txt",
        ),
        "filesystem": (files, "read_text_file", {"path": str(folder / "note.txt")}, "The cellar is dry."),
        "everything": (everything, "get-sum", {"a": 2, "b": 3}, "5"),
    }


@pytest.mark.parametrize("name", ["time", "git", "filesystem", "everything"])
def test_an_agent_calls_a_tool_that_only_its_server_describes(
    tmp_path: Path, free_ports: Callable[[int], int], name: str
) -> None:
    """``{mcp: NAME, only: [TOOL]}``: the schema is the server's, the call reaches it, the answer comes back."""
    folder = tmp_path / "data"
    folder.mkdir()
    server, tool, arguments, text = servers(folder)[name]
    script_file = tmp_path / "script"
    call = {"tool_calls": [{"id": "x", "name": tool, "arguments": json.dumps(arguments)}]}
    script_file.write_text(json.dumps([call, {"content": "Done."}]))
    model = {
        **scripted_model(free_ports(1), script=str(script_file), record=str(tmp_path / "record")),
        "tools": {"mcp": {name: server}},
    }
    agent = {"id": "a", "model": "m", "tools": [{"mcp": name, "only": [tool]}]}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        wait_for(lambda: service.get("/v1/models/m/tools")["tools"], "the server has told its tools", 60)
        job = service.post_job({"agents": [agent], "conversations": [{"prompt": "Go."}]})
        assert service.wait_ended(job, 60)["state"] == "completed"
        (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    (record,) = talk["turns"][0]["tool_calls"]
    assert (record["name"], record["reason"]) == (tool, None)
    assert text in json.dumps(record["result"])
    sent = json.loads((tmp_path / "record").read_text().splitlines()[0])["request"]
    (shown,) = sent["tools"]
    assert shown["function"]["name"] == tool
    assert set(arguments) <= set(shown["function"]["parameters"]["properties"])
    assert "mcp" not in shown
    assert f"- {tool}(" in sent["messages"][0]["content"]
