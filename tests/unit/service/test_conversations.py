from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.conversations.document import condition_faults
from service.conversations.document.job_faults import JobRules, find_cycle
from service.conversations.document.job_parser import parse_job
from service.conversations.document.limits import Limits
from service.conversations.job.job import Agent, Job, JobId
from service.conversations.job.until import scalar_key
from service.conversations.job.validation import Validation
from service.conversations.job.wording import Wording
from service.conversations.talk.discussion import Spoken, Utterance, visible_before
from service.conversations.talk.prompt_messages import PromptWriter
from service.errors import InvalidJob
from tests.harness.jobs import DEBATE, agent, job
from transport.request import Message


def heard(agents: tuple[Agent, ...], listener: str, round_number: int) -> list[tuple[str, int]]:
    made = job(*agents, rounds=9)
    listening = next(each for each in agents if each.id == listener)
    spoken = {(each.id, number): f"{each.id}{number}" for each in agents for number in range(round_number)}
    spoken |= {(each, round_number): f"{each}{round_number}" for each in listening.waits_for}
    words = visible_before(made, listening, round_number, spoken)
    assert all(
        word == Utterance(agent=word.agent, round=word.round, text=f"{word.agent}{word.round}") for word in words
    )
    return [(word.agent, word.round) for word in words]


def test_by_default_every_agent_hears_all_in_a_fixed_order() -> None:
    """Specification, "Visibility": earlier rounds, and of this round the agents it waits for."""
    assert heard(DEBATE, "a", 0) == []
    assert heard(DEBATE, "m", 0) == [("a", 0), ("b", 0)]
    assert heard(DEBATE, "a", 1) == [("a", 0), ("b", 0), ("m", 0)]
    assert heard(DEBATE, "m", 1) == [("a", 0), ("b", 0), ("m", 0), ("a", 1), ("b", 1)]


def test_visible_to_rules_later_rounds_and_waiting_rules_this_one() -> None:
    """Specification, "Visibility": the two are distinct; an agent always sees its own words."""
    agents = (agent("a", visible_to=["b"]), agent("b", visible_to=[]), agent("m", waits=["a"]))
    assert heard(agents, "a", 1) == [("a", 0), ("m", 0)]
    assert heard(agents, "b", 1) == [("b", 0), ("a", 0), ("m", 0)]
    assert heard(agents, "m", 0) == [("a", 0)]
    assert heard(agents, "m", 1) == [("m", 0), ("a", 1)]


NAMES = ("a", "b", "c", "d")


@st.composite
def casts(draw: st.DrawFn) -> tuple[Agent, ...]:
    size = draw(st.integers(1, 4))
    return tuple(
        agent(
            name,
            waits=draw(st.sets(st.sampled_from(NAMES[:number]))) if number else (),  # type: ignore[arg-type]
            visible_to=draw(st.none() | st.sets(st.sampled_from(NAMES[:size]))),  # type: ignore[arg-type]
        )
        for number, name in enumerate(NAMES[:size])
    )


@given(casts(), st.integers(0, 3), st.data())
def test_no_agent_reads_what_it_may_not(cast: tuple[Agent, ...], round_number: int, data: st.DataObject) -> None:
    """For any cast an agent reads its own words, words visible to it, and words of this round that it waits for."""
    listener = data.draw(st.sampled_from(cast))
    by_id = {each.id: each for each in cast}
    for speaker, number in heard(cast, listener.id, round_number):
        seen_by = by_id[speaker].visible_to
        if number == round_number:
            assert speaker in listener.waits_for
        else:
            assert speaker == listener.id or seen_by is None or listener.id in seen_by


@given(casts(), st.integers(1, 3), st.data())
def test_messages_alternate_and_end_with_the_user(cast: tuple[Agent, ...], rounds: int, data: st.DataObject) -> None:
    """Many chat templates insist on strict alternation."""
    made = job(*cast, rounds=rounds)
    listener = data.draw(st.sampled_from(cast))
    spoken = {(each.id, number): "x" for each in cast for number in range(rounds)}
    messages = render(made, listener, rounds - 1, spoken)
    assert [message.role for message in messages] == ["user", "assistant"] * (rounds - 1) + ["user"]


