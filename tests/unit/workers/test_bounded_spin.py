"""How long threads of llama.cpp's engines spin on a shared CPU."""

import pytest

from workers.engine.launch import command_for
from workers.spec import EngineKind, WorkerSpec

SPINS = "GOMP_SPINCOUNT"


def environment(
    engine: EngineKind, around: dict[str, str], env: dict[str, str] | None = None, *, on_cpu: bool = True
) -> dict[str, str]:
    spec = WorkerSpec(engine=engine, model="m.gguf", name="m", on_cpu=on_cpu, env=env or {})
    return dict(command_for(spec, around).env)


@pytest.mark.parametrize("engine", [EngineKind.EMBEDDED, EngineKind.LLAMA_SERVER])
class TestSpin:
    def test_spinning_is_bounded_on_a_cpu(self, engine: EngineKind) -> None:
        """Every thread that shares a core with a spinning thread is slowed down."""
        assert environment(engine, {})[SPINS] == "100"

    def test_threads_that_feed_a_gpu_are_unchanged(self, engine: EngineKind) -> None:
        """They compute nothing that other threads could delay."""
        assert SPINS not in environment(engine, {}, on_cpu=False)

    @pytest.mark.parametrize("name", [SPINS, "OMP_WAIT_POLICY"])
    def test_a_users_setting_is_kept(self, engine: EngineKind, name: str) -> None:
        """It stands in the model's env, or in the environment of the service."""
        assert environment(engine, {}, {name: "7"}).get(SPINS) == ("7" if name == SPINS else None)
        assert environment(engine, {name: "7"}).get(SPINS) == ("7" if name == SPINS else None)


def test_other_engines_are_unchanged() -> None:
    """VLLM binds its threads to cores of its own."""
    assert SPINS not in environment(EngineKind.VLLM, {})
