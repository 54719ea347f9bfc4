"""Agents that differ in single conversations (specification, "Casts")."""

from collections import Counter
from pathlib import Path

import pytest

from service.config.load import load_config
from service.conversations.document.job_faults import JobRules
from service.conversations.document.job_parser import parse_job
from service.conversations.document.limits import Limits
from service.conversations.job.job import Job, JobId, TurnKey
from service.errors import InvalidJob
from service.run import read_job_file
from service.scheduling.core.backlog import Estimates
from service.scheduling.core.events import JobAdmitted
from service.scheduling.core.live import LiveConversation, LiveJob

SIGNAL: dict[str, object] = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}
AGENTS: list[dict[str, object]] = [
    {"id": "a", "model": "m", "system": "Be A.", "params": {"seed": 1, "temperature": 0}, "exit_tools": [SIGNAL]},
    {"id": "b", "model": "m", "validation": {"choices": ["yes", "no"]}, "speak_after_within_round": ["a"]},
]


def parsed(*casts: dict[str, object], **job: object) -> Job:
    """Return a job with a conversation for each of these casts."""
    conversations = [{"id": f"c{n}", "prompt": "p", "agents": cast} for n, cast in enumerate(casts)]
    document = {"agents": AGENTS, "rounds": 3, "conversations": conversations, **job}
    rules = JobRules(models={"m", "n"}, adapters={"poet": "n"}, limits=Limits())
    return parse_job(document, JobId("j"), rules)


def test_a_cast_inherits_what_it_does_not_give() -> None:
    """Parameters merge by name, and every other field is replaced; null removes a validation."""
    job = parsed(
        {"a": {"params": {"temperature": 1, "top_k": 5}}},
        {"a": {"system": "", "model": "poet"}, "b": {"validation": None}},
        {},
    )
    a, b = job.agents
    first, second, third = job.conversations
    assert first.cast_agent(a).params == {"seed": 1, "temperature": 1, "top_k": 5}
    assert (first.cast_agent(a).system, first.cast_agent(b)) == ("Be A.", b)
    assert (second.cast_agent(a).model, second.cast_agent(a).adapter, second.cast_agent(a).system) == ("n", "poet", "")
    assert second.cast_agent(a).params == a.params
    assert second.cast_agent(a).exit_tools == a.exit_tools
    assert (b.validation is None, second.cast_agent(b).validation) == (False, None)
    assert (third.cast_agent(a), third.cast_agent(b)) == (a, b)


@pytest.mark.parametrize(
    ("own", "cast", "both"),
    [
        ({"max_tokens": 5}, {"n_predict": 40}, {"n_predict": 40}),
        ({"n_predict": 5}, {"max_tokens": 40, "seed": 2}, {"max_tokens": 40, "seed": 2}),
        ({"max_tokens": 5}, {"max_tokens": None}, {"max_tokens": 5}),
        ({"max_tokens": None}, {"seed": 2}, {"seed": 2}),
    ],
)
def test_a_bound_replaces_one_of_another_name(
    own: dict[str, object], cast: dict[str, object], both: dict[str, object]
) -> None:
    """All such names bound the answer's length, and an engine given two would choose one. Null counts as not given."""
    job = parsed({"a": {"params": cast}}, agents=[{"id": "a", "model": "m", "params": own}])
    assert job.conversations[0].cast_agent(job.agents[0]).params == both


def test_a_job_counts_the_models_of_its_conversations() -> None:
    """A node that takes the job has to serve all of them. First turns need slots of the first speakers' models."""
    job = parsed({"a": {"model": "n"}}, {"b": {"model": "n"}}, {})
    assert set(job.models) == {"m", "n"}
    assert job.first_models() == [("n",), ("m",), ("m",)]
    assert job.first_turns == Counter(m=2, n=1)