def test_a_later_prompt_extends_an_earlier_one() -> None:
    """Prefix caches of engines keep an unchanged beginning."""
    made = job(*DEBATE, rounds=4)
    spoken: dict[tuple[str, int], str] = {}
    before: dict[str, tuple[Message, ...]] = {}
    for number in range(4):
        for each in DEBATE:
            now = render(made, each, number, spoken)
            assert now[: len(before.get(each.id, ()))] == before.get(each.id, ())
            before[each.id] = now
            spoken[each.id, number] = f"{each.id}{number}"


def render(made: Job, listener: Agent, round_number: int, spoken: Spoken) -> tuple[Message, ...]:
    heard = visible_before(made, listener, round_number, spoken)
    writer = PromptWriter(made, Wording())
    return writer.messages(made.conversations[0], listener, round_number, heard, (), is_told=False)


@pytest.mark.parametrize(
    ("waits", "cycle"),
    [
        ({}, ()),
        ({"a": ["b"], "b": ["c"], "c": []}, ()),
        ({"a": ["a"]}, ("a",)),
        ({"a": ["b"], "b": ["a"]}, ("a", "b")),
        ({"x": ["a"], "a": ["b"], "b": ["c"], "c": ["a"]}, ("a", "b", "c")),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, ()),
        ({"a": ["gone"]}, ()),
    ],
)
def test_a_cycle_is_found(waits: dict[str, list[str]], cycle: tuple[str, ...]) -> None:
    """No agent in a cycle could ever speak."""
    assert find_cycle(waits) == cycle


def test_a_long_chain_is_no_cycle() -> None:
    """The search does not recurse."""
    assert find_cycle({str(number): [str(number + 1)] for number in range(50_000)}) == ()


WRONG_VALIDATIONS: list[dict[str, object]] = [
    {},
    {"choices": []},
    {"choices": ["yes", "Yes"]},
    {"choices": ["yes"], "pattern": "y"},
    {"pattern": "("},
    {"json_schema": {"type": "nothing"}},
    {"json_schema": {"$ref": "#/x"}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$ref": "http://example.com/schema"}},
    {"json_schema": {"unevaluatedProperties": False}},
    {"choices": ["yes"], "retries": -1},
    {"choices": [""]},
]


def rules(**limits: int) -> JobRules:
    return JobRules(models=["m"], limits=Limits(**limits), webhook_hosts=["hooks.example"], webhook_secrets=["ours"])


def document(**changes: object) -> dict[str, object]:
    return {"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "p"}], **changes}


def test_defaults_are_those_of_the_specification() -> None:
    """A one-agent, one-round, one-conversation job is an ordinary prompt."""
    made = parse_job(document(), JobId("j"), rules())
    assert (made.total_turns, made.conversations[0].id, made.conversations[0].rounds) == (1, "c0", 1)
    assert made.agents[0] == Agent(id="a", role="participant", model="m", system="")


@pytest.mark.parametrize(
    ("limit", "changes", "told"),
    [
        (
            "agents",
            {"agents": [{"id": f"a{n}", "model": "m"} for n in range(3)]},
            "3 agents are more than limits.agents = 2",
        ),
        (
            "conversations",
            {"conversations": [{"prompt": "p"}] * 3},
            "3 conversations are more than limits.conversations = 2",
        ),
        ("rounds", {"rounds": 3}, "3 rounds are more than limits.rounds = 2"),
        ("turns", {"rounds": 3}, "3 turns are more than limits.turns = 2"),
    ],
)
def test_an_exceeded_limit_is_named(limit: str, changes: dict[str, object], told: str) -> None:
    """Limits are configured, and a job that exceeds one is refused whole."""
    with pytest.raises(InvalidJob, match=told):
        parse_job(document(**changes), JobId("j"), rules(**{limit: 2}))


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "freely"},
        {"prompt_at": "queue"},
        {"mode": "free", "prompt_at": "never"},
        {
            "mode": "free",
            "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "m", "speak_after_within_round": ["a"]}],
        },
        {"agents": [{"id": "a", "model": "m", "markup": "yes"}]},
        {"rounds": 0},
        {"rounds": True},
        {"agents": [{"id": "", "model": "m"}]},
        {"agents": [{"id": "../a", "model": "m"}]},
        {"conversations": [{"id": "a/b", "prompt": "p"}]},
        {"conversations": [{"prompt": 5}]},
        {"priority": 1.5},
        {"agents": "a"},
        *({"agents": [{"id": "a", "model": "m", "validation": validation}]} for validation in WRONG_VALIDATIONS),
    ],
)
def test_unknown_fields_and_values_are_refused(changes: dict[str, object]) -> None:
    """No option is accepted and ignored. Ids may become names of files."""
    with pytest.raises(InvalidJob):
        parse_job(document(**changes), JobId("j"), rules())


