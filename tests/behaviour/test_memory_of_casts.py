"""Memories where not all agents may read the same, or where one of them leaves (specification, "Memory")."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.behaviour.test_memory import prompt, run, summaries
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

Ports = Callable[[int], int]
SUMMED = {"keep": {"rounds": 2}, "summary": {"by": "ann", "prompt": "SUM UP."}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Ports) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("casts")
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1), slots=4, tokens=10)}) as running:
        yield running


def agent(name: str, **fields: object) -> Document:
    return {"id": name, "model": "m", "system": f"You are {name}.", **fields}


def job(rounds: int, memory: Document, *agents: Document, **fields: object) -> Document:
    talks = [{"id": "c", "prompt": "Go."}]
    return {"memory": memory, "agents": agents, "rounds": rounds, "conversations": talks, **fields}


def fork(source: str, rounds: int, memory: Document, *agents: Document, **fields: object) -> Document:
    talks = [{"id": "c", "from": {"job": source, "conversation": "c"}}]
    return {**job(rounds, memory, *agents, **fields), "conversations": talks}


def cuts(turns: list[Document]) -> dict[tuple[str, int], object]:
    return {(turn["agent"], turn["round"]): (turn["memory"] or {}).get("from_round") for turn in turns}


@pytest.mark.parametrize("stays", [True, False])
def test_a_new_reader_gets_no_summary_of_hidden_words(service: Service, stays: bool) -> None:
    """All agents of the source might read bob's words, from which the summary was made; the new agent may not."""
    bob = agent("bob", visible_to=["ann", "cid"])
    both = (agent("ann"), agent("cid"))
    source, _ = run(service, job(4, SUMMED, *both, bob, view="shared"))
    assert "bob:" in prompt(service, source, "ann", 3, "summary")
    heirs = (*both, *((bob,) if stays else ()), agent("new"))
    heir, _ = run(service, fork(source, 5, SUMMED, *heirs, view="shared"))
    anew = [each for each in summaries(service, heir) if not each["inherited"]]
    assert [each["round"] for each in anew] == [4], "it is summed up anew, of what all may read"
    assert "bob:" not in prompt(service, heir, "ann", 4, "summary")
    assert "summed up" in prompt(service, heir, "new", 4)


def test_an_agent_that_may_read_less_forgets_its_summary(service: Service) -> None:
    """Also in its own view: the heir's visibility is what counts."""
    memory = {"keep": {"rounds": 2}, "summary": {}}
    source, _ = run(service, job(4, memory, agent("ann"), agent("bob")))
    kept, _ = run(service, fork(source, 5, memory, agent("ann"), agent("bob")))
    assert "summed up" in prompt(service, kept, "ann", 4)
    heir, _ = run(service, fork(source, 5, memory, agent("ann"), agent("bob", visible_to=[])))
    mine = [each for each in summaries(service, heir) if each["agent"] == "ann" and not each["inherited"]]
    assert [each["round"] for each in mine] == [4], "it is summed up anew, of what it may read"
    assert "bob:" not in prompt(service, heir, "ann", 4, "summary")


@pytest.mark.parametrize("view", ["own", "shared"])
def test_an_heir_of_an_heir_gets_no_summary_that_its_source_had_to_drop(service: Service, view: str) -> None:
    """The second one made a new cut without bob's words. The third continues from there, with no older summary."""
    memory = {"keep": {"rounds": 2}, "summary": {"by": "ann" if view == "shared" else "self"}}
    hidden = (agent("ann"), agent("bob", visible_to=[]))
    first, _ = run(service, job(4, memory, agent("ann"), agent("bob"), view=view))
    second, _ = run(service, fork(first, 5, memory, *hidden, view=view))
    third, _ = run(service, fork(second, 5, memory, *hidden, view=view) | cut_to(second, 4))
    assert "bob:" not in prompt(service, third, "ann", 4, "summary")
    inherited = [each["text"] for each in summaries(service, third) if each["inherited"]]
    anew = [each for each in summaries(service, third) if each["agent"] == "ann" and not each["inherited"]]
    assert (bool(inherited), [each["round"] for each in anew]) == (True, [4])
    kept, _ = run(service, fork(second, 6, memory, *hidden, view=view))
    before = next(each for each in summaries(service, second) if each["agent"] == "ann" and not each["inherited"])
    assert f"summed up: {before['text']})" in prompt(service, kept, "ann", 5), "what the second has made is its heir's"


def test_a_shared_summary_includes_missing_agents(service: Service) -> None:
    """All agents might read them, and those rounds are no longer shown."""
    source, _ = run(service, job(3, {"keep": "all"}, agent("ann"), agent("bob"), view="shared"))
    heir, _ = run(service, fork(source, 4, SUMMED, agent("ann"), agent("dan"), view="shared"))
    assert "bob:" in prompt(service, heir, "ann", 3, "summary")


