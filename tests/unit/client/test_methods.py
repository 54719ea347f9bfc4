"""Both clients have every call, each in one line."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

from roundhouse_client import AsyncClient, Client
from roundhouse_client.calls import job_calls, model_calls, node_calls, worker_calls
from roundhouse_client.flows import following, reading, waiting
from roundhouse_client.request import encoded, model_place, place

FLOWS = (following, reading, waiting)
CALLS = (job_calls, model_calls, node_calls, worker_calls)


def public(modules: tuple[ModuleType, ...]) -> dict[str, object]:
    return {
        name: each
        for module in modules
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("key", ["a\nb", "ü"], ids=repr)
def test_an_idempotency_key_that_no_header_can_hold_is_refused(key: str) -> None:
    """It is refused before anything is sent."""
    with pytest.raises(ValueError, match="idempotency_key"):
        job_calls.post_jobs([], idempotency_key=key)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_call_and_every_flow_is_a_method(kind: type[Client] | type[AsyncClient]) -> None:
    """With the same name, parameters and docstring."""
    expected = public(CALLS) | {name: each for name, each in public(FLOWS).items() if name != "event_of"}
    methods = {name: getattr(kind, name) for name in vars(kind) if getattr(kind, name) in expected.values()}
    assert methods == expected
    client = kind("http://here")
    assert inspect.signature(client.get_log).parameters == inspect.signature(worker_calls.get_log).parameters
    assert client.get_log.__doc__ == worker_calls.get_log.__doc__


def test_names_may_hold_any_character() -> None:
    """A slash is a part of an id, and separates parts of a model's name."""
    assert place("a/b c", 3) == "/a%2Fb%20c/3"
    assert model_place("org/model ü") == "/v1/models/org/model%20%C3%BC"
    assert encoded({"a": "ü\u2028", "b": [1]}) == '{"a":"ü\u2028","b":[1]}'.encode()


def test_the_client_imports_nothing_of_the_service() -> None:
    """Nor torch, before a trainer broadcasts."""
    script = (
        "import sys, roundhouse_client\n"
        "print({'service', 'workers', 'transport', 'pydantic', 'fastapi', 'msgspec', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
