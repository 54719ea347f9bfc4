"""Turns that programs and people speak (specification, "Turns of callers")."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

ANN: Document = {"id": "ann", "model": "m", "system": "SAY-ann", "speak_after_within_round": ["guest"]}
Start = Callable[..., Service]


def cast(**guest: object) -> list[Document]:
    """Return a guest that a caller speaks for, and Ann, who answers."""
    return [{"id": "guest", "by": "caller", **guest}, ANN]


def job(guest: Document, **more: object) -> Document:
    return {"agents": cast(**guest), "rounds": 2, "conversations": [{"id": "c", "prompt": "Talk."}], **more}


@pytest.fixture
def service(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """Run a service on a scripted engine."""
    model = scripted_model(free_ports(1), slots=2, echo=r"SAY-\w+", record=str(tmp_path / "record"))
    with serving(tmp_path, free_ports(1), {"m": model}) as running:
        yield running


def awaited(service: Service, job_id: str | None = None) -> list[tuple[str, str, int]]:
    """Return the awaited turns: conversation, agent and round of each."""
    path = "/v1/awaited" if job_id is None else f"/v1/jobs/{job_id}/awaited"
    return [(turn["conversation"], turn["agent"], turn["round"]) for turn in service.get(path)["awaited"]]


def say(service: Service, job_id: str, text: object, place: str = "c/turns/guest/0") -> tuple[int, Document]:
    """Post words; return the status, and the turn or the problem."""
    answer = service.http.post(f"/v1/jobs/{job_id}/conversations/{place}", json={"text": text})
    return answer.status_code, answer.json()


def wait_awaited(service: Service, job_id: str, *places: tuple[str, str, int]) -> None:
    wait_for(lambda: awaited(service, job_id) == list(places), f"{places} are awaited")


def test_a_caller_speaks_and_the_conversation_goes_on(service: Service, tmp_path: Path) -> None:
    """The words are durable once with the answer, and are in the prompts of the agents that hear them."""
    job_id = service.post_job(job({"role": "visitor"}))
    wait_awaited(service, job_id, ("c", "guest", 0))
    shown = service.get(f"/v1/jobs/{job_id}")
    counts = shown["progress"]["turns"]
    assert (shown["state"], counts["awaited"], counts["pending"], counts["total"]) == ("running", 1, 3, 4)
    assert service.get("/v1/awaited")["awaited"][0]["until"] is None
    status, turn = say(service, job_id, "SAY-hello")
    assert (status, turn["by"], turn["state"], turn["text"]) == (201, "caller", "completed", "SAY-hello")
    assert say(service, job_id, "SAY-hello") == (200, turn)
    status, problem = say(service, job_id, "SAY-other")
    assert (status, problem["code"]) == (409, "not_awaited")
    wait_awaited(service, job_id, ("c", "guest", 1))
    assert say(service, job_id, "", "c/turns/guest/1")[0] == 201
    assert service.wait_ended(job_id)["state"] == "completed"
    turns = service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"]
    assert [(turn["agent"], turn["by"]) for turn in turns] == [("guest", "caller"), ("ann", "model")] * 2
    first, second = (each["messages"][-1]["content"] for each in recorded(tmp_path / "record"))
    assert "guest: SAY-hello" in first
    assert "guest" not in second, "silence leaves no trace"
    events = service.http.get(f"/v1/jobs/{job_id}/events").text
    assert events.count('"state":"awaited"') == 2


@pytest.mark.parametrize(
    ("place", "text", "status", "code", "told"),
    [
        ("c/turns/guest/1", "x", 409, "not_awaited", "its order has not come"),
        ("c/turns/ann/0", "x", 409, "not_awaited", "a model speaks for its agent"),
        ("c/turns/bob/0", "x", 409, "not_awaited", "no such agent"),
        ("d/turns/guest/0", "x", 404, "conversation_not_found", "d"),
        ("c/turns/guest/0", "maybe", 422, "invalid_words", "exactly one of: yes, no"),
        ("c/turns/guest/0", "<answer>yes</answer> no", 422, "invalid_words", "it holds no and yes"),
        ("c/turns/guest/0", "yes" * 30_000, 422, "invalid_words", "more than 65536"),
        ("c/turns/guest/0", 5, 422, "invalid_words", "text"),
        ("c/turns/guest/99999999999999999999", "yes", 409, "not_awaited", "its order has not come"),
    ],
)
def test_invalid_words_are_refused(
    service: Service, place: str, text: object, status: int, code: str, told: str
) -> None:
    """The turn stays awaited: a caller may try again."""
    job_id = service.post_job(job({"validation": {"choices": ["yes", "no"]}}))
    wait_awaited(service, job_id, ("c", "guest", 0))
    answered, problem = say(service, job_id, text, place)
    assert (answered, problem["code"]) == (status, code)
    assert told in problem["detail"]
    assert say(service, job_id, "Yes.")[0] == 201


@pytest.mark.system
def test_awaited_turns_outlive_a_kill_and_accepted_words_are_not_lost(service: Service) -> None:
    """No node runs the conversation meanwhile; the next life continues it as soon as its caller speaks."""
    conversations = [{"id": name, "prompt": "Talk."} for name in "cd"]
    job_id = service.post_job(job({}, rounds=1, conversations=conversations))
    wait_awaited(service, job_id, ("c", "guest", 0), ("d", "guest", 0))
    service.kill()
    service.start()
    assert len(awaited(service)) == 2
    assert say(service, job_id, "SAY-late")[0] == 201
    service.kill()
    service.start()
    path = f"/v1/jobs/{job_id}/conversations/c"
    wait_for(lambda: service.get(path)["state"] == "completed", "it goes on")
    wait_awaited(service, job_id, ("d", "guest", 0))
    assert say(service, job_id, "SAY-late", "d/turns/guest/0")[0] == 201
    assert service.wait_ended(job_id)["progress"]["turns"]["completed"] == 4
    assert service.http.get(f"/v1/jobs/{job_id}/events").text.count('"state":"awaited"') == 2


@pytest.mark.system
def test_a_caller_that_misses_its_time_speaks_the_words_of_otherwise(service: Service) -> None:
    """Without such words its turn fails, and its conversation too, unless its agent may be silent."""
    spoken = service.post_job(job({"wait_s": 0.2, "otherwise": "SAY-pass"}))
    failed = service.post_job(job({"wait_s": 0.2}))
    skipped = service.post_job(job({"wait_s": 0.2, "on_failure": "skip"}, rounds=1))
    assert service.wait_ended(spoken)["state"] == "completed"
    turns = service.get(f"/v1/jobs/{spoken}/conversations/c")["turns"]
    assert [turn["text"].split()[-1] for turn in turns] == ["SAY-pass"] * 4
    told = {(turn["by"], turn["detail"]) for turn in turns}
    assert told == {("caller", "nobody spoke within wait_s = 0.2; the words are those of otherwise"), ("model", None)}
    assert service.wait_ended(failed)["state"] == "failed"
    transcript = service.get(f"/v1/jobs/{failed}/conversations/c")
    assert (transcript["reason"], transcript["turns"][0]["by"]) == ("not_said", "caller")
    assert service.wait_ended(skipped)["state"] == "completed"
    status, problem = say(service, failed, "too late")
    assert (status, problem["code"]) == (409, "not_awaited")
    assert say(service, spoken, "SAY-pass")[0] == 200


@pytest.mark.system
def test_time_without_a_service_does_not_count_against_a_caller(service: Service) -> None:
    """A caller that could not speak is not recorded as silent."""
    job_id = service.post_job(job({"wait_s": 3.0, "otherwise": "SAY-pass"}, rounds=1))
    wait_awaited(service, job_id, ("c", "guest", 0))
    until = service.get("/v1/awaited")["awaited"][0]["until"]
    service.stop()
    wait_for(lambda: service.process is not None and seconds_since(until) > 0.5, "its time would be over", 10.0)
    service.start()
    assert awaited(service) == [("c", "guest", 0)]
    assert say(service, job_id, "SAY-here")[0] == 201
    service.wait_ended(job_id)


def seconds_since(at: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()


def test_a_cancelled_job_awaits_no_caller(service: Service) -> None:
    """No node has its conversation, so some node ends it."""
    job_id = service.post_job(job({}))
    wait_awaited(service, job_id, ("c", "guest", 0))
    service.http.post(f"/v1/jobs/{job_id}/cancel")
    assert service.wait_ended(job_id)["state"] == "cancelled"
    assert awaited(service) == []
    status, problem = say(service, job_id, "x")
    assert (status, problem["code"]) == (409, "not_awaited")


@pytest.mark.parametrize("mode", ["rounds", "free"])
def test_other_agents_speak_while_a_caller_is_awaited(service: Service, mode: str) -> None:
    """In rounds mode those that do not wait for it; in free mode all other agents in all rounds."""
    agents = [{"id": "guest", "by": "caller"}, {"id": "bob", "model": "m", "system": "SAY-bob"}]
    conversations = [{"id": "c", "prompt": "Talk.", "until": [{"agent": "guest", "says": ["stop"]}]}]
    job_id = service.post_job({"mode": mode, "rounds": 3, "agents": agents, "conversations": conversations})
    spoken = 1 if mode == "rounds" else 3
    path = f"/v1/jobs/{job_id}/conversations/c"
    wait_for(lambda: len(service.get(path)["turns"]) == spoken, "the others have spoken")
    wait_awaited(service, job_id, ("c", "guest", 0))
    assert say(service, job_id, "stop")[0] == 201
    ended = service.wait_ended(job_id)
    transcript = service.get(path)
    assert transcript["ended_by"] == {"until": 0, "agent": "guest", "round": 0}
    assert ended["progress"]["turns"]["total"] == len(transcript["turns"]) == spoken + 1


def test_a_leader_names_a_caller(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its turn is awaited like any other."""
    (tmp_path / "script").write_text('[{"content": "guest"}, {"content": "end"}]')
    model = scripted_model(free_ports(1), slots=2, script=str(tmp_path / "script"))
    agents = [{"id": "host", "model": "m"}, {"id": "guest", "by": "caller"}]
    led = {"mode": "led", "leader": "host", "rounds": 4, "agents": agents}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job_id = service.post_job({**led, "conversations": [{"id": "c", "prompt": "Talk."}]})
        wait_awaited(service, job_id, ("c", "guest", 0))
        assert say(service, job_id, "Here I am.")[0] == 201
        assert service.wait_ended(job_id)["state"] == "completed"
        transcript = service.get(f"/v1/jobs/{job_id}/conversations/c")
    assert transcript["ended_by"] == {"leader": "host", "round": 1}
    assert [turn["text"] for turn in transcript["turns"]] == ["guest", "Here I am.", "end"]