FINISH = {"type": "function", "function": {"name": "finish", "parameters": {"type": "object"}}}
VERDICT = {
    "type": "object",
    "properties": {
        "verdict": {"type": "string", "enum": ["yes", "no"]},
        "sure": {"type": "boolean"},
        "on": {"type": "object", "properties": {"point": {"type": ["integer", "null"]}}, "additionalProperties": False},
        "any": {"anyOf": [{"type": "object"}, {"type": "string"}]},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("field", "equals"),
    [("verdict", "YES"), ("sure", False), ("on.point", 3), ("on.point", 3.0), ("any.x", "y"), ("any", 5)],
)
def test_a_field_that_a_schema_allows_is_accepted(field: str, equals: object) -> None:
    """A schema that leaves properties open allows any field."""
    agent = {"id": "j", "model": "m", "validation": {"json_schema": VERDICT}}
    parse_job(document(agents=[agent], until=[{"agent": "j", "field": field, "equals": equals}]), JobId("j"), rules())


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-03/schema#", "properties": {"v": {"type": "any"}}},
        {"$schema": "http://json-schema.org/draft-03/schema#", "type": ["number", {"type": "object"}]},
        {"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"v": {"const": "no"}}},
        {"properties": {"v": {"$ref": "#/$defs/v"}}, "$defs": {"v": {"enum": ["yes"]}}, "additionalProperties": False},
        {"properties": {"v": True}, "additionalProperties": False},
    ],
)
def test_an_unsupported_schema_refuses_no_condition(schema: dict[str, object]) -> None:
    """Only the schema's validator can say what it rules out."""
    agent = {"id": "j", "model": "m", "validation": {"json_schema": schema}}
    parse_job(document(agents=[agent], until=[{"agent": "j", "field": "v", "equals": "yes"}]), JobId("j"), rules())


def test_a_condition_is_judged_by_the_validations_that_apply() -> None:
    """A validation that every conversation replaces does not apply, nor does one where each has its own conditions."""
    agents = [{"id": "j", "model": "m", "validation": {"json_schema": VERDICT}}]
    until = [{"agent": "j", "field": "verdict", "equals": "maybe"}]
    free = {"prompt": "p", "agents": {"j": {"validation": None}}}
    own = {"prompt": "p", "until": [{"answer_tokens": 5}]}
    for talks in ([free], [own], [free, own]):
        parse_job(document(agents=agents, until=until, conversations=talks), JobId("j"), rules())
    with pytest.raises(InvalidJob, match="it must be one of"):
        parse_job(document(agents=agents, until=until, conversations=[free, {"prompt": "q"}]), JobId("j"), rules())


def test_conditions_of_many_conversations_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An enumeration is read once for all of them: a job of 12 KB once took a second."""
    schema = {"properties": {"v": {"enum": [f"v{n}" for n in range(2_000)]}}}
    agents = [{"id": each, "model": "m", "validation": {"json_schema": schema}} for each in ("j", "k")]
    talk = {"prompt": "p", "agents": {"k": {"validation": None}}}
    until = [{"agent": "j", "field": "v", "equals": "v1999"}] * 30
    posted = document(agents=agents, until=until, conversations=[talk] * 100)
    read: list[object] = []

    def reading(value: object) -> object:
        read.append(value)
        return scalar_key(value)

    monkeypatch.setattr(condition_faults, "scalar_key", reading)
    parse_job(posted, JobId("j"), rules())
    assert len(read) <= 2_000 + 30


def test_many_words_beside_many_choices_are_checked_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is not searched for in other choices, and only so many characters are compared.

    32 KB of a job once took two thirds of a second.
    """
    choices = [f"v{n}" for n in range(900)]
    agents = [{"id": "j", "model": "m", "validation": {"choices": choices}}]
    compared: list[int] = []

    def comparing(validation: Validation, words: str) -> str | None:
        compared.append(sum(map(len, validation.choices)) * len(words))
        return fault_of(validation, words)

    fault_of = Validation.fault_of
    monkeypatch.setattr(Validation, "fault_of", comparing)
    exact = [{"agent": "j", "says": choices[at : at + 100]} for at in range(0, 900, 100)]
    parse_job(document(agents=agents, until=exact), JobId("j"), rules())
    assert not compared
    longer = [{"agent": "j", "says": ["v1 " * 30] * 100}] * 30
    parse_job(document(agents=agents, until=longer), JobId("j"), rules())
    assert 0 < sum(compared) <= condition_faults.MOST_COMPARED
    with pytest.raises(InvalidJob, match="can never say 'w1'"):
        parse_job(document(agents=agents, until=[{"agent": "j", "says": ["v1", "w1"]}]), JobId("j"), rules())


