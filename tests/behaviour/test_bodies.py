"""Bodies of YAML have the bounds of bodies of JSON: what they expand to counts, not how they are written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from roundhouse_client import Client, InvalidRequest, load_job
from service.formats.documents import lines_in, parse_document
from tests.harness.service import Document, Service, scripted_model, serving

MOST_BYTES = 300_000  # ``limits.body_bytes`` of the service
MOST_NODES = 2_000  # ``limits.nodes``
AGENTS: list[Document] = [{"id": "a", "model": "m"}]
AS_YAML = {"Content-Type": "application/yaml"}
MIB = 1 << 20
Ports = Callable[[int], int]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Ports) -> Iterator[Service]:
    limits: Document = {"body_bytes": MOST_BYTES, "nodes": MOST_NODES}
    folder = tmp_path_factory.mktemp("bodies")
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1))}, limits=limits) as running:
        yield running


def post_yaml(service: Service, text: str) -> httpx.Response:
    return service.http.post("/v1/jobs", content=text.encode(), headers=AS_YAML)


def told(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the detail of a problem."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, str(answer.json()["detail"])


def peak_bytes(service: Service) -> int:
    """Return the most memory that the service has held since the peak was last reset."""
    assert service.process is not None
    status = Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak(service: Service) -> None:
    assert service.process is not None
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5", encoding="utf-8")


ALIASED = {
    "a value": "agents: [{id: a, model: m}]\nconversations: [{prompt: &p Hello}, {prompt: *p}]\n",
    "an agent": "agents: [&a {id: a, model: m}]\nmetadata: {first: *a}\nconversations: [{prompt: Hello}]\n",
    "itself": "agents: [{id: a, model: m}]\nconversations: [{prompt: Hello}]\nmetadata: &m {me: *m}\n",
    "an anchor alone": "agents: [{id: a, model: m}]\nconversations: [{prompt: &p Hello}]\n",
}


@pytest.mark.parametrize("text", ALIASED.values(), ids=ALIASED)
def test_aliases_in_a_body_are_refused_with_their_line(service: Service, text: str) -> None:
    """The answer also says where aliases are allowed: in a client's files."""
    status, detail = told(post_yaml(service, text))
    assert (status, "alias" in detail) == (400, True), detail
    assert "line:" in detail, detail


