"""Conversations that begin with what others have recorded (specification, "Begun from a record")."""

import re
from collections.abc import Callable, Iterator

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving

WORDS = "ANSWERS: one | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve"
TOOL: Document = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
Ports = Callable[[int], int]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Ports) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("heirs")
    models = {"m": scripted_model(free_ports(1), slots=4, chooses=True, record=str(folder / "record"))}
    with serving(folder, free_ports(1), models) as running:
        yield running


def asked(service: Service) -> list[Document]:
    return recorded(service.folder / "record")


def job(rounds: int, **fields: object) -> Document:
    agents: list[Document] = [
        {"id": "ann", "model": "m", "system": WORDS},
        {"id": "bob", "model": "m", "system": WORDS, "speak_after_within_round": ["ann"]},
        {"id": "cid", "model": "m", "system": WORDS, "visible_to": ["bob"]},
    ]
    return {"agents": agents, "rounds": rounds, "conversations": [{"id": "c", "prompt": "Count."}], **fields}


def run(service: Service, document: Document) -> tuple[str, Document]:
    """Run a job; return its id, and its first transcript."""
    job_id = service.post_job(document)
    service.wait_ended(job_id)
    transcript: Document = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]
    return job_id, transcript


def heir(job_id: str, **cut: object) -> Document:
    return {"id": "heir", "from": {"job": job_id, "conversation": "c", **cut}}


def said(transcript: Document) -> dict[tuple[str, int], str]:
    return {(turn["agent"], turn["round"]): turn["text"] for turn in transcript["turns"]}


def own(transcript: Document) -> set[tuple[str, int]]:
    return {(turn["agent"], turn["round"]) for turn in transcript["turns"] if turn["inherited"] is None}


SHAPES: dict[str, Document] = {
    "rounds": {},
    "one text": {"view": "shared"},
    "free": {"mode": "free", "agents": [{"id": name, "model": "m", "system": WORDS} for name in ("ann", "bob")]},
    "led": {
        "mode": "led",
        "leader": "host",
        "agents": [
            {"id": "host", "model": "m"},
            {"id": "ann", "model": "m", "system": WORDS},
            {"id": "bob", "model": "m", "system": WORDS},
        ],
    },
}


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "free"])
def test_an_extended_conversation_equals_one_long_run(service: Service, shape: str) -> None:
    """All of it and more rounds: the words, and each prompt, are those of one run with all rounds."""
    rounds = 4 if shape == "led" else 3
    _, whole = run(service, job(rounds, **SHAPES[shape]))
    source, begun = run(service, job(1, **SHAPES[shape]))
    before = len(asked(service))
    extended_id, extended = run(service, job(rounds, **{**SHAPES[shape], "conversations": [heir(source)]}))
    assert said(extended) == said(whole)
    assert own(extended) == own(whole) - said(begun).keys() or shape == "led"
    assert len(asked(service)) - before == len(own(extended))
    assert {str(turn["inherited"]) for turn in extended["turns"] if turn["inherited"]} == {
        str({"job": source, "conversation": "c"})
    }
    counts = service.get(f"/v1/jobs/{extended_id}")["progress"]["turns"]
    assert counts["completed"] == counts["total"] == len(own(extended))


def test_free_turns_are_inherited(service: Service) -> None:
    """Each agent's first turns; who has been silent longest goes first."""
    source, _ = run(service, job(2, **SHAPES["free"]))
    _, extended = run(service, job(3, **{**SHAPES["free"], "conversations": [heir(source, rounds=1)]}))
    assert own(extended) == {("ann", 1), ("bob", 1), ("ann", 2), ("bob", 2)}


def test_a_fork_takes_the_turns_that_do_not_wait_for_its_own(service: Service) -> None:
    """``before``: earlier rounds whole, and of that round the turns that do not wait for it."""
    source, whole = run(service, job(3))
    _, fork = run(service, job(3, conversations=[heir(source, before={"agent": "ann", "round": 1})]))
    assert own(fork) == said(whole).keys() - {("ann", 0), ("bob", 0), ("cid", 0), ("cid", 1)}
    assert said(fork) == said(whole), "nothing was changed, and the model is certain of its words"
    other = {"bob": {"system": "ANSWERS: other"}}
    _, fork = run(
        service, job(3, conversations=[{**heir(source, before={"agent": "bob", "round": 2}), "agents": other}])
    )
    assert own(fork) == {("bob", 2)}
    assert said(fork) == {**said(whole), ("bob", 2): "other"}


