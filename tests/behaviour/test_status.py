"""Every wait shows its reason: GET /v1/status and ``roundhouse top`` (specification, "Status snapshot")."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.processes import running_program
from tests.harness.service import ROUNDHOUSE, Document, Service, debate, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    models = {
        "m": scripted_model(free_ports(1), tokens=100_000, interval=0.01),
        "broken": {**scripted_model(free_ports(1), exit_at_once=3), "restart": {"initial_s": 600}},
    }
    folder = tmp_path_factory.mktemp("status")
    with serving(folder, free_ports(1), models, {"drain_s": 0.2}, ready=False) as running:
        wait_for(lambda: running.get("/v1/workers/m-0")["state"] == "ready", "the sound model is ready")
        wait_for(lambda: running.get("/v1/workers/broken-0")["state"] == "backoff", "the other one waits")
        running.post_job(debate(conversations=2))
        running.post_job(debate(model="broken"))
        wait_for(lambda: running.get("/v1/status")["pools"]["in_flight"] == 2, "turns run")
        yield running


def test_the_status_names_what_each_turn_waits_for(service: Service) -> None:
    """Agents, slots of a model, or a worker's restart."""
    now = service.get("/v1/status")
    assert (now["jobs"], now["conversations"]) == (2, {"total": 3, "finished": 0, "persisted": 0})
    assert now["pools"] == {"pending": 3, "ready": 4, "in_flight": 2, "capacity": 2}
    assert {head["waits_for"] for head in now["heads"]["pending"]} == {"a, b to speak in round 0"}
    waits = {head["waits_for"] for head in now["heads"]["ready"]}
    assert "a slot of m: 2 of 2 in use" in waits
    (other,) = (told for told in waits if "broken" in told)
    assert "a worker of broken: broken-0 is backoff: the engine exited with status 3; its last line: " in other
    assert {worker["id"] for worker in now["workers"]} == {"m-0", "broken-0"}


def test_top_prints_lines_into_a_pipe(service: Service) -> None:
    """Plain lines without a terminal; JSON for machines."""
    plain = _top(service, "--once").stdout
    assert "0/3 conversations (0 persisted) | in flight 2/2 | ready 4 | pending 3" in plain
    assert "waits for a slot of m: 2 of 2 in use" in plain
    assert "\x1b" not in plain
    document: Document = json.loads(_top(service, "--once", "--json").stdout)
    assert document["pools"]["in_flight"] == 2


def test_top_restores_the_cursor(service: Service) -> None:
    """On a terminal it is a live table; any end of it leaves the terminal as it was."""
    with _top_on_terminal(service, "xterm-256color") as (process, read, _):
        wait_for(lambda: b"READY" in read() and b"pending 3" in read(), "the table is drawn")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: read() is not None and process.poll() is not None, "it ends")
        seen = read()
    assert HIDE_CURSOR in seen
    assert seen.rindex(SHOW_CURSOR) > seen.rindex(HIDE_CURSOR)


def test_keys_show_last_words_and_leave(service: Service) -> None:
    """The terminal reads keys without Return meanwhile, and is restored afterwards."""
    with _top_on_terminal(service, "xterm-256color") as (process, read, ours):
        before = termios.tcgetattr(ours)[3] | termios.ICANON | termios.ECHO
        wait_for(lambda: b"so far" in read(), "the table tells how far turns are")
        assert not termios.tcgetattr(ours)[3] & termios.ICANON
        os.write(ours, b"w")
        wait_for(lambda: b"last words" in read(), "it tells what they say")
        os.write(ours, b"q")
        wait_for(lambda: read() is not None and process.poll() is not None, "it ends")
        assert process.returncode == 0
        assert termios.tcgetattr(ours)[3] == before
        seen = read()
    assert seen.rindex(SHOW_CURSOR) > seen.rindex(HIDE_CURSOR)
    assert "░".encode() in seen


def test_top_prints_lines_where_nothing_can_be_drawn(service: Service) -> None:
    """A simple terminal, as editors have, cannot show a live table."""
    with _top_on_terminal(service, "dumb") as (_, read, _):
        wait_for(lambda: read().count(b"0/3 conversations") > 1, "lines are printed")
        assert b"\x1b" not in read()


@contextlib.contextmanager
def _top_on_terminal(
    service: Service, kind: str
) -> Iterator[tuple["subprocess.Popen[bytes]", Callable[[], bytearray], int]]:
    """Run ``top`` on a terminal for a block.

    Give the process, a function that returns its output, and the end for typing.
    """
    ours, theirs = pty.openpty()
    command = [ROUNDHOUSE, "top", "--url", service.url, "--interval", "0.1"]
    environment = {**os.environ, "TERM": kind, "COLUMNS": "150", "LINES": "40"}
    with running_program(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        os.set_blocking(ours, False)
        seen = bytearray()

        def read() -> bytearray:
            with contextlib.suppress(OSError):  # nothing yet, or the terminal's other end is gone
                seen.extend(os.read(ours, 1 << 20))
            return seen

        yield process, read, ours
    os.close(ours)


def test_reused_tokens_are_counted(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Engines' reports verify affinity: this engine reuses none of 10 tokens a turn."""
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}) as service:
        service.wait_ended(service.post_job(debate(rounds=3)))
        assert service.get("/v1/status")["prefix_tokens"] == {"reusable": 3 * 2 * 10, "reused": 0}


def test_a_turn_that_waits_in_vain_is_an_error(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Specification, "Lost models": if no engine will start, the turn gives the reason and ends."""
    restart = {"initial_s": 0.05, "failures": 1, "retry_s": None}
    models = {
        "m": scripted_model(free_ports(1)),
        "gone": {**scripted_model(free_ports(1), exit_at_once=3), "restart": restart},
    }
    with serving(tmp_path, free_ports(1), models, ready=False) as service:
        wait_for(lambda: service.get("/v1/workers/gone-0")["state"] == "failed", "it gives up")
        job = service.post_job(debate(model="gone"))
        assert service.wait_ended(job)["state"] == "failed"
        (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
        assert talk["reason"] == "engine_unreachable"
        (failed,) = (turn for turn in talk["turns"] if turn["state"] == "failed")
        assert "gone-0 is failed: gave up after 1 failure in" in failed["detail"]


def _top(service: Service, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [ROUNDHOUSE, "top", "--url", service.url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
