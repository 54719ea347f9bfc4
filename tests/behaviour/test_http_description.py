"""The HTTP surface describes itself, and the reference describes the same."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest

from roundhouse_client.values import jobs, models, node, transcripts, workers
from roundhouse_client.values.value import Value
from tests.harness.service import Service, scripted_model, serving

HTTP_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("described")
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1))}) as running:
        yield running


def test_the_surface_describes_itself(service: Service) -> None:
    """/openapi.json has every route of the specification, no dangling reference, and the job's schema."""
    document = service.get("/openapi.json")
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])
    assert "HTTPValidationError" not in text
    assert "speak_after_within_round" in text
    for path in ("/v1/jobs", "/v1/jobs/{job_id}/events", "/v1/workers/{worker_id}/logs", "/healthz", "/readyz"):
        assert path in document["paths"]
    assert set(document["paths"]["/v1/jobs"]["post"]["responses"]) >= {"200", "202", "400", "409", "413", "422", "429"}
    assert document["components"]["schemas"]["AgentSpec"]["properties"]["model"]["minLength"] == 1


def test_every_value_of_the_client_is_described(service: Service) -> None:
    """By name and with its fields: the client's values are the service's answers. Values of events are in a stream."""
    components = service.get("/openapi.json")["components"]["schemas"]
    for module in (jobs, models, node, transcripts, workers):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Value) and kind.__module__ == module.__name__:
                assert set(components[kind.__name__]["properties"]) == {each.name for each in fields(cast("Any", kind))}


@pytest.mark.parametrize(
    ("path", "name", "bad", "good"),
    [
        ("/v1/jobs", "cursor", ("", "x", "1" * 19), ("1",)),
        ("/v1/jobs/{job_id}/events", "last-event-id", ("x", "1" * 19), ("", "1")),
        ("/v1/usage", "by", ("nobody", "key,key"), ("", "key", "day,model")),
    ],
)
def test_a_parameters_form_is_described(
    service: Service, path: str, name: str, bad: Sequence[str], good: Sequence[str]
) -> None:
    """Values that its pattern rejects are refused, and others accepted."""
    parameters = service.get("/openapi.json")["paths"][path]["get"]["parameters"]
    (told,) = (each for each in parameters if each["name"] == name)
    schema = next((each for each in told["schema"].get("anyOf", ()) if "pattern" in each), told["schema"])
    for value in (*bad, *good):
        address, given = path.replace("{job_id}", "nobody"), {name: value}
        is_header = told["in"] == "header"
        answer = service.http.get(address, headers=given if is_header else {}, params={} if is_header else given)
        assert (re.search(schema["pattern"], value) is None) == (answer.status_code == 400), value
        assert (value in bad) == (answer.status_code == 400), value


def test_a_refused_number_of_a_path_is_described(service: Service) -> None:
    """The route lists the answer 400."""
    path = "/v1/jobs/{job_id}/conversations/{conversation_id}/turns/{agent}/{round_number}/prompt"
    asked = service.http.get(path.replace("{round_number}", "first"))
    assert str(asked.status_code) in service.get("/openapi.json")["paths"][path]["get"]["responses"]
    assert asked.status_code == 400


def test_the_calls_of_the_reference_are_the_surface(service: Service) -> None:
    """The page has a heading for every route and method, and no other."""
    headings = re.findall(r"^### `(GET|POST|DELETE) (/[^`?]*)`$", HTTP_PAGE.read_text(), re.MULTILINE)
    listed = {(method, _shape(path)) for method, path in headings}
    served = {
        (method.upper(), _shape(path))
        for path, item in service.get("/openapi.json")["paths"].items()
        for method in item
    }
    assert listed == served


def _shape(path: str) -> str:
    return re.sub(r"{\w+}", "{}", path)
