"""The service through kills: signals, broken engines, real engines."""

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from service.store.databases.migrations import WRITTEN_BEFORE_RELEASE
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from tests.harness.service import (
    Document,
    Service,
    asked_for,
    check_debate,
    debate,
    recorded,
    scripted_model,
    serving,
)
from tests.harness.stored import write_before_release
from tests.harness.waiting import LIMIT_S, is_alive, wait_for

KILLS = 6  # three hundred of the real engine are in a soak (tests/faults/test_kills.py)


def embedded_model(port: int, *, replicas: int = 2, slots: int = 2, max_tokens: int = 8) -> Document:
    return {
        "engine": "embedded",
        "port": port,
        "replicas": replicas,
        "slots": slots,
        "context": 2048,
        "args": {"threads": 1},
        "params": {"max_tokens": max_tokens},
    }


@pytest.mark.system
def test_fifty_conversations_on_two_real_engines(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """50 conversations of 3 agents and 3 rounds run at once: all 450 turns, each exactly once and in order.

    Source: specification, "Rounds mode" and "Transcripts".
    """
    with serving(tmp_path, free_ports(1), {"m": embedded_model(free_ports(2))}) as service:
        job_id = service.post_job(debate(conversations=50, rounds=3))
        job = service.wait_ended(job_id, limit_s=90)
        assert (job["state"], job["progress"]["turns"]["completed"]) == ("completed", 450)
        result = service.get(f"/v1/jobs/{job_id}/result")
        for transcript in result["conversations"]:
            check_debate(transcript, rounds=3)
        turns = [turn for transcript in result["conversations"] for turn in transcript["turns"]]
        assert {turn["worker"] for turn in turns} == {"m-0", "m-1"}
        assert all(turn["text"] and turn["usage"]["completion_tokens"] == 8 for turn in turns)
        tree = service.tree()
        assert len(tree) == 4  # two guardians and two engines
        assert service.stop() == 0
        assert not any(map(is_alive, tree))


def completed_turns(service: Service, job_id: str) -> set[tuple[str, int, str]]:
    """Return a debate's completed turns as its transcript has them: conversation, round and agent."""
    talks = [service.http.get(f"/v1/jobs/{job_id}/conversations/q{number}") for number in range(40)]
    return {
        (talk["id"], turn["round"], turn["agent"])
        for talk in (answer.json() for answer in talks if answer.is_success)
        for turn in talk["turns"]
        if turn["state"] == "completed"
    }


@pytest.mark.system
def test_kills_of_the_service_leave_no_engine_and_lose_no_turn(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """After each SIGKILL in mid-job no engine is alive after a second, and the job goes on to its end.

    Source: specification, "Recovery after a crash" and "Guardian".
    """
    record = tmp_path / "record.jsonl"
    flags: Document = {"record": str(record), "echo": r"You are (MARK-\w+)\.", "interval": 0.02, "prefill": 0.02}
    service = Service(tmp_path, free_ports(1), {"m": scripted_model(free_ports(2), replicas=2, **flags)})
    service.start()
    try:
        job_id = service.post_job(debate(conversations=40, rounds=3))
        generator = random.Random(7)  # noqa: S311
        told: list[tuple[int, set[tuple[str, int, str]]]] = []
        for _ in range(KILLS):
            pause = time.monotonic() + generator.uniform(0.0, 0.2)
            wait_for(lambda until=pause: time.monotonic() > until, "a random moment")  # type: ignore[misc]
            tree, completed = service.tree(), completed_turns(service, job_id)
            service.kill()
            wait_for(lambda pids=tree: not any(map(is_alive, pids)), "no engine is alive", limit_s=1.0)  # type: ignore[misc]
            told.append((len(recorded(record)), completed))
            service.start(ready=False)
        service.wait_ended(job_id, limit_s=60)
        for transcript in service.get(f"/v1/jobs/{job_id}/result")["conversations"]:
            check_debate(transcript, rounds=3)
        events = service.http.get(f"/v1/jobs/{job_id}/events").text
        assert events.count('"state":"completed"') == 360 + 40 + 1
        asked = list(map(asked_for, recorded(record)))
        assert len(set(asked)) == 360
        assert told[-1][1]
        for count, completed in told:  # turns completed before a kill are asked of no engine after it
            assert not completed & set(asked[count:])
        assert service.stop() == 0
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill()
        service.http.close()


@pytest.mark.system
def test_a_drain_ends_running_turns_and_the_next_process_goes_on(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """One SIGTERM: no turn starts, turns in flight end, exit 0; no turn runs twice."""
    record = tmp_path / "record.jsonl"
    models = {"m": scripted_model(free_ports(1), record=str(record), tokens=10, interval=0.03)}
    service = Service(tmp_path, free_ports(1), models)
    service.start()
    job_id = service.post_job(debate(conversations=3))
    wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 2, "turns are in flight")
    tree = service.tree()
    assert service.stop() == 0
    assert not any(map(is_alive, tree))
    service.start()
    try:
        assert service.wait_ended(job_id)["state"] == "completed"
        assert len(recorded(record)) == 9
        assert service.stop() == 0
    finally:
        service.http.close()


@pytest.mark.system
def test_a_request_that_outlasts_the_drain_is_refused(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its client may ask another service; here it would wait for an engine that never starts."""
    models = {"m": scripted_model(free_ports(1), hold=r"/\S+/go\b")}
    service = Service(tmp_path, free_ports(1), models, {"drain_s": 0.5})
    service.start()
    asked = {"model": "m", "messages": [{"role": "user", "content": f"{tmp_path}/go"}]}
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{service.url}/v1/chat/completions", json=asked, timeout=LIMIT_S))
    )
    asking.start()
    wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 1, "it is asked")
    assert service.stop() == 0
    asking.join(LIMIT_S)
    service.http.close()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutdown")
    assert "Traceback" not in service.log()


@pytest.mark.system
def test_a_second_signal_stops_at_once(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Two SIGTERMs: no drain, no grace period, no process left, and the job is stored."""
    models = {"m": scripted_model(free_ports(1), tokens=100_000, interval=0.01, ignore_sigterm=True)}
    service = Service(tmp_path, free_ports(1), models, {"drain_s": 600})
    service.start()
    job_id = service.post_job(debate())
    wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 2, "turns are in flight")
    tree = service.tree()
    assert service.process is not None
    service.process.send_signal(signal.SIGINT)
    wait_for(lambda: service.get("/v1/workers/m-0")["state"] == "draining", "the service drains")
    assert service.http.get("/readyz").status_code == 503
    assert service.http.post("/v1/jobs", json=debate()).json()["code"] == "shutting_down"
    started_at = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - started_at < 5
    assert not any(map(is_alive, tree))
    service.start(ready=False)
    try:
        assert service.get(f"/v1/jobs/{job_id}")["state"] == "running"
        service.http.post(f"/v1/jobs/{job_id}/cancel")
        assert service.wait_ended(job_id)["state"] == "cancelled"
    finally:
        assert service.process is not None
        service.process.send_signal(signal.SIGINT)  # and then SIGTERM: the same signal twice at once may be one
        assert service.stop() == 0
        service.http.close()


@pytest.mark.system
def test_a_cancel_survives_a_kill(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The cancel is durable: the next process carries it out, and no turn of the job starts again."""
    record = tmp_path / "record.jsonl"
    models = {"m": scripted_model(free_ports(1), tokens=100_000, interval=0.01, record=str(record))}
    with serving(tmp_path, free_ports(1), models) as service:
        job_id = service.post_job(debate(conversations=3))
        wait_for(lambda: record.exists() and len(recorded(record)) == 2, "two turns are in flight")
        service.http.post(f"/v1/jobs/{job_id}/cancel")
        service.kill()
        service.start()
        assert service.wait_ended(job_id)["state"] == "cancelled"
        turns = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
        assert {turn["state"] for turn in turns} == {"cancelled"}
        assert len(turns) == 3
        assert len(recorded(record)) == 2


def test_a_broken_engine_costs_an_attempt_and_no_turn(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """An engine's failure is not the turn's failure: the failed attempt stays in the transcript."""
    flags: Document = {"die_after": 2, "die_once": str(tmp_path / "died"), "interval": 0.02}
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1), **flags)}) as service:
        job_id = service.post_job(debate(conversations=2))
        assert service.wait_ended(job_id)["state"] == "completed"
        turns = [turn for talk in service.get(f"/v1/jobs/{job_id}/result")["conversations"] for turn in talk["turns"]]
        assert len(turns) == 6
        failed = [turn["attempts"][0] for turn in turns if len(turn["attempts"]) == 2]
        assert 1 <= len(failed) <= 2
        assert {attempt["reason"] for attempt in failed} == {"engine_died"}
        assert "word0 word1 " in {attempt["text"] for attempt in failed}
        worker = service.get("/v1/workers/m-0")
        assert (worker["incarnation"], worker["restarts"], worker["last_exit"]["text"]) == (
            2,
            1,
            "exited with status 0",
        )
        lines = service.get("/v1/workers/m-0/logs?tail=1000")["lines"]
        assert {line["incarnation"] for line in lines} == {1, 2}


@pytest.mark.system
def test_a_poisonous_turn_is_found_and_its_neighbours_go_on(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It brought down two incarnations, and ends as poisoned; turns that ran beside it go on."""
    models = {"m": scripted_model(free_ports(1), slots=4, die_on="TOPIC-1.", interval=0.01, prefill=0.05)}
    with serving(tmp_path, free_ports(1), models) as service:
        job_id = service.post_job(debate(conversations=4))
        job = service.wait_ended(job_id, limit_s=60)
        assert job["state"] == "completed_with_failures"
        states = {
            talk["id"]: (talk["state"], talk["reason"])
            for talk in service.get(f"/v1/jobs/{job_id}/result")["conversations"]
        }
        assert states["q1"] == ("failed", "poisoned")
        assert {states[name] for name in ("q0", "q2", "q3")} == {("completed", None)}


@pytest.mark.system
def test_a_request_that_the_engine_refuses_fails_its_conversation(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The real engine rejects the prompt as too long: context_overflow, at once, and the others go on."""
    models = {"m": {**embedded_model(free_ports(1), replicas=1), "context": 768}}
    job = debate(conversations=2)
    job["conversations"][1]["prompt"] = "long " * 400
    with serving(tmp_path, free_ports(1), models) as service:
        job_id = service.post_job(job)
        assert service.wait_ended(job_id)["state"] == "completed_with_failures"
        good, bad = service.get(f"/v1/jobs/{job_id}/result")["conversations"]
        check_debate(good, rounds=1)
        assert (bad["state"], bad["reason"]) == ("failed", "context_overflow")
        failed = next(turn for turn in bad["turns"] if turn["state"] == "failed")
        assert "exceeds the available context size" in failed["detail"]


@pytest.mark.system
def test_a_killed_real_engine_is_replaced(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """SIGKILL of llama.cpp's own server in mid-answer: the turn runs again on the next incarnation."""
    tokens = 4000  # enough that a test delayed by a second comes before their end
    models = {"m": {**embedded_model(free_ports(1), replicas=1, slots=1, max_tokens=tokens), "context": 8192}}
    with serving(tmp_path, free_ports(1), models) as service:
        agents = [{"id": "a", "model": "m", "params": {"ignore_eos": True}}]
        job_id = service.post_job({"name": "long", "agents": agents, "conversations": [{"prompt": "Go."}]})
        pid = service.get("/v1/workers/m-0")["pid"]

        def has_text() -> bool:
            """Let it go on for a moment, and pause it for the check.

            The answer must not be complete before the kill.
            """
            os.kill(pid, signal.SIGCONT)
            until = time.monotonic() + 0.03
            wait_for(lambda: time.monotonic() > until, "a moment has passed")
            os.kill(pid, signal.SIGSTOP)
            turns = service.get(f"/v1/jobs/{job_id}/conversations/c0")["turns"]
            return bool(turns and turns[0]["text"])

        wait_for(has_text, "the engine has begun to answer")
        os.kill(pid, signal.SIGKILL)
        assert service.wait_ended(job_id)["state"] == "completed"
        turn = service.get(f"/v1/jobs/{job_id}/conversations/c0")["turns"][0]
        assert [attempt["outcome"] for attempt in turn["attempts"]] == ["failed", "completed"]
        assert turn["attempts"][0]["text"]
        assert (turn["incarnation"], turn["usage"]["completion_tokens"]) == (2, tokens)


@pytest.mark.system
def test_two_services_never_share_a_state(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """One process owns the store, and the second one gets a clear error."""
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}) as service:
        other = Service(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))})
        with pytest.raises(AssertionError):
            other.start()
        assert other.process is not None
        assert other.process.returncode == 2
        assert f"another Roundhouse (process {service.process.pid if service.process else 0}) uses" in service.log()
        other.http.close()