@pytest.mark.parametrize(
    ("until", "place", "told"),
    [
        ({}, "until[0]", "a condition has one of says, matches, field, signal, agree, unchanged and answer_tokens"),
        ({"agent": "a", "says": ["x"], "matches": "y"}, "until[0]", "has one of"),
        ({"says": ["x"]}, "until[0]", "says wants an agent beside it"),
        ({"agent": "a", "unchanged": 1}, "until[0]", "has no agent beside it"),
        ({"agent": "a", "says": [" "]}, "until[0]", "fulfils no condition"),
        ({"agent": "a", "says": []}, "until[0].says", "at least 1"),
        ({"agent": "a", "matches": "("}, "until[0]", "matches: "),
        ({"agree": ["a"]}, "until[0].agree", "at least 2"),
        ({"agree": ["a", "a"]}, "until[0]", "named twice"),
        ({"agree": ["a", "x"]}, "until[0].agree[1]", "unknown agent 'x'"),
        ({"agent": "x", "says": ["y"]}, "until[0].agent", "unknown agent 'x'"),
        ({"signal": "finished"}, "until[0].signal", "did you mean 'finish'"),
        ({"agent": "b", "signal": "finish"}, "until[0].signal", "unknown exit tool 'finish'"),
        ({"agent": "b", "says": ["yes", "perhaps"]}, "until[0].says[1]", "'b' can never say 'perhaps'"),
        ({"agent": "a", "field": "x"}, "until[0]", "field and equals stand together"),
        ({"agent": "a", "matches": "x", "equals": "y"}, "until[0]", "field and equals stand together"),
        ({"equals": "x", "field": "y"}, "until[0]", "field wants an agent"),
        ({"agent": "a", "field": "x.", "equals": 1}, "until[0].field", "pattern"),
        ({"agent": "a", "field": "x", "equals": ["y"]}, "until[0].equals", "must be text, a number, true or false"),
        ({"agent": "j", "field": "verdct", "equals": "yes"}, "until[0].field", "did you mean 'verdict'"),
        ({"agent": "j", "field": "verdict.x", "equals": 1}, "until[0].field", "unknown property 'x'"),
        ({"agent": "j", "field": "verdict", "equals": "maybe"}, "until[0].equals", 'one of ["yes", "no"]'),
        ({"agent": "j", "field": "sure", "equals": "true"}, "until[0].equals", 'its type is "boolean"'),
        ({"agent": "j", "field": "on.point", "equals": 1.5}, "until[0].equals", "its type is"),
        ({"agent": "a", "field": "x", "equals": "y" * 1001}, "until[0]", "at most 1000 characters"),
        ({"agent": "j", "field": "on.other", "equals": 1}, "until[0].field", "unknown property 'other'"),
        ({"unchanged": 2}, "until[0].unchanged", "2 rounds of 'c0' are too few"),
        ({"unchanged": 0}, "until[0].unchanged", "must be at least 1"),
        ({"answer_tokens": "many"}, "until[0].answer_tokens", "integer"),
    ],
)
@pytest.mark.parametrize("at", ["job", "conversation"])
def test_a_condition_that_can_never_hold_is_refused(until: dict[str, object], place: str, told: str, at: str) -> None:
    """Specification, "Ends": the fault names its place, in the job or in a conversation."""
    agents = [
        {"id": "a", "model": "m", "exit_tools": [FINISH]},
        {"id": "b", "model": "m", "validation": {"choices": ["yes", "no"]}},
        {"id": "j", "model": "m", "validation": {"json_schema": VERDICT}},
    ]
    conversation = {"prompt": "p", **({"until": [until]} if at == "conversation" else {})}
    made = document(
        agents=agents, rounds=2, conversations=[conversation], **({"until": [until]} if at == "job" else {})
    )
    with pytest.raises(InvalidJob) as caught:
        parse_job(made, JobId("j"), rules())
    (fault,) = caught.value.faults
    assert fault.path == (place if at == "job" else f"conversations[0].{place}")
    assert told in fault.message