def test_pending_turns_are_counted_by_the_models_of_each_conversation() -> None:
    """The counts hold from admission, over ends of turns, to the ends of conversations."""
    job = parsed({"a": {"model": "n"}}, {})
    live = LiveJob(JobAdmitted(job=job), Estimates())
    talks = [LiveConversation(live, each, number) for number, each in enumerate(job.conversations)]
    live.conversations = {talk.definition.id: talk for talk in talks}
    assert live.backlog.left_by_model == {"m": 9, "n": 3}
    talks[0].end_turn(TurnKey(job.id, "c0", "a", 0))
    assert live.backlog.left_by_model == {"m": 9, "n": 2}
    assert (live.backlog.load("n").model_work, live.backlog.load("m").model_work) == (2, 9)
    live.end_conversation(talks[0])
    assert +live.backlog.left_by_model == {"m": 6}


@pytest.mark.parametrize(
    ("cast", "place", "told"),
    [
        ({"c": {}}, "conversations[0].agents.c", "unknown agent 'c'"),
        ({"a": {"model": "o"}}, "conversations[0].agents.a.model", "unknown model 'o'"),
        (
            {"a": {"params": {"max_tokens": 2, "n_predict": 3}}},
            "conversations[0].agents.a.params.n_predict",
            "one of both",
        ),
        ({"a": {"params": {"stream": True}}}, "conversations[0].agents.a.params.stream", "Roundhouse sets it"),
        ({"a": {"params": {"n": 2}}}, "conversations[0].agents.a.params.n", "one answer"),
        ({"a": {"tools": [SIGNAL]}}, "conversations[0].agents.a.tools[0]", "has a tool 'stop' already"),
        ({"a": {"role": "critic"}}, "conversations[0].agents.a.role", "unknown key"),
        ({"b": {"validation": {"choices": ["maybe"]}}}, "until[0].says[0]", "can never say 'yes'"),
    ],
)
def test_an_invalid_cast_is_refused_at_its_place(cast: dict[str, object], place: str, told: str) -> None:
    """The rules are those for an agent of the job."""
    with pytest.raises(InvalidJob) as caught:
        parsed(cast, until=[{"agent": "b", "says": ["yes"]}])
    assert [fault.path for fault in caught.value.faults] == [place]
    assert told in caught.value.faults[0].message


def test_a_leader_has_no_validation_in_any_conversation() -> None:
    """A leader's answer names an agent."""
    agents = [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}]
    with pytest.raises(InvalidJob, match="name of an agent"):
        parsed({"a": {"validation": {"choices": ["b"]}}}, mode="led", leader="a", agents=agents)


def test_a_replaced_system_prompt_needs_no_variables() -> None:
    """Only texts that the conversation uses are filled in."""
    agents = [{"id": "a", "model": "m", "system": "You are $name."}]
    given = {"prompt": "p", "variables": {"topic": "x"}}
    named = {"prompt": "p", "variables": {"name": "Ann"}}
    parsed(agents=agents, conversations=[{**given, "agents": {"a": {"system": "Of $topic."}}}, named])
    wanted = {"prompt": "p", "variables": {"name": "Bob"}, "agents": {"a": {"system": "$topic"}}}
    with pytest.raises(InvalidJob, match=r"'topic' is not given, which conversations\[1\]\.agents\.a\.system names"):
        parsed(agents=agents, conversations=[{**given, "variables": {"topic": "x", "name": "y"}}, wanted])


def test_one_model_for_all_applies_to_casts_too(tmp_path: Path) -> None:
    """``roundhouse run --model`` replaces every model that is named; callers have none."""
    (tmp_path / "rh.yaml").write_text("models: {x: {engine: attached, url: 'http://127.0.0.1:1', model: x}}")
    text = """
agents:
  - {id: a, model: m}
  - {id: b}
  - {id: guest, by: caller}
conversations:
  - {prompt: p, agents: {a: {model: n}, b: {system: s}, guest: {validation: {pattern: x}}}}
"""
    job = read_job_file("job.yaml", text, load_config(tmp_path / "rh.yaml"), "x").job
    assert {agent.model for agent in job.all_agents()} == {"x", ""}
