"""Conversations that begin from a fork's record, with other agents, or whose source is deleted meanwhile."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.behaviour.test_heirs import WORDS, heir, own, run, said
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

Ports = Callable[[int], int]
HELD = r"HOLD-(\S+?)[ \\\".]"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Ports) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("forks")
    models = {"m": scripted_model(free_ports(1), slots=4, chooses=True, hold=HELD)}
    with serving(folder, free_ports(1), models, limits={"body_bytes": 100_000}) as running:
        yield running


def agent(name: str, **fields: object) -> Document:
    return {"id": name, "model": "m", "system": WORDS, **fields}


def job(rounds: int, *agents: Document, **fields: object) -> Document:
    return {"agents": agents, "rounds": rounds, "conversations": [{"id": "c", "prompt": "Count."}], **fields}


def fork(rounds: int, source: str, *agents: Document, cut: Document | None = None, **fields: object) -> Document:
    talk = {**heir(source, **(cut or {})), "id": "c"}
    return job(rounds, *agents, **fields) | {"conversations": [talk]}


@pytest.mark.parametrize("mode", ["rounds", "free"])
def test_turns_stay_in_their_order_when_a_source_is_gone(service: Service, tmp_path: Path, mode: str) -> None:
    """A store may assign numbers again: turns after a deletion do not come before older ones."""
    both, held = (agent("ann"), agent("bob")), tmp_path / f"go-{mode}"
    waiting = [{**each, "system": f"{WORDS}\nHOLD-{held} "} for each in both]
    source, first = run(service, job(2, *both, mode=mode))
    second = service.post_job(fork(3, source, *waiting, mode=mode))
    assert service.http.delete(f"/v1/jobs/{source}").status_code == 204
    held.touch()
    service.wait_ended(second)
    _, third = run(service, fork(4, second, *both, mode=mode))
    places = [(turn["agent"], turn["round"]) for turn in third["turns"]]
    assert places[:4] == [(turn["agent"], turn["round"]) for turn in first["turns"]]
    assert [number for _, number in places[4:]] == [2, 2, 3, 3]


def test_an_agent_that_joined_without_speaking_misses_nothing(service: Service, tmp_path: Path) -> None:
    """The rounds before it joined are inherited whole, and it begins where it would have begun."""
    both, held = (agent("ann"), agent("bob")), tmp_path / "go"
    source, _ = run(service, job(2, *both))
    waiting = [{**each, "system": f"HOLD-{held} "} for each in (*both, agent("cid"))]
    second = service.post_job(fork(3, source, *waiting))
    _, cut = run(service, fork(2, second, *both, agent("cid"), cut={"rounds": 1}))
    assert own(cut) == {("ann", 1), ("bob", 1), ("cid", 1)}
    _, extended = run(service, fork(3, second, *both, agent("cid"), agent("dan")))
    assert own(extended) == {(name, 2) for name in ("ann", "bob", "cid", "dan")}
    held.touch()
    service.wait_ended(second)


def test_a_turn_that_failed_with_the_last_agent_is_asked_again(service: Service) -> None:
    """The only agent leaves, which fails the conversation; its earlier words are inherited."""
    refused = {"choices": ["yes", "no"], "retries": 0, "constrain": "off"}
    leaving = agent("ann", on_failure="leave", validation=refused)
    source = service.post_job(job(3, leaving))
    assert service.wait_ended(source)["state"] == "failed"
    _, extended = run(service, fork(2, source, agent("ann")))
    assert own(extended) == {("ann", 0), ("ann", 1)}


def test_tokens_of_missing_agents_count(service: Service) -> None:
    """One token a turn: six are inherited, three of them from an agent that the heir lacks."""
    source, _ = run(service, job(3, agent("ann"), agent("bob")))
    _, ended = run(service, fork(9, source, agent("ann"), until=[{"answer_tokens": 7}]))
    assert ended["ended_by"] == {"until": 0, "agent": None, "round": 3}


def test_answers_of_missing_agents_count_as_words_only_if_valid(service: Service) -> None:
    """An answer that failed validation was never said, whichever agent recorded it."""
    silent = agent("sil", on_failure="skip", validation={"pattern": "zzz", "retries": 0, "constrain": "off"})
    source, _ = run(service, job(3, agent("ann"), silent))
    _, ended = run(service, fork(9, source, agent("ann"), until=[{"answer_tokens": 5}]))
    assert ended["ended_by"] == {"until": 0, "agent": None, "round": 4}


def test_a_new_agent_joins_at_the_fork_point_of_an_agent_that_left(service: Service) -> None:
    """The heir may begin before a turn of an agent that its source had already lost."""
    source, _ = run(service, job(3, agent("ann"), agent("old")))
    second, _ = run(service, fork(4, source, agent("ann"), agent("bob")))
    cut = {"before": {"agent": "old", "round": 1}}
    _, third = run(service, fork(3, second, agent("ann"), agent("new"), cut=cut))
    assert min(number for name, number in own(third) if name == "new") == 1


def test_a_conversation_that_lost_its_inheritance_cannot_be_forked(tmp_path: Path, free_ports: Ports) -> None:
    """An owner has deleted the source of another's job: the rest of that job is no beginning."""
    keys = [{"name": name, "key": f"{name}-{'k' * 20}", "scopes": ["admin"] if name == "root" else ["read", "submit"]}
            for name in ("alice", "root")]  # fmt: skip
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}, {"keys": keys}) as service:

        def be(name: str) -> None:
            service.http.headers["Authorization"] = f"Bearer {name}-{'k' * 20}"

        be("alice")
        source, _ = run(service, job(2, agent("ann")))
        be("root")
        second, _ = run(service, fork(3, source, agent("ann")))
        be("alice")
        assert service.http.delete(f"/v1/jobs/{source}").status_code == 204
        be("root")
        refused = service.http.post("/v1/jobs", json=fork(4, second, agent("ann"), cut={"rounds": 2}))
        assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "conversations[0].from.job")
        told = service.get(f"/v1/jobs/{second}/conversations/c/turns/ann/2/prompt")["attempts"]
        assert [each["messages"] for each in told] == [None]


