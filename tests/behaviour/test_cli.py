"""The command line (specification, "Commands" and "Exit codes"): effects, output and exit codes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.harness.service import (
    ROUNDHOUSE,
    Document,
    Service,
    asked_for,
    check_debate,
    debate,
    recorded,
    run_command,
    scripted_model,
    serving,
)
from tests.harness.waiting import LIMIT_S, is_alive, wait_for


@pytest.fixture
def folder(tmp_path: Path, free_ports: Callable[[int], int]) -> Path:
    """A user's folder with a configuration of one scripted model."""
    write_config(tmp_path, {"m": scripted_model(free_ports(1))})
    return tmp_path


def write_config(folder: Path, models: Document, **more: object) -> None:
    server = {"state_dir": str(folder / "state")}
    (folder / "roundhouse.yaml").write_text(yaml.safe_dump({"server": server, "models": models, **more}))


def write_job(folder: Path, job: Document, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(job) if name.endswith(".yaml") else json.dumps(job))
    return str(path)


def only_lines(done: subprocess.CompletedProcess[str], code: int, *texts: str) -> None:
    """An error is a few plain lines that name the place and the fix."""
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    for text in texts:
        assert text in done.stderr, done.stderr


OFFLINE = {"PIP_NO_INDEX": "1"}  # so the made model stands in


def assert_nothing_is_left(folder: Path) -> None:
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if f"{folder}/roundhouse-demo-" in command]
    assert not list(folder.glob("roundhouse-demo-*"))


@pytest.mark.system
def test_the_demo_kills_an_engine_calls_a_tool_and_leaves_nothing(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The built-in debate on two embedded engines, exit 0, no process left."""
    ports = ("--port", str(free_ports(2)), "--http-port", str(free_ports(1)))
    environment = {**OFFLINE, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_command("demo", *ports, folder=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "the small model cannot be fetched, so a generated one stands in" in done.stderr
    assert f"Watch it in a browser: http://127.0.0.1:{ports[-1]}" in done.stdout
    assert re.search(
        r"\*\*\* small-[01]: its engine is killed \(SIGKILL to process \d+\) with [12] turns?", done.stdout
    )
    assert "runs again: engine_died" in done.stdout
    assert re.search(r"\*\*\* small-[01]: engine 2 is ready, ", done.stdout)
    assert re.search(r"demo: completed, 24 turns, [12] of them twice", done.stdout)
    assert re.search(r'clerk calls look_up\(\{"town": "\w+"\}\) and gets \{.*"inhabitants": \d+\}', done.stdout)
    assert "census: completed, 1 turn\n" in done.stdout
    assert "One of your own: roundhouse init" in done.stdout.splitlines()[-1]
    assert_nothing_is_left(tmp_path)


@pytest.mark.system
def test_a_demo_whose_engine_cannot_start_ends(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Another program has its port: exit 4, and no service is left running unseen."""
    environment = {**OFFLINE, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port)):
        ports = ("--port", str(port), "--http-port", str(free_ports(1)))
        done = run_command("demo", *ports, folder=tmp_path, **environment)
    only_lines(done, 4, "small-0")
    assert_nothing_is_left(tmp_path)


