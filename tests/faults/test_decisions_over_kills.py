"""Conversations decide the same with and without kills: ends, leaders, failures, callers (specification, "Ends").

Their answers have thoughts and calls, and go on where they broke off.
"""

import hashlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest

from tests.harness.service import Document, Service, scripted_model
from tests.harness.waiting import is_alive, wait_for

KILLS, SOAK_KILLS = 4, 200
SERVICE_EVERY = 5  # one kill of so many is the service's
MUSES = 30  # tokens of a thought
MOST_AGAIN = 1.05  # tokens generated with kills, to those without
LOOK: Document = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    "unverified": "retry",
}
STOP: Document = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
WORDS = "yes | no | maybe | I wonder."
COMPARED = ("agent", "role", "round", "by", "kind", "state", "reason", "text", "signals", "memory", "thinking")
UNTIL: list[list[Document]] = [
    [{"agent": "bob", "says": ["yes"]}],
    [{"agent": "ann", "matches": "^ma"}],
    [{"signal": "stop"}],
    [{"agree": ["ann", "bob"]}],
    [{"unchanged": 1}],
    [{"answer_tokens": 9 * MUSES}, {"agent": "guest", "says": ["no"]}],
    [],
]


def rounds(seed: int) -> Document:
    """Return a job in rounds with a caller, a silent agent, one that sometimes fails, and every kind of condition."""
    fails = {"pattern": "^(yes|no|maybe)$", "retries": 0, "constrain": "off"}
    silence = {"otherwise": "I pass."} if seed % 2 else {"on_failure": "skip"}
    agents: list[Document] = [
        {"id": "guest", "by": "caller"},
        {"id": "mute", "by": "caller", "wait_s": 0.05, **silence},
        {"id": "ann", "model": "m", "system": f"ANSWERS: {WORDS} | CALL stop | CALL look", "exit_tools": [STOP],
         "tools": [LOOK]},
        {"id": "bob", "model": "m", "system": f"ANSWERS: {WORDS}", "speak_after_within_round": ["ann", "guest"]},
        {
            "id": "cid", "model": "m", "system": f"ANSWERS: {WORDS}", "validation": fails,
            "on_failure": ("skip", "leave", "end")[seed % 3],
            # If a conversation fails, running agents are cut off: it speaks last.
            "speak_after_within_round": ["ann"] if seed % 3 < 2 else ["ann", "bob", "guest", "mute"],
        },
    ]  # fmt: skip
    if seed % 3 < 2 and seed % 4 < 2:  # no agent waits for a whole round, so which turns a failure cuts off is random
        for agent, readers in zip(agents, (["bob"], [], ["cid"], ["guest"], ["ann"]), strict=True):
            agent["visible_to"] = readers
    talks = [{"id": f"c{n}", "prompt": f"{seed}, {n}?", "until": until} for n, until in enumerate(UNTIL)]
    memory = {"keep": {"rounds": 2}} if seed % 2 else {"keep": {"rounds": 1}, "summary": {"by": "self"}}
    return {"name": f"rounds-{seed}", "rounds": 4, "memory": memory, "agents": agents, "conversations": talks}


def led(seed: int) -> Document:
    """Return a job whose leader names a model, a caller, and one that leaves with its first failure."""
    agents: list[Document] = [
        {"id": "host", "model": "m", "system": "Lead."},
        {"id": "guest", "by": "caller"},
        {"id": "ann", "model": "m", "system": f"ANSWERS: {WORDS}"},
        {
            "id": "bob", "model": "m", "system": f"ANSWERS: {WORDS}", "on_failure": "leave",
            "validation": {"pattern": "^(yes|no|maybe)$", "retries": 1, "constrain": "off"},
        },
    ]  # fmt: skip
    until = [{"agree": ["ann", "guest"]}, {"unchanged": 3}]
    talks = [{"id": f"c{n}", "prompt": f"{seed}, {n}?", "until": until if n % 2 else []} for n in range(4)]
    return {
        "name": f"led-{seed}",
        "mode": "led",
        "leader": "host",
        "rounds": 6,
        "agents": agents,
        "conversations": talks,
    }