def test_variables_are_filled_in_once_where_the_job_names_them() -> None:
    """A dollar sign before no name stays, and so do all of them in a conversation without variables."""
    agents = [{"id": "a", "model": "m", "system": "$name pays $5 or $$5, ${name}s ^DONE$"}]
    text = "$topic costs $5, $$topic, ${topic}!"
    conversations = [
        {"prompt": text, "variables": {"topic": "$name", "name": "Ann"}},
        {"prompt": text},
        {"prompt": "Plain.", "variables": {"name": 2.5, "topic": True}},
    ]
    made = parse_job(document(agents=agents, system="Of $name.", conversations=conversations), JobId("j"), rules())
    assert [each.prompt for each in made.conversations] == ["$name costs $5, $topic, $name!", text, "Plain."]
    writer = PromptWriter(made, Wording())
    systems = [writer.system(each, made.agents[0], is_told=False) for each in made.conversations]
    assert systems == [
        "Of Ann.\n\nAnn pays $5 or $5, Anns ^DONE$",
        "Of $name.\n\n$name pays $5 or $$5, ${name}s ^DONE$",
        "Of 2.5.\n\n2.5 pays $5 or $5, 2.5s ^DONE$",
    ]


def test_the_patterns_of_conditions_are_bounded() -> None:
    """Each pattern is compiled; one that many conversations share counts once."""
    conversations = [{"prompt": "p", "until": [{"agent": "a", "matches": f"x{n}"}]} for n in range(257)]
    with pytest.raises(InvalidJob, match="257 different patterns"):
        parse_job(document(conversations=conversations), JobId("j"), rules())
    same = [{"prompt": "p", "until": [{"agent": "a", "matches": "x"}]} for _ in range(257)]
    assert len(parse_job(document(conversations=same), JobId("j"), rules()).conversations) == 257


@pytest.mark.parametrize("where", ["prompt", "system"])
def test_variables_make_no_text_too_long(where: str) -> None:
    """A few bytes may name a long value many times: the job is refused before the value is filled in."""
    texts = {"prompt": "p", "system": "", where: "$a" * 100_000}
    conversations = [{"prompt": texts["prompt"], "variables": {"a": "x" * 1_000_000}}]
    with pytest.raises(InvalidJob, match=r"more than limits\.body_bytes"):
        parse_job(document(system=texts["system"], conversations=conversations), JobId("j"), rules())


@pytest.mark.parametrize(
    ("variables", "place", "told"),
    [
        ({"name": "Ann"}, "conversations[1].variables", "'topic' is not given, which conversations[1].prompt names"),
        ({"topic": "x"}, "conversations[1].variables", "'name' is not given, which system, agents[0].system names"),
        ({"topic": "x", "name": "y", "2nd": "z"}, "conversations[1].variables.2nd", "begins with no digit"),
        ({"topic": "x", "name": "y", "agent": "z"}, "conversations[1].variables.agent", "Roundhouse's own words"),
        ({"topic": "x", "name": ["y"]}, "conversations[1].variables.name", "must be"),
        ({"topic": "x", "naem": "y"}, "conversations[1].variables", "did you mean $naem?"),
    ],
)
def test_a_missing_variable_is_refused(variables: dict[str, object], place: str, told: str) -> None:
    """The fault lists every place that names it. A conversation without variables needs none."""
    agents = [{"id": "a", "model": "m", "system": "You are $name."}]
    prompt = "Of $topic and $$other."
    conversations = [
        {"prompt": prompt, "variables": {"topic": "x", "name": "y"}},
        {"prompt": prompt, "variables": variables},
        {"prompt": prompt},
    ]
    with pytest.raises(InvalidJob) as caught:
        parse_job(document(agents=agents, system="With $name.", conversations=conversations), JobId("j"), rules())
    assert {fault.path for fault in caught.value.faults} == {place}
    assert told in caught.value.faults[0].message


