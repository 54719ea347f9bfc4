"""An answer goes on where it was when the service itself ends: by SIGKILL, by a drain, by an upgrade."""

import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.test_continued_answers import LOOK, job
from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.upgrades import upgrade
from tests.harness.waiting import wait_for

Ports = Callable[[int], int]
TOKENS = 40
ANSWER = " ".join(f"word{number}" for number in range(TOKENS))
PACE = {"goes_on": "kept", "tokens": TOKENS, "interval": 0.08}


def model(folder: Path, port: int, **flags: object) -> Document:
    return {**scripted_model(port), "args": {**PACE, "record": str(folder / "record"), **flags}}


def half_of(folder: Path) -> dict[str, Any]:
    """Return the half that the store has, empty without one."""
    (file,) = folder.rglob("roundhouse.db")
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT record FROM unfinished_turns").fetchall()
    kept = [msgspec.json.decode(row[0])["half"] for row in rows]
    return kept[0] or {} if kept else {}


def posted(service: Service, document: Document) -> str:
    """Post a job, and wait until half its answer is durable."""
    job_id = service.post_job(document)
    wait_for(lambda: len(half_of(service.folder).get("text", ())) >= 5, "a half is durable")
    return job_id


def ended(service: Service, job_id: str) -> dict[str, Any]:
    assert service.wait_ended(job_id)["state"] == "completed"
    turn: dict[str, Any]
    (turn,) = service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"]
    return turn


def check(service: Service, turn: dict[str, Any], folder: Path, *, tools: int = 0) -> None:
    """The words are whole, each token counts once, and the record says where the answer went on."""
    assert turn["text"] == ANSWER
    assert turn["usage"]["completion_tokens"] >= TOKENS
    (place,) = turn["continued"]
    assert 5 <= place["at_tokens"] < TOKENS + tools
    assert place["because"] == "shutdown"
    assert [each["outcome"] for each in turn["attempts"]] == ["cancelled", "completed"]
    last = [each for each in recorded(folder / "record") if each.get("stream")][-1]
    assert ANSWER.startswith(last["messages"][-1]["content"])
    assert last["continue_final_message"]
    counted = sum(row["answer_tokens"] for row in service.get("/v1/usage")["usage"])
    assert counted == turn["usage"]["completion_tokens"]
    assert half_of(folder) == {}


@pytest.mark.system
def test_an_answer_goes_on_after_the_service_was_killed(tmp_path: Path, free_ports: Ports) -> None:
    """At most a second of it, or 256 tokens, is written again."""
    with serving(tmp_path, free_ports(1), {"m": model(tmp_path, free_ports(1))}) as service:
        job_id = posted(service, job())
        service.kill()
        kept = half_of(tmp_path)
        service.start()
        turn = ended(service, job_id)
        check(service, turn, tmp_path)
        assert turn["continued"][0]["at_tokens"] == kept["tokens"]
        assert turn["attempts"][0]["text"] == "".join(kept["text"])


@pytest.mark.system
def test_an_answer_goes_on_after_a_kill_in_the_middle_of_a_drain(tmp_path: Path, free_ports: Ports) -> None:
    """Container runtimes kill what has not stopped in time; until then halves are stored as before."""
    slow = model(tmp_path, free_ports(1), interval=0.2)
    with serving(tmp_path, free_ports(1), {"m": slow}, {"drain_s": 60}) as service:
        job_id = posted(service, job())
        assert service.process is not None
        service.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in service.log(), "it drains")
        before = half_of(tmp_path)["tokens"]
        wait_for(lambda: half_of(tmp_path)["tokens"] > before + 5, "the half grows in the store")
        service.kill()
        service.start()
        check(service, ended(service, job_id), tmp_path)