def fork(seed: int, job: Document, job_id: str) -> Document:
    """Return a job that continues another's record with other words from one turn on, and more rounds."""
    cuts: list[Document] = [{"before": {"agent": "ann", "round": 0}}, {"rounds": 1}, {}]
    if job.get("mode") == "led":
        cuts[:2] = [{"before": {"agent": "host", "round": 0}}, {}]  # a leader may have ended it at once
    talks = [
        {
            "id": f"f{n}", "from": {"job": job_id, "conversation": talk["id"], **cuts[(seed + n) % 3]},
            "agents": {"ann": {"system": f"ANSWERS: {WORDS} | Otherwise."}}, "until": talk["until"],
        }
        for n, talk in enumerate(job["conversations"])
    ]  # fmt: skip
    return {**job, "name": f"fork-{job['name']}", "rounds": 7, "conversations": talks}


@contextmanager
def guests(url: str) -> Iterator[None]:
    """Speak every awaited turn from another thread: the same words in the same turn of the same job."""
    is_over = threading.Event()

    def speak() -> None:
        with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as http:
            names: dict[str, str] = {}
            while not is_over.wait(0.02):
                with suppress(httpx.HTTPError, KeyError, ValueError):
                    for turn in http.get("/v1/awaited?limit=1000").json()["awaited"]:
                        if turn["agent"] == "guest":
                            say(http, turn, names)

    def say(http: httpx.Client, turn: Document, names: dict[str, str]) -> None:
        job = turn["job"]
        names[job] = names.get(job) or http.get(f"/v1/jobs/{job}").json()["name"]
        place = f"{names[job]} {turn['conversation']} {turn['round']}"
        words = ("yes", "no", "maybe", "Well.")[hashlib.sha256(place.encode()).digest()[0] % 4]
        path = f"/v1/jobs/{job}/conversations/{turn['conversation']}/turns/guest/{turn['round']}"
        assert http.post(path, json={"text": words}).status_code in {200, 201, 409, 503}

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def transcripts(service: Service, job_id: str) -> list[Document]:
    """Return the parts of a job's transcripts that must be the same, whenever its turns ended."""
    result = service.get(f"/v1/jobs/{job_id}/result")
    return [
        {
            **{key: talk[key] for key in ("id", "state", "reason", "ended_by", "left")},
            "turns": sorted(map(compared, talk["turns"]), key=placed),
        }
        for talk in result["conversations"]
    ]


def compared(turn: Document) -> Document:
    calls = [(call["iteration"], call["name"], call["result"]) for call in turn["tool_calls"]]
    return {**{key: turn[key] for key in COMPARED}, "calls": calls, "tokens": turn["usage"]["completion_tokens"]}


def placed(turn: Document) -> tuple[int, str, str]:
    return turn["round"], turn["agent"], turn["kind"]


