"""A job is stored as it was posted, byte for byte; only names of tools and a fork's inherited parts are written out.

Source: specification, "Job documents".
"""

from collections.abc import Callable, Iterator

import pytest

from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.surface import problem

TOOLS = "def add(a: int, b: int = 1):\n    '''Add.'''\n    return a + b\n\n\ndef now():\n    return 'noon'\n"
ADD = (
    '{"type":"function","function":{"name":"add","description":"Add.","parameters":{"additionalProperties":false,'
    '"properties":{"a":{"title":"A","type":"integer"},"b":{"default":1,"title":"B","type":"integer"}},'
    '"required":["a"],"type":"object"}}}'
)
NOW = (
    '{"type":"function","function":{"name":"now","description":"","parameters":'
    '{"additionalProperties":false,"properties":{},"type":"object"}}}'
)
OWN = '{"function":{"parameters":{"type":"object"},"name":"own"},"type":"function"}'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("stored")
    (folder / "mytools.py").write_text(TOOLS)
    models = {
        "m": {**scripted_model(free_ports(1)), "tools": {"python": {"add": "mytools:add", "now": "mytools:now"}}},
        "n": {**scripted_model(free_ports(1)), "tools": {"python": {"add": "mytools:add"}}},
    }
    with serving(folder, free_ports(1), models) as running:
        yield running


