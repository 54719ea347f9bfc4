"""The foreign servers, as the tests run them; Roundhouse is attached to them."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from tests.conftest import SHARED
from workers import WorkerSpec
from workers.engine.launch import command_for

KEY = "key-of-the-tests"  # for servers that require one, so that tests may ask them as well
Launch = tuple[list[str], dict[str, str]]  # a command, and its whole environment


@dataclass
class ForeignServer:
    """An OpenAI-compatible server with another operator: here, the test."""

    spec: WorkerSpec
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def model(self) -> str:
        """The server's name of its model."""
        return str(self.spec.name)

    @property
    def behind(self) -> "ForeignServer | None":
        """The server that it passes requests on to."""
        return None

    def launch(self) -> Launch:
        command = command_for(self.spec, {"PATH": "/usr/bin:/bin"})
        return list(command.argv), dict(command.env)

    def change(self, **changes: object) -> None:
        self.spec = replace(self.spec, **changes)  # type: ignore[arg-type]

    def start(self) -> None:
        argv, env = self.launch()
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers(self) -> bool:
        try:
            headers = {"Authorization": f"Bearer {KEY}"}
            url = f"{self.spec.endpoint.base_url}/v1/models"
            return httpx.get(url, timeout=1, trust_env=False, headers=headers).is_success
        except httpx.TransportError:
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.behind.running() if self.behind else nullcontext():
            self.start()
            try:
                yield
            finally:
                self.kill()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@dataclass
class KeptServer(ForeignServer):
    """A server that takes seconds to start and is shared by tests."""

    def start(self) -> None:
        super().start()
        assert self.process is not None
        SHARED.add(self.process.pid)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.behind.running() if self.behind else nullcontext():
            if self.process is None or self.process.poll() is not None:
                self.start()
            yield


@dataclass
class TransformersServe(KeptServer):
    """Hugging Face's ``transformers serve``, on a checkpoint: it takes no schema, and one request at a time."""

    python: Path = field(kw_only=True)
    home: Path = field(kw_only=True)  # its hub's folder; without one it answers /v1/models with a 500

    @property
    def model(self) -> str:
        return str(self.spec.model)

    def launch(self) -> Launch:
        (self.home / "hub").mkdir(exist_ok=True)
        argv = [str(self.python.with_name("transformers")), "serve", self.model, "--device", "cpu"]
        env = {"PATH": "/usr/bin:/bin", "HF_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return [*argv, "--host", "127.0.0.1", "--port", str(self.spec.port)], env


@dataclass
class LlamaCppPython(ForeignServer):
    """llama-cpp-python's server: one request at a time, and a new one breaks off a running stream."""

    python: Path = field(kw_only=True)

    def launch(self) -> Launch:
        flags = {
            "model": self.spec.model,
            "host": "127.0.0.1",
            "port": self.spec.port,
            "n_ctx": self.spec.context,
            "n_threads": 1,
            "model_alias": self.spec.name,
            "api_key": KEY,
        }
        told = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return [str(self.python), "-m", "llama_cpp.server", *told], {"PATH": "/usr/bin:/bin"}


@dataclass
class LiteLlmProxy(KeptServer):
    """LiteLLM's proxy before a llama-server: all that says anything of the engine goes through it."""

    python: Path = field(kw_only=True)
    folder: Path = field(kw_only=True)
    engine: ForeignServer = field(kw_only=True)

    @property
    def behind(self) -> ForeignServer:
        return self.engine

    def change(self, **changes: object) -> None:
        self.engine.change(**changes)

    def launch(self) -> Launch:
        config = self.folder / "litellm.yaml"
        url = f"{self.engine.spec.endpoint.base_url}/v1"
        at = {"model": f"openai/{self.engine.spec.name}", "api_base": url, "api_key": KEY}
        models = [{"model_name": self.spec.name, "litellm_params": at}]
        config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
        argv = [str(self.python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
        env = {"PATH": "/usr/bin:/bin", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # prices of no use here, from afar
        return [*argv, "--port", str(self.spec.port)], env
