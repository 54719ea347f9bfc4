"""Conversations longer than a context: the part of the past that agents are shown (specification, "Memory")."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving

Ports = Callable[[int], int]
ROUNDS = 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Ports) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("memory")
    engine = scripted_model(free_ports(1), slots=4, tokens=10, record=str(folder / "record"))
    with serving(folder, free_ports(1), {"m": {**engine, "context": 1000, "params": {"max_tokens": 100}}}) as running:
        yield running


def job(memory: Document | None, **fields: object) -> Document:
    agents = [{"id": name, "model": "m", "system": "Talk."} for name in ("ann", "bob")]
    own = {} if memory is None else {"memory": memory}
    return {"agents": agents, "rounds": ROUNDS, "conversations": [{"id": "c", "prompt": "Go."}], **own, **fields}


def run(service: Service, document: Document) -> tuple[str, list[Document]]:
    """Run a job; return its id, and its turns without summaries."""
    job_id = service.post_job(document)
    service.wait_ended(job_id)
    (talk,) = service.get(f"/v1/jobs/{job_id}/result")["conversations"]
    assert talk["state"] == "completed", [t for t in talk["turns"] if t["state"] == "failed"]
    return job_id, [turn for turn in talk["turns"] if turn["kind"] == "turn"]


def summaries(service: Service, job_id: str) -> list[Document]:
    (talk,) = service.get(f"/v1/jobs/{job_id}/result")["conversations"]
    return [turn for turn in talk["turns"] if turn["kind"] == "summary"]


def shown(turn: Document) -> int:
    """Return how many rounds before its own a turn was shown."""
    first: int = (turn["memory"] or {"from_round": 0})["from_round"]
    return int(turn["round"]) - first


def prompt(service: Service, job_id: str, agent: str, number: int, kind: str = "turn") -> str:
    path = f"/v1/jobs/{job_id}/conversations/c/turns/{agent}/{number}/prompt?kind={kind}"
    messages = service.get(path)["attempts"][0]["messages"]
    return "\n".join(each["content"] for each in messages)


@pytest.mark.parametrize("view", ["own", "shared"])
def test_rounds_are_dropped_down_to_a_third(service: Service, view: str) -> None:
    """Also with ``rounds``: between two cuts each prompt extends the one before."""
    job_id, turns = run(service, job({"keep": {"rounds": 6}}, view=view))
    by_agent = [shown(turn) for turn in turns if turn["agent"] == "ann"]
    assert by_agent[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert by_agent[7:12] == [2, 3, 4, 5, 6]
    assert max(by_agent) == 6
    for turn in turns:
        text = prompt(service, job_id, turn["agent"], turn["round"])
        first = turn["round"] - shown(turn)
        assert ("is left out" in text) == (first > 0)
        if first:
            assert f"(What was said in rounds 1 to {first} is left out.)" in text


def test_tokens_are_counted_from_the_record(service: Service) -> None:
    """Ten tokens a turn, two turns a round, and the text around them."""
    _, turns = run(service, job({"keep": {"tokens": 200}}))
    by_agent = [shown(turn) for turn in turns if turn["agent"] == "bob"]
    assert by_agent[:7] == [0, 1, 2, 3, 4, 5, 1]
    assert max(by_agent) == 5


def test_auto_keeps_what_fits_beside_the_longest_answer(service: Service) -> None:
    """By the context, the answer's bound, and what the engine has counted of the last prompt."""
    long = [{"id": name, "model": "m", "params": {"max_tokens": 700}} for name in ("ann", "bob")]
    _, turns = run(service, job({"keep": "auto"}, agents=long))
    assert max(shown(turn) for turn in turns) in range(4, 9)
    _, turns = run(service, job({"keep": "auto"}))
    assert not any(turn["memory"] for turn in turns), "a shorter answer leaves room for all of it"


def test_reported_rounds_are_those_that_were_sent(service: Service) -> None:
    """The reported windows equal those in the prompts that the recording engine got."""
    before = len(recorded(service.folder / "record"))
    job_id, turns = run(service, job({"keep": {"rounds": 3}}))
    asked = [re.sub(r"\s+", " ", "\n".join(m["content"] for m in each["messages"])) for each in
             recorded(service.folder / "record")[before:]]  # fmt: skip
    told = [re.sub(r"\s+", " ", prompt(service, job_id, turn["agent"], turn["round"])) for turn in turns]
    assert sorted(asked) == sorted(told)


