"""Probes of scripted engines (specification, "Engines of others"): the ways to hang, and those that only seem so."""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer

from service.cli import engine_probe
from service.cli.app import app as command_line
from service.cli.commands.watch_engine import EngineWatch
from service.cli.engine_probe import (
    HANGS,
    UNSURE,
    WORKS,
    Reading,
    ReadingFile,
    Target,
    Tree,
    examine,
    open_folder,
    target_of,
)
from tests.harness.ports import find_ports
from tests.harness.processes import running_program
from tests.harness.waiting import wait_for

LIMIT_S = 0.4
FILE = Path(engine_probe.__file__)
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="awake"}} {awake}.0
vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="weights_offloaded"}} 0.0
vllm:rl_weight_update_operations_in_flight{{engine="0",model_name="m",operation="update"}} {updating}.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 8.0
vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf",model_name="m"}} {count}.0
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {count}.0
vllm:iteration_tokens_total_created{{engine="0",model_name="m"}} 1.7957985848607752e+09
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{engine_type="unified",model_name="m",tp_rank="0"}} {running}.0
sglang:num_queue_reqs{{engine_type="unified",model_name="m",tp_rank="0"}} 0.0
sglang:realtime_tokens_total{{engine_type="unified",mode="prefill_compute",model_name="m",tp_rank="0"}} 2.0
sglang:realtime_tokens_total{{engine_type="unified",mode="decode",model_name="m",tp_rank="0"}} {count}.0
"""
LLAMA = """# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total {count}
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing {running}
"""
SLOTS = [
    {"id": 0, "is_processing": True, "id_task": 3, "n_prompt_tokens_processed": 5, "next_token": [{"n_decoded": 2}]}
]


Page = tuple[int, str]


class Engine(ThreadingHTTPServer):
    """An engine's front end: ``pages`` has for each path a status and a text, or their maker, or None for no answer."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ends = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        models = json.dumps({"data": [{"id": 'a "model"', "owned_by": kind}]})
        self.pages: dict[str, Page | Callable[[], Page] | None] = {
            "/v1/models": (200, models),
            "/v1/completions": (200, "{}"),
        }
        self.key: str | None = None
        self.asked: list[tuple[str, bytes]] = []

    def metrics(self, form: str, count: int = 7, running: int = 0, awake: int = 1, updating: int = 0) -> None:
        text = form.format(count=count, running=running, awake=awake, updating=updating)
        self.pages["/metrics"] = (200, text)

    def count_on(self, form: str) -> None:
        """Count a step at each look."""
        texts = (form.format(count=count, running=1, awake=1, updating=0) for count in itertools.count())
        self.pages["/metrics"] = lambda: (200, next(texts))

    def freeze(self) -> None:
        """Answer no request for tokens."""
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            self.pages[path] = None


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        engine = self.server
        engine.asked.append((self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0))))
        page = engine.pages.get(self.path, (404, ""))
        page = page() if callable(page) else page
        if engine.key and self.headers.get("Authorization") != f"Bearer {engine.key}":
            page = (401, "no key")
        if page is None:
            engine.ends.wait()
            return
        self.send_response(page[0])
        self.end_headers()
        self.wfile.write(page[1].encode())

    do_POST = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(params=["vllm"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(request.param) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ends.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it wait no longer than a scripted engine needs, and see no processes: these are ours."""
    monkeypatch.setattr(engine_probe, "ASK_S", 0.3)
    monkeypatch.setattr(engine_probe, "CANARY_S", 0.25)
    monkeypatch.setattr(engine_probe, "LEAST_INTERVAL_S", 0.01)
    monkeypatch.setattr(engine_probe, "look_at_tree", lambda _port, _known: None)


def examined(engine: Engine, seconds: float = 2 * LIMIT_S, before: Reading | None = None) -> Reading:
    """The first verdict that it hangs, or else the last after this time."""
    target, ends_at = target_of(engine.url, limit_s=LIMIT_S), time.monotonic() + seconds
    while True:
        before = examine(target, before, lambda _: None)
        if before.verdict == HANGS or time.monotonic() > ends_at:
            return before


def frozen_vllm(engine: Engine, running: int) -> None:
    engine.metrics(VLLM, running=running)
    engine.freeze()


def dead_core(engine: Engine) -> None:
    engine.metrics(VLLM)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
        engine.pages[path] = (500, "EngineCore encountered an issue.")
    engine.pages["/health"] = (503, "")


def full_queue(engine: Engine) -> None:
    engine.metrics(VLLM, running=4)
    engine.pages["/v1/completions"] = (429, "")


def frozen_sglang(engine: Engine) -> None:
    engine.metrics(SGLANG, running=2)
    engine.freeze()


def frozen_scheduler(engine: Engine) -> None:
    """SGLang without metrics: its state comes from the scheduler, which answers no more."""
    engine.pages["/get_server_info"] = None
    engine.freeze()


def mute(engine: Engine) -> None:
    """A stopped front end: the kernel takes connections for it."""
    engine.pages = dict.fromkeys(("/metrics", "/slots", "/v1/models", "/health"))


def works_now(target: Target, readings: list[Reading]) -> bool:
    readings.append(examine(target, readings[-1], lambda _: None))
    return readings[-1].verdict == WORKS


HANGING: dict[str, tuple[str, Callable[[Engine], None], str]] = {
    "a worker is frozen under load": ("vllm", lambda e: frozen_vllm(e, 1), "counters stand still"),
    "a worker is frozen while idle": ("vllm", lambda e: frozen_vllm(e, 0), "counters stand still"),
    "the core is dead behind its front end": ("vllm", dead_core, "engine core is dead"),
    "the queue of a hung engine is full": ("vllm", full_queue, "counters stand still"),
    "the front end is stopped": ("vllm", mute, "front end answers nothing"),
    "SGLang's scheduler is frozen": ("sglang", frozen_sglang, "counters stand still"),
    "SGLang's scheduler is frozen, without metrics": ("sglang", frozen_scheduler, "counters stand still"),
}


@pytest.mark.parametrize("way", HANGING)
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_an_engine_that_hangs_is_found(engine: Engine, way: str) -> None:
    """Its own /health says 200 in most of these."""
    kind, hang, proof = HANGING[way]
    healthy: dict[str, Callable[[], None]] = {
        "vllm": lambda: engine.metrics(VLLM),
        "sglang": lambda: engine.metrics(SGLANG),
    }
    healthy[kind]()
    if way.endswith("without metrics"):
        del engine.pages["/metrics"]
        engine.pages["/v1/models"] = (200, '{"data": [{"id": "m", "owned_by": "sglang"}]}')
        engine.pages["/get_server_info"] = (200, '{"internal_states": [{"last_gen_throughput": 4.5}]}')
    target, readings = target_of(engine.url, kind, limit_s=LIMIT_S), [Reading()]
    wait_for(lambda: works_now(target, readings), "the engine works")
    hang(engine)
    began_at = time.monotonic()
    found = examined(engine, 5.0, readings[-1])
    assert found.verdict == HANGS
    assert proof in found.reason
    assert time.monotonic() - began_at < LIMIT_S + 1.5


def test_a_frozen_llama_cpp_is_found_by_its_processes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts batches, so counters that stand still are no proof of their own."""
    engine.metrics(LLAMA, running=1)
    engine.freeze()
    idle = Tree(holders={"7": 1}, cpu={"7": 3.0})
    monkeypatch.setattr(engine_probe, "look_at_tree", lambda _port, _known: idle)
    assert "its processes use no CPU" in examined(engine, 5.0).reason
    monkeypatch.setattr(engine_probe, "look_at_tree", lambda _port, _known: None)
    assert examined(engine).verdict == UNSURE


def test_an_engine_that_is_busy_with_a_long_batch_is_left_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither counters nor canaries show it, but the time of its processes does."""
    engine.metrics(LLAMA, running=1)
    engine.freeze()

    def busy(_port: int, _known: object) -> Tree:
        return Tree(holders={"7": 1}, cpu={"7": time.monotonic()})

    monkeypatch.setattr(engine_probe, "look_at_tree", busy)
    reading = examined(engine)
    assert reading.verdict == WORKS
    assert "it computes with 1.0 cores" in reading.reason


def paused(engine: Engine) -> None:
    frozen_vllm(engine, 1)
    engine.pages["/is_sleeping"] = (200, '{"is_sleeping":true}')


def asleep(engine: Engine) -> None:
    engine.metrics(VLLM, awake=0)
    engine.freeze()


def updating(engine: Engine) -> None:
    engine.metrics(VLLM, running=1, updating=1)
    engine.freeze()


def loading(engine: Engine) -> None:
    engine.pages = dict.fromkeys(("/metrics", "/slots", "/v1/models"), (503, "Loading model"))


def behind_a_proxy(engine: Engine) -> None:
    engine.pages = dict.fromkeys(("/metrics", "/slots", "/v1/models"), (502, "Bad Gateway"))


def without_counters(engine: Engine) -> None:
    engine.freeze()


def with_a_key(engine: Engine) -> None:
    engine.key = "secret"


def sleeping_llama(engine: Engine) -> None:
    engine.metrics(LLAMA)
    engine.freeze()
    engine.pages["/props"] = (200, '{"is_sleeping": true}')


def moving(engine: Engine) -> None:
    engine.count_on(VLLM)
    engine.freeze()


def moving_slots(engine: Engine) -> None:
    slots = (json.dumps([{**SLOTS[0], "n_prompt_tokens_processed": count}]) for count in itertools.count())
    engine.pages["/slots"] = lambda: (200, next(slots))
    engine.freeze()


def embedding(engine: Engine) -> None:
    engine.metrics(VLLM)
    engine.pages["/v1/completions"] = engine.pages["/v1/chat/completions"] = (404, "no such API")
    engine.pages["/v1/embeddings"] = (200, "{}")


SEEMING: dict[str, tuple[Callable[[Engine], None], str]] = {
    "busy, with canaries that wait": (moving, WORKS),
    "busy, by its slots": (moving_slots, WORKS),
    "idle": (lambda e: e.metrics(VLLM), WORKS),
    "idle, and makes vectors": (embedding, WORKS),
    "paused": (paused, UNSURE),
    "asleep": (asleep, UNSURE),
    "asleep until a request wakes it": (sleeping_llama, UNSURE),
    "its weights are updated": (updating, UNSURE),
    "loading": (loading, UNSURE),
    "behind a proxy": (behind_a_proxy, UNSURE),
    "without counters": (without_counters, UNSURE),
    "with a key": (with_a_key, UNSURE),
    "never seen to answer": (mute, UNSURE),
}


@pytest.mark.parametrize("way", SEEMING)
def test_an_engine_that_only_seems_to_hang_is_left_alone(engine: Engine, way: str) -> None:
    """Without a proof the verdict is unknown."""
    prepare, verdict = SEEMING[way]
    prepare(engine)
    reading = examined(engine)
    assert reading.verdict == verdict, reading.reason


def test_a_refusal_is_named_with_its_status(engine: Engine) -> None:
    """An operator sees at once what the engine said to the canary."""
    engine.metrics(VLLM)
    engine.pages |= {"/v1/completions": (429, ""), "/health": (200, "")}
    assert "/v1/completions: HTTP 429" in examined(engine, 0.0).reason


def test_a_canary_names_the_model_and_sends_the_key(engine: Engine) -> None:
    """Some servers refuse a request without either."""
    engine.key = "secret"
    engine.metrics(VLLM)
    examine(target_of(f"{engine.url}/v1", None, "secret"), None, lambda _: None)
    asked = dict(engine.asked)
    assert json.loads(asked["/v1/completions"]) == {"model": 'a "model"', "prompt": "ping", "max_tokens": 1}


def probed(engine: Engine, folder: Path, *options: str, file: Path = FILE) -> subprocess.CompletedProcess[str]:
    """Run the file alone, as an orchestrator does."""
    environment = {"XDG_CACHE_HOME": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    argv = [sys.executable, "-I", "-S", str(file), engine.url, *options]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.system
def test_the_file_runs_alone_and_remembers(engine: Engine, tmp_path: Path) -> None:
    """It is copied to where engines run: no package of ours, a private file, and a verdict over two calls."""
    copied = Path(shutil.copy(FILE, tmp_path / "copied.py"))
    frozen_vllm(engine, 1)
    first = probed(engine, tmp_path, "--limit=0.2", "--strict", file=copied)
    assert (first.returncode, first.stdout.partition(":")[0]) == (1, "hangs") or first.returncode == 2
    second = probed(engine, tmp_path, "--limit", "0.2", file=copied)
    assert second.returncode == 1
    assert second.stdout.startswith("hangs: no sign of life for ")
    assert second.stderr == ""
    kept = tmp_path / "roundhouse-probe"
    assert kept.stat().st_mode & 0o077 == 0
    assert [path.stat().st_mode & 0o077 for path in kept.iterdir()] == [0, 0]
    engine.metrics(VLLM, count=8)
    assert probed(engine, tmp_path, file=copied).stdout == "works: its counters move\n"
    assert not (tmp_path / "copied.pyc").exists()


def test_exit_codes_follow_the_verdict(engine: Engine, tmp_path: Path) -> None:
    """2 is for those who ask for it, and for wrong usage."""
    engine.metrics(VLLM)
    assert probed(engine, tmp_path, "--strict").returncode == 0
    with_a_key(engine)
    doubtful = probed(engine, tmp_path)
    assert (doubtful.returncode, doubtful.stdout) == (0, "unknown: the key is refused (HTTP 401)\n")
    assert probed(engine, tmp_path, "--strict").returncode == 2
    assert probed(engine, tmp_path, "--api-key", "secret", "--strict").returncode == 0
    for wrong in (["--limit", "0"], ["--limit"], ["--engine", "tgi"], ["--odd"]):
        refused = probed(engine, tmp_path, *wrong)
        assert refused.returncode == 2
        assert "Usage: probe URL" in refused.stderr
    assert "secret" not in "".join(path.read_text("latin1") for path in (tmp_path / "roundhouse-probe").iterdir())


def test_a_file_that_is_not_ours_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a folder that others may write to, nor a link in its place or in the place of a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (tmp_path / "cache").mkdir()
    folder = tmp_path / "cache" / "roundhouse-probe"
    folder.symlink_to(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert open_folder() is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder.unlink()
    opened = open_folder()
    assert opened is not None
    memory = ReadingFile(opened, "a")
    secret = tmp_path / "secret"
    secret.write_text("kept")
    (folder / "a.part").symlink_to(secret)
    memory.keep(Reading(at=1.0))
    assert (secret.read_text(), memory.read_last()) == ("kept", None)
    (folder / "a.part").unlink()
    memory.keep(Reading(at=1.0, tree=Tree(holders={"1": 2}, cpu={"1": 0.5})))
    kept = memory.read_last()
    assert kept is not None and kept.tree is not None and kept.tree.cpu == {"1": 0.5}  # noqa: PT018
    (folder / "a.reading").write_bytes(b"\0" * 200)
    assert memory.read_last() is None
    folder.chmod(0o770)
    assert open_folder() != opened


@pytest.mark.system
@pytest.mark.parametrize(
    "trouble",
    ["a folder for the lock", "a link for the lock", "a pipe for the reading", "a full disk", "no standard output"],
)
def test_a_failure_of_its_own_is_no_proof(engine: Engine, tmp_path: Path, trouble: str) -> None:
    """Exit code 1 ends an engine: neither a missing reader of its line nor odd files in its folder may cause it."""
    engine.metrics(VLLM)
    assert probed(engine, tmp_path).returncode == 0
    (lock,) = (tmp_path / "roundhouse-probe").glob("*.lock")
    lock.unlink()
    reading = lock.with_suffix(".reading")
    if trouble == "a folder for the lock":
        lock.mkdir()
    elif trouble == "a link for the lock":
        lock.symlink_to(tmp_path / "elsewhere")
    elif trouble == "a pipe for the reading":
        reading.unlink()
        os.mkfifo(reading)
    to = {"a full disk": ">/dev/full", "no standard output": ">&-"}.get(trouble, "")
    frozen_vllm(engine, 1)
    command = f"exec {sys.executable} -I -S {FILE} {engine.url} {to}"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["/bin/sh", "-c", command], env=environment, timeout=30, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_counts_of_half_an_answer_are_none(engine: Engine) -> None:
    """More than 4 MiB is cut off somewhere: other sums would look like progress. So would NaN, which equals nothing."""
    many = "".join(f'vllm:generation_tokens_total{{engine="{number}"}} 1\n' for number in range(110_000))
    engine.freeze()
    for text in (many, "vllm:generation_tokens_total NaN\n"):
        engine.pages["/metrics"] = (200, text)
        kept: list[Reading] = []
        for _ in range(2):
            examine(target_of(engine.url), kept[-1] if kept else None, kept.append)
        assert "counters move" not in kept[-1].reason, kept[-1]


def test_two_probes_at_once_ask_once(engine: Engine, tmp_path: Path) -> None:
    """The second gives the first one's last verdict."""
    engine.metrics(VLLM)
    assert probed(engine, tmp_path).stdout == "works: it answers a canary\n"
    (lock,) = (tmp_path / "roundhouse-probe").glob("*.lock")
    asked = len(engine.asked)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert probed(engine, tmp_path).stdout == "works: another probe is asking it\n"
    assert len(engine.asked) == asked


def test_a_probe_that_is_killed_while_a_canary_waits_leaves_its_reading(engine: Engine) -> None:
    """An orchestrator's own limit may be shorter than ours; the silence counts all the same."""
    frozen_vllm(engine, 1)
    kept: list[Reading] = []
    examine(target_of(engine.url), None, kept.append)
    assert len(kept) == 2
    assert (kept[0].verdict, kept[0].owed_since) == (UNSURE, kept[1].owed_since)


def test_the_command_and_the_file_have_the_same_options() -> None:
    """The command reads them before it imports anything; --help is the other commands'."""
    group = typer.main.get_command(command_line)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.get_command(typer.Context(group, **group.context_settings), "probe")
    assert command is not None
    options = {option for each in command.params for option in each.opts if option.startswith("--")}
    assert options - {"--help"} == {
        word for word in engine_probe.USAGE.replace("[", "").replace("]", "").split() if word[:2] == "--"
    }


def test_the_command_imports_nothing_but_the_file() -> None:
    """A call each 10 s may cost half a percent of a core."""
    code = (
        "import sys; before = set(sys.modules); from service.cli.main import main; sys.argv = ['roundhouse', 'probe', "
        "'127.0.0.1:1']\ntry:\n    main()\nexcept SystemExit:\n    print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(FILE.parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert {"typing", "re", "socket", "json", "argparse", "typer", "workers"} & imported == set()
    assert len(imported) < 30


@pytest.mark.system
def test_the_watch_serves_the_verdict(engine: Engine) -> None:
    """A sidecar's probes are plain GETs."""
    engine.metrics(VLLM)
    port = find_ports(1)
    argv = [sys.executable, "-m", "service.cli.main", "watch-engine", engine.url, "--port", str(port), "--limit", "0.3"]
    served = target_of(f"http://127.0.0.1:{port}")

    def status(path: str) -> int:
        return engine_probe.ask(served, path, 1.0, engine_probe.Look()).status

    with running_program(argv):
        wait_for(lambda: status("/ready") == 200, "the engine works")
        assert status("/live") == 200
        frozen_vllm(engine, 1)
        wait_for(lambda: status("/live") == 503, "the engine hangs")
        assert status("/ready") == 503
        text = engine_probe.ask(served, "/metrics", 1.0, engine_probe.Look()).body.decode()
        assert 'roundhouse_probe_verdict{verdict="hangs"} 1' in text
        engine.metrics(VLLM, count=9)
        wait_for(lambda: status("/live") == 200, "the engine works again")


def test_the_watch_is_live_and_not_ready_before_its_first_reading() -> None:
    """An orchestrator must not kill for what is not known yet."""
    watch = EngineWatch(target_of("127.0.0.1:1"))
    assert [watch.answer(path)[0] for path in ("/live", "/ready", "/metrics", "/")] == [200, 503, 200, 404]
