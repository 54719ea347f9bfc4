"""One suite, four engines: the wheel's server, the binary, vLLM on the CPU, and a server that somebody else runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.checkpoint import write_checkpoint
from tests.engines.subjects import KEY, Subject, attached_subject, llama_subject, vllm_subject
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


@pytest.fixture(params=["embedded", "llama-server", "vllm", "attached"])
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
        case _:
            if request.config.getoption("--llama-server") is None:
                pytest.skip("make test-engines attaches to real servers; tests/faults has it to scripted ones")
            return attached_subject("attached", base, replace(base, args={"threads": 1}, name="theirs"))
