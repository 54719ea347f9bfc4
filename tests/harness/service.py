"""The real command in a real process, over real HTTP, on scripted or embedded engines."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.conftest import ENGINE_PROGRAM
from tests.harness.waiting import LIMIT_S, is_alive, wait_for

COMMAND_S = 400.0  # a few hundred tokens of the small model on a machine that is busy with other tests
ROUNDHOUSE = str(Path(sys.executable).parent / "roundhouse")
Document = dict[str, Any]


def scripted_model(port: int, *, replicas: int = 1, slots: int = 2, **flags: object) -> Document:
    """Return a model of the configuration that is served by the scripted engine."""
    return {
        "engine": "llama-server",
        "command": [sys.executable, "-I", "-S", str(ENGINE_PROGRAM)],
        "args": flags,
        "port": port,
        "replicas": replicas,
        "slots": slots,
        "restart": {"initial_s": 0.1, "max_s": 0.2, "failures": 50},
    }


class Service:
    """``roundhouse serve``, started again and again on the same state."""

    def __init__(
        self,
        folder: Path,
        port: int,
        models: Document,
        server: Document | None = None,
        *,
        key: str | None = None,
        **sections: Document,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.config = folder / "roundhouse.yaml"
        settings = {"port": port, "state_dir": str(folder / "state"), "drain_s": 5, **(server or {})}
        self.config.write_text(yaml.safe_dump({"server": settings, "models": models, **sections}))
        self.url = f"http://127.0.0.1:{port}"
        keys = settings.get("api_keys")
        key = keys[0] if isinstance(keys, list) else key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S, trust_env=False, headers=headers)
        self.environment: dict[str, str] = {}  # over our own
        self.command: Sequence[str] = (ROUNDHOUSE,)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True, limit_s: float = LIMIT_S) -> None:
        """Start the service; return when it serves, or when every model is ready."""
        environment = {**os.environ, **self.environment}
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, "serve", "--config", str(self.config)], stdout=log, stderr=log, env=environment
            )
        path = "/readyz" if ready else "/healthz"
        wait_for(lambda: self._answers(path), "the service is there; see its serve.log", limit_s)

    def stop(self) -> int:
        """End the service as an operator does; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        """Kill the service with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(LIMIT_S)

    def log(self) -> str:
        """Return its log."""
        log = self.folder / "serve.log"
        return log.read_text() if log.exists() else ""

    def tree(self) -> list[int]:
        """Return the processes below it."""
        assert self.process is not None
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON of the service
        """Return the JSON of an answer that must be a success."""
        answer = self.http.get(path)
        assert answer.is_success, answer.text
        return answer.json()

    def post_job(self, job: Document, **headers: str) -> str:
        """Post a job that must be accepted; return its id."""
        answer = self.http.post("/v1/jobs", json=job, headers=headers)
        assert answer.status_code in (200, 202), answer.text
        return str(answer.json()["id"])

    def wait_ended(self, job_id: str, limit_s: float = LIMIT_S) -> Document:
        """Return a job once it has ended."""
        seen: list[Document] = [{}]

        def has_ended() -> bool:
            seen[0] = self.get(f"/v1/jobs/{job_id}")
            return seen[0]["state"] not in ("queued", "running")

        wait_for(has_ended, f"job {job_id} has ended", limit_s)
        return seen[0]

    def _answers(self, path: str) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            return self.http.get(path).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def serving(
    folder: Path,
    port: int,
    models: Document,
    server: Document | None = None,
    *,
    ready: bool = True,
    key: str | None = None,
    limit_s: float = LIMIT_S,
    **sections: Document,
) -> Iterator[Service]:
    """Run a service for a block, ready within ``limit_s``, and leave no process.

    ``key`` is used for requests, by default the first of ``api_keys``.
    """
    service = Service(folder, port, models, server, key=key, **sections)
    try:
        service.start(ready=ready, limit_s=limit_s)
        yield service
    finally:
        try:
            if service.process is not None and service.process.poll() is None:
                tree = service.tree()
                assert service.stop() == 0, service.log()
                wait_for(lambda: not any(map(is_alive, tree)), "nothing of the service is left")
        finally:
            service.http.close()


def run_command(
    *arguments: str, folder: Path | None = None, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; ``stdin`` is piped to it."""
    return subprocess.run(
        [ROUNDHOUSE, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
    )


def debate(*, conversations: int = 1, rounds: int = 1, model: str = "m", **fields: object) -> Document:
    """Return a job of two participants and a moderator that waits for both."""
    agents = [
        {"id": "a", "model": model, "system": "You are MARK-a."},
        {"id": "b", "model": model, "system": "You are MARK-b."},
        {"id": "m", "model": model, "system": "You are MARK-m.", "speak_after_within_round": ["a", "b"]},
    ]
    talks = [{"id": f"q{number}", "prompt": f"TOPIC-{number}."} for number in range(conversations)]
    words = {"prompts": {"cue": "(Round $round of $rounds)"}}  # so that requests can be told apart
    return {"name": "debate", "rounds": rounds, "agents": agents, "conversations": talks, **words, **fields}


def check_debate(transcript: Document, rounds: int) -> None:
    """Check that every turn is there once, completed, and every moderator's after its participants'."""
    order = [(turn["round"], turn["agent"]) for turn in transcript["turns"]]
    assert sorted(order) == [(number, agent) for number in range(rounds) for agent in "abm"]
    assert {turn["state"] for turn in transcript["turns"]} == {"completed"}
    assert transcript["state"] == "completed"
    for number in range(rounds):
        places = [order.index((number, agent)) for agent in "abm"]
        assert places[2] > max(places[:2])
        assert number == 0 or min(places) > order.index((number - 1, "m"))


def recorded(file: Path) -> list[Document]:
    """Return a recording engine's requests; none without a file."""
    if not file.exists():
        return []
    return [json.loads(line)["request"] for line in file.read_text().splitlines()]


def asked_for(request: Document) -> tuple[str, int, str]:
    """Return which turn of a :func:`debate` a recorded request was: conversation, round (from 0) and agent."""
    told = "\n".join(message["content"] for message in request["messages"])
    topic, agent = re.findall(r"TOPIC-(\d+)\.", told), re.findall(r"MARK-(\w)\.", told)
    number = re.findall(r"\(Round (\d+) of", told)
    return f"q{topic[0]}", int(number[-1]) - 1, agent[0]
