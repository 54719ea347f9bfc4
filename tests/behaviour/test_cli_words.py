"""The output of commands: causes instead of counts, awaited turns, workers that are down, tables for later analysis."""

import csv
import io
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.harness.ports import find_ports
from tests.harness.service import ROUNDHOUSE, Document, Service, debate, run_command, scripted_model, serving
from tests.harness.terminal import END, Terminal
from tests.harness.waiting import LIMIT_S, wait_for

REFUSAL = '{"error": {"message": "no such thing"}}'
GUEST: list[Document] = [
    {"id": "ann", "model": "m", "system": "SAY-ann"},
    {"id": "guest", "by": "caller", "speak_after_within_round": ["ann"]},
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """A service with a model that answers, one that refuses all requests, and one whose server is away."""
    folder = tmp_path_factory.mktemp("words")
    models: Document = {
        "m": scripted_model(free_ports(1), echo=r"SAY-\w+"),
        "refuses": scripted_model(free_ports(1), reject=400, reject_body=REFUSAL),
        "gone": {"engine": "attached", "url": f"http://127.0.0.1:{free_ports(1)}/v1", "slots": 1},
    }
    with serving(folder, free_ports(1), models, {"heartbeat_s": 0.2}, ready=False) as running:
        wait_for(lambda: running.get("/v1/workers/m-0")["state"] == "ready", "the first is ready")
        yield running


@pytest.fixture
def awaited(service: Service) -> str:
    """A job of two conversations, each of which waits for a person."""
    conversations = [{"id": name, "prompt": f"Of {name}."} for name in ("cars", "tea")]
    job_id = service.post_job({"name": "talk", "agents": GUEST, "rounds": 1, "conversations": conversations})
    wait_for(lambda: len(service.get(f"/v1/jobs/{job_id}/awaited")["awaited"]) == 2, "both are awaited")
    return job_id


@pytest.fixture(scope="module")
def ended(service: Service) -> str:
    job_id = service.post_job(debate(conversations=2))
    service.wait_ended(job_id)
    return job_id


def ask(service: Service, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, stdin=stdin, ROUNDHOUSE_URL=service.url)


class TestCallers:
    def test_say_to_an_unknown_conversation_names_the_cause(self, service: Service, awaited: str) -> None:
        """The error is the unknown conversation, not that it has no awaited turn."""
        done = ask(service, "say", awaited, "zzz", "hi")
        assert done.returncode != 0
        assert "zzz" in done.stderr
        assert "has no conversation zzz" in done.stderr
        assert "nobody" not in done.stderr

    def test_say_for_an_agent_of_a_model_is_refused(self, service: Service, awaited: str) -> None:
        """Callers do not speak for it."""
        done = ask(service, "say", awaited, "cars", "hi", "--agent", "ann")
        assert done.returncode != 0
        assert "ann" in done.stderr
        assert "spoken by a model" in done.stderr

    def test_say_for_an_unknown_agent_lists_the_agents(self, service: Service, awaited: str) -> None:
        """A typing error is shown beside the right name."""
        done = ask(service, "say", awaited, "cars", "hi", "--agent", "gest")
        assert done.returncode != 0
        assert "no agent gest" in done.stderr
        assert "guest" in done.stderr

    def test_say_for_another_round_names_the_awaited_one(self, service: Service, awaited: str) -> None:
        """The agent is awaited, so "no turn is awaited" would be wrong."""
        done = ask(service, "say", awaited, "cars", "hi", "--round", "3")
        assert (done.returncode, "guest in round 0" in done.stderr) == (2, True), done.stderr

    def test_the_same_words_again_change_nothing(self, service: Service, awaited: str) -> None:
        """An interrupted script sends them again; other words get an error with the awaited turn."""
        for _ in range(2):
            done = ask(service, "say", awaited, "tea", "With milk.", "--round", "0")
            assert (done.returncode, "guest has spoken in round 0" in done.stdout) == (0, True), done
        done = ask(service, "say", awaited, "tea", "With lemon.", "--round", "0")
        assert (done.returncode, "awaits no caller" in done.stderr) == (2, True), done.stderr

    @pytest.mark.parametrize("text", ["", " \t\n "])
    def test_an_empty_text_is_refused(self, service: Service, awaited: str, text: str) -> None:
        """Words cannot be taken back, and an empty variable of a script would speak nothing."""
        for arguments, stdin in ((["say", awaited, "cars", text], ""), (["say", awaited, "cars", "-"], text)):
            done = ask(service, *arguments, stdin=stdin)
            assert (done.returncode, "empty" in done.stderr) == (2, True), done
        assert len(service.get(f"/v1/jobs/{awaited}/awaited")["awaited"]) == 2

    def test_awaited_turns_are_listed_with_the_last_words(self, service: Service, awaited: str) -> None:
        """The answering person sees the question; the oldest turn comes first, turns of one moment by name."""
        done = ask(service, "awaited", awaited)
        lines = [line for line in done.stdout.splitlines() if "guest" in line]
        told = json.loads(ask(service, "awaited", awaited, "--json").stdout)["awaited"]
        oldest_first = sorted((each["since"], each["conversation"]) for each in told)
        assert [name for line in lines for name in ("cars", "tea") if name in line] == [
            name for _, name in oldest_first
        ]
        assert all("SAY-ann" in line for line in lines), done.stdout


class TestCounts:
    def test_status_counts_ended_conversations_as_the_dashboard_does(self, service: Service) -> None:
        """Failed ones have ended too, and are counted beside it."""
        job_id = service.post_job(debate(conversations=3, model="refuses"))
        service.wait_ended(job_id)
        (line,) = [line for line in ask(service, "status", job_id).stdout.splitlines() if job_id in line]
        assert "0/3" not in line
        assert "3/3" in line
        assert "3 failed" in line
        assert "9/9" in line
        lines = ask(service, "status").stdout.splitlines()
        (listed,) = [each for each in lines if job_id in each]
        assert listed.split() == line.split()

    def test_a_line_of_progress_counts_failed_conversations_as_ended(self, service: Service, tmp_path: Path) -> None:
        """``submit --wait`` ends with all of them, not with none."""
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(debate(conversations=2, model="refuses")))
        done = ask(service, "submit", str(tmp_path / "job.yaml"), "--wait")
        assert (done.returncode, "2/2 conversations, 2 failed" in done.stderr) == (1, True), done.stderr