@pytest.mark.system
def test_two_waits_that_end_at_once_end_their_conversation_once(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The first one fails the conversation and its job; the second then has nothing left to end."""
    go = tmp_path / "go"
    model = scripted_model(free_ports(1), slots=1, echo=r"SAY-\w+", hold=r"/\S+/go\b")
    agents = [{"id": name, "by": "caller", "wait_s": 0.1} for name in "ab"] + [{"id": "m", "model": "m"}]
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        talk = [{"id": "c", "prompt": "Talk."}]
        busy = service.post_job({"agents": [{"id": "x", "model": "m", "system": str(go)}], "conversations": talk})
        job_id = service.post_job({"agents": agents, "conversations": talk})
        assert service.wait_ended(job_id)["state"] == "failed"
        transcript = service.get(f"/v1/jobs/{job_id}/conversations/c")
        assert (transcript["reason"], len(transcript["turns"])) == ("not_said", 3)
        go.touch()
        assert service.wait_ended(busy)["state"] == "completed"


def test_awaited_turns_of_an_unknown_job_are_not_found(service: Service) -> None:
    """A key with admin gets the same answer."""
    for answer in (service.http.get("/v1/jobs/gone/awaited"), service.http.post(
        "/v1/jobs/gone/conversations/c/turns/guest/0", json={"text": "x"}
    )):  # fmt: skip
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
