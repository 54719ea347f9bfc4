"""Every way of spoiling a job's document is refused with the same faults as ever (specification, "Refused jobs").

Each value of a few rich documents is left out, replaced by values of every kind, and given a neighbour with an unknown
key. ``tests/data/faults_of_documents.json`` has a digest of the faults by document and place. After a change of a
message, write it again: ``python -m tests.unit.service.test_faults_of_documents``.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from service.conversations.document.job_faults import JobRules
from service.conversations.document.job_parser import parse_job
from service.conversations.document.limits import Limits
from service.conversations.job.job import Job, JobId
from service.errors import InvalidJob
from tests.documents.pages import ROOT

FROZEN = ROOT / "tests" / "data" / "faults_of_documents.json"
LONG = "x" * 300
VALUES: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**40, 1.5, 1e300),
    *("", " ", "a", "b", "$name", "$what", "a\x00\x1bz", "no one", "(", LONG),
    *([], ["a"], ["a", "a"], ["nobody"], [None], [1], [[]], [{}]),
    *({}, {"a": 1}, {"from": "x"}, {"mcp": "files"}, {"python": 5}),
)
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
LIMITS = Limits(agents=6, conversations=6, rounds=50, tools=4, turns=400, metadata=200, choices=4)
RULES = JobRules(
    models=["m", "n", "k"],
    adapters={"ours": "m"},
    limits=LIMITS,
    webhook_hosts=["hooks.example"],
    webhook_secrets=["s"],
    servers={"m": ["files"]},
    untold=["k"],
)
DOCUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "Go."}]},
    "rounds": {
        "name": "debate",
        "system": "Speak of $topic.",
        "prompts": {"context": "A debate.", "cue": "Now you.", "quote": "$who: $words", "left": "$who left."},
        "rounds": 3,
        "until": [
            {"agent": "a", "says": ["yes", "No"]},
            {"agent": "b", "matches": "^yes"},
            {"agent": "b", "field": "grade.value", "equals": 5},
            {"signal": "stop", "agent": "a"},
            {"agree": ["a", "c"]},
            {"unchanged": 2},
            {"answer_tokens": 1000},
        ],
        "memory": {"keep": {"rounds": 2}, "summary": {"max_tokens": 50, "prompt": "Sum up."}},
        "priority": 2,
        "metadata": {"run": 1},
        "webhook": {"url": "https://hooks.example/ended", "secret": "s"},
        "agents": [
            {
                "id": "a",
                "role": "judge of $topic",
                "model": "ours",
                "system": "You judge.",
                "params": {"temperature": 0.5, "max_tokens": 5},
                "visible_to": ["b"],
                "validation": {"choices": ["yes", "no"], "retries": 1, "constrain": "off"},
                "markup": True,
                "tools": [TOOL, {"mcp": "files", "only": ["read"]}, {"python": "now"}],
                "exit_tools": [{"type": "function", "function": {"name": "stop"}}],
                "on_failure": "leave",
                "memory": {"keep": "auto"},
            },
            {
                "id": "b",
                "model": "m",
                "speak_after_within_round": ["a"],
                "validation": {
                    "json_schema": {
                        "type": "object",
                        "properties": {"grade": {"type": "object", "properties": {"value": {"type": "integer"}}}},
                    }
                },
            },
            {
                "id": "c",
                "by": "caller",
                "wait_s": 5,
                "otherwise": "no $topic",
                "validation": {"pattern": "."},
            },
        ],
        "conversations": [
            {
                "id": "first",
                "prompt": "What of $topic and $cost?",
                "rounds": 2,
                "variables": {"topic": "tea", "cost": 3},
                "agents": {
                    "a": {"system": "You judge $topic.", "params": {"seed": 1}, "tools": [TOOL]},
                    "b": {"model": "n", "validation": {"pattern": "^ok"}},
                },
                "weights": "pinned",
                "metadata": {"n": [1, 2]},
                "until": [{"agent": "b", "matches": "end$"}],
            },
            {"from": {"job": "j", "conversation": "c", "rounds": 1}, "variables": {"topic": "sea"}},
            {"from": {"job": "j", "conversation": "c", "before": {"agent": "a", "round": 1}}, "prompt": "$topic"},
        ],
    },
    "led": {
        "mode": "led",
        "leader": "host",
        "view": "shared",
        "memory": {"keep": {"tokens": 500}, "summary": {"by": "ann"}},
        "agents": [{"id": "host", "model": "m"}, {"id": "ann", "model": "m"}, {"id": "bob", "by": "caller"}],
        "conversations": [{"prompt": "Go."}, {"id": "c9", "prompt": "Go on."}],
    },
    "free": {
        "mode": "free",
        "prompt_at": "queue",
        "until": [{"agent": "a", "says": ["end"]}],
        "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "n", "visible_to": []}],
        "conversations": [{"prompt": "Go.", "rounds": 40}],
    },
}


def spoilt(value: object) -> Iterator[tuple[str, Any]]:
    """Yield copies of a value with one place spoilt, each with its place."""
    for other in VALUES:
        yield "", other
    if isinstance(value, dict):
        yield "", {**value, "unknwon": 1}
        for key, inner in value.items():
            yield f".{key}", {name: each for name, each in value.items() if name != key}
            yield from ((f".{key}{place}", {**value, key: each}) for place, each in spoilt(inner))
    if isinstance(value, list):
        yield "", [*value, *value]
        for number, inner in enumerate(value):
            for place, each in spoilt(inner):
                yield f"[{number}]{place}", [*value[:number], each, *value[number + 1 :]]


def verdict(document: object) -> object:
    """Return the faults of a document, or the job that it describes."""
    try:
        return parse_job(deepcopy(document), JobId("j"), RULES)
    except InvalidJob as refusal:
        return [(fault.path, fault.message) for fault in refusal.faults]


def told(document: object) -> str:
    found = verdict(document)
    return "accepted" if isinstance(found, Job) else json.dumps(found)


def digests(document: object) -> dict[str, str]:
    """Return, for each place of a document, a digest of the faults when that place is spoilt."""
    by_place: dict[str, list[str]] = {}
    for place, each in spoilt(document):
        by_place.setdefault(place, []).append(told(each))
    return {place: sha256("\n".join(said).encode()).hexdigest()[:12] for place, said in by_place.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.system) if name == "rounds" else name for name in DOCUMENTS]
)
def test_a_spoilt_document_has_the_faults_that_it_always_had(name: str) -> None:
    """Programs read the paths, and people the messages."""
    assert digests(DOCUMENTS[name]) == json.loads(FROZEN.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_is_not_spoilt_is_accepted(name: str) -> None:
    """Otherwise its faults would hide those of the spoilt place."""
    assert told(DOCUMENTS[name]) == "accepted"


if __name__ == "__main__":
    found = {name: digests(document) for name, document in DOCUMENTS.items()}
    FROZEN.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