def test_without_a_memory_nothing_is_cut_and_an_overflow_names_it(service: Service) -> None:
    """Cuts have to be asked for."""
    _, turns = run(service, job(None))
    assert not any(turn["memory"] for turn in turns)
    _, turns = run(service, job({"keep": "all"}))
    assert not any(turn["memory"] for turn in turns)


def test_a_fork_is_cut_as_its_source_was(service: Service) -> None:
    """Both prompts then begin alike."""
    source, turns = run(service, job({"keep": {"rounds": 6}}))
    heir = {"id": "c", "from": {"job": source, "conversation": "c", "rounds": 15}}
    _, forked = run(service, job({"keep": {"rounds": 6}}, conversations=[heir]))
    assert [shown(turn) for turn in forked[30:]] == [shown(turn) for turn in turns[30:]]


@pytest.mark.parametrize(("view", "by"), [("own", "self"), ("own", "bob"), ("shared", "bob")])
def test_omitted_rounds_are_summarised_first(service: Service, view: str, by: str) -> None:
    """By the reader or another agent. The summary is recorded, shown to its reader, and not counted as a turn."""
    before = len(recorded(service.folder / "record"))
    memory = {"keep": {"rounds": 6}, "summary": {"by": by, "max_tokens": 5, "prompt": "SUM UP."}}
    job_id, turns = run(service, job(memory, view=view, until=[{"answer_tokens": 10_000}]))
    made = summaries(service, job_id)
    progress = service.get(f"/v1/jobs/{job_id}")["progress"]["turns"]
    assert progress["completed"] == progress["total"] == len(turns) == 2 * ROUNDS
    cuts = {(turn["agent"], turn["round"]) for turn in turns if shown(turn) == 2 and turn["round"] > 2}
    if view == "shared":
        assert {(each["agent"], each["round"]) for each in made} == {("bob", number) for _, number in cuts}
    else:
        assert {(each["agent"], each["round"]) for each in made} == cuts
    assert all(each["state"] == "completed" and each["text"] for each in made)
    for turn in turns:
        text, memory_of = prompt(service, job_id, turn["agent"], turn["round"]), turn["memory"]
        if memory_of is None:
            assert "summed up" not in text
            continue
        first = memory_of["from_round"]
        assert memory_of["summary_of"] == [0, first - 1]
        (its,) = (
            each["text"]
            for each in made
            if each["round"] <= turn["round"]
            and each["round"] > turn["round"] - 5
            and each["agent"] in {turn["agent"], "bob"}
            if view == "shared" or each["agent"] == turn["agent"]
        )
        assert f"(Rounds 1 to {first}, summed up: {its})" in text
    asked = recorded(service.folder / "record")[before:]
    of_summaries = [each for each in asked if each["messages"][-1]["content"].endswith("SUM UP.")]
    assert len(of_summaries) == len(made)
    assert {each["max_tokens"] for each in of_summaries} == {5}
    said = sorted("\n".join(each["content"] for each in asked["messages"]) for asked in of_summaries)
    told = sorted(prompt(service, job_id, each["agent"], each["round"], "summary") for each in made)
    assert [re.sub(r"\s+", " ", each) for each in said] == [re.sub(r"\s+", " ", each) for each in told]


def test_a_fork_has_the_summary_that_its_source_was_shown(service: Service) -> None:
    """In a shared view another agent made it, whose own turn of that round is to be repeated."""
    agents = [
        {"id": "ann", "model": "m", "system": "Talk."},
        {"id": "bob", "model": "m", "system": "Talk.", "speak_after_within_round": ["ann"]},
    ]
    shared = job({"keep": {"rounds": 6}, "summary": {"by": "bob"}}, view="shared", agents=agents)
    source, _ = run(service, shared)
    begun = {"job": source, "conversation": "c", "before": {"agent": "bob", "round": 7}}
    fork, turns = run(service, {**shared, "rounds": 9, "conversations": [{"id": "c", "from": begun}]})
    first = next(turn for turn in turns if turn["inherited"] is None)
    assert (first["agent"], first["round"]) == ("bob", 7)
    assert first["memory"] == {"from_round": 5, "summary_of": [0, 4]}
    assert prompt(service, fork, "bob", 7) == prompt(service, source, "bob", 7)


def test_a_summary_reveals_no_hidden_words(service: Service) -> None:
    """In a shared view it is made from words that all may read."""
    agents = [
        {"id": "ann", "model": "m", "system": "Talk."},
        {"id": "spy", "model": "m", "system": "Talk.", "visible_to": ["ann"]},
        {"id": "bob", "model": "m", "system": "Talk."},
    ]
    memory = {"keep": {"rounds": 6}, "summary": {"by": "ann"}}
    job_id, _ = run(service, job(memory, view="shared", agents=agents))
    made = summaries(service, job_id)
    assert made
    for each in made:
        text = prompt(service, job_id, "ann", each["round"], "summary")
        assert "bob:" in text
        assert "spy:" not in text