@pytest.mark.system
def test_decisions_are_the_same_with_and_without_kills(
    tmp_path: Path, free_ports: Callable[[int], int], request: pytest.FixtureRequest
) -> None:
    """The service and its engines are killed; some 300 kills in a soak. Words, states, costs and ends are the same."""
    kills = SOAK_KILLS if request.config.getoption("--soak") else KILLS
    jobs = [make(seed) for seed in range((kills + 1) // 2) for make in (rounds, led)]
    chance = Random(kills)  # noqa: S311
    (tmp_path / "kill_tools.py").write_text("def look() -> int:\n    return 5\n")
    flags: Document = {"chooses": True, "interval": 0.002, "goes_on": "kept", "muses": MUSES}
    model = {
        **scripted_model(free_ports(1), slots=8, **flags),
        "tools": {"python": {"look": "kill_tools:look"}},
    }
    port = free_ports(1)
    calm = Service(tmp_path / "calm", port, {"m": model})
    calm.environment["PYTHONPATH"] = str(tmp_path)
    expected: list[list[Document]] = []
    calm.start()
    with guests(calm.url):
        for job_id in [calm.post_job(job) for job in jobs]:
            calm.wait_ended(job_id, 120.0)
            expected.append(transcripts(calm, job_id))
        forks = [seed for seed, talks in enumerate(expected) if all(talk["state"] == "completed" for talk in talks)]
        ids = [calm.get("/v1/jobs?limit=1000")["jobs"][-1 - seed]["id"] for seed in forks]
        for seed, source in zip(forks, ids, strict=True):
            job_id = calm.post_job(fork(seed, jobs[seed], source))
            calm.wait_ended(job_id, 120.0)
            expected.append(transcripts(calm, job_id))
    wait_for(lambda: generated(calm) > 0, "its usage is written")
    tokens = generated(calm)
    assert calm.stop() == 0
    calm.http.close()
    endings = Counter(str(talk["ended_by"] or talk["reason"])[:12] for each in expected for talk in each)
    print(f"{len(jobs)} jobs end by {dict(endings)}; left: {sum(bool(t['left']) for each in expected for t in each)}")
    service = Service(tmp_path / "killed", port, {"m": model})
    service.environment["PYTHONPATH"] = str(tmp_path)
    service.start()
    try:
        with guests(service.url):
            ids = []
            posts: list[tuple[int, Document | None]] = [*enumerate(jobs), *((seed, None) for seed in forks)]
            for number, (seed, plain) in enumerate(posts):
                if plain is None:
                    service.wait_ended(ids[seed], 120.0)
                ids.append(service.post_job(plain or fork(seed, jobs[seed], ids[seed])))
                until = time.monotonic() + chance.uniform(0.0, 0.6)
                wait_for(lambda at=until: time.monotonic() > at, "a random moment")  # type: ignore[misc]
                if number % SERVICE_EVERY:
                    kill_engine(service)
                else:
                    tree = service.tree()
                    service.kill()
                    wait_for(lambda pids=tree: not any(map(is_alive, pids)), "no engine is left", 5.0)  # type: ignore[misc]
                    service.start()
            for job_id in ids:
                service.wait_ended(job_id, 120.0)
        found = [transcripts(service, job_id) for job_id in ids]
        assert not (different := differences(found, expected)), different[:8]
        again, breaks = generated(service) / tokens, continued(service, ids)
        print(f"{len(posts)} kills: {breaks} answers went on, {again:.4f} x tokens generated")
        assert breaks
        assert again <= MOST_AGAIN
        assert service.stop() == 0
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill()
        service.http.close()


def differences(found: list[list[Document]], expected: list[list[Document]]) -> list[Document]:
    """Return the fields of turns, and of conversations without their turns, that are not the same."""
    pairs: list[tuple[Document, Document]] = []
    for got, wanted in zip(chain(*found), chain(*expected), strict=True):
        pairs.append(({**got, "turns": len(got["turns"])}, {**wanted, "turns": len(wanted["turns"])}))
        pairs += zip(got["turns"], wanted["turns"], strict=False)
    return [
        {name: (got.get(name), wanted[name]) for name in wanted if got.get(name) != wanted[name]}
        | {name: got[name] for name in ("id", "agent", "round") if name in got}
        for got, wanted in pairs
        if got != wanted
    ]


def generated(service: Service) -> int:
    """Return the tokens that engines have generated, each as often as it was."""
    usage = service.get("/v1/usage")["usage"]
    return sum(row["answer_tokens"] + row["wasted_tokens"] for row in usage)


def continued(service: Service, job_ids: list[str]) -> int:
    """Return how often answers of these jobs went on from a half."""
    results = [service.get(f"/v1/jobs/{job_id}/result") for job_id in job_ids]
    turns = [turn for result in results for talk in result["conversations"] for turn in talk["turns"]]
    return sum(len(turn["continued"]) for turn in turns if not turn["inherited"])


def kill_engine(service: Service) -> None:
    for worker in service.get("/v1/workers")["workers"]:
        if worker["pid"] is not None:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(worker["pid"]).send_signal(signal.SIGKILL)