def test_variables_are_filled_in_all_words_of_a_conversation() -> None:
    """Roles, choices, prepared words and ends are filled in, per conversation."""
    agents = [
        {"id": "a", "model": "m", "role": "friend of $name", "validation": {"choices": ["$yes", "no"]}},
        {"id": "b", "by": "caller", "wait_s": 1, "otherwise": "$name is away"},
    ]
    conversations = [
        {"prompt": "p", "variables": {"name": "Ann", "yes": "ja"}},
        {"prompt": "p", "variables": {"name": "Bob", "yes": "oui"}, "until": [{"agent": "a", "says": ["$yes!"]}]},
        {"prompt": "p"},
    ]
    until = [{"agent": "a", "says": ["$yes"]}]
    made = parse_job(document(agents=agents, conversations=conversations, until=until), JobId("j"), rules())
    cast = [[each.cast_agent(agent) for agent in made.agents] for each in made.conversations]
    assert [(a.role, a.validation.choices if a.validation else (), b.otherwise) for a, b in cast] == [
        ("friend of Ann", ("ja", "no"), "Ann is away"),
        ("friend of Bob", ("oui", "no"), "Bob is away"),
        ("friend of $name", ("$yes", "no"), "$name is away"),
    ]
    assert [each.until[0].says for each in made.conversations] == [("ja",), ("oui!",), ("$yes",)]


@pytest.mark.parametrize(
    ("agent", "place"),
    [
        ({"system": "You are $nobody."}, "agents[0].system"),
        ({"role": "$nobody"}, "agents[0].role"),
        ({"validation": {"choices": ["$nobody", "x"]}}, "agents[0].validation.choices[0]"),
        ({"system": "You are $agent."}, "agents[0].system"),
    ],
)
def test_a_name_that_no_variable_fills_is_refused(agent: dict[str, object], place: str) -> None:
    """The text would be sent with the name in it, which is never intended."""
    conversations = [{"prompt": "p", "variables": {"a": "x"}}]
    made = document(agents=[{"id": "a", "model": "m", **agent}], conversations=conversations)
    with pytest.raises(InvalidJob, match="is not given, which") as caught:
        parse_job(made, JobId("j"), rules())
    assert place in caught.value.faults[0].message


def test_choices_that_variables_make_equal_are_refused() -> None:
    """No answer could match one of them alone."""
    agents = [{"id": "a", "model": "m", "validation": {"choices": ["$one", "$two"]}}]
    for values in ({"one": "x", "two": " X "}, {"one": "x", "two": ""}):
        with pytest.raises(InvalidJob, match="are not distinct words"):
            parse_job(
                document(agents=agents, conversations=[{"prompt": "p", "variables": values}]), JobId("j"), rules()
            )


@pytest.mark.parametrize(
    ("validation", "otherwise", "is_fault"),
    [
        ({"pattern": "^q$"}, "zz", True),
        ({"pattern": "^q$"}, "q", False),
        ({"json_schema": {"type": "object"}}, "zz", True),
        ({"json_schema": {"type": "object"}}, "{}", False),
        ({"choices": ["a", "b"]}, "c", True),
    ],
)
def test_prepared_words_are_validated(validation: dict[str, object], otherwise: str, *, is_fault: bool) -> None:
    """The rules are those for a caller's words."""
    caller = {"id": "b", "by": "caller", "wait_s": 1, "otherwise": otherwise, "validation": validation}
    made = document(agents=[{"id": "a", "model": "m"}, caller])
    if not is_fault:
        parse_job(made, JobId("j"), rules())
        return
    with pytest.raises(InvalidJob) as caught:
        parse_job(made, JobId("j"), rules())
    assert [fault.path for fault in caught.value.faults] == ["agents[1].otherwise"]


