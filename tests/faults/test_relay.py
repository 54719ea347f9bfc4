"""Engines that fail under relayed requests (specification, "Front door")."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.behaviour.test_relay_queue import Caller
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

HOLD = r"HOLD:([^ \"]+)"


def kill_engine(service: Service, worker: str) -> None:
    os.kill(service.get(f"/v1/workers/{worker}")["pid"], signal.SIGKILL)


def errors(text: str) -> list[dict[str, str]]:
    """Return the error events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["error"] for line in lines if "error" in json.loads(line)]


@pytest.mark.system
@pytest.mark.parametrize("is_streamed", [False, True])
def test_before_the_first_byte_another_incarnation_answers(
    tmp_path: Path, free_ports: Callable[[int], int], *, is_streamed: bool
) -> None:
    """The engine is killed under a request of which no byte was passed on: its client gets a complete answer."""
    gate = tmp_path / "gate"
    model = scripted_model(free_ports(1), slots=1, hold=HOLD)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        caller = Caller(service, f"HOLD:{gate}", stream=is_streamed)
        wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"], "it is on its slot")
        kill_engine(service, "m-0")
        wait_for(lambda: service.get("/v1/workers/m-0")["incarnation"] == 2, "another engine is there")
        gate.touch()
        caller.join(LIMIT_S)
        assert (caller.status, caller.told["x-roundhouse-attempts"]) == (200, "2")
        assert "word2" in caller.text
        assert not is_streamed or (errors(caller.text) == [] and caller.text.endswith("data: [DONE]\n\n"))


def test_after_the_first_byte_the_stream_ends_with_an_error(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its client wants no continuation: it gets the error in the stream, and its slot is free."""
    model = scripted_model(free_ports(1), slots=1, tokens=10_000, interval=0.01)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        caller = Caller(service, "Go.", stream=True, headers={"x-roundhouse-continue": "off"})
        wait_for(lambda: "word3" in caller.text, "some of it has come")
        kill_engine(service, "m-0")
        caller.join(LIMIT_S)
        (error,) = errors(caller.text)
        assert (error["code"], error["type"]) == ("engine_died", "server_error")
        assert "[DONE]" not in caller.text
        assert caller.text.endswith("\n\n")
        wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 0, "its slot is free")


def test_half_an_answer_that_no_client_has_seen_is_tried_again(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A whole answer is passed on when it is complete, so its engine may die in the middle of it."""
    model = scripted_model(free_ports(1), slots=1, die_after=2, die_once=str(tmp_path / "died"))
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        body = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
        answer = service.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.headers["x-roundhouse-attempts"]) == (200, "2")
        assert answer.json()["choices"][0]["message"]["content"] == "word0 word1 word2 "


@pytest.mark.system
def test_a_request_that_kills_engines_is_poisoned(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Blame holds for requests as for turns; a bystander is answered."""
    model = scripted_model(free_ports(2), slots=1, replicas=2, die_on="KILLER")
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        killer = Caller(service, "KILLER", stream=True)
        others = [Caller(service, f"innocent {number}") for number in range(4)]
        for caller in others:
            caller.join(LIMIT_S)
            assert caller.status == 200
        killer.join(LIMIT_S)
        assert (killer.status, json.loads(killer.text)["error"]["code"]) == (500, "poisoned")
        assert killer.told["x-should-retry"] == "false"
        # Five deaths alone, as little is known of the engine. One right after an answer may be due to whoever got that:
        # so each answer excuses one death, and no more.
        assert int(killer.told["x-roundhouse-attempts"]) <= 5 + len(others)
        late = Caller(service, "KILLER", stream=True)
        late.join(LIMIT_S)
        assert int(late.told["x-roundhouse-attempts"]) <= 5 + 2, "each of the two engines may just have answered"


@pytest.mark.system
@pytest.mark.parametrize(("goes_on", "code"), [("off", "stalled_decode"), ("on", "poisoned")])
def test_a_stream_that_stalls_ends_with_an_error(
    tmp_path: Path, free_ports: Callable[[int], int], goes_on: str, code: str
) -> None:
    """Liveness is judged as for turns: no progress within decode_stall_s, no counter, no canary.

    A stream that goes on is convicted as a turn is, once engine after engine has stalled with it.
    """
    model = scripted_model(free_ports(1), slots=1, stall_after=2)
    model["timeouts"] = {"decode_stall_s": 1, "prefill_stall_s": 1}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        caller = Caller(service, "Go.", stream=True, headers={"x-roundhouse-continue": goes_on})
        caller.join(LIMIT_S * 2)
        (error,) = errors(caller.text)
        assert error["code"] == code
        assert "word1" in caller.text


@pytest.mark.system
def test_a_stream_that_repeats_itself_ends(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Lines that repeat without end are cut off, and the client gets the reason."""
    model = scripted_model(free_ports(1), slots=1, repeat="again|")
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        caller = Caller(service, "Go.", stream=True)
        caller.join(LIMIT_S)
        (error,) = errors(caller.text)
        assert error["code"] == "repeated_line_loop"


@pytest.mark.system
def test_an_error_in_a_stream_is_the_engines_own(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It passes unchanged, once: no event of ours follows."""
    model = scripted_model(free_ports(1), slots=1, error_after=2, interval=0.02)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        caller = Caller(service, "Go.", stream=True)
        caller.join(LIMIT_S)
        assert errors(caller.text) == [{"code": 500, "message": "Compute error.", "type": "server_error"}]


@pytest.mark.system
def test_a_refusal_is_retried_until_it_is_proved(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A busy engine is asked again; one that refuses this request and no other decides."""
    busy = scripted_model(free_ports(1), slots=1, reject=503, reject_first=1, retry_after=0)
    picky = scripted_model(free_ports(1), slots=1, reject=500, reject_on="ODD")
    with serving(tmp_path, free_ports(1), {"busy": busy, "picky": picky}) as service:
        again, odd = Caller(service, "Go.", model="busy"), Caller(service, "ODD", model="picky")
        again.join(LIMIT_S)
        assert (again.status, again.told["x-roundhouse-attempts"]) == (200, "2")
        odd.join(LIMIT_S)
        assert (odd.status, odd.told["x-roundhouse-attempts"]) == (500, "1")
        assert json.loads(odd.text)["error"]["message"] == "no"


def test_a_model_whose_workers_have_given_up_is_refused(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Otherwise the request would wait without end."""
    model = scripted_model(free_ports(1), slots=1, exit_at_once=1)
    model["restart"] = {"initial_s": 0.01, "failures": 1, "retry_s": None}
    with serving(tmp_path, free_ports(1), {"m": model}, ready=False) as service:
        wait_for(lambda: service.get("/v1/workers/m-0")["state"] == "failed", "it has given up")
        answer = service.http.post("/v1/chat/completions", json={"model": "m", "messages": []})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unreachable")
        assert answer.headers["retry-after"] == "5"


@pytest.mark.system
def test_a_slow_client_occupies_no_slot(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Unread bytes wait in memory, and the engine does not wait."""
    model = scripted_model(free_ports(1), slots=1, tokens=20_000)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Go."}]}
        with (
            httpx.Client(base_url=service.url, timeout=LIMIT_S, trust_env=False) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 0, "the engine is done")
            text = "".join(answer.iter_text())
        assert text.endswith("data: [DONE]\n\n")
        assert "word19999 " in text
