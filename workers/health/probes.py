"""An engine's signs of life beside its answers: counters, a canary, and the kernel's view of it."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from secrets import token_hex
from typing import Final, Protocol

import anyio
import anyio.to_thread
import msgspec
import psutil
from msgspec.structs import replace

from transport.client import EngineClient
from transport.counters import EngineCounters
from transport.errors import CannotAsk, EngineError, EngineTimeout
from transport.request import ChatRequest, Message
from workers.health.canary import CANARY, CanaryResult, Listener, ask_canary
from workers.requests.generation import Generation

VIEW_PROCESSES: Final = 64  # most of one engine's tree; vLLM has a dozen
# Programs that Triton, Inductor, FlashInfer and llama.cpp's backends run to make kernels; in-process compilers run
# none.
COMPILERS: Final = frozenset(
    {
        *("ptxas", "cicc", "nvcc", "cudafe++", "fatbinary", "nvlink", "hipcc", "ninja"),
        *("gcc", "g++", "cc", "c++", "cc1", "cc1plus", "as", "ld", "collect2", "clang", "clang++", "ld.lld"),
    }
)
CALIBRATION_S: Final = 10.0
WARM_UP_S: Final = 60.0
logger = logging.getLogger(__name__)


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's view of a process: its state, the call it waits in, memory in bytes, CPU seconds."""

    pid: int
    name: str
    state: str
    wchan: str | None
    rss_bytes: int
    cpu_s: float
    threads: int


class KernelView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's whole tree at one moment."""

    processes: tuple[ProcessView, ...] = ()
    members_cpu_s: tuple[float, ...] = ()  # other members of its span, as their nodes report

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all of them together."""
        return sum(process.cpu_s for process in self.processes)

    def cpu_since(self, earlier: "KernelView") -> float:
        """Return the CPU seconds that its processes spent since then; of a span, those of the least busy member.

        The members wait for each other, some of them by spinning: only all of them together make progress.
        """
        spent = {process.pid: process.cpu_s for process in earlier.processes}
        own = sum(max(0.0, process.cpu_s - spent.get(process.pid, 0.0)) for process in self.processes)
        others = (now - before for now, before in zip(self.members_cpu_s, earlier.members_cpu_s, strict=False))
        return min((own, *others))

    def compiles_since(self, earlier: "KernelView") -> bool:
        """Whether a compiler below the engine has worked since: kernels are made when a shape first occurs."""
        spent = {process.pid: process.cpu_s for process in earlier.processes}
        compilers = (process for process in self.processes if process.name in COMPILERS)
        return any(process.cpu_s > spent.get(process.pid, -1.0) for process in compilers)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds in which an engine read ``tokens`` of a prompt, and wrote ``answer_tokens``."""

    tokens: int
    seconds: float
    answer_tokens: int = 0
    answer_s: float = 0.0


class ProbeResult(StrEnum):
    """The result of one readiness probe."""

    ANSWERED = "answered"
    REFUSED = "refused"  # nothing listens, or the answer is not a ready engine's
    SILENT = "silent"  # no answer in time, as from a healthy engine in the middle of a batch


class Probes(Protocol):
    """The interface of the watch: the real one asks an engine and the kernel, that of tests has fixed answers."""

    async def read_counters(self) -> EngineCounters | None:
        """Return the engine's counters, None if it does not report them, or not now."""

    async def ask_canary(self, limit_s: float) -> CanaryResult:
        """Ask for one token as a turn would, or for one vector; return the result."""

    async def calibrate(self, words: int, answer_tokens: int) -> Calibration | None:
        """Return the engine's time for a short prompt, or a lower bound of it; None if it is unknown."""

    async def read_prompt(self, system: str, tools: Sequence[Mapping[str, object]]) -> None:
        """Read the common beginning of prompts into the engine's cache, within a time limit."""

    async def probe(self) -> ProbeResult:
        """Make one readiness probe; return its result."""

    async def kernel_view(self) -> KernelView:
        """Return the kernel's view of the engine's processes."""

    def kernel_view_nowait(self) -> KernelView:
        """Return the same at once, for a moment that cannot wait."""

    def log_bytes(self) -> int:
        """Return the size of the engine's output so far."""