@pytest.mark.system
def test_a_store_from_before_the_first_release_ends_the_start(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """`serve` exits with 2, as for faults of the configuration, and names the program that reads the results."""
    service = Service(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))})
    (tmp_path / "state").mkdir()
    write_before_release(SqliteDatabase(tmp_path / "state" / FILE_NAME).connect_writer())
    with pytest.raises(AssertionError):
        service.start()
    assert service.process is not None
    assert service.process.returncode == 2
    assert f"roundhouse: {WRITTEN_BEFORE_RELEASE}\n" in service.log()
    service.http.close()


@pytest.mark.system
def test_a_job_with_an_unreadable_row_stops_no_other(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It waits for a version that can read it, the log names it, and the service starts without it."""
    agents = [{"id": "a", "model": "m"}]
    gate = tmp_path / "gate"
    model = scripted_model(free_ports(1), hold=r"/[\w/.-]+/gate")
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        talks = [{"id": "c", "prompt": "Go."}, {"id": "d", "prompt": f"Wait for {gate}."}]
        broken = service.post_job({"agents": agents, "rounds": 2, "conversations": talks})
        ended = f"/v1/jobs/{broken}/conversations/c"
        wait_for(lambda: service.http.get(ended).json().get("state") == "completed", "one has ended")
        service.kill()
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / FILE_NAME)) as database, database:
            database.execute("UPDATE turns SET conversation_id = 'd', record = '{broken' WHERE round = 0")
        gate.touch()
        service.start()
        other = service.post_job({"agents": agents, "conversations": [{"prompt": "Go."}]})
        assert service.wait_ended(other)["state"] == "completed"
        assert service.get(f"/v1/jobs/{broken}")["state"] == "running"
        assert f"job {broken} waits for a version of Roundhouse that can read it" in service.log()


@pytest.mark.system
def test_an_idle_service_uses_no_cpu(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """No loop polls without work: context switches stay few."""
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(2), replicas=2)}) as service:
        assert service.process is not None
        process = psutil.Process(service.process.pid)
        before, started_at = process.num_ctx_switches().voluntary, time.monotonic()
        wait_for(lambda: time.monotonic() - started_at > 2.0, "two seconds")
        assert process.num_ctx_switches().voluntary - before < 100


@pytest.mark.system
def test_a_job_of_another_version_does_not_prevent_a_start(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It waits for a version that can read it; all other jobs go on."""
    model = {"m": scripted_model(free_ports(1), mute_on="strange")}
    with serving(tmp_path, free_ports(1), model) as service:
        job = service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "strange"}]})
        service.kill()
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / "roundhouse.db")) as database, database:
            database.execute("UPDATE job_documents SET document = json_set(document, '$.agents[0].mood', 'x')")
        service.start()
        assert service.wait_ended(service.post_job(debate()))["state"] == "completed"
        assert service.get(f"/v1/jobs/{job}")["state"] in {"queued", "running"}
        assert f"job {job} waits for a version of Roundhouse that can read it: agents[0].mood" in service.log()


@pytest.mark.system
def test_a_restart_forgets_no_attempt(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Retries are counted over restarts of the service, and every failed attempt stays in the transcript."""
    record = tmp_path / "record"
    model = scripted_model(free_ports(1), slots=1, prefill=2.0, record=str(record))
    agent = {"id": "a", "model": "m", "validation": {"choices": ["yes"], "retries": 1}}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job = service.post_job({"agents": [agent], "conversations": [{"prompt": "Agree?"}]})
        wait_for(lambda: record.exists() and len(recorded(record)) == 2, "it is asked again")
        rejected = "SELECT count(*) FROM unfinished_turns WHERE record LIKE '%invalid_answer%'"
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / "roundhouse.db")) as database:
            wait_for(lambda: database.execute(rejected).fetchone()[0] == 1, "the first attempt is stored")
        service.kill()
        service.start()
        assert service.wait_ended(job)["state"] == "failed"
        ((turn,),) = (talk["turns"] for talk in service.get(f"/v1/jobs/{job}/result")["conversations"])
    assert turn["reason"] == "validation_exhausted"
    assert [attempt["text"] for attempt in turn["attempts"]] == ["word0 word1 word2 "] * 2
    assert len(recorded(record)) == 3
