"""An option without effect is refused: ignoring it would give a wrong result silently."""

from collections.abc import Callable, Iterator

import pytest
import yaml

from roundhouse_client import Client, InvalidRequest, NotFound, NothingToFork
from roundhouse_client.calls import job_calls
from roundhouse_client.request import EmptyId
from tests.harness.service import Document, Service, debate, recorded, run_command, scripted_model, serving
from tests.harness.surface import problem

HI: Document = {"role": "user", "content": "Hi."}
TALK: Document = {"id": "c", "prompt": "On $topic.", "variables": {"topic": "cars", "name": "Ann"}}
AGENTS: list[Document] = [{"id": "ann", "model": "m", "system": "You are $name."}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("options")
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1), record=str(folder / "record"))}) as running:
        yield running


@pytest.fixture(scope="module")
def ended(service: Service) -> str:
    job_id = service.post_job({"agents": AGENTS, "conversations": [TALK]})
    service.wait_ended(job_id)
    return job_id


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/jobs?limt=5", "unknown query parameter 'limt'; did you mean 'limit'?"),
        ("/v1/jobs?limit=5&state=queued&page=2", "unknown query parameter 'page'; known: state, limit, cursor"),
        ("/v1/jobs?limit=5&limit=6", "limit: is given 2 times"),
        ("/v1/jobs/ID?wait=5", "unknown query parameter 'wait'; did you mean 'wait_s'?"),
        ("/v1/jobs/ID/result?fmt=csv", "unknown query parameter 'fmt'; did you mean 'format'?"),
        ("/v1/jobs/ID/conversations/c?since=1", "unknown query parameter 'since'; known: after"),
        ("/v1/jobs/ID/timeline?format=html", "unknown query parameter 'format'; known: none"),
        ("/v1/awaited?conversation=c", "unknown query parameter 'conversation'; known: limit, after"),
        ("/v1/workers?model=m", "unknown query parameter 'model'; known: none"),
        ("/v1/workers/m-0/logs?tial=5", "unknown query parameter 'tial'; did you mean 'tail'?"),
        ("/v1/status?job=x", "unknown query parameter 'job'; known: none"),
        ("/v1/usage?from=x", "unknown query parameter 'from'; known: "),
        ("/v1/models/m/tools?server=x", "unknown query parameter 'server'; known: none"),
    ],
)
def test_an_unknown_query_parameter_is_refused(service: Service, ended: str, path: str, told: str) -> None:
    """The error has the nearest name, on every route of ours."""
    refused = problem(service.http.get(path.replace("ID", ended)), 400, "invalid_parameter")
    assert refused["detail"].startswith(told), refused


def test_a_parameter_of_a_post_is_refused_before_anything_is_done(service: Service) -> None:
    """Otherwise a job that should be refused rather than wait would have been posted."""
    before = service.get("/v1/jobs")["jobs"]
    problem(service.http.post("/v1/jobs?que=false", json=debate()), 400, "invalid_parameter")
    assert service.get("/v1/jobs")["jobs"] == before


def test_the_parameters_of_the_dashboard_are_known(service: Service, ended: str) -> None:
    """This includes parameters that a route takes from shared code."""
    asked = f"/v1/jobs/{ended}/overview/events?page=1&order=position&descending=false&awaited=false&text=x"
    with service.http.stream("GET", asked) as answer:
        assert answer.status_code == 200
    problem(service.http.get(f"{asked}&sort=x"), 400, "invalid_parameter")
    for path in ("/v1/usage?by=key,agent&limit=5", "/v1/overview/history?after=0", "/v1/jobs?limit=5&state=completed"):
        assert service.http.get(path).status_code == 200, path


def test_clients_of_other_surfaces_and_probes_may_send_more(service: Service) -> None:
    """Anthropic's client sends beta=true, and orchestrators add their own."""
    asked = {"model": "m", "max_tokens": 5, "messages": [HI]}
    for path in ("/v1/chat/completions?beta=true", "/v1/messages?beta=true"):
        assert service.http.post(path, json=asked).status_code != 400
    for path in ("/v1/models?limit=1000", "/v1/models/m?x=1", "/healthz?x=1", "/readyz?x=1"):
        assert service.http.get(path).status_code == 200, path


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("X-Roundhouse-Priorty", "did you mean 'X-Roundhouse-Priority'?"),
        ("X-Roundhouse-Timeout", "unknown header 'X-Roundhouse-Timeout'"),
    ],
)
def test_an_unknown_roundhouse_header_is_refused(service: Service, name: str, told: str) -> None:
    """On relayed routes too: no other server has such headers."""
    answer = service.http.post("/v1/chat/completions", json={"model": "m", "messages": [HI]}, headers={name: "5"})
    assert (answer.status_code, told in answer.json()["error"]["message"]) == (400, True), answer.text
    refused = problem(service.http.post("/v1/jobs", json=debate(), headers={name: "5"}), 400, "invalid_parameter")
    assert told in refused["detail"]


@pytest.mark.parametrize("name", ["X-Roundhouse-Priority", "X-Roundhouse-Wait-S", "X-Roundhouse-Deadline-S"])
def test_a_header_of_relayed_requests_has_no_meaning_elsewhere(service: Service, name: str) -> None:
    """A job has its priority in its document, and would silently run with 0."""
    told = problem(service.http.post("/v1/jobs", json=debate(), headers={name: "5"}), 400, "invalid_parameter")
    assert name in told["detail"]
    problem(service.http.get("/v1/jobs", headers={name: "5"}), 400, "invalid_parameter")
    twice = [(name, "5"), (name, "6")]
    answer = service.http.post("/v1/chat/completions", json={"model": "m", "messages": [HI]}, headers=twice)
    assert (answer.status_code, "given twice" in answer.text) == (400, True)


