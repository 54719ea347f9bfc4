"""Tells a hung LLM engine from a busy one: ``python3 engine_probe.py URL``, or ``roundhouse probe URL``.

One file of the standard library (Linux, Python 3.10 or later), to be copied to wherever an engine runs that Roundhouse
does not own. Each call takes one look at the engine and compares it with the last reading, which it keeps in a file of
its user. To call an engine hung needs proof (specification, "Engines of others"); without it, the verdict is unknown.

Orchestrators call this every few seconds. So it asks only what it needs, and does without modules that take longer to
import than the look takes: typing, socket, json, argparse and contextlib among them.
"""

from __future__ import annotations

import _socket
import fcntl
import marshal
import os
import sys
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, Final

USAGE: Final = (
    "probe URL [--engine vllm|sglang|llama.cpp] [--api-key KEY | ROUNDHOUSE_PROBE_KEY] [--limit S] [--strict]"
)
WORKS, SILENT, UNSURE, HANGS = "works", "silent so far", "unknown", "hangs"
UP, REFUSED, DENIED, LOADING, LOST = "up", "refused", "denied", "loading", "lost"  # and SILENT: its front end
ANSWERED, UNFIT = "answered", "unfit"  # and SILENT, REFUSED, DENIED: a canary
ENGINES: Final = ("vllm", "sglang", "llama.cpp")
STEPWISE: Final = ("vllm", "sglang")  # they cut prompts into steps of some seconds, and count each
LIMIT_S: Final = 120.0
BUSY_S: Final = 900.0  # beyond the limit, for an engine that may be computing one long batch
BUSY_CORES: Final = 0.25
LEAST_INTERVAL_S: Final = 0.9  # between two looks at the CPU time of processes
STALE_S: Final = 60.0  # after a longer gap, if it is over two limits too, silence is counted from the start
ASK_S: Final = 2.0
CANARY_S: Final = 3.0
LEAST_CANARY_S: Final = 0.5
CANARY_EVERY_S: Final = 10.0  # to an idle engine; a quarter of the limit if that is less
MOST_BYTES: Final = 4 * 1024 * 1024
MOST_KEPT: Final = 64 * 1024
MOST_SLOTS: Final = 256
MOST_PROCESSES: Final = 256
FRONT: Final = "/v1/models"  # answered by the front end alone
FORMS: Final = (  # a canary's; some models make no tokens, but vectors
    ("/v1/completions", '"prompt": "ping", "max_tokens": 1'),
    ("/v1/chat/completions", '"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1'),
    ("/v1/embeddings", '"input": "ping"'),
)
PATHS: Final[dict[str | None, tuple[str, ...]]] = {  # where counters are, the best first
    "vllm": ("/metrics",),
    "sglang": ("/metrics", "/server_info", "/get_server_info"),
    "llama.cpp": ("/metrics", "/slots"),
    None: ("/metrics", "/slots"),
}
COUNTERS: Final = (  # each rises only where the engine itself has worked
    *("vllm:iteration_tokens_total_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("sglang:realtime_tokens_total", "sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    *("sglang:inter_token_latency_seconds_count", "sglang:time_to_first_token_seconds_count"),
    *("llamacpp:n_decode_total", "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
)
GAUGES: Final = (  # requests that it has
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    *("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)
SLEEP: Final = "vllm:engine_sleep_state"
UPDATING: Final = "vllm:rl_weight_update_operations_in_flight"
OWNERS: Final = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}  # names of engines in their own answers
MARKS: Final = (b"vllm", b"sglang", b"llama")  # in the command line of an engine, and not of a proxy before it
GPUS: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")
COMPILERS: Final = ("ptxas", "cicc", "nvcc", "nvlink", "hipcc", "ninja", "gcc", "g++", "cc1", "cc1plus", "clang")


class Record:
    """Named values; a class's attributes are their defaults."""

    def __init__(self, **given: Any) -> None:  # noqa: ANN401
        self.__dict__.update(given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(**{vars(self)})"


class Target(Record):
    """An engine to look at."""

    scheme = "http"
    host: str
    port: int
    base = ""  # what stands before the paths of its API
    engine: str | None = None
    key: str | None = None
    limit_s = LIMIT_S

    @property
    def name(self) -> str:
        """A name for files: readable, and different for different addresses."""
        name = f"{self.host}-{self.port}{self.base}"
        readable = "".join(sign if sign.isalnum() or sign in ".-" else "_" for sign in name)[:80]
        return f"{readable}-{zlib.crc32(name.encode()):08x}"


class HttpAnswer(Record):
    """An answer over HTTP; without one ``status`` is 0, and ``fault`` is SILENT, REFUSED or LOST."""

    status = 0
    body = b""
    fault = ""
    note = ""

    @property
    def json(self) -> Any:  # noqa: ANN401
        """The value of the body, None if it is no JSON."""
        import json  # noqa: PLC0415 - most calls need it not

        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class Tree(Record):
    """The processes of an engine on this machine: those that hold its port, and all below, with their CPU seconds."""

    holders: dict[str, int]  # pids, each with the tick of its start
    cpu: dict[str, float]
    stopped = ""
    compiler = ""
    has_gpu = False


class Look(Record):
    """All that one call has seen; times in seconds of the clock that neither a date nor a suspension moves."""

    at = 0.0
    ended_at = 0.0
    boot = ""
    front = UP
    engine: str | None = None
    path: str | None = None  # where the counters are
    model: str | None = None  # as it stands in JSON, with its quotes
    form = 0
    counters: dict[str, float] | None = None  # None if they could not be read
    requests = 0.0  # the most of any count of them
    asleep = ""
    canary: str | None = None
    is_dead = False
    has_moved = False  # its counters, while a canary waited
    tree: Tree | None = None
    is_local = False
    note = ""


class Reading(Record):
    """A verdict, and what the next call compares with."""

    verdict = UNSURE
    reason = ""
    at = 0.0
    boot = ""
    engine: str | None = None
    path: str | None = None
    model: str | None = None
    form = 0
    counters: dict[str, float] | None = None
    owed_since: float | None = None  # since when it has owed an answer without a sign of life
    proven_at: float | None = None  # its last sign of life
    tree: Tree | None = None
    tree_at = 0.0
    cores: float | None = None  # in use by its processes, when that was last measured


def comparable(before: Reading | None, look: Look, limit_s: float) -> Reading | None:
    """Return the last reading if silence may be counted on from it; None after a boot, a long gap or a new process."""
    if before is None or before.boot != look.boot or not 0 <= look.at - before.at <= max(STALE_S, 2 * limit_s):
        return None
    is_same = before.tree is None or look.tree is None or before.tree.holders == look.tree.holders
    return before if is_same else None


def judge(before: Reading | None, look: Look, limit_s: float) -> Reading:
    """Return the verdict on a look, beside the last reading."""
    was = comparable(before, look, limit_s) or Reading()
    reading = Reading(at=look.at, boot=look.boot, engine=look.engine, path=look.path, model=look.model, form=look.form)
    reading.proven_at = was.proven_at
    reading.counters = was.counters if look.counters is None else look.counters
    reading.tree, reading.tree_at, reading.cores = _measure_cores(was, look)
    doubt = _doubt(look)
    if has_moved(was, look) or look.canary == ANSWERED:
        reading.verdict, reading.proven_at = WORKS, look.ended_at
        reading.reason = "it answers a canary" if look.canary == ANSWERED else "its counters move"
    elif doubt:
        reading.reason = doubt
    elif look.canary is None and look.front == UP:
        reading.verdict, reading.reason = WORKS, "it is idle, and has answered a canary lately"
    else:
        reading.owed_since = look.at if was.owed_since is None else was.owed_since
        silent_s = look.ended_at - reading.owed_since
        reading.verdict, reading.reason = _judge_silence(was, look, reading.cores, silent_s, limit_s)
    return reading


def has_moved(was: Reading, look: Look) -> bool:
    """Whether the engine's counters have moved since the last reading, or while a canary waited."""
    return look.has_moved or (None not in (was.counters, look.counters) and was.counters != look.counters)


def _doubt(look: Look) -> str:
    """Return the reason for which silence would prove nothing."""
    if look.canary in {DENIED, UNFIT} or (look.canary == REFUSED and not look.requests):
        return look.asleep or f"it refuses the canary ({look.note})"
    fronts = {
        REFUSED: "nothing listens there; it may be starting",
        DENIED: f"the key is refused ({look.note})",
        LOADING: f"it is loading, or a proxy has no engine ({look.note})",
        LOST: f"there is no way to it ({look.note})",
    }
    return fronts.get(look.front, look.asleep)


def _judge_silence(was: Reading, look: Look, cores: float | None, silent_s: float, limit_s: float) -> tuple[str, str]:
    words, tree = f"no sign of life for {silent_s:.0f} s of {limit_s:.0f} s", look.tree or Tree()
    is_idle = cores is not None and cores < BUSY_CORES
    is_over = silent_s >= limit_s + BUSY_S
    if cores is not None and not is_idle and not tree.has_gpu and not tree.stopped and not is_over:
        return WORKS, f"it computes with {cores:.1f} cores; {words}"
    if tree.compiler:
        return WORKS, f"{tree.compiler} compiles for it; {words}"
    if silent_s < limit_s:
        return SILENT, words
    is_measured = look.tree is None or tree.has_gpu or cores is not None
    is_quick = (look.engine in STEPWISE and is_measured) or tree.has_gpu or is_over
    proofs = (
        (look.is_dead, "its engine core is dead, as /health says"),
        (tree.stopped, f"process {tree.stopped} is stopped"),
        (look.front == SILENT and was.engine and is_measured, "its front end answers nothing"),
        (was.counters and is_idle, "its counters stand still, its processes use no CPU, and it answers no canary"),
        (was.counters and is_quick, "its counters stand still, and it answers no canary"),
        (is_idle and not tree.has_gpu, "its processes use no CPU, and it answers no canary"),
    )
    for holds, proof in proofs:
        if holds:
            return HANGS, f"{words}: {proof}"
    return UNSURE, f"{words}, but nothing shows whether it computes"


def _measure_cores(was: Reading, look: Look) -> tuple[Tree | None, float, float | None]:
    """Return the processes to compare with next, when they were seen, and how many cores they used lately."""
    if look.tree is None:
        return was.tree, was.tree_at, None
    if was.tree is None:
        return look.tree, look.ended_at, None
    seconds = look.ended_at - was.tree_at
    if seconds < LEAST_INTERVAL_S:
        return was.tree, was.tree_at, was.cores
    spent = sum(max(0.0, cpu_s - was.tree.cpu.get(pid, 0.0)) for pid, cpu_s in look.tree.cpu.items())
    return look.tree, look.ended_at, spent / seconds


def wants_canary(before: Reading | None, look: Look, limit_s: float) -> bool:
    """Whether only a canary can tell: nothing has moved, and no life was proven lately of an engine that is idle."""
    was = comparable(before, look, limit_s) or Reading()
    if look.front != UP or look.asleep or has_moved(was, look):
        return False
    is_proven = was.proven_at is not None and look.at - was.proven_at < min(CANARY_EVERY_S, limit_s / 4)
    return not is_proven or look.requests > 0 or was.owed_since is not None


def examine(target: Target, before: Reading | None, keep: Callable[[Reading], None]) -> Reading:
    """Look at the engine, and judge it.

    ``keep`` gets the reading, and before a canary is asked one that stands if this process is killed while it waits.
    """
    look = read_front(target, before)
    if wants_canary(before, look, target.limit_s):
        look.canary = SILENT
        waiting = judge(before, look, target.limit_s)
        waiting.verdict, waiting.reason = UNSURE, "a canary waits for its answer"
        keep(waiting)
        look.canary = None
        ask_canary(target, look, look.at if waiting.owed_since is None else waiting.owed_since)
    if SILENT in {look.front, look.canary} and look.is_local:
        known = before.tree.holders if before and before.tree and before.boot == look.boot else {}
        look.tree = look_at_tree(target.port, known)
    look.ended_at = time.monotonic()
    reading = judge(before, look, target.limit_s)
    keep(reading)
    return reading


def read_front(target: Target, before: Reading | None) -> Look:
    """Read the engine's counters; if there are none, ask whether its front end lives."""
    now, boot = time.monotonic(), _read("/proc/sys/kernel/random/boot_id").decode().strip()
    look, was = Look(at=now, ended_at=now, boot=boot), before or Reading()
    look.engine, look.model, look.form = target.engine or was.engine, was.model, was.form
    for path in (was.path,) if was.path else PATHS[look.engine]:
        answer = ask(target, path, ASK_S, look)
        if answer.fault in {REFUSED, LOST}:
            look.front = answer.fault
            return look
        if decode_counts(answer, look):
            look.path = path
            return look
        if answer.fault == SILENT:  # some engines hold the answer back for a whole batch
            look.path = was.path
            break
    _ask_models(target, look)
    return look


def _ask_models(target: Target, look: Look) -> None:
    answer = ask(target, FRONT, ASK_S, look)
    if answer.status in {401, 403}:
        look.front = DENIED
    elif answer.status in {502, 503, 504}:
        look.front = LOADING
    elif not answer.status:
        look.front = answer.fault
    elif look.model is None or look.engine is None:
        import json  # noqa: PLC0415 - once for each engine

        found = answer.json
        models = found.get("data") if isinstance(found, dict) else None
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        look.model = json.dumps(first["id"]) if "id" in first else None
        look.engine = look.engine or OWNERS.get(str(first.get("owned_by")))


def ask_canary(target: Target, look: Look, owed_since: float) -> None:
    """Ask for one token, or one vector, and look at the counters again."""
    if look.model is None:
        _ask_models(target, look)
    if look.front != UP:
        return
    if look.engine == "llama.cpp" and b'"is_sleeping":true' in ask(target, "/props", ASK_S, look).body.replace(
        b" ", b""
    ):
        look.asleep = "it is asleep, and a canary would wake it"
        return
    left_s = owed_since + target.limit_s - time.monotonic()
    _send_canary(target, look, min(CANARY_S, left_s) if left_s > LEAST_CANARY_S else CANARY_S)
    if look.engine == "vllm" and look.canary != ANSWERED:
        _ask_vllm(target, look)
    counters = look.counters
    if look.canary in {ANSWERED, SILENT} and look.path is not None and counters is not None:
        decode_counts(ask(target, look.path, ASK_S, look), look)
        look.has_moved = look.counters != counters


def _ask_vllm(target: Target, look: Look) -> None:
    """Ask whether its core is dead, or paused; the words on the canary stay."""
    note = look.note
    if look.canary == REFUSED and ask(target, "/health", ASK_S, look).status == 503:  # noqa: PLR2004
        look.canary, look.is_dead = SILENT, True
    if look.canary == SILENT:
        state = ask(target, "/is_sleeping", ASK_S, look)
        look.asleep = "it is paused or asleep" if b"true" in state.body and state.status == 200 else ""  # noqa: PLR2004
    look.note = note


def _send_canary(target: Target, look: Look, limit_s: float) -> None:
    named = f'"model": {look.model}, ' if look.model else ""
    extra = ', "cache_prompt": false' if look.engine == "llama.cpp" else ""
    for look.form in range(look.form, len(FORMS)):  # noqa: B020
        path, body = FORMS[look.form]
        answer = ask(target, path, limit_s, look, f"{{{named}{body}{extra}}}".encode())
        look.note = f"{path}: {answer.note}"
        if answer.status == 200 or answer.fault == SILENT:  # noqa: PLR2004
            look.canary = SILENT if answer.fault else ANSWERED
            return
        refused = {401: DENIED, 403: DENIED, 0: REFUSED, 408: REFUSED, 429: REFUSED, 500: REFUSED}
        look.canary = refused.get(answer.status, REFUSED if answer.status > 501 else UNFIT)  # noqa: PLR2004
        if look.canary != UNFIT and answer.status != 500:  # noqa: PLR2004
            return
    look.model, look.form = None, 0


def ask(target: Target, path: str, limit_s: float, look: Look, body: bytes | None = None) -> HttpAnswer:
    """Send one request, and read its answer within the limit; ``look`` notes where the answer came from."""
    named = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"{'GET' if body is None else 'POST'} {target.base}{path} HTTP/1.0", f"Host: {named}:{target.port}"]
    lines += [] if target.key is None else [f"Authorization: Bearer {target.key}"]
    lines += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    sent = "\r\n".join([*lines, "Connection: close", "", ""]).encode() + (body or b"")
    try:
        answer = _exchange(target, sent, time.monotonic() + limit_s, look)
    except TimeoutError:
        answer = HttpAnswer(fault=SILENT, note="no answer in time")
    except ConnectionRefusedError as error:
        answer = HttpAnswer(fault=REFUSED, note=str(error))
    except OSError as error:
        answer = HttpAnswer(fault=LOST, note=str(error))
    look.note = answer.note
    return answer


def _exchange(target: Target, sent: bytes, ends_at: float, look: Look) -> HttpAnswer:
    link: Any = _connected(target, ends_at)
    try:
        look.is_local = link.getsockname()[0] == link.getpeername()[0]
        if target.scheme == "https":
            import socket  # noqa: PLC0415 - most engines are asked without
            import ssl  # noqa: PLC0415

            link = socket.socket(fileno=link.detach())
            link.settimeout(max(0.001, ends_at - time.monotonic()))
            link = ssl.create_default_context().wrap_socket(link, server_hostname=target.host)
        link.sendall(sent)
        received = bytearray()
        while not _is_whole(received) and len(received) < MOST_BYTES:
            link.settimeout(max(0.001, ends_at - time.monotonic()))
            piece = link.recv(256 * 1024)
            if not piece:
                break
            received += piece
            if time.monotonic() >= ends_at:
                return HttpAnswer(fault=SILENT, note="no whole answer in time")
    finally:
        link.close()
    head, _, after = bytes(received).partition(b"\r\n\r\n")
    status = head[9:12]
    if not head.startswith(b"HTTP/") or not status.isdigit():
        return HttpAnswer(fault=LOST, note="its answer is no HTTP")
    whole = after if len(received) < MOST_BYTES else b""  # the rest might have other counts, and tell of a change
    return HttpAnswer(status=int(status), body=whole, note=f"HTTP {int(status)}")


def _connected(target: Target, ends_at: float) -> Any:  # noqa: ANN401
    host = target.host.encode("ascii" if target.host.isascii() else "idna")  # a string would import 10 ms of encodings
    *others, last = _socket.getaddrinfo(host, target.port, 0, _socket.SOCK_STREAM)
    for family, kind, protocol, _, address in (*others, last):
        link = _socket.socket(family, kind, protocol)
        try:
            link.settimeout(max(0.001, ends_at - time.monotonic()))
            link.connect(address)
        except OSError:
            link.close()
            if address is last[4]:
                raise
        else:
            return link
    raise AssertionError


def _is_whole(received: bytearray) -> bool:
    end = received.find(b"\r\n\r\n")
    length = bytes(received[: max(0, end)]).lower().partition(b"\r\ncontent-length:")[2].split(b"\r\n")[0].strip()
    return length.isdigit() and len(received) >= end + 4 + int(length)


def decode_counts(answer: HttpAnswer, look: Look) -> bool:
    """Put the counts of an answer into the look: metrics, llama.cpp's slots, or SGLang's state; False without any."""
    if answer.status != 200:  # noqa: PLR2004
        return False
    if answer.body.lstrip()[:1] not in {b"[", b"{"}:
        return _decode_metrics(answer.body.decode(errors="replace"), look)
    decoded = answer.json
    if isinstance(decoded, list):
        slots = [slot for slot in decoded if isinstance(slot, dict)][:MOST_SLOTS]
        look.counters = dict(_counts_of_slots(slots))
        look.engine, look.requests = "llama.cpp", sum(slot.get("is_processing") is True for slot in slots)
        return True
    return _decode_state(decoded.get("internal_states") if isinstance(decoded, dict) else None, look)


def _decode_state(states: object, look: Look) -> bool:
    ranks = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    speeds = {str(rank): state.get("last_gen_throughput") for rank, state in enumerate(ranks)}
    look.counters = {rank: float(speed) for rank, speed in speeds.items() if isinstance(speed, int | float)} or None
    look.engine = "sglang" if look.counters else look.engine
    return look.counters is not None


def _counts_of_slots(slots: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for number, slot in enumerate(slots):
        following = slot.get("next_token")
        tokens = following if isinstance(following, list) else [following]
        written = [token.get("n_decoded") for token in tokens if isinstance(token, dict)]
        for place, count in enumerate((slot.get("id_task"), slot.get("n_prompt_tokens_processed"), *written[:1])):
            if isinstance(count, int):
                yield f"{number}.{place}", float(count)


def _decode_metrics(text: str, look: Look) -> bool:
    counters: dict[str, float] = {}
    look.requests = 0.0
    for line in text.splitlines():
        prefix = line.partition(":")[0]
        series, _, number = line.rpartition(" ")
        if prefix not in OWNERS:
            continue
        try:
            name, value = series.partition("{")[0], float(number)
        except ValueError:
            continue
        if value != value:  # noqa: PLR0124 - NaN is no count, and no two of them are equal
            continue
        if name in COUNTERS:
            look.engine = OWNERS[prefix]
            counters[name] = counters.get(name, 0.0) + value
        elif name in GAUGES:
            look.requests = max(look.requests, value)
        elif name == UPDATING and value:
            look.asleep = "its weights are being updated"
        elif name == SLEEP and 'sleep_state="awake"' in series and not value:
            look.asleep = "it is asleep"
    if counters:
        look.counters = counters
    return bool(counters)


def look_at_tree(port: int, known: dict[str, int]) -> Tree | None:
    """Return the engine's processes; None if we may not see them, or if a proxy holds the port."""
    table = dict(_processes())
    holders = {pid: start for pid, start in known.items() if pid in table and table[pid][4] == start}
    holders = holders or {pid: table[pid][4] for pid in _find_holders(port, table)}
    members = list(holders)
    for pid in members:
        members += [child for child, process in table.items() if process[2] == pid and child not in members]
        if len(members) > MOST_PROCESSES:
            break
    if not any(mark in _read(f"/proc/{pid}/cmdline").lower() for pid in members for mark in MARKS):
        return None
    tree = Tree(holders=holders, cpu={pid: table[pid][3] for pid in members})
    for pid in members:
        name, state, *_ = table[pid]
        tree.stopped = f"{pid} ({name})" if state in "Tt" else tree.stopped
        tree.compiler = name if name in COMPILERS else tree.compiler
        tree.has_gpu = tree.has_gpu or any(file.startswith(GPUS) for file in _files_of(pid))
    return tree


def _processes() -> Iterator[tuple[str, tuple[str, str, str, float, int]]]:
    """Yield pids with name, state, parent, CPU seconds and tick of the start (proc(5): stat)."""
    hertz = os.sysconf("SC_CLK_TCK")
    for pid in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - pathlib is worth no time here
        name, _, after = _read(f"/proc/{pid}/stat").decode(errors="replace").partition("(")[2].rpartition(")")
        row = after.split()
        if row:
            yield pid, (name, row[0], row[1], (int(row[11]) + int(row[12])) / hertz, int(row[19]))


def _find_holders(port: int, pids: dict[str, Any]) -> Iterator[str]:
    """Yield the processes that listen at a port, as far as we may look."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in _read(f"/proc/net/{table}").decode().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    if inodes:
        yield from (pid for pid in pids if not inodes.isdisjoint(_files_of(pid)))


def _files_of(pid: str) -> Iterator[str]:
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            yield os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115
    except OSError:  # another user's, or gone
        return


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


class ReadingFile:
    """The last reading of one engine, in a folder that only this user enters; written by one probe at a time."""

    def __init__(self, folder: int, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lock = self._open("lock", os.O_RDWR | os.O_CREAT)

    def take(self) -> bool:
        """Keep other probes off until this process ends; return whether none has it now."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def read_last(self) -> Reading | None:
        """Return the last reading; None if there is none that can be read."""
        try:
            with open(self._open("reading", os.O_RDONLY), "rb") as file:  # noqa: PTH123
                check, kept = file.read(4), file.read(MOST_KEPT)
            if check != zlib.crc32(kept).to_bytes(4, "big"):
                return None
            reading = Reading(**marshal.loads(kept))  # noqa: S302 - it is ours, and whole
        except (OSError, ValueError, EOFError, TypeError):
            return None
        tree: Any = reading.tree
        reading.tree = tree and Tree(**tree)
        return reading

    def keep(self, reading: Reading) -> None:
        """Put a reading in the place of the last."""
        kept = marshal.dumps({**vars(reading), "tree": reading.tree and vars(reading.tree)})
        try:
            with open(self._open("part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:  # noqa: PTH123
                file.write(zlib.crc32(kept).to_bytes(4, "big") + kept)
            os.replace(f"{self._name}.part", f"{self._name}.reading", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:  # a full disk: the next call begins
            return

    def _open(self, kind: str, flags: int) -> int:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in its place does not block
        return os.open(f"{self._name}.{kind}", flags, 0o600, dir_fd=self._folder)


def open_folder() -> int | None:
    """Open the user's folder for readings; None if there is no private one."""
    run, home = os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    temporary = f"/tmp/roundhouse-probe-{os.geteuid()}"  # noqa: S108
    for path in (*([f"{run}/roundhouse-probe"] if run else []), f"{home}/roundhouse-probe", temporary):
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)  # noqa: PTH103
            folder = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        found = os.fstat(folder)
        if found.st_uid == os.geteuid() and not found.st_mode & 0o077 and os.access(path, os.W_OK):
            return folder
        os.close(folder)
    return None


def target_of(url: str, engine: str | None = None, key: str | None = None, limit_s: float = LIMIT_S) -> Target:
    """Return the engine at an address.

    Raises:
        ValueError: no address of a server over HTTP, no engine that is known here, or no limit.
    """
    scheme, _, rest = url.rpartition("://")
    place, _, path = rest.partition("/")
    place = place.rpartition("@")[2]
    bare, end, after = place[1:].partition("]") if place.startswith("[") else place.partition(":")
    number = after.lstrip(":") or ("443" if scheme == "https" else "80")
    is_port = number.isdecimal() and 0 < int(number) < 2**16
    if scheme not in {"", "http", "https"} or not bare or not is_port or place.startswith("[") != (end == "]"):
        raise ValueError(f"{url} is not the address of a server over HTTP")
    if engine not in {None, *ENGINES}:
        raise ValueError(f"{engine} is none of {', '.join(ENGINES)}")
    if not 0 < limit_s < float("inf"):
        raise ValueError("the limit is a number of seconds above 0")
    base = f"/{path.partition('?')[0]}".rstrip("/").removesuffix("/v1")
    given = {"scheme": scheme or "http", "base": base, "engine": engine, "key": key, "limit_s": limit_s}
    return Target(host=bare, port=int(number), **given)


def probe(target: Target, *, is_strict: bool) -> int:
    """Take a reading, print the verdict in a line, and return the exit code."""
    try:
        reading = _take_reading(target)
    except Exception as error:  # noqa: BLE001 - exit code 1 is for a proof alone
        reading = Reading(reason=f"the probe itself failed: {type(error).__name__}: {error}")
    _say(f"{reading.verdict}: {reading.reason}\n")
    if reading.verdict == HANGS:
        return 1
    return 2 if is_strict and reading.verdict != WORKS else 0


def _take_reading(target: Target) -> Reading:
    folder = open_folder()
    file = None if folder is None else ReadingFile(folder, target.name)
    if file is None:
        return examine(target, None, lambda _: None)
    if file.take():
        return examine(target, file.read_last(), file.keep)
    last = file.read_last()
    is_fresh = last is not None and 0 <= time.monotonic() - last.at < target.limit_s
    return Reading(verdict=last.verdict if last and is_fresh else UNSURE, reason="another probe is asking it")


def _say(line: str) -> None:
    """Print a line, if it can be read: Python would end with an exit code of its own."""
    if sys.stdout is None:
        return
    try:
        os.write(1, line.encode(errors="replace"))
    except OSError:
        return


def main(arguments: Sequence[str]) -> int:
    """Probe as the arguments say; wrong ones are exit code 2."""
    try:
        given = _read_arguments(list(arguments))
        key = given.get("--api-key") or os.environ.get("ROUNDHOUSE_PROBE_KEY")
        target = target_of(given["URL"], given.get("--engine"), key, float(given.get("--limit", LIMIT_S)))
    except (ValueError, LookupError) as error:
        sys.stderr.write(f"probe: wrong or missing: {error}\nUsage: {USAGE}\n")
        return 2
    return probe(target, is_strict="--strict" in given)


def _read_arguments(rest: list[str]) -> dict[str, str]:
    given = {}
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in {"--engine", "--api-key", "--limit"}:
            given[name] = value if equals else rest.pop(0)
        elif name == "--strict" or not name.startswith("-"):
            given["--strict" if name == "--strict" else "URL"] = f"{name}{equals}{value}"
        else:
            raise ValueError(f"no option {name}")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