class TestTables:
    @pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
    def test_result_has_the_formats_of_the_service(self, service: Service, ended: str, form: str) -> None:
        """The same bytes as over HTTP, so that curl is not needed."""
        done = ask(service, "result", ended, "--format", form)
        assert done.returncode == 0, done.stderr
        over_http = service.http.get(f"/v1/jobs/{ended}/result", params={"format": form}).text
        if form == "json":
            assert json.loads(done.stdout) == json.loads(over_http)
        else:
            assert done.stdout.splitlines() == over_http.splitlines()

    def test_an_unknown_format_is_refused(self, service: Service, ended: str) -> None:
        """The error lists the formats."""
        done = ask(service, "result", ended, "--format", "xlsx")
        assert done.returncode == 2
        assert all(form in done.stderr for form in ("json", "jsonl", "csv"))

    @pytest.mark.system
    def test_a_result_of_a_failed_job_exits_with_1_in_every_format(self, service: Service) -> None:
        """Like a result without a format."""
        job_id = service.post_job(debate(model="refuses"))
        service.wait_ended(job_id)
        for form in ("json", "jsonl", "csv"):
            done = ask(service, "result", job_id, "--format", form)
            assert (done.returncode, bool(done.stdout)) == (1, True), done

    @pytest.mark.system
    @pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
    def test_run_writes_a_table_beside_its_transcripts(
        self, tmp_path: Path, free_ports: Callable[[int], int], form: str
    ) -> None:
        """The table has all conversations of the job, also after another run."""
        models = {"m": scripted_model(free_ports(1))}
        config: Document = {"server": {"state_dir": "state"}, "models": models}
        (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump(config))
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(debate(conversations=2)))
        for _ in range(2):
            done = run_command("run", "job.yaml", "--format", form, folder=tmp_path)
            assert done.returncode == 0, done.stderr
            (table,) = (tmp_path / "output" / "debate").glob(f"result.{form}")
            assert str(table.relative_to(tmp_path)) in done.stdout
            text = table.read_text()
            if form == "csv":
                assert len(list(csv.DictReader(io.StringIO(text)))) == 6
            elif form == "jsonl":
                assert [json.loads(line)["id"] for line in text.splitlines()] == ["q0", "q1"]
            else:
                assert [each["id"] for each in json.loads(text)["conversations"]] == ["q0", "q1"]

    @pytest.mark.system
    def test_a_table_of_a_finished_job_needs_no_engine(self, tmp_path: Path, free_ports: Callable[[int], int]) -> None:
        """Engines with real models take minutes to start."""
        models = {"m": scripted_model(free_ports(1))}
        (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"server": {"state_dir": "state"}, "models": models}))
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(debate()))
        assert run_command("run", "job.yaml", folder=tmp_path).returncode == 0
        models["m"]["command"] = ["/nowhere/engine"]
        (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"server": {"state_dir": "state"}, "models": models}))
        done = run_command("run", "job.yaml", "--format", "csv", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "output" / "debate" / "result.csv").is_file()
        shutil.rmtree(tmp_path / "output" / ".roundhouse")
        gone = run_command("run", "job.yaml", "--format", "jsonl", folder=tmp_path)
        assert (gone.returncode, "is gone, so no result" in gone.stderr) == (2, True)
        assert not (tmp_path / "output" / ".roundhouse").exists()

    def test_a_table_has_metadata_and_variables_as_columns(self, service: Service) -> None:
        """Analyses group by them; without them every user would join by hand."""
        agents = [{"id": "a", "model": "m", "system": "SAY-$name"}]
        conversations = [
            {"id": "x", "prompt": "p", "variables": {"name": "ann"}, "metadata": {"group": "one", "n": 1}},
            {"id": "y", "prompt": "p", "variables": {"name": "bob"}, "metadata": {"group": 'two, "b"'}},
        ]
        job_id = service.post_job({"agents": agents, "rounds": 1, "conversations": conversations})
        service.wait_ended(job_id)
        text = service.http.get(f"/v1/jobs/{job_id}/result", params={"format": "csv"}).text
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [row["conversation"] for row in rows] == ["x", "y"]
        assert [row.get("metadata.group") for row in rows] == ["one", 'two, "b"']
        assert [row.get("metadata.n") for row in rows] == ["1", ""]
        assert [row.get("variables.name") for row in rows] == ["ann", "bob"]