def test_awaited_turns_of_an_unknown_conversation_are_refused(service: Service, ended: str) -> None:
    """The answer is neither an empty list nor the turns of all jobs."""
    problem(service.http.get(f"/v1/jobs/{ended}/awaited?conversation=x"), 404, "conversation_not_found")
    assert service.get(f"/v1/jobs/{ended}/awaited?conversation=c") == {"awaited": []}
    with Client(service.url) as client, pytest.raises(NotFound):
        client.awaited(ended, "x")
    with pytest.raises(ValueError, match="give its job_id"):
        job_calls.awaited(None, "c")


@pytest.mark.system
def test_an_empty_id_is_refused(service: Service) -> None:
    """Its path is that of all jobs."""
    with pytest.raises(EmptyId):
        job_calls.get_job("")
    for arguments in (["status", ""], ["result", ""], ["awaited", ""], ["tools", ""], ["logs", ""], ["cancel", ""]):
        done = run_command(*arguments, ROUNDHOUSE_URL=service.url)
        assert (done.returncode, "an id is empty" in done.stderr) == (2, True), done


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["result", "JOB", "--json", "--format", "csv"], "give one of them"),
        (["timeline", "JOB", "--json", "--format", "html"], "leave out"),
        (["timeline", "JOB", "--json", "-o", "there.html"], "leave out"),
        (["submit", "FILE", "--idempotency-key", ""], "--idempotency-key is empty"),
        (["submit", "FILE", "--verbose"], "it needs --wait"),
        (["top", "--once", "--interval", "2"], "leave out --interval"),
        (["top", "--once", "--json", "--words"], "leave out --words"),
        (["launch", "--print"], "name the agent"),
        (["fork", "JOB", "--set", "conversations=[]"], "conversations: they are those of the job"),
        (["fork", "JOB", "--set", "rounds=abc"], "rounds: 'abc' is not a number from 1"),
        (["fork", "JOB", "--set", "rounds=null"], "rounds: None is not a number from 1"),
    ],
)
def test_a_flag_without_effect_is_refused(service: Service, ended: str, arguments: list[str], told: str) -> None:
    """Before anything is written or posted."""
    file = service.folder / "job.yaml"
    file.write_text(yaml.safe_dump(debate()))
    before = service.get("/v1/jobs")["jobs"]
    given = [{"JOB": ended, "FILE": str(file)}.get(each, each) for each in arguments]
    done = run_command(*given, folder=service.folder, ROUNDHOUSE_URL=service.url)
    assert (done.returncode, done.stdout, told in done.stderr) == (2, "", True), done
    assert (service.get("/v1/jobs")["jobs"], (service.folder / "there.html").exists()) == (before, False)


@pytest.mark.system
def test_a_result_in_json_may_be_requested_in_two_ways(service: Service, ended: str) -> None:
    """Both mean the same."""
    told = {
        run_command("result", ended, *flags, ROUNDHOUSE_URL=service.url).stdout
        for flags in (["--json"], ["--format", "json"], ["--json", "--format", "json"])
    }
    assert len(told) == 1


def test_an_heir_with_a_prompt_of_its_own_keeps_the_variables(service: Service, ended: str) -> None:
    """System prompts use them too, and would otherwise contain a dollar sign."""
    with Client(service.url) as client:
        changed = client.fork(ended, more=1, changes={"conversations.c.prompt": "About $topic and $name."})
        service.wait_ended(changed.id)
        said = str(recorded(service.folder / "record")[-1]["messages"])
        assert ("About cars and Ann." in said, "You are Ann." in said) == (True, True), said
        other = client.fork(
            ended, more=1, changes={"conversations.c.prompt": "$topic", "conversations.c.variables.topic": "tea"}
        )
        service.wait_ended(other.id)
        said = str(recorded(service.folder / "record")[-1]["messages"])
        assert ("tea" in said, "You are Ann." in said) == (True, True), said
        assert client.get_document(other.id).count('"cars"') == 0


def test_a_fork_of_a_fork_has_the_rounds_that_are_set(service: Service, ended: str) -> None:
    """Its conversations have rounds of their own, which once took precedence."""
    with Client(service.url) as client:
        first = client.fork(ended, more=1)
        service.wait_ended(first.id)
        second = client.fork(first.id, changes={"rounds": 5})
        assert service.wait_ended(second.id)["progress"]["turns"]["total"] == 3, "two are inherited"
        for value in (0, True, 2.5, "7"):
            with pytest.raises(NothingToFork):
                client.fork(first.id, changes={"rounds": value})
        with pytest.raises(InvalidRequest):
            client.fork(first.id, changes={"conversations.c.rounds": "abc"})


@pytest.mark.system
def test_run_says_why_it_shows_nothing(service: Service) -> None:
    """An ended job does not run again."""
    folder = service.folder / "again"
    folder.mkdir()
    config = yaml.safe_load((service.folder / "roundhouse.yaml").read_text())
    config["server"] = {"state_dir": "own"}
    (folder / "roundhouse.yaml").write_text(yaml.safe_dump(config))
    (folder / "job.yaml").write_text(yaml.safe_dump(debate()))
    assert run_command("run", "job.yaml", folder=folder).returncode == 0
    done = run_command("run", "job.yaml", "--show-prompts", "--words", folder=folder)
    assert (done.returncode, "--show-prompts and --words: every job has ended" in done.stderr) == (0, True), done
