"""What one worker is to run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from workers.policy.restart import RestartPolicy
from workers.policy.silence import SilenceLimits

WorkerId = NewType("WorkerId", str)
FlagValue = str | int | float | bool | None
Flag = FlagValue | tuple[FlagValue, ...]


class EngineKind(StrEnum):
    """The engines that a worker can run."""

    LLAMA_SERVER = "llama-server"  # llama.cpp's own binary
    EMBEDDED = "embedded"  # llama.cpp's server out of the xllamacpp wheel, in a program of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimeouts:
    """Limits on an engine, in seconds; None is for ever."""

    start_s: float = 600.0  # from the process's start to readiness: loading of weights included
    stop_grace_s: float = 10.0  # from SIGTERM to SIGKILL
    request_s: float | None = None  # one whole request
    silence: SilenceLimits = field(default_factory=SilenceLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One engine process and its slots (contract, sections 4 and 7).

    ``model_file`` is what the engine loads, as it takes it: an absolute path, or the id of a repository. It may be None
    where ``command`` is a program that needs none.
    ``command`` stands in place of the engine's own program; the engine's ordinary flags follow it. ``args`` are further
    flags, passed through unknown: a name to its value, True for a bare flag, a tuple for a repeated one.
    ``context`` is in tokens a slot.
    """

    id: WorkerId
    model: str
    engine: EngineKind
    model_file: str | None
    port: int
    host: str = "127.0.0.1"
    slots: int = 4
    context: int = 4096
    command: tuple[str, ...] = ()
    args: Mapping[str, Flag] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timeouts: WorkerTimeouts = field(default_factory=WorkerTimeouts)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
