"""Real engines of others, frozen and busy, under our probe and their own (specification, "Engines of others")."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from service.cli.engine_probe import HANGS, WORKS, Reading, Target, examine, target_of
from tests.conftest import SHARED
from tests.engines.subjects import vllm_spec
from tests.engines.theirs import KEY, ForeignServer
from tests.harness.ports import find_ports
from tests.harness.waiting import wait_for
from workers import EngineKind, WorkerSpec, WorkerTimeouts

LIMIT_S = 6.0
FOUND_S = LIMIT_S + 5.0
START_S = 180.0
PARTS = ["llama-server", "Worker", "EngineCore", "api_server"]


class Probe:
    """Readings of one engine, as the watch takes them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.verdicts: list[str] = []
        self.last: Reading | None = None

    def look(self) -> str:
        self.last = examine(self.target, self.last, lambda _: None)
        self.verdicts.append(self.last.verdict)
        return self.last.verdict

    def find(self, verdict: str, limit_s: float) -> float:
        """Look until this verdict; return after how many seconds it came."""
        return wait_for(lambda: self.look() == verdict, f"it {verdict}", limit_s)


@pytest.fixture(scope="module")
def vllm(vllm_python: str, checkpoint: Path) -> Iterator[ForeignServer]:
    base = WorkerSpec(name="theirs", engine=EngineKind.VLLM, model="", port=find_ports(1), slots=4, context=2048)
    server = ForeignServer(vllm_spec(replace(base, timeouts=WorkerTimeouts()), vllm_python, checkpoint))
    server.start()
    assert server.process is not None
    tree = psutil.Process(server.process.pid)
    try:
        wait_for(server.answers, "vLLM is up", START_S)
        SHARED.update(each.pid for each in [*tree.children(recursive=True), tree])
        yield server
    finally:
        for process in [*tree.children(recursive=True), tree]:
            process.kill()
        server.process.wait()


@pytest.fixture
def llama(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[ForeignServer]:
    binary = request.config.getoption("--llama-server")
    if binary is None:
        pytest.skip("make test-engines builds the binary and names it")
    spec = WorkerSpec(
        name="theirs",
        engine=EngineKind.LLAMA_SERVER,
        command=[binary],
        model=str(tiny_model),
        port=find_ports(1),
        slots=1,
        context=32_768,
        args={"threads": 1, "cache_ram": 0, "no_warmup": True, "batch_size": 32_768, "ubatch_size": 4096},
        env={"LLAMA_API_KEY": KEY},
    )
    server = ForeignServer(spec)
    with server.running():
        wait_for(server.answers, "llama-server is up", START_S)
        yield server


def asking(url: str, words: int, tokens: int, headers: dict[str, str]) -> threading.Thread:
    """Ask in a thread; an engine that is killed answers nothing."""

    def ask() -> None:
        prompt = " ".join(str(number) for number in range(words))
        body = {"model": "theirs", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        try:
            httpx.post(f"{url}/v1/completions", json=body, timeout=60, headers=headers)
        except httpx.TransportError:
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def part_of(server: ForeignServer, name: str) -> psutil.Process:
    """The process of the server's tree whose command line has the name."""
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    return next(each for each in [*root.children(recursive=True), root] if name in " ".join(each.cmdline()))


@pytest.mark.system
@pytest.mark.parametrize("load", ["idle", "under load"])
@pytest.mark.parametrize("part", PARTS)
def test_a_frozen_engine_is_found_and_its_own_health_finds_nothing(
    request: pytest.FixtureRequest, part: str, load: str
) -> None:
    """Each part of an engine, stopped by SIGSTOP; it works again when it is woken."""
    server: ForeignServer = request.getfixturevalue("llama" if part == "llama-server" else "vllm")
    url, headers = server.spec.endpoint.base_url, {"Authorization": f"Bearer {KEY}"}
    probe = Probe(target_of(url, key=KEY, limit_s=LIMIT_S))
    probe.find(WORKS, FOUND_S)
    if load != "idle":
        asking(url, 4, 1_500, headers)
        probe.find(WORKS, FOUND_S)
    with frozen(part_of(server, part)):
        assert probe.find(HANGS, FOUND_S) <= FOUND_S
        assert probe.last is not None
        assert "is stopped" in probe.last.reason
        if part in {"Worker", "EngineCore"}:
            assert httpx.get(f"{url}/health", timeout=5).status_code == 200
    probe.find(WORKS, START_S)


@pytest.mark.system
def test_a_long_prompt_is_no_hang(llama: ForeignServer) -> None:
    """One batch of many seconds: no counter moves, no canary is answered, and the limit is much shorter."""
    url = llama.spec.endpoint.base_url
    probe = Probe(target_of(url, key=KEY, limit_s=1.0))
    probe.find(WORKS, FOUND_S)
    thread = asking(url, 5_400, 1, {"Authorization": f"Bearer {KEY}"})
    began_at, looks = time.monotonic(), len(probe.verdicts)
    while thread.is_alive():
        probe.look()
    assert time.monotonic() - began_at > 4.0
    assert len(probe.verdicts) - looks > 2
    assert HANGS not in probe.verdicts


@pytest.mark.system
def test_a_busy_vllm_is_no_hang(vllm: ForeignServer) -> None:
    """Its canaries wait behind others, and its steps count."""
    url = vllm.spec.endpoint.base_url
    probe = Probe(target_of(url, limit_s=1.0))
    threads = [asking(url, 20, 500, {}) for _ in range(24)]
    while any(thread.is_alive() for thread in threads):
        probe.look()
    assert HANGS not in probe.verdicts
    assert probe.find(WORKS, FOUND_S) <= FOUND_S
