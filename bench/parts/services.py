"""Services and commands that benchmarks run: each in a folder of its own, and nothing of it is left."""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.engines.subjects import VLLM_ENVIRONMENT
from tests.harness.service import ROUNDHOUSE, Service

START_S: Final = 300.0  # time that a service gets to be ready; vLLM takes minutes on a CPU
STOP_S: Final = 60.0  # time that a service under load gets to end
REQUEST_S: Final = 300.0  # time that an answer may take
JOB_S: Final = 3600.0  # time that a job may take
Document = dict[str, Any]
VLLM: Final[Document] = {"env": VLLM_ENVIRONMENT, "args": {"enforce_eager": True, "dtype": "bfloat16"}}


@contextmanager
def serving(
    port: int,
    models: Document,
    server: Document | None = None,
    *,
    key: str | None = None,
    command: Sequence[str] = (ROUNDHOUSE,),
    environment: Mapping[str, str] | None = None,
    **sections: Document,
) -> Iterator[Service]:
    """Run a service for a block, from when all its models are ready; it ends without a drain.

    ``key`` authenticates our own requests. ``command`` stands before ``serve``.
    """
    with tempfile.TemporaryDirectory() as name:
        service = Service(Path(name), port, models, {"drain_s": 0, **(server or {})}, key=key, **sections)
        service.http.timeout = REQUEST_S
        service.command = command
        service.environment = dict(environment or {})
        try:
            service.start(limit_s=START_S)
            yield service
        finally:
            end(service)


def end(service: Service) -> None:
    """End a service, and close its client."""
    service.http.close()
    if service.process is None or service.process.poll() is not None:
        return
    service.process.terminate()
    try:
        service.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        service.kill()


def wait_ended(service: Service, job_id: str, pause_s: float) -> Document:
    """Return a job that has ended. Its state is read once in ``pause_s``, since each read costs the service CPU.

    Raises:
        TimeoutError: it has not ended within ``JOB_S``.
    """
    until = time.monotonic() + JOB_S
    while time.monotonic() < until:
        job: Document = service.get(f"/v1/jobs/{job_id}")
        if job["state"] not in {"queued", "running"}:
            return job
        time.sleep(pause_s)
    raise TimeoutError(f"job {job_id} has not ended")


def process_of(service: Service) -> psutil.Process:
    """Return the process of a running service."""
    assert service.process is not None
    return psutil.Process(service.process.pid)


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of one process, user and system."""
    times = process.cpu_times()
    return float(times.user + times.system)


def run_job(models: Document, job: Document, **sections: Document) -> list[Document]:
    """Run a job with ``roundhouse run``; return its transcripts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"server": {"state_dir": str(folder / "state")}, "models": models, **sections}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "job.json").write_text(json.dumps(job))
        command = [ROUNDHOUSE, "run", "job.json", "--config", "config.yaml", "--output", "out"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return [json.loads(file.read_text()) for file in folder.glob("out/*/transcripts/*.json")]