def post(service: Service, text: str) -> str:
    answer = service.http.post("/v1/jobs", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def stored(service: Service, text: str) -> str:
    """Return the document of a job that is posted and ended at once."""
    job_id = post(service, text)
    service.http.post(f"/v1/jobs/{job_id}/cancel")
    return service.http.get(f"/v1/jobs/{job_id}/document").text


@pytest.mark.parametrize(
    "text",
    [
        '{"conversations":[{"prompt":"Go."}],"agents":[{"model":"m","id":"a"}]}',
        (
            '{"agents":[{"id":"a","wait_s":5,"by":"caller"},{"params":{"z":1,"a":1.0},"id":"b","model":"m"}],'
            '"conversations":[{"variables":{"z":true,"a":1e3},"prompt":"$a é","id":"x"},{"prompt":"","id":null,'
            '"variables":null,"from":null}],"metadata":{"b":[1.50,null],"a":{}},"priority":0,"prompts":{}}'
        ),
        '{"agents":[{"id":"a","model":"m","tools":[' + OWN + '],"memory":null,"validation":{"pattern":"x"}}],'
        '"conversations":[{"prompt":"Go.","agents":{"a":{"tools":[],"system":"s"}}}],"rounds":1}',
    ],
)
def test_a_document_without_names_is_kept_to_the_byte(service: Service, text: str) -> None:
    """The order of keys appears in prompts, and numbers keep their form except for zeros at the end."""
    text = text.replace('{"prompt":"","id":null,"variables":null,"from":null}', '{"prompt":"Go","id":null}')
    wanted = text.replace("1e3", "1000.0").replace("1.50", "1.5")
    assert stored(service, text) == wanted


def test_named_tools_are_written_out(service: Service) -> None:
    """Those of an agent, and those of an agent with another model or other tools in one conversation."""
    given = (
        '{"agents":[{"tools":[{"python":"add"},' + OWN + '],"id":"a","model":"m"},'
        '{"id":"b","model":"n","exit_tools":[]}],"conversations":[{"agents":{"a":{"model":"n"},'
        '"b":{"tools":[{"python":"add"}],"system":"s"}},"prompt":"Go."},'
        '{"prompt":"On.","agents":{"a":{"system":"t"},"b":{"model":"m","tools":[{"python":"now"}]}}}]}'
    )
    both = ADD + "," + OWN
    wanted = (
        '{"agents":[{"tools":[' + both + '],"id":"a","model":"m"},'
        '{"id":"b","model":"n","exit_tools":[]}],"conversations":[{"agents":{"a":{"model":"n","tools":[' + both + "]},"
        '"b":{"tools":[' + ADD + '],"system":"s"}},"prompt":"Go."},'
        '{"prompt":"On.","agents":{"a":{"system":"t"},"b":{"model":"m","tools":[' + NOW + "]}}}]}"
    )
    assert stored(service, given) == wanted


@pytest.mark.parametrize(
    ("prompt", "own", "wanted"),
    [
        ('"prompt":"Of $x"', '"rounds":2', '{FROM,"rounds":2,"prompt":"Of $x"}'),
        ('"prompt":"Of $x"', '"prompt":null,"rounds":2', '{FROM,"prompt":"Of $x","rounds":2}'),
        ('"prompt":"Of $x"', '"prompt":"Mine","rounds":2', '{FROM,"prompt":"Mine","rounds":2}'),
        (
            '"prompt":"Of $x","variables":{"x":1,"y":"z"}',
            '"rounds":2',
            '{FROM,"rounds":2,"prompt":"Of $x","variables":{"x":1,"y":"z"}}',
        ),
        (
            '"prompt":"Of $x","variables":{"x":1,"y":"z"}',
            '"variables":{"w":true,"y":2},"rounds":2',
            '{FROM,"variables":{"x":1,"y":2,"w":true},"rounds":2,"prompt":"Of $x"}',
        ),
        (
            '"prompt":"Of $x","variables":{"x":1,"y":"z"}',
            '"prompt":"$y","rounds":2',
            '{FROM,"prompt":"$y","rounds":2,"variables":{"x":1,"y":"z"}}',
        ),
        ('"prompt":"Of","variables":{}', '"rounds":2', '{FROM,"rounds":2,"prompt":"Of","variables":{}}'),
        ('"prompt":"Of","variables":{}', '"variables":{},"rounds":2', '{FROM,"variables":{},"rounds":2,"prompt":"Of"}'),
        ('"prompt":"Of"', '"variables":{},"rounds":2', '{FROM,"variables":{},"rounds":2,"prompt":"Of"}'),
        ('"prompt":"Of"', '"variables":null,"rounds":2', '{FROM,"variables":null,"rounds":2,"prompt":"Of"}'),
    ],
)
def test_a_fork_is_stored_with_what_it_inherits(service: Service, prompt: str, own: str, wanted: str) -> None:
    """Its source may be deleted earlier."""
    agents = '"agents":[{"id":"a","model":"m"}]'
    source = post(service, "{" + agents + ',"conversations":[{' + prompt + ',"id":"c"}]}')
    service.wait_ended(source)
    begun = '"from":{"job":"' + source + '","conversation":"c"}'
    head = "{" + agents + ',"conversations":[{"prompt":"First"},'
    assert stored(service, head + "{" + begun + "," + own + "}]}") == head + wanted.replace("FROM", begun) + "]}"


def faults(service: Service, *agents: Document, **given: object) -> list[tuple[str, str]]:
    job = {"agents": [{"model": "m", **each} for each in agents], "conversations": [{"prompt": "Go."}], **given}
    answer = problem(service.http.post("/v1/jobs", json=job), 422, "invalid_job")
    return [(each["path"], each["message"]) for each in answer["errors"]]


def test_faults_of_looked_up_parts_have_their_places(service: Service) -> None:
    """As those of any other part of a document have."""
    unknown = "unknown Python tool 'what'; known: add, now"
    agents: list[Document] = [{"id": "a", "tools": [{"python": "what"}]}, {"id": "b"}]
    cast = {"b": {"tools": [{"python": "what"}]}, "nobody": {"tools": [{"python": "add"}]}, "a": {"model": "n"}}
    talks = [{"prompt": "Go."}, {"prompt": "Go.", "agents": cast}]
    assert faults(service, *agents, conversations=talks) == [
        ("agents[0].tools[0].python", unknown),
        ("conversations[1].agents.b.tools[0].python", unknown),
        ("conversations[1].agents.nobody.tools[0].python", "unknown Python tool 'add'; known: none"),
        ("conversations[1].agents.a.tools[0].python", "unknown Python tool 'what'; known: add"),
    ]
    many = [{"python": "add"}, *({"function": {"name": f"f{number}"}} for number in range(128))]
    assert faults(service, {"id": "a", "tools": many}) == [
        ("agents[0].tools", "129 tools are more than limits.tools = 128")
    ]
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "what"}}}
    ((path, message),) = faults(service, {"id": "a", "tools": [wrong, {"python": "add"}]})
    assert (path, message[:30]) == ("agents[0].tools[0]", "function.parameters: type: 'wh")


def test_a_missing_source_is_no_fault_of_the_document(service: Service) -> None:
    """It may have been deleted meanwhile; a malformed one is a fault."""
    job: Document = {
        "agents": [{"id": "a", "model": "m"}],
        "conversations": [{"from": {"job": "j", "conversation": "c"}}],
    }
    problem(service.http.post("/v1/jobs", json=job), 404, "job_not_found")
    job["conversations"][0]["from"]["rounds"] = 0
    assert faults(service, conversations=job["conversations"], agents=job["agents"]) == [
        ("conversations[0].from.rounds", "must be at least 1, not 0")
    ]