def test_a_fork_of_a_fork_refers_to_the_originals(service: Service) -> None:
    """It never refers to a fork's turns; each turn names the conversation in which it was spoken."""
    source, _ = run(service, job(1))
    second, _ = run(service, job(2, conversations=[{**heir(source), "id": "c"}]))
    _, third = run(service, job(3, conversations=[heir(second)]))
    assert [(turn["round"], turn["inherited"]) for turn in third["turns"] if turn["agent"] == "ann"] == [
        (0, {"job": source, "conversation": "c"}),
        (1, {"job": second, "conversation": "c"}),
        (2, None),
    ]


def test_a_fork_of_a_shorter_fork_has_no_words_of_the_other_branch(service: Service) -> None:
    """The original went on; the fork went another way, and so does a fork of it."""
    source, whole = run(service, job(4))
    other = {"ann": {"system": "ANSWERS: other"}}
    shorter = {**heir(source, rounds=1), "id": "c", "agents": other}
    second, branch = run(service, job(3, conversations=[shorter]))
    _, third = run(service, job(4, conversations=[heir(second)]))
    assert len(third["turns"]) == len(said(third)) == 12
    assert {place: said(third)[place] for place in said(branch)} == said(branch)
    assert said(third)["ann", 1] != said(whole)["ann", 1]


def test_an_heir_takes_no_more_rounds_than_it_has(service: Service) -> None:
    """Agents that do not read each other are rounds apart, or free."""
    source, _ = run(service, job(3, **SHAPES["free"]))
    cut = heir(source, before={"agent": "bob", "round": 1})
    job_id, transcript = run(service, job(2, **{**SHAPES["free"], "conversations": [cut]}))
    assert own(transcript) == {("bob", 1)}
    counts = service.get(f"/v1/jobs/{job_id}")["progress"]["turns"]
    assert (counts["total"], counts["completed"]) == (1, 1)


@pytest.mark.parametrize("given", [[1], "ab"])
def test_variables_of_another_kind_are_refused(service: Service, given: object) -> None:
    """The rules are those of a job without a source."""
    source, _ = run(service, job(1))
    refused = service.http.post("/v1/jobs", json=job(2, conversations=[{**heir(source), "variables": given}]))
    assert refused.status_code == 422


def test_words_of_a_missing_agent_reveal_nothing(service: Service) -> None:
    """They go to the agents that the source showed them: cid's to bob alone, ann's to all; a new agent joins later."""
    source, whole = run(service, job(2))
    agents = [
        {"id": "bob", "model": "m", "system": WORDS},
        {"id": "dan", "model": "m", "system": WORDS},
    ]
    _, fork = run(service, job(3, agents=agents, conversations=[heir(source)]))
    assert own(fork) == {("bob", 2), ("dan", 2)}
    prompts = {
        who: service.get(f"/v1/jobs/{fork_id(service)}/conversations/heir/turns/{who}/2/prompt")["attempts"][0]
        for who in ("bob", "dan")
    }
    texts = {who: "\n".join(each["content"] for each in prompt["messages"][1:]) for who, prompt in prompts.items()}
    for number in range(2):
        assert f"ann: {said(whole)['ann', number]}" in texts["dan"]
        assert f"cid: {said(whole)['cid', number]}" in texts["bob"]
    assert "cid:" not in texts["dan"]


def fork_id(service: Service) -> str:
    newest: str = service.get("/v1/jobs?limit=1")["jobs"][0]["id"]
    return newest


def test_the_prompt_of_an_inherited_turn_is_shown(service: Service) -> None:
    """It comes from the source; tools are not called again."""
    source, _ = run(service, job(1))
    _, fork = run(service, job(2, conversations=[heir(source)]))
    assert len(own(fork)) == 3
    path = "/v1/jobs/{}/conversations/{}/turns/bob/0/prompt"
    assert service.get(path.format(fork_id(service), "heir")) == service.get(path.format(source, "c"))