@pytest.mark.parametrize("order", [("ann", "bob"), ("bob", "ann")])
def test_a_shared_bound_holds_for_the_agent_that_is_shown_most(service: Service, order: tuple[str, str]) -> None:
    """Ann reads four agents and bob two, with 18 tokens a turn each: two rounds of ann's exceed the bound."""
    others = [agent(name, visible_to=["ann"]) for name in ("one", "two")]
    memory: Document = {"keep": {"tokens": 100}}
    _, turns = run(service, job(4, memory, *map(agent, order), *others, view="shared"))
    told = cuts(turns)
    assert [told["ann", number] for number in range(4)] == [None, None, 1, 2]
    assert [told["bob", number] for number in range(4)] == [None, None, 1, 2]


def test_a_shared_bound_holds_for_the_agent_that_hears_late_words(service: Service) -> None:
    """Solo reads no agent and is rounds ahead: its full window proves nothing about ann, who reads more."""
    cast = (agent("ann", speak_after_within_round=["bob"]), agent("bob"), agent("solo", visible_to=[]))
    deaf = [each | {"visible_to": ["ann", "bob"]} for each in cast[:2]]
    _, turns = run(service, job(10, {"keep": {"tokens": 120}}, *deaf, cast[2], view="shared"))
    told = cuts(turns)
    shown = [number - int(str(told["ann", number] or 0)) for number in range(10)]
    assert max(shown) <= 3, "36 tokens a round"


@pytest.mark.system
def test_an_agent_that_left_takes_no_room_after_a_restart(tmp_path: Path, free_ports: Ports) -> None:
    """A restart and an heir cut where an uninterrupted run does."""
    gone = {"on_failure": "leave", "validation": {"pattern": "zzz", "retries": 0, "constrain": "off"}}
    agents = (agent("dan"), agent("bob", **gone), agent("ann"))
    document = job(8, {"keep": {"tokens": 39}}, *agents)
    model = scripted_model(free_ports(1), slots=4, tokens=1, interval=0.02, prefill=0.02)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        source, turns = run(service, document)
        _, forked = run(service, fork(source, 8, {"keep": {"tokens": 39}}, *agents) | cut_to(source, 1))
        assert cuts(forked) == cuts(turns)
        killed = service.post_job(document)
        wait_for(lambda: len(service.get(f"/v1/jobs/{killed}/conversations/c")["turns"]) > 3, "some have spoken")
        service.kill()
        service.start()
        service.wait_ended(killed)
        (talk,) = service.get(f"/v1/jobs/{killed}/result")["conversations"]
        assert cuts(talk["turns"]) == cuts(turns)


def cut_to(source: str, rounds: int) -> Document:
    return {"conversations": [{"id": "c", "from": {"job": source, "conversation": "c", "rounds": rounds}}]}


def test_a_leader_that_ended_it_is_asked_again_beside_a_summary(tmp_path: Path, free_ports: Ports) -> None:
    """Another agent's summary in that round is not the leader's turn."""
    script = tmp_path / "script.json"
    says = ["ann", "w0", "ann", "w1", "ann", "w2", "SUMMARY", "end"]
    script.write_text("[" + ", ".join(f'{{"content": "{each}"}}' for each in says) + "]")
    model = scripted_model(free_ports(1), slots=1, script=str(script))
    led = {"mode": "led", "leader": "host", "view": "shared"}
    with serving(tmp_path / "s", free_ports(1), {"m": model}) as service:
        source, turns = run(service, job(9, SUMMED, agent("host"), agent("ann"), **led))
        assert turns[-1]["text"] == "end"
        assert [each["round"] for each in summaries(service, source)] == [turns[-1]["round"]]
        forked = service.http.post("/v1/jobs", json=fork(source, 9, SUMMED, agent("host"), agent("ann"), **led))
        assert forked.status_code == 202, forked.text


def test_a_summary_is_counted_as_an_attempt(service: Service) -> None:
    """In metrics as in usage."""
    before = counted(service)
    job_id, turns = run(service, job(6, {"keep": {"rounds": 2}, "summary": {}}, agent("ann")))
    made = summaries(service, job_id)
    assert made
    assert counted(service) - before == len(turns) + len(made)


def counted(service: Service) -> float:
    lines = service.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("roundhouse_attempts_total{"))


@pytest.mark.system
def test_an_engines_death_during_a_shared_summary_does_not_end_it(tmp_path: Path, free_ports: Ports) -> None:
    """Readers that wait for it on the same engine cannot make it there: that engine is gone."""
    once = str(tmp_path / "died")
    model = scripted_model(free_ports(1), slots=4, tokens=10, die_on="SUM UP", die_after=5, die_once=once)
    with serving(tmp_path / "s", free_ports(1), {"m": model}) as service:
        job_id, _ = run(service, job(5, SUMMED, *map(agent, ("ann", "bob", "cid")), view="shared"))
        assert [each["state"] for each in summaries(service, job_id)] == ["completed"]
