"""A service whose engine runs the small model, and such an engine by itself."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import httpx

from bench.parts.services import START_S, serving, wait_ended
from tests.harness.service import Service
from tests.harness.waiting import wait_for
from workers.engine.embedded import server as embedded
from workers.models.small_model import ensure_small_model

SLOTS: Final = 4
LIMIT_S: Final = 600.0  # time that an answer of the small model may take
PAUSE_S: Final = 0.2  # pause between two reads of a job's state
Document = dict[str, Any]


class SmallModel:
    """The service, and the engine that is asked directly."""

    def __init__(self, service: Service, port: int) -> None:
        self._service = service
        self.engine = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, trust_env=False)

    def run(self, job: Document) -> Document:
        """Return the result of a job."""
        name = self._service.post_job(job)
        assert wait_ended(self._service, name, PAUSE_S)["state"] != "cancelled"
        result: Document = self._service.get(f"/v1/jobs/{name}/result")
        return result

    def prompt(self, job: str, conversation: str, turn: Document) -> list[Document]:
        """Return the messages of a turn's first attempt."""
        path = f"/v1/jobs/{job}/conversations/{conversation}/turns/{turn['agent']}/{turn['round']}/prompt"
        messages: list[Document] = self._service.get(path)["attempts"][0]["messages"]
        return messages

    def tokens(self, text: str) -> int:
        """Count a text's tokens."""
        return len(self.engine.post("/tokenize", json={"content": text}).json()["tokens"]) if text else 0

    def ask(self, body: Document) -> tuple[str, str, Document]:
        """Ask the engine itself; return the answer, why it ended, and its usage."""
        answer = self.engine.post("/v1/chat/completions", json=body).json()
        choice = answer["choices"][0]
        return choice["message"]["content"] or "", choice["finish_reason"], answer["usage"]

    def is_there(self) -> bool:
        """Return whether the engine answers."""
        try:
            return self.engine.get("/v1/models").is_success
        except httpx.TransportError:
            return False


@contextmanager
def small_model(port: int, bios: Mapping[str, object]) -> Iterator[SmallModel]:
    """Run both for a block, on three ports from ``port`` on."""
    model = {
        "engine": "embedded", "model": "roundhouse:small", "port": port + 1, "slots": SLOTS, "context": 4096,
        "bios": dict(bios),
    }  # fmt: skip
    flags = ["--model", str(ensure_small_model()), "--host", "127.0.0.1", "--port", str(port + 2)]
    argv = [sys.executable, "-P", embedded.__file__, "--parallel", "1", "--ctx-size", "4096", *flags]
    with (
        serving(port, {"small": model}) as service,
        subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as engine,
    ):
        try:
            both = SmallModel(service, port + 2)
            wait_for(both.is_there, "the engine is there", START_S)
            yield both
        finally:
            engine.terminate()
            engine.wait(30)