@pytest.mark.parametrize(
    ("cut", "fields", "path", "message"),
    [
        ({"rounds": 3}, {}, "conversations[0].from.rounds", "2 rounds are recorded"),
        ({"before": {"agent": "ann", "round": 2}}, {}, "conversations[0].from.before", "is not recorded"),
        ({"before": {"agent": "eve", "round": 1}}, {}, "conversations[0].from.before.agent", "is no agent"),
        ({"rounds": 1, "before": {"agent": "ann", "round": 1}}, {}, "conversations[0].from", "not both"),
        ({}, {"rounds": 2}, "conversations[0].rounds", "nothing is left to say"),
        ({}, {"mode": "free"}, "conversations[0].from.job", "goes on as it began"),
        ({"rounds": 0}, {}, "conversations[0].from.rounds", "must be at least 1"),
    ],
)
def test_an_impossible_inheritance_is_refused(
    service: Service, cut: Document, fields: Document, path: str, message: str
) -> None:
    """The fault has its place."""
    source, _ = run(service, job(2))
    refused = service.http.post("/v1/jobs", json={**job(4, conversations=[heir(source, **cut)]), **fields})
    if fields.get("mode") == "free":
        bare = [{"id": name, "model": "m"} for name in ("ann", "bob")]
        refused = service.http.post("/v1/jobs", json=job(4, agents=bare, conversations=[heir(source)], **fields))
    assert refused.status_code == 422
    assert [fault["path"] for fault in refused.json()["errors"]] == [path]
    assert message in refused.text


def test_an_unknown_source_is_not_found(service: Service) -> None:
    """The job or its conversation does not exist."""
    source, _ = run(service, job(1))
    assert service.http.post("/v1/jobs", json=job(2, conversations=[heir("job-0")])).status_code == 404
    wrong = {"from": {"job": source, "conversation": "x"}}
    assert service.http.post("/v1/jobs", json=job(2, conversations=[wrong])).status_code == 404


def test_a_deleted_source_leaves_its_heirs_their_turns(service: Service) -> None:
    """They are copied when it is deleted, as far as inherited, and dropped with the last heir."""
    source, whole = run(service, job(3))
    fork, before = run(service, job(2, conversations=[heir(source, rounds=1)]))
    other, _ = run(service, job(2, conversations=[{**heir(source, rounds=1), "id": "c"}]))
    assert service.http.delete(f"/v1/jobs/{source}").status_code == 204
    assert service.get(f"/v1/jobs/{fork}/result")["conversations"] == [before]
    again, third = run(service, job(3, conversations=[heir(other)]))
    assert {place: said(third)[place] for place in said(third) if place[1] == 0} == {
        place: words for place, words in said(whole).items() if place[1] == 0
    }
    assert service.http.delete(f"/v1/jobs/{other}?heirs=drop").status_code == 204
    assert service.http.get(f"/v1/jobs/{again}").status_code == 404
    assert service.get(f"/v1/jobs/{fork}/result")["conversations"] == [before]


def test_conditions_judge_only_new_words(service: Service) -> None:
    """A fulfilled condition does not end the heir at once; a token budget counts all answers."""
    until = [{"agent": "ann", "matches": "."}]
    source, ended = run(service, job(5, until=until))
    assert ended["ended_by"] == {"until": 0, "agent": "ann", "round": 0}
    _, extended = run(service, job(5, conversations=[heir(source)], until=until))
    assert extended["ended_by"] == {"until": 0, "agent": "ann", "round": 1}
    assert ("bob", 0) in own(extended), "bob waits for whoever ended it, and never spoke there"


def test_an_heir_has_the_prompt_and_variables_of_its_source(service: Service) -> None:
    """Unless it has its own; a variable of its own changes the filled-in text."""
    talk = {"id": "c", "prompt": "On $topic.", "variables": {"topic": "cars", "name": "Ann"}}
    source, _ = run(service, job(1, conversations=[talk]))
    changed = {**heir(source), "variables": {"topic": "trains"}}
    run(service, job(2, conversations=[heir(source)]))
    assert any("On cars." in str(each) for each in asked(service)[-3:])
    run(service, job(2, conversations=[changed]))
    assert any("On trains." in str(each) for each in asked(service)[-3:])
    assert not re.search(r"\$topic", str(asked(service)))