class EngineProbes:
    """The probes of a real engine.

    ``base`` gives the model's name and the parameters of a request without adapters; ``root`` the pid above the
    engine's whole tree, None without one.
    """

    def __init__(
        self,
        client: EngineClient,
        base: Callable[[], tuple[str, Mapping[str, object]]],
        root: Callable[[], int | None],
        log_bytes: Callable[[], int],
        members_cpu: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._members_cpu = members_cpu
        self._client = client
        self._base = base
        self._root = root
        self._log_bytes = log_bytes

    def __repr__(self) -> str:
        return f"<EngineProbes {self._client!r}>"

    async def calibrate(self, words: int, answer_tokens: int) -> Calibration | None:
        """Ask for ``answer_tokens`` after a prompt of that many words that no cache holds."""
        generation = Generation(time.monotonic)
        model, params = self._base()
        length = {"max_tokens": answer_tokens, "ignore_eos": True}
        prompt = f"{token_hex(4)} " + "word " * words
        asked = ChatRequest(
            model=model,
            messages=(Message(role="user", content=prompt),),
            params={**self._client.dialect.canary_params, **params, **length},
        )
        with anyio.move_on_after(CALIBRATION_S) as limit:
            try:
                await self._client.stream(asked, generation)
            except EngineError:
                return None
        if limit.cancelled_caught:  # its speed is at most that
            return Calibration(tokens=words, seconds=CALIBRATION_S)
        timings, usage, first_at = generation.timings, generation.usage, generation.first_token_at
        if usage is None or first_at is None:
            return None
        seen_s = first_at - generation.started_at
        return Calibration(
            tokens=timings.prompt_tokens if timings else usage.prompt_tokens - usage.cached_tokens,
            seconds=min(timings.prompt_ms / 1000, seen_s) if timings else seen_s,
            answer_tokens=usage.completion_tokens - 1,
            answer_s=generation.last_progress_at - first_at,
        )

    async def read_prompt(self, system: str, tools: Sequence[Mapping[str, object]]) -> None:
        """Ask for one token after a prompt with this beginning."""
        model, params = self._base()
        messages = (Message(role="system", content=system), *CANARY)
        asked = ChatRequest(model=model, messages=messages, params={**params, "max_tokens": 1}, tools=tuple(tools))
        with anyio.move_on_after(WARM_UP_S), contextlib.suppress(EngineError):
            await self._client.stream(asked, Listener())

    async def read_counters(self) -> EngineCounters | None:
        """Ask /slots once; older builds hold the answer back for a whole batch, so silence says nothing."""
        try:
            return await self._client.read_counters()
        except EngineError:
            return None

    async def ask_canary(self, limit_s: float) -> CanaryResult:
        """Ask for one token, or for one vector."""
        model, params = self._base()
        return await ask_canary(self._client, model, params, limit_s)

    async def probe(self) -> ProbeResult:
        """Probe once."""
        try:
            await self._client.probe_ready()
        except (EngineTimeout, CannotAsk):
            return ProbeResult.SILENT
        except EngineError:
            return ProbeResult.REFUSED
        return ProbeResult.ANSWERED

    async def kernel_view(self) -> KernelView:
        """Look at /proc, in a thread: a tree of hundreds takes milliseconds."""
        root = self._root()
        if root is None:
            return KernelView()
        return replace(await anyio.to_thread.run_sync(look_at_tree, root), members_cpu_s=tuple(self._members_cpu()))

    def kernel_view_nowait(self) -> KernelView:
        """Look at /proc from the event loop: once, for an engine that is broken anyway."""
        root = self._root()
        return KernelView() if root is None else look_at_tree(root)

    def log_bytes(self) -> int:
        """Return the number of bytes that came through the guardian."""
        return self._log_bytes()


def look_at_tree(root: int) -> KernelView:
    """Return the processes below ``root``."""
    try:
        below = psutil.Process(root).children(recursive=True)[:VIEW_PROCESSES]
    except (psutil.Error, OSError):  # OSError if no descriptor is left
        return KernelView()
    views = (_look_at(process) for process in below)
    return KernelView(processes=tuple(view for view in views if view is not None))


def _look_at(process: psutil.Process) -> ProcessView | None:
    try:
        with process.oneshot():
            times = process.cpu_times()
            return ProcessView(
                pid=process.pid,
                name=process.name().encode("utf-8", "replace").decode(),
                state=process.status(),
                wchan=_wchan(process.pid),
                rss_bytes=process.memory_info().rss,
                cpu_s=times.user + times.system,
                threads=process.num_threads(),
            )
    except (psutil.Error, OSError):
        return None


def _wchan(pid: int) -> str | None:
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return None if channel in ("", "0") else channel