def test_aliases_of_a_body_are_never_expanded(service: Service) -> None:
    """Neither in the service nor on the way to it: counted in bytes, since a fast machine hides an expansion."""
    name = "x" * 100_000
    body = f"agents: [{{id: a, model: m}}]\nconversations: [{{prompt: Go}}]\nt: &t {name}\nmetadata: [{'*t, ' * 900}]\n"
    forget_peak(service)
    before = peak_bytes(service)
    status, _ = told(post_yaml(service, body))
    assert (status, (peak_bytes(service) - before) // MIB < 32) == (400, True), (peak_bytes(service) - before) // MIB


def test_a_small_body_cannot_stand_for_a_large_job(service: Service) -> None:
    """100 prompts of 10,000 characters exceed ``limits.body_bytes``, however they are written."""
    talks = "".join("  - {prompt: *p}\n" for _ in range(99))
    body = f"agents: [{{id: a, model: m}}]\nconversations:\n  - {{prompt: &p {'x' * 10_000}}}\n{talks}"
    assert len(body) < MOST_BYTES // 10
    status, _ = told(post_yaml(service, body))
    assert status in (400, 413)


def test_a_body_of_yaml_holds_as_many_values_as_one_of_json(service: Service) -> None:
    """A body at ``limits.nodes`` passes; a larger one is refused in the same words."""
    for count, status in ((MOST_NODES // 2, 202), (2 * MOST_NODES, 400)):
        job = {"agents": AGENTS, "conversations": [{"prompt": "Go."}], "metadata": {"many": [0] * count}}
        as_json = service.http.post("/v1/jobs", json=job)
        as_yaml = post_yaml(service, yaml.safe_dump(job, default_flow_style=True))
        assert (as_json.status_code, as_yaml.status_code) == (status, status), as_yaml.text
        if status == 400:
            assert told(as_yaml)[1] == told(as_json)[1]
            assert "limits.nodes" in told(as_yaml)[1]


@pytest.mark.parametrize("said", ["\a", "\\"], ids=["control", "backslash"])
def test_the_size_of_a_body_of_yaml_is_the_size_of_its_json(service: Service, said: str) -> None:
    """Two bytes of YAML may take six of JSON; the job is stored as JSON, and ``body_bytes`` bounds that."""
    written = {"\a": '"' + r"\a" * 100_000 + '"', "\\": "'" + "\\" * 200_000 + "'"}[said]
    body = f"agents: [{{id: a, model: m}}]\nconversations: [{{prompt: {written}}}]\n"
    prompt = said * (100_000 if said == "\a" else 200_000)
    as_json = json.dumps({"agents": AGENTS, "conversations": [{"prompt": prompt}]})
    assert len(body) < MOST_BYTES < len(as_json)
    answer = post_yaml(service, body)
    assert answer.status_code == 413, answer.text
    assert "limits.body_bytes" in answer.text


def test_depth_is_bounded_in_the_same_words(service: Service) -> None:
    """``limits.depth`` counts without a walk through repeated aliases."""
    deep = "[" * 70 + "]" * 70
    as_yaml = post_yaml(service, f"a: {deep}\n")
    as_json = service.http.post("/v1/jobs", content=f'{{"a": {deep}}}', headers={"Content-Type": "application/json"})
    assert told(as_yaml) == told(as_json)


def test_files_of_a_client_may_have_aliases(service: Service, tmp_path: Path) -> None:
    """The client expands its own files and posts JSON; configurations keep their aliases."""
    text = "agents: [{id: a, model: m, system: &s Hello}]\nconversations: [{prompt: *s}, {prompt: *s}]\n"
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    job = load_job(path)
    assert [each["prompt"] for each in job["conversations"]] == ["Hello", "Hello"]
    assert service.http.post("/v1/jobs", json=job).status_code == 202
    assert parse_document(text, "roundhouse.yaml")[0] == job


def test_text_that_json_cannot_hold_is_refused(service: Service) -> None:
    """An escape of YAML may write half of a surrogate pair; JSON with the same is refused too."""
    answer = post_yaml(service, 'agents: [{id: a, model: m}]\nconversations: [{prompt: "\\ud800"}]\n')
    assert told(answer)[0] == 400


LINED = """name: x
agents:
  - id: a
    model: nope
    params: {max_tokens: 0}
    rloe: 1
conversations:
  - prompt: Hello
  - {}
"""


@pytest.mark.parametrize("kind", ["YAML", "JSON"])
def test_a_fault_names_its_line(service: Service, kind: str) -> None:
    """The line of the posted text; a missing part has the line of the object that lacks it."""
    document = yaml.safe_load(LINED)
    text = LINED if kind == "YAML" else json.dumps(document, indent=2)
    headers = AS_YAML if kind == "YAML" else {"Content-Type": "application/json"}
    answer = service.http.post("/v1/jobs", content=text.encode(), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_job")
    lines = {fault["path"]: fault["line"] for fault in answer.json()["errors"]}
    wanted = next(number for number, line in enumerate(text.splitlines(), start=1) if "rloe" in line)
    assert lines["agents[0].rloe"] == wanted


def test_a_fault_of_a_document_without_lines_names_none(service: Service) -> None:
    """A document in one line, and text whose lines would take long to find."""
    with pytest.raises(InvalidRequest) as refused, Client(service.url) as client:
        client.post_job({"agents": [], "conversations": [{"prompt": "x"}]})  # in one line
    assert [fault.line for fault in refused.value.faults] == [None]
    long = json.dumps({"agents": [], "conversations": [{"prompt": "x" * 40_000}]}, indent=1)
    answer = service.http.post("/v1/jobs", content=long.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert all("line" not in fault for fault in answer.json()["errors"])


@pytest.mark.parametrize("odd", ["\t", "\u2028", "\x85", "\x7f", "\u202e", "\N{GRINNING FACE}"])
def test_lines_are_counted_as_an_editor_counts_them(odd: str) -> None:
    """Strings and the whitespace of JSON may hold any kind of line end."""
    text = f'{{\n\t"name": "{"x" if odd == chr(9) else odd}",\n\t"agents": [\n\t\t{{"id": "a"}}\n\t]\n}}'
    assert lines_in(text)["agents[0].id"] == 4
    assert lines_in(f"name: 'a{odd}b'\nagents:\n  - id: a\n")["agents[0].id"] == 3


def test_an_ambiguous_path_names_no_line() -> None:
    """A key may look like an index of a list."""
    lines = lines_in('agents:\n  - id: a\n"agents[0]":\n  id: b\n')
    assert "agents[0].id" not in lines
    assert lines["agents"] == 1


@pytest.mark.parametrize("key", ["rounds", "agents", "conversations"])
def test_a_duplicate_key_is_refused(service: Service, key: str) -> None:
    """One of the two values would be ignored silently."""
    body = json.dumps({"agents": AGENTS, "rounds": 1, "conversations": [{"prompt": "a: b, \\"}]})
    twice = f'{body[:-1]}, "{key}": {json.dumps(json.loads(body)[key])}}}'
    as_json = {"Content-Type": "application/json"}
    answer = service.http.post("/v1/jobs", content=twice, headers=as_json)
    assert told(answer) == (400, f"the body is not usable JSON: the key {key!r} stands there twice")
    escaped = twice.replace(f', "{key}":', f', "\\u{ord(key[0]):04x}{key[1:]}":')
    assert escaped != twice
    assert told(service.http.post("/v1/jobs", content=escaped, headers=as_json)) == told(answer)
    assert service.http.post("/v1/jobs", content=body, headers=as_json).status_code == 202
    lines = service.http.post("/v1/jobs", content=twice, headers={"Content-Type": "application/x-ndjson"}).text
    assert "stands there twice" in lines


@pytest.mark.parametrize(
    "value",
    [
        *("!!bool x", "!!int ''", "!!int '_'", "!!float '_'", "!!float ''", "!!seq x", "!!map x", "!!str [a]"),
        *("!!map [a]", "!!seq {a: b}", "!!int 1.5", "!!null x", "!!int", "!!bool", "010", "-08", ".inf", "1e999"),
        *('"\\ud83d"', '"\\U00110000"', "9" * 5000, "a\x07", "<<", "!!binary aGk="),
    ],
)
def test_an_invalid_value_is_reported_with_its_line(service: Service, value: str) -> None:
    """It is not an internal error."""
    text = f"agents: [{{id: a, model: m}}]\nconversations: [{{prompt: Hello}}]\nmetadata:\n  v: {value}\n"
    status, detail = told(post_yaml(service, text))
    assert (status, detail[:7]) == (400, "line:4:"), detail