def test_the_named_speaker_is_the_one_that_spoke(tmp_path: Path, free_ports: Ports) -> None:
    """In the heir the leader's words would name another agent, whose id they contain."""
    script = tmp_path / "script.json"
    script.write_text('[{"content": "bob next"}, {"content": "Hello."}, {"content": "end"}]')
    model = scripted_model(free_ports(1), slots=1, script=str(script))
    cast = [{"id": name, "model": "m"} for name in ("host", "ann", "bob", "next")]
    led: Document = {"mode": "led", "leader": "host"}
    with serving(tmp_path / "led", free_ports(1), {"m": model}) as other:
        source, told = run(other, job(2, *cast[:3], **led))
        assert [turn["agent"] for turn in told["turns"]] == ["host", "bob", "host"]
        script.write_text('[{"content": "end"}]')
        _, forked = run(other, fork(3, source, *cast, **led))
        assert own(forked) == {("host", 1)}


def test_a_new_agent_joins_in_the_first_incomplete_round(tmp_path: Path, free_ports: Ports) -> None:
    """In free mode one agent may be far ahead of another when a condition ends the conversation."""
    script = tmp_path / "script.json"
    script.write_text('[{"content": "on"}, {"content": "on"}, {"content": "on"}, {"content": "stop"}]')
    cast, until = [agent("ann"), agent("bob"), agent("new")], [{"agent": "ann", "says": ["stop"]}]
    with serving(tmp_path / "s", free_ports(1), {"m": scripted_model(free_ports(1), script=str(script))}) as other:
        source, _ = run(other, job(6, agent("ann"), {"id": "bob", "by": "caller"}, mode="free", until=until))
        script.write_text('[{"content": "on"}]')
        _, forked = run(other, fork(2, source, *cast, cut={"before": {"agent": "ann", "round": 3}}, mode="free"))
    assert own(forked) == {(name, number) for name in ("bob", "new") for number in range(2)}