class TestForks:
    @pytest.mark.system
    def test_a_fork_is_followed_to_its_end(self, service: Service) -> None:
        """Like ``submit --wait``: only the id on the standard output, the end as exit status."""
        job_id = service.post_job(debate())
        service.wait_ended(job_id)
        done = ask(service, "fork", job_id, "--more", "1", "--wait")
        assert done.returncode == 0, done.stderr
        (heir,) = done.stdout.split()
        assert service.get(f"/v1/jobs/{heir}")["state"] == "completed"
        assert done.stderr.rstrip().endswith("completed")

    def test_the_same_fault_of_many_conversations_is_one_line(self, service: Service) -> None:
        """The line gives the number of conversations and the fix."""
        job_id = service.post_job(debate(conversations=40))
        service.wait_ended(job_id)
        done = ask(service, "fork", job_id)
        assert done.returncode in {2, 3}
        lines = [line for line in done.stderr.splitlines() if "nothing is left to say" in line]
        assert len(lines) == 1, done.stderr
        assert "40" in lines[0]
        assert "--more" in done.stderr


class TestJobFiles:
    def test_the_faults_of_a_file_are_reported_without_a_service(
        self, tmp_path: Path, free_ports: Callable[[int], int]
    ) -> None:
        """First the file's faults with their lines, then the missing service."""
        (tmp_path / "bad.yaml").write_text("agents:\n  - {id: a, modle: m}\nconversations: []\nround: 2\n")
        url = f"http://127.0.0.1:{free_ports(1)}"
        done = run_command("submit", "bad.yaml", "--url", url, folder=tmp_path)
        assert done.returncode == 2, done
        assert "bad.yaml:2" in done.stderr
        assert "modle" in done.stderr
        assert "bad.yaml:4" in done.stderr
        (tmp_path / "good.yaml").write_text(yaml.safe_dump(debate()))
        good = run_command("submit", "good.yaml", "--url", url, folder=tmp_path)
        assert (good.returncode, "no service at" in good.stderr) == (3, True)

    @pytest.mark.parametrize("command", ["submit", "run"])
    def test_a_missing_file_of_rows_is_reported_with_the_line_that_names_it(
        self, service: Service, tmp_path: Path, command: str
    ) -> None:
        """The name or the file is wrong; the line is the place to look."""
        agents = "agents: [{id: a, model: m}]\n"
        (tmp_path / "job.yaml").write_text(f"{agents}conversations:\n  file: nope.csv\n  prompt: $question\n")
        (tmp_path / "roundhouse.yaml").write_text(service.config.read_text())
        done = run_command(command, "job.yaml", folder=tmp_path, ROUNDHOUSE_URL=service.url)
        assert done.returncode == 2
        assert "job.yaml:3: conversations.file: nope.csv" in done.stderr, done.stderr


