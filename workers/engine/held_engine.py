"""One worker's engine and all that is known of it, as one program of this process leaves it to the next.

The form of the document is ``service.upgrade``'s; its version stands there. Times are monotonic seconds of the machine,
which go on over an exec.
"""

from collections.abc import Mapping

from msgspec import Struct

from workers.engine.log_ring import HeldLog
from workers.process.child import EngineExit, HeldProcess


class HeldEngine(Struct, frozen=True, kw_only=True):
    """An engine that runs; ``key`` is what it asks of us, None where it asks for none."""

    incarnation: int
    process: HeldProcess
    key: str | None
    was_ready: bool
    holds: list[str]  # what its worker is drained for
    failed_at: list[float]
    paused_at: list[float]
    last_exit: EngineExit | None
    log: HeldLog


class HeldPace(Struct, frozen=True, kw_only=True):
    """How fast an engine is, as measured and learned."""

    rates: list[float]
    tokens_a_char: float
    steps_s: list[float]
    errors: list[float]


class HeldWorker(Struct, frozen=True, kw_only=True):
    """A worker with its engine; ``launch`` is the digest of what the engine was started as, its adapters apart.

    ``adapters`` are those that the engine has, in its order, each with its path; ``numbers`` are vLLM's own for them.
    """

    id: str
    model: str
    launch: str
    engine: HeldEngine
    pace: HeldPace
    adapters: Mapping[str, str]
    numbers: Mapping[str, int | None]
    weights: int | None = None  # their version; None where the engine knows none