@pytest.mark.parametrize(
    ("changes", "place", "told"),
    [
        ({}, "leader", "mode: led wants a leader"),
        ({"leader": "hots"}, "leader", "did you mean 'host'"),
        ({"leader": "host", "mode": "rounds"}, "leader", "only mode: led has one"),
        ({"leader": "host", "agents": [{"id": "host", "model": "m"}]}, "agents", "nobody to name"),
        ({"leader": "host", "agent": {"id": "End"}}, "agents[1].id", "what a leader says"),
        ({"leader": "host", "agent": {"id": "HOST"}}, "agents[1].id", "the id of agents[0]"),
        (
            {"leader": "host", "agent": {"speak_after_within_round": ["host"]}},
            "agents[1].speak_after_within_round",
            "led",
        ),
        ({"leader": "a", "agent": {"validation": {"choices": ["x"]}}}, "agents[1].validation", "name of an agent"),
        ({"leader": "a", "agent": {"on_failure": "leave"}}, "agents[1].on_failure", "without the leader"),
        ({"leader": "host", "prompt_at": "queue"}, "prompt_at", "only mode: free"),
        ({"leader": "host", "until": [{"agree": ["a", "host"]}]}, "until[0].agree[1]", "agrees with nobody"),
        ({"leader": "host", "until": [{"agent": "host", "says": ["b"]}]}, "until[0].says[0]", "can never say 'b'"),
        (
            {"leader": "host", "until": [{"agent": "host", "field": "b", "equals": 1}]},
            "until[0].field",
            "the name of an agent, or end",
        ),
    ],
)
def test_a_led_job_that_cannot_be_led_is_refused(changes: dict[str, object], place: str, told: str) -> None:
    """Specification, "Led mode": no field is accepted and ignored."""
    agent = {"id": "a", "model": "m", **cast("dict[str, object]", changes.get("agent", {}))}
    agents = [{"id": "host", "model": "m"}, agent]
    given = {"mode": "led", "agents": agents, **{key: value for key, value in changes.items() if key != "agent"}}
    with pytest.raises(InvalidJob) as caught:
        parse_job(document(**given), JobId("j"), rules())
    assert [(fault.path, told in fault.message) for fault in caught.value.faults] == [(place, True)]


def test_a_flood_of_faults_is_cut() -> None:
    """Reporting faults must not cost more than a valid job."""
    agents = [{"id": f"a{n}", "model": "gone"} for n in range(200)]
    with pytest.raises(InvalidJob) as caught:
        parse_job(document(agents=agents), JobId("j"), rules())
    assert len(caught.value.faults) == 100
    with pytest.raises(InvalidJob, match="600000 agents"):
        parse_job(document(agents=[{"id": "a", "model": "m"}] * 600_000), JobId("j"), rules())


@pytest.mark.parametrize(
    ("guest", "places"),
    [
        ({"model": "m"}, ["agents[1].model"]),
        ({"params": {}, "tools": [], "markup": False, "system": "", "exit_tools": []}, [
            f"agents[1].{key}" for key in ("exit_tools", "markup", "params", "system", "tools")
        ]),
        ({"otherwise": "I pass."}, ["agents[1].otherwise"]),
        ({"wait_s": 1, "otherwise": "x" * 65_537}, ["agents[1].otherwise"]),
        ({"wait_s": 1, "otherwise": "maybe", "validation": {"choices": ["yes", "no"]}}, ["agents[1].otherwise"]),
        ({"wait_s": 0}, ["agents[1].wait_s"]),
        ({"wait_s": 1e300}, ["agents[1].wait_s"]),
        ({"by": "model", "model": "m", "wait_s": 5, "otherwise": "x"}, ["agents[1].otherwise", "agents[1].wait_s"]),
        ({"by": "model"}, ["agents[1].model"]),
        ({"by": "nobody"}, ["agents[1].by"]),
    ],
)  # fmt: skip
def test_a_callers_unused_fields_are_refused(guest: dict[str, object], places: list[str]) -> None:
    """Specification, "Turns of callers": no field is accepted and ignored."""
    agents = [{"id": "a", "model": "m"}, {"id": "guest", "by": "caller", **guest}]
    with pytest.raises(InvalidJob) as caught:
        parse_job(document(agents=agents), JobId("j"), rules())
    assert [fault.path for fault in caught.value.faults] == places


def test_a_job_needs_at_least_one_model() -> None:
    """A job of callers alone needs no engine.

    A leader is never a caller, and no conversation turns a caller into a model or back.
    """
    callers = [{"id": "a", "by": "caller"}, {"id": "b", "by": "caller"}]
    with pytest.raises(InvalidJob, match="asked of a model"):
        parse_job(document(agents=callers), JobId("j"), rules())
    led = [{"id": "a", "by": "caller"}, {"id": "b", "model": "m"}]
    with pytest.raises(InvalidJob, match="a leader is asked of a model"):
        parse_job(document(agents=led, mode="led", leader="a"), JobId("j"), rules())
    cast = [{"prompt": "p", "agents": {"a": {"model": "m", "validation": {"choices": ["x"]}}}}]
    with pytest.raises(InvalidJob) as caught:
        parse_job(document(agents=led, conversations=cast), JobId("j"), rules())
    assert [fault.path for fault in caught.value.faults] == ["conversations[0].agents.a.model"]
    stored = parse_job(document(agents=led), JobId("j"), rules())
    assert stored.models == ("m",)
    assert stored.first_models() == [("m",)]