class TestDown:
    def test_a_piped_chat_with_an_unreachable_model_says_so_at_once(self, service: Service) -> None:
        """Standard error has its address, the refusal, and since when; the chat goes on waiting."""
        waiting = subprocess.Popen(
            [ROUNDHOUSE, "chat", "gone", "--url", service.url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert waiting.stdin is not None
            assert waiting.stderr is not None
            with waiting.stdin as typed:
                typed.write(b"Hello")
            told = _first_line(waiting)
            assert "refuses connections since" in told, told
            assert service.get("/v1/workers/gone-0")["because"].split("http")[1].split()[0] in told
            assert waiting.poll() is None
        finally:
            waiting.kill()
            waiting.wait(LIMIT_S)
            for pipe in (waiting.stdout, waiting.stderr):
                if pipe is not None:
                    pipe.close()

    def test_a_chat_on_a_terminal_with_an_unreachable_model_says_so_at_once(
        self, service: Service, tmp_path: Path
    ) -> None:
        """Before the user has typed a question."""
        command = [ROUNDHOUSE, "chat", "gone", "--url", service.url]
        with Terminal(command, tmp_path, XDG_STATE_HOME=str(tmp_path)) as terminal:
            terminal.wait_for("refuses connections since")
            terminal.type(END)

    def test_a_worker_that_is_down_shows_its_address_and_the_time(self, service: Service) -> None:
        """``submit --wait``, ``/readyz`` and the worker's page take their words from here."""
        wait_for(lambda: "not ready" in service.get("/v1/workers/gone-0")["because"] or _tells(service), "it is tried")
        because = service.get("/v1/workers/gone-0")["because"]
        url = yaml.safe_load(service.config.read_text())["models"]["gone"]["url"].removesuffix("/v1")
        assert f"{url} refuses connections since " in because
        assert "All connection attempts failed" not in because


def _tells(service: Service) -> bool:
    return "refuses" in service.get("/v1/workers/gone-0")["because"]


def _first_line(process: "subprocess.Popen[bytes]") -> str:
    """Return the first line of a standard error, or an empty line if none comes in time."""
    assert process.stderr is not None
    if not select.select([process.stderr], [], [], LIMIT_S / 2)[0]:
        return ""
    return os.read(process.stderr.fileno(), 65_536).decode()


@pytest.mark.parametrize("arguments", [["say", "job-1", "c", "hi"], ["fork", "job-1"]])
def test_a_wrong_address_is_not_retried(arguments: list[str]) -> None:
    """A restarting service is waited for; a wrong address would be asked for a minute."""
    began_at = time.monotonic()
    done = run_command(*arguments, ROUNDHOUSE_URL=f"http://127.0.0.1:{find_ports(1)}")
    assert (done.returncode, "no service at" in done.stderr) == (3, True), done
    assert time.monotonic() - began_at < LIMIT_S


@pytest.mark.system
@pytest.mark.parametrize(
    "arguments", [["chat"], ["launch", "--print", "claude"], ["status"], ["say", "job-1", "c", "hi"]]
)
def test_a_wrong_key_is_reported(tmp_path: Path, free_ports: Callable[[int], int], arguments: list[str]) -> None:
    """Errors have another form on OpenAI's surface."""
    server: Document = {"api_keys": ["k" * 24]}
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}, server, ready=False) as running:
        done = run_command(*arguments, stdin="Hi", ROUNDHOUSE_URL=running.url, ROUNDHOUSE_API_KEY="wrong")
    assert (done.returncode, "status 401" in done.stderr) == (3, False), done
    assert "key" in done.stderr
