"""One suite for all engines: the wheel's server, the binary, vLLM on the CPU, and attached servers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.checkpoint import write_checkpoint
from tests.engines.subjects import Subject, attached_subject, llama_subject, vllm_subject
from tests.engines.theirs import KEY, ForeignServer, KeptServer, LiteLlmProxy, LlamaCppPython, TransformersServe
from tests.harness.ports import find_ports
from tests.harness.waiting import LIMIT_S
from tests.harness.working import QUICK
from workers import BiosPolicy, EngineKind, WorkerSpec, WorkerTimeouts
from workers.policy.repetition import RepetitionLimits

TIGHT = WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S, prefill_stall_s=2.0, decode_stall_s=2.0, cancel_s=5.0)
SLOTS = 4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", seed=0)


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> str:
    python: str | None = request.config.getoption("--vllm-python")
    if python is None:
        pytest.skip("make test-engines sets up vLLM and names it")
    return python


@pytest.fixture(autouse=True)
def leave_the_long(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("long") and request.config.getoption("--llama-server") is None:
        pytest.skip("make test-engines has the time")


@pytest.fixture(scope="session")
def kept_servers() -> Iterator[dict[str, KeptServer]]:
    """Hold the servers that tests share, by name."""
    servers: dict[str, KeptServer] = {}
    yield servers
    for server in servers.values():
        if server.process is not None:
            server.kill()


def foreign_server(request: pytest.FixtureRequest, name: str) -> ForeignServer:
    """Return a foreign server by its name; shared ones run already, others are not started."""
    if request.config.getoption("--llama-server") is None:
        pytest.skip("make test-engines attaches to real servers; tests/faults has it to scripted ones")
    gguf = WorkerSpec(
        name="theirs",
        engine=EngineKind.EMBEDDED,
        model=str(request.getfixturevalue("tiny_model")),
        port=find_ports(1),
        slots=SLOTS,
        context=4096,
        args={"threads": 1},
        env={"LLAMA_API_KEY": KEY},
    )
    kept: dict[str, KeptServer] = request.getfixturevalue("kept_servers")
    if name not in ("transformers", "litellm"):
        python = _python(request, name) if name == "llama-cpp-python" else None
        return LlamaCppPython(gguf, python=python) if python else ForeignServer(gguf)
    if name not in kept:
        folder = request.getfixturevalue("tmp_path_factory").mktemp(name)
        if name == "transformers":
            spec = replace(gguf, model=str(request.getfixturevalue("checkpoint")), env={})
            kept[name] = TransformersServe(spec, python=_python(request, "vllm"), home=folder)
        else:
            front, engine = replace(gguf, port=find_ports(1)), ForeignServer(gguf)
            kept[name] = LiteLlmProxy(front, python=_python(request, name), folder=folder, engine=engine)
    server = kept[name]
    if server.behind is not None:
        server.behind.spec = replace(gguf, port=server.behind.spec.port)
    return server


def _python(request: pytest.FixtureRequest, name: str) -> Path:
    python: str | None = request.config.getoption(f"--{name}-python")
    if python is None:
        pytest.skip(f"make test-engines sets up {name} and names it")
    return Path(python)


@pytest.fixture(params=["embedded", "llama-server", "vllm", "attached", "transformers", "litellm", "llama-cpp-python"])
def subject(request: pytest.FixtureRequest, tiny_model: Path, checkpoint: Path) -> Subject:
    """Return each real engine; the programs' paths are options of the run."""
    base = WorkerSpec(
        engine=EngineKind.EMBEDDED,
        model=str(tiny_model),
        port=find_ports(1),
        slots=SLOTS,
        context=4096,
        timeouts=TIGHT,
        restart=QUICK,
        repetition=RepetitionLimits(lines=None),  # its text is noise
        bios=BiosPolicy(template="$context\n\n$tools\n\n$budget"),  # no clock: what noise says turns on a character
        env={"LLAMA_API_KEY": KEY},
    )
    match request.param:
        case "embedded":
            return llama_subject("embedded", base, None)
        case "llama-server":
            binary = request.config.getoption("--llama-server")
            if binary is None:
                pytest.skip("make test-engines builds the binary and names it")
            return llama_subject("llama-server", base, binary)
        case "vllm":
            return vllm_subject("vllm", base, request.getfixturevalue("vllm_python"), checkpoint)
        case name:
            return attached_subject(name, base, foreign_server(request, name))