@pytest.mark.system
def test_the_demo_stays_until_a_person_stops_it(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """With --open the dashboard shows the debate after its end; Ctrl-C stops everything."""
    port = free_ports(1)
    environment = {**os.environ, **OFFLINE, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [ROUNDHOUSE, "demo", "--open", "--port", str(free_ports(2)), "--http-port", str(port)]
    with (tmp_path / "told").open("wb") as told:
        demo = subprocess.Popen(command, stdout=told, stderr=told, env=environment, cwd=tmp_path)
    try:
        wait_for(lambda: "The service runs at" in (tmp_path / "told").read_text(), "the demo stays", 120)
        jobs = httpx.get(f"http://127.0.0.1:{port}/v1/jobs", trust_env=False).json()["jobs"]
        assert {(job["name"], job["state"]) for job in jobs} == {("demo", "completed"), ("census", "completed")}
        assert "Roundhouse" in httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).text
    finally:
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0, (tmp_path / "told").read_text()
    assert_nothing_is_left(tmp_path)


def test_run_writes_transcripts_a_manifest_and_an_index(folder: Path) -> None:
    """DIR/<job name>/transcripts/<conversation id>.json, manifest.json, index.jsonl."""
    job = write_job(folder, debate(conversations=3, rounds=2))
    done = run_command("run", job, "--config", str(folder / "roundhouse.yaml"), "--output", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    written = folder / "out" / "debate"
    for name in ("q0", "q1", "q2"):
        check_debate(json.loads((written / "transcripts" / f"{name}.json").read_text()), rounds=2)
    manifest = json.loads((written / "manifest.json").read_text())
    assert manifest["state"] == "completed"
    assert manifest["conversations"] == {name: {"state": "completed", "reason": None} for name in ("q0", "q1", "q2")}
    index = [json.loads(line) for line in (written / "index.jsonl").read_text().splitlines()]
    assert sorted((entry["id"], entry["turns"]) for entry in index) == [("q0", 6), ("q1", 6), ("q2", 6)]
    assert all((written / entry["file"]).is_file() for entry in index)


@pytest.mark.system
def test_run_continues_where_it_stopped(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Killed in the middle and run again on the same output, it repeats no ended turn and no finished job."""
    record = tmp_path / "record.jsonl"
    write_config(tmp_path, {"m": scripted_model(free_ports(1), record=str(record), interval=0.03)})
    job = write_job(tmp_path, debate(conversations=5, rounds=2), "job.json")
    arguments = ["run", job, "--config", str(tmp_path / "roundhouse.yaml"), "--output", str(tmp_path / "out")]
    first = subprocess.Popen([ROUNDHOUSE, *arguments], stdout=subprocess.DEVNULL)
    index = tmp_path / "out/debate/index.jsonl"
    wait_for(lambda: index.exists() and "\n" in index.read_text(), "some transcripts have been written")
    tree = [child.pid for child in psutil.Process(first.pid).children(recursive=True)]
    first.kill()
    first.wait(LIMIT_S)
    wait_for(lambda: not any(map(is_alive, tree)), "no engine is alive", limit_s=1.0)
    before, written = len(recorded(record)), {json.loads(line)["id"] for line in index.read_text().splitlines()}
    second = run_command(*arguments)
    assert second.returncode == 0, second.stderr
    for number in range(5):
        check_debate(json.loads((tmp_path / "out/debate/transcripts" / f"q{number}.json").read_text()), rounds=2)
    asked = list(map(asked_for, recorded(record)))
    assert len(set(asked)) == 30
    assert not written & {talk for talk, _, _ in asked[before:]}
    count = len(asked)
    assert count < before + 30
    third = run_command(*arguments)
    assert (third.returncode, len(recorded(record))) == (0, count)


@pytest.mark.system
def test_run_continues_a_job_of_its_own_output(folder: Path) -> None:
    """It knows those jobs by their ids, but not the jobs of another folder."""
    common = ("--config", str(folder / "roundhouse.yaml"), "--output")
    first = run_command("run", write_job(folder, debate(rounds=1)), *common, str(folder / "out"))
    assert first.returncode == 0, first.stderr
    source = json.loads((folder / "out" / "debate" / "manifest.json").read_text())["id"]
    heir = {
        **debate(rounds=2),
        "name": "longer",
        "conversations": [{"id": "q0", "from": {"job": source, "conversation": "q0"}}],
    }
    job = write_job(folder, heir, "longer.yaml")
    second = run_command("run", job, *common, str(folder / "out"))
    assert second.returncode == 0, second.stderr
    (transcript,) = (folder / "out" / "longer" / "transcripts").glob("*.json")
    turns = json.loads(transcript.read_text())["turns"]
    assert [turn["inherited"] is not None for turn in turns] == [True] * 3 + [False] * 3
    by_name = {
        **heir,
        "name": "named",
        "conversations": [{"id": "q0", "from": {"job": "debate", "conversation": "q0"}}],
    }
    named = run_command("run", write_job(folder, by_name, "named.yaml"), *common, str(folder / "out"))
    assert (named.returncode, f"the id of the job named 'debate' is {source}" in named.stderr) == (2, True), named
    elsewhere = run_command("run", job, *common, str(folder / "elsewhere"))
    only_lines(elsewhere, 2, f"longer.yaml: from: job {source} does not exist")
    heir["conversations"][0]["from"]["rounds"] = 7
    refused = run_command("run", write_job(folder, {**heir, "name": "x"}, "x.yaml"), *common, str(folder / "out"))
    only_lines(refused, 2, "x.yaml: conversations[0].from.rounds: 1 rounds are recorded")


@pytest.mark.system
def test_run_runs_only_the_job_it_is_given(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """An interrupted job of the same output is left alone; a changed job of the same name deletes no transcripts."""
    record = tmp_path / "record.jsonl"
    write_config(tmp_path, {"m": scripted_model(free_ports(1), record=str(record), interval=0.02)})
    arguments = ["--config", str(tmp_path / "roundhouse.yaml"), "--output", str(tmp_path / "out")]
    first = subprocess.Popen(
        [ROUNDHOUSE, "run", write_job(tmp_path, debate(conversations=9, name="one"), "one.yaml"), *arguments],
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: record.exists() and len(recorded(record)) >= 3, "some turns have been run")
    first.send_signal(signal.SIGINT)
    assert first.wait(LIMIT_S) == 130
    count = len(recorded(record))
    assert run_command("run", write_job(tmp_path, debate(name="two"), "two.yaml"), *arguments).returncode == 0
    assert len(recorded(record)) == count + 3
    changed = write_job(tmp_path, debate(conversations=2, name="two"), "two.yaml")
    (tmp_path / "out/two/transcripts/old.json").write_text("{}")
    refused = run_command("run", changed, *arguments)
    only_lines(refused, 2, "holds the transcripts of another job named 'two'", "give --output another folder")
    assert sorted(path.name for path in (tmp_path / "out/two/transcripts").iterdir()) == ["old.json", "q0.json"]
    assert run_command("run", changed, *arguments[:-1], str(tmp_path / "other")).returncode == 0
    assert sorted(path.name for path in (tmp_path / "other/two/transcripts").iterdir()) == ["q0.json", "q1.json"]


def test_a_failed_job_exits_with_1(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """0 done; 1 the job failed or ended with failures."""
    model = scripted_model(free_ports(1), reject=400, reject_body='{"error": {"message": "no such thing"}}')
    write_config(tmp_path, {"m": model})
    job = write_job(tmp_path, debate())
    done = run_command("run", job, "--config", str(tmp_path / "roundhouse.yaml"), "--output", str(tmp_path / "out"))
    assert done.returncode == 1, done
    transcript = json.loads((tmp_path / "out/debate/transcripts/q0.json").read_text())
    assert (transcript["state"], transcript["reason"]) == ("failed", "engine_rejected")


@pytest.mark.system
@pytest.mark.parametrize("when", ["at once", "later"])
def test_an_engine_that_cannot_be_started_exits_with_4(
    tmp_path: Path, free_ports: Callable[[int], int], when: str
) -> None:
    """Its last log lines are in the message; a run never hangs on an engine that has given up."""
    marker = tmp_path / "died"
    flags: Document = {"exit_at_once": 3} if when == "at once" else {"die_after": 1, "exit_if": str(marker)}
    if when == "later":
        flags["die_once"] = str(marker)
    model = scripted_model(free_ports(1), **flags)
    model["restart"] = {"initial_s": 0.05, "failures": 3}
    write_config(tmp_path, {"m": model})
    job = write_job(tmp_path, debate())
    done = run_command("run", job, "--config", str(tmp_path / "roundhouse.yaml"), "--output", str(tmp_path / "out"))
    only_lines(done, 4, "worker m-0", "cannot allocate the universe")


@pytest.mark.system
def test_a_port_in_use_is_reported(tmp_path: Path, folder: Path) -> None:
    """The service's port is named with its place; ``run`` picks another port for an engine that only it uses."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        only_lines(
            run_command("serve", "--config", str(folder / "roundhouse.yaml"), "--port", str(port)),
            2,
            f"cannot listen on 127.0.0.1:{port}: Address already in use",
            "--port or server.port",
        )
        write_config(folder, {"m": scripted_model(port)})
        job = write_job(folder, debate())
        done = run_command("run", job, "--config", str(folder / "roundhouse.yaml"), "--output", str(tmp_path / "out"))
        only_lines(done, 0, f"port {port} is taken")


@pytest.mark.parametrize("command", ["check", "serve"])
def test_an_unusable_configuration_exits_with_2(tmp_path: Path, command: str) -> None:
    """Errors name the file, the line or field, and the fix, before anything is started."""
    (tmp_path / "roundhouse.yaml").write_text("models:\n  m:\n    engine: embedded\n    slot: 2")
    done = run_command(command, "--config", "roundhouse.yaml", folder=tmp_path)
    only_lines(done, 2, "roundhouse.yaml:4: models.m.slot: unknown key 'slot'; did you mean 'slots'?")


def test_check_prints_the_effective_configuration_without_secrets(tmp_path: Path) -> None:
    """Variables are filled in, defaults are shown, secrets are masked; values keep the types of the text."""
    (tmp_path / "roundhouse.yaml").write_text(
        "server: {port: '${PORT:-8123}', api_keys: ['${KEY}']}\n"
        "models:\n  m:\n    engine: embedded\n    slots: ${SLOTS}\n"
        "    env:\n      HF_TOKEN: hidden\n      LANG: ${LANGUAGE}\n      N: 5\n"
        "    params:\n      temperature: ${HEAT:-0.5}\n      stop: ['${HEAT:-0.5}']\n"
    )
    done = run_command(
        "check", "-c", str(tmp_path / "roundhouse.yaml"), KEY="0123", SLOTS="3", LANGUAGE="no", ROUNDHOUSE_STATEDIR="x"
    )
    assert done.returncode == 0, done.stderr
    assert "unknown variable 'ROUNDHOUSE_STATEDIR'; did you mean 'ROUNDHOUSE_STATE_DIR'?" in done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["server"]["api_keys"] == ["********"]
    assert (shown["server"]["port"], shown["server"]["drain_s"]) == (8123, 30.0)
    model = shown["models"]["m"]
    assert (model["slots"], model["env"]) == (3, {"HF_TOKEN": "********", "LANG": "no", "N": "5"})
    assert model["params"] == {"temperature": 0.5, "stop": ["0.5"]}
    assert "hidden" not in done.stdout
    assert "0123" not in done.stdout


def test_check_reads_the_variables_that_serve_reads(tmp_path: Path) -> None:
    """Serve must not refuse a configuration that check accepts."""
    (tmp_path / "roundhouse.yaml").write_text("models:\n  m:\n    engine: embedded\n")
    refused = run_command("check", folder=tmp_path, ROUNDHOUSE_HOST="0.0.0.0")
    only_lines(refused, 2, "host 0.0.0.0 is reachable from outside")
    shown = run_command("check", folder=tmp_path, ROUNDHOUSE_PORT="8765", ROUNDHOUSE_HOST="localhost").stdout
    server = yaml.safe_load(shown)["server"]
    assert (server["port"], server["host"]) == (8765, "localhost")


@pytest.mark.system
def test_wrong_usage_exits_with_2(folder: Path) -> None:
    """A missing file, a missing option, or an unknown command."""
    only_lines(
        run_command("run", "gone.yaml", "--config", "roundhouse.yaml", folder=folder),
        2,
        "gone.yaml: there is no such file",
    )
    only_lines(run_command("serve", "--config", "gone.yaml", folder=folder), 2, "gone.yaml: there is no such file")
    only_lines(run_command("serve"), 2, "--config")
    only_lines(run_command("dance"), 2, "dance")


@pytest.mark.system
def test_an_unreachable_service_exits_with_3(free_ports: Callable[[int], int], folder: Path) -> None:
    """3: not reachable, or refused."""
    url = f"http://127.0.0.1:{free_ports(1)}"
    for command in (["status"], ["workers"], ["result", "x"], ["submit", write_job(folder, debate())]):
        only_lines(run_command(*command, "--url", url), 3, f"no service at {url}", "roundhouse serve")
    only_lines(run_command("status", ROUNDHOUSE_URL="http://[::1"), 3, "http://[::1")
    only_lines(run_command("status", "--url", "127.0.0.1:8080"), 3, "127.0.0.1:8080", "http://")


def test_output_in_a_missing_folder_exits_with_2(tmp_path: Path) -> None:
    """A mistyped folder is not created, and no request is made whose result could not be kept."""
    page = tmp_path / "nowhere" / "page.html"
    only_lines(run_command("timeline", "job-1", "-o", str(page)), 2, f"there is no folder {page.parent}")
    assert not page.parent.exists()


INTERRUPTED = """
import os, signal, sys
from service.cli.main import main

class Early:
    def find_spec(self, name, *_):
        if name == "service.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Early())
main()
"""


def test_ctrl_c_during_the_imports_exits_with_130() -> None:
    """Without output: nothing has begun."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    ignored = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{INTERRUPTED}"  # as behind a shell's &
    command = [sys.executable, "-c", ignored, "version"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    models = {"m": scripted_model(free_ports(1)), "slow": scripted_model(free_ports(1), tokens=9999, interval=0.01)}
    with serving(tmp_path_factory.mktemp("cli"), free_ports(1), models, {"api_keys": ["secret"]}) as running:
        yield running


class TestRemote:
    def ask(self, service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command(*arguments, ROUNDHOUSE_URL=service.url, ROUNDHOUSE_API_KEY="secret")

    @pytest.mark.system
    def test_a_job_is_submitted_followed_and_read(self, service: Service, tmp_path: Path) -> None:
        """Submit --wait, status, result and watch do over HTTP what run does."""
        emoji = debate(conversations=2, metadata={"face": "\U0001f600", "day": "2024-01-01"})
        job = write_job(tmp_path, emoji, "job.json")
        done = self.ask(service, "submit", job, "--wait")
        assert re.fullmatch(r"job-\w+\n", done.stdout)  # for scripts
        assert done.returncode == 0, done.stderr
        job_id = done.stdout.strip()
        assert done.stderr.rstrip().endswith("debate: completed")
        assert "debate: 6/6 turns, 2/2 conversations, 0 in flight, 0 ready" in done.stderr
        each = self.ask(service, "submit", job, "--wait", "--verbose").stderr
        assert "q0 round 0 m: completed on m-0" in each
        assert each.rstrip().endswith("job: completed")
        told = self.ask(service, "submit", job, "--wait", "--json").stdout.splitlines()
        assert [json.loads(line)["state"] for line in told] == ["queued", "completed"]
        shown = json.loads(self.ask(service, "status", job_id, "--json").stdout)
        assert (shown["id"], shown["state"], shown["metadata"]["face"]) == (job_id, "completed", "\U0001f600")
        assert job_id in self.ask(service, "status").stdout
        result = self.ask(service, "result", job_id, "--json")
        for transcript in json.loads(result.stdout)["conversations"]:
            check_debate(transcript, rounds=1)
        assert "[round 0] m" in self.ask(service, "result", job_id).stdout
        watched = [json.loads(line) for line in self.ask(service, "watch", job_id, "--json").stdout.splitlines()]
        assert (watched[0]["event"], watched[-1]["event"]) == ("job", "end")

    @pytest.mark.system
    def test_a_job_is_cancelled(self, service: Service, tmp_path: Path) -> None:
        """cancel, and a watch that ends with failures exits with 1."""
        job_id = self.ask(service, "submit", write_job(tmp_path, debate(model="slow"))).stdout.strip()
        assert self.ask(service, "result", job_id).returncode == 3
        told = self.ask(service, "cancel", job_id).stdout
        assert told in {f"{job_id}: running, to be cancelled\n", f"{job_id}: cancelled\n"}
        watched = self.ask(service, "watch", job_id)
        assert (watched.returncode, watched.stdout.rstrip()[-14:]) == (1, "job: cancelled")
        again = self.ask(service, "cancel", job_id)
        assert (again.returncode, again.stdout) == (0, f"{job_id}: cancelled, nothing to cancel\n")

    @pytest.mark.system
    def test_workers_and_logs_are_shown(self, service: Service) -> None:
        """The commands print them for people and for machines."""
        assert "m-0" in self.ask(service, "workers").stdout
        assert len(json.loads(self.ask(service, "workers", "--json").stdout)["workers"]) == 2
        assert "scripted engine: listening" in self.ask(service, "logs", "m-0").stdout
        only_lines(self.ask(service, "logs", "none"), 3, "worker none does not exist")

    def test_logs_are_followed(self, service: Service) -> None:
        """With -f, logs continues with new lines."""
        environment = {**os.environ, "ROUNDHOUSE_URL": service.url, "ROUNDHOUSE_API_KEY": "secret"}
        follower = subprocess.Popen([ROUNDHOUSE, "logs", "slow-0", "-f"], stdout=subprocess.PIPE, env=environment)
        try:
            assert follower.stdout is not None
            lines = iter(follower.stdout.readline, b"")
            assert any(b"listening" in line for line in lines)
            pid = service.get("/v1/workers/slow-0")["pid"]
            os.kill(pid, signal.SIGKILL)
            assert any(b"[roundhouse] ready -> backoff: the engine was killed by SIGKILL" in line for line in lines)
            assert any(b"listening" in line for line in lines)
        finally:
            follower.send_signal(signal.SIGINT)
            follower.communicate(timeout=LIMIT_S)
        assert follower.returncode == 130

    @pytest.mark.system
    def test_refusals_are_reported(self, service: Service, tmp_path: Path) -> None:
        """A wrong key and an unknown job are refusals; a bad job is a fault of the file."""
        wrong = run_command("status", ROUNDHOUSE_URL=service.url, ROUNDHOUSE_API_KEY="wrong")
        only_lines(wrong, 3, "api_keys")
        only_lines(self.ask(service, "status", "none"), 3, "job none does not exist")
        bad = write_job(tmp_path, debate(model="gone"))
        only_lines(self.ask(service, "submit", bad), 2, "agents[0].model: unknown model 'gone'")


def test_the_version_is_printed() -> None:
    """The command is installed under its name."""
    assert run_command("version").stdout.strip() == "1.0.0"