@pytest.mark.system
def test_tokens_count_once_over_deaths_of_engine_and_service(tmp_path: Path, free_ports: Ports) -> None:
    """The half that the crash leaves has a part that was counted with the engine's death, and one that was not."""
    own = model(tmp_path, free_ports(1), die_after=7, die_once=str(tmp_path / "died"))
    with serving(tmp_path, free_ports(1), {"m": own}) as service:
        job_id = service.post_job(job())
        wait_for(lambda: half_of(tmp_path).get("tokens", 0) > 15, "a half of the second attempt is durable")
        service.kill()
        service.start()
        turn = ended(service, job_id)
        counted = sum(row["answer_tokens"] for row in service.get("/v1/usage")["usage"])
    assert turn["text"] == ANSWER
    assert [place["because"] for place in turn["continued"]] == ["engine_died", "shutdown"]
    assert counted == TOKENS


@pytest.mark.system
@pytest.mark.parametrize("what", ["file", "setting"])
def test_a_half_of_another_model_or_against_the_settings_is_dropped(
    tmp_path: Path, free_ports: Ports, what: str
) -> None:
    """No answer is joined from those of two models; ``continuation: off`` holds for stored halves too."""
    (tmp_path / "a.gguf").write_text("one")
    own = {**model(tmp_path, free_ports(1)), "model": str(tmp_path / "a.gguf")}
    port = free_ports(1)
    with serving(tmp_path, port, {"m": own}) as service:
        document = job()
        del document["continuation"]
        job_id = posted(service, document)
        service.kill()
        if what == "file":
            (tmp_path / "a.gguf").write_text("another one")
        else:
            own["continuation"] = "off"
        service.http.close()
    with serving(tmp_path, port, {"m": own}) as service:
        turn = ended(service, job_id)
    assert (turn["text"], turn["continued"]) == (ANSWER, [])
    assert "continue_final_message" not in [each for each in recorded(tmp_path / "record") if each.get("stream")][-1]


@pytest.mark.system
@pytest.mark.parametrize("how", ["stop", "upgrade"])
def test_an_answer_goes_on_after_a_drain(tmp_path: Path, free_ports: Ports, how: str) -> None:
    """None of it is written again: what a cancelled attempt has written is durable with its end."""
    server, pace = {"drain_s": 0.1}, {"stop": 0.08, "upgrade": 0.3}  # the next program is checked first
    slow = model(tmp_path, free_ports(1), interval=pace[how])
    with serving(tmp_path, free_ports(1), {"m": slow}, server) as service:
        job_id = posted(service, job())
        if how == "stop":
            service.stop()
            service.start()
        else:
            upgrade(service)
        check(service, ended(service, job_id), tmp_path)


@pytest.mark.system
def test_calls_of_an_earlier_life_are_not_made_again(tmp_path: Path, free_ports: Ports) -> None:
    """The message after them goes on; their message, its thoughts and their results are in the record."""
    script = [{"content": "I look.", "tool_calls": [{"name": "look", "arguments": "{}"}]}, {"content": ANSWER}]
    (tmp_path / "script").write_text(msgspec.json.encode(script).decode())
    (tmp_path / "mytools.py").write_text(LOOK.format(ran=tmp_path / "ran"))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    own = model(tmp_path, free_ports(1), script=str(tmp_path / "script"))
    own["tools"] = {"python": {"look": "mytools:look"}}
    with serving(tmp_path, free_ports(1), {"m": own}) as service:
        job_id = posted(service, job(tools=[tool], params={"max_tokens": 40, "seed": 5}))
        service.kill()
        service.start()
        turn = ended(service, job_id)
        check(service, turn, tmp_path, tools=5)
    assert (tmp_path / "ran").read_text().splitlines() == ["ran"]
    assert [call["name"] for call in turn["tool_calls"]] == ["look"]


@pytest.mark.system
def test_a_job_that_wants_none_starts_over(tmp_path: Path, free_ports: Ports) -> None:
    """Nothing is stored of its halves."""
    with serving(tmp_path, free_ports(1), {"m": model(tmp_path, free_ports(1))}) as service:
        job_id = service.post_job(job("off"))
        wait_for(lambda: written(service, job_id) > 20, "it has written for more than a second")
        assert half_of(tmp_path) == {}
        service.kill()
        service.start()
        turn = ended(service, job_id)
    assert (turn["text"], turn["continued"]) == (ANSWER, [])


def written(service: Service, job_id: str) -> int:
    turns = service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"]
    return max((len(turn["text"].split()) for turn in turns), default=0)