def test_an_heir_that_begins_with_a_callers_turn_is_running(service: Service) -> None:
    """Like every conversation whose first turn is awaited; its start time is set."""
    caller = {"id": "eve", "by": "caller"}
    first = service.post_job(job(1, caller, agent("ann", speak_after_within_round=["eve"])))
    place = f"/v1/jobs/{first}/conversations/c/turns/eve/0"
    wait_for(lambda: service.http.post(place, json={"text": "Hello."}).status_code == 201, "it is awaited")
    service.wait_ended(first)
    second = service.post_job(fork(2, first, caller, agent("ann", speak_after_within_round=["eve"])))
    wait_for(lambda: service.get(f"/v1/jobs/{second}/awaited")["awaited"], "the next one is awaited")
    assert service.get(f"/v1/jobs/{second}")["state"] == "running"
    service.http.post(f"/v1/jobs/{second}/conversations/c/turns/eve/1", json={"text": "Again."})
    assert service.wait_ended(second)["started_at"] is not None


def test_the_inheritance_of_a_job_is_bounded(service: Service) -> None:
    """A small body may name a long prompt many times, and each conversation is stored with its own."""
    source, _ = run(service, job(1, agent("ann")) | {"conversations": [{"id": "c", "prompt": "x" * 30_000}]})
    talks = [{**heir(source), "id": f"c{number}"} for number in range(4)]
    refused = service.http.post("/v1/jobs", json=job(2, agent("ann")) | {"conversations": talks})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["path"] == "conversations[3].from"
    assert "limits.body_bytes = 100000" in refused.text
    mine = [{**each, "prompt": "Go."} for each in talks]
    assert service.http.post("/v1/jobs", json=job(2, agent("ann")) | {"conversations": mine}).status_code == 202


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        ({"job": "a\0b", "conversation": "c"}, "conversations[0].from.job", ""),
        ({"job": "x" * 129, "conversation": "c"}, "conversations[0].from.job", "128"),
        ({"job": "j", "conversation": "c", "round": 1}, "conversations[0].from.round", "did you mean 'rounds'"),
    ],
)
def test_a_malformed_source_is_refused(service: Service, given: Document, path: str, message: str) -> None:
    """Before the database is read."""
    refused = service.http.post("/v1/jobs", json=job(2, agent("ann")) | {"conversations": [{"from": given}]})
    assert [fault["path"] for fault in refused.json()["errors"]] == [path]
    assert message in refused.text


def test_a_key_without_the_read_scope_cannot_fork(tmp_path: Path, free_ports: Ports) -> None:
    """Not even its own job: its engine would show it the words."""
    scopes = {"blind": ["submit"], "seeing": ["read", "submit"]}
    keys = [{"name": name, "key": f"{name}-{'k' * 20}", "scopes": scopes[name]} for name in scopes]
    model = scripted_model(free_ports(1))
    with serving(tmp_path, free_ports(1), {"m": model}, {"keys": keys}) as service:
        for name, expected in (("blind", 404), ("seeing", 202)):
            service.http.headers["Authorization"] = f"Bearer {name}-{'k' * 20}"
            source = service.http.post("/v1/jobs", json=job(1, agent("ann"))).json()["id"]
            assert service.http.post("/v1/jobs", json=fork(2, source, agent("ann"))).status_code == expected


def test_the_said_variable_of_a_fork_of_a_fork_has_all_words(service: Service) -> None:
    """Each generation with the words of all before it."""
    both = (agent("ann"), agent("bob"))
    source, first = run(service, job(1, *both))
    for rounds in range(2, 5):
        source, next_one = run(service, fork(rounds, source, *both))
        assert said(first).items() <= said(next_one).items()
        first = next_one