@pytest.mark.system
def test_a_failed_summary_becomes_a_plain_cut(tmp_path: Path, free_ports: Ports) -> None:
    """Its engine refused it: the turn goes on without a summary, and the record says so."""
    model = scripted_model(free_ports(1), slots=2, tokens=5, reject=400, reject_on="SUM UP")
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        memory = {"keep": {"rounds": 6}, "summary": {"by": "self", "prompt": "SUM UP."}}
        job_id, turns = run(service, job(memory))
        assert {each["state"] for each in summaries(service, job_id)} == {"failed"}
        assert {each["reason"] for each in summaries(service, job_id)} == {"engine_rejected"}
        cut = [turn for turn in turns if turn["memory"]]
        assert cut
        assert all(turn["memory"]["summary_of"] is None for turn in cut)
        assert "is left out" in prompt(service, job_id, cut[0]["agent"], cut[0]["round"])


def test_a_summary_lost_with_its_engine_is_counted_as_wasted(tmp_path: Path, free_ports: Ports) -> None:
    """It has no record of its own, and cost the same."""
    once = str(tmp_path / "died")
    model = scripted_model(free_ports(1), slots=2, tokens=30, die_on="SUM UP", die_after=20, die_once=once)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        memory = {"keep": {"rounds": 6}, "summary": {"by": "self", "prompt": "SUM UP."}}
        job_id, turns = run(service, job(memory, agents=[{"id": "ann", "model": "m"}]))
        (died,) = [turn for turn in turns if turn["attempts"][0]["reason"] == "engine_died"]
        assert min(each["round"] for each in summaries(service, job_id)) == died["round"]
        (used,) = service.get("/v1/usage?by=model")["usage"]
        assert used["wasted_tokens"] >= 20
        assert used["answer_tokens"] == 30 * used["turns"] + 30 * len(summaries(service, job_id))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"memory": {"keep": "all", "summary": {}}}, "memory.summary"),
        ({"memory": {"keep": "auto", "summary": {"by": "eve"}}}, "memory.summary.by"),
        ({"memory": {"keep": "auto", "summary": {"by": "self"}}, "view": "shared"}, "memory.summary.by"),
        ({"memory": {"keep": "auto", "summary": {"max_tokens": 0}}}, "memory.summary.max_tokens"),
        ({"memory": {"keep": "some"}}, "memory.keep"),
        ({"memory": {"keep": {"rounds": 0}}}, "memory.keep"),
        ({"memory": {"keep": {"rounds": 1, "tokens": 1}}}, "memory.keep"),
        ({"memory": {}}, "memory.keep"),
        ({"view": "shared", "agents": [{"id": "a", "model": "m", "memory": {"keep": "auto"}}]}, "agents[0].memory"),
        ({"agents": [{"id": "a", "model": "m"}, {"id": "b", "by": "caller", "memory": {"keep": "auto"}}]},
         "agents[1].memory"),
    ],
)  # fmt: skip
def test_an_impossible_memory_is_refused(service: Service, fields: Document, path: str) -> None:
    """The fault has its place."""
    refused = service.http.post("/v1/jobs", json={**job(None), **fields})
    assert refused.status_code == 422
    assert all(fault["path"].startswith(path) for fault in refused.json()["errors"])


@pytest.mark.system
def test_a_kill_changes_no_memory_window(tmp_path: Path, free_ports: Ports) -> None:
    """Decisions are stored before the turn is asked."""
    model = scripted_model(free_ports(1), slots=2, chooses=True, interval=0.01)
    document = job({"keep": {"rounds": 3}, "summary": {"by": "self"}})
    with serving(tmp_path / "calm", free_ports(1), {"m": model}) as calm:
        calm_id, expected = run(calm, document)
        expected += summaries(calm, calm_id)
    service = Service(tmp_path / "killed", free_ports(1), {"m": model})
    service.start()
    try:
        job_id = service.post_job(document)
        for _ in range(3):
            service.kill()
            service.start()
        service.wait_ended(job_id)
        turns = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
        told = ("agent", "round", "kind", "text", "memory")
        assert [[t[key] for key in told] for t in sorted(turns, key=place)] == [
            [t[key] for key in told] for t in sorted(expected, key=place)
        ]
    finally:
        assert service.stop() == 0
        service.http.close()


def place(turn: Document) -> tuple[int, str, str]:
    return turn["round"], turn["agent"], turn["kind"]
