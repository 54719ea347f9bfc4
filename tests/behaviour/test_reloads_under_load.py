"""Reloads of every kind while real engines work on jobs: each turn is answered once, and no engine is left behind.

Source: specification, "Reload".
"""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.reloads import engines, models_of, post_reload, reload, wait_settled
from tests.harness.service import Document, Service, check_debate, debate, serving
from tests.harness.waiting import wait_for

FEW, MANY = 20, 200  # reloads
ROUNDS = 2
LIMIT_S = 120.0
Change = Callable[[Document], object]


def model(port: int, **fields: object) -> Document:
    return {
        "engine": "embedded",
        "port": port,
        "slots": 2,
        "context": 1024,
        "params": {"max_tokens": 8},
        "args": {"threads": 1},
        **fields,
    }


def changes(port: int) -> Iterator[Change]:
    """Iterate for ever over reloads of every kind; each model that leaves comes back."""
    while True:
        yield lambda all_: all_
        yield lambda all_: models_of(all_)["m"].update(replicas=3)
        yield lambda all_: models_of(all_)["m"].update(replicas=2)
        yield lambda all_: models_of(all_).pop("n")
        yield lambda all_: models_of(all_)["m"].update(context=2048)
        yield lambda all_: models_of(all_).update(n=model(port + 4))
        yield lambda all_: models_of(all_)["m"].update(context=1024)
        yield lambda all_: models_of(all_).update(n=model(port + 5))
        yield lambda all_: all_.update(limits={"rounds": 100})
        yield lambda all_: all_.pop("limits")


@pytest.mark.system
def test_no_turn_is_lost_or_repeated(
    tmp_path: Path, free_ports: Callable[[int], int], request: pytest.FixtureRequest
) -> None:
    """No attempt is interrupted, however the workers change."""
    count = MANY if request.config.getoption("--soak") else FEW
    port = free_ports(8)
    models = {"m": model(port + 1, replicas=2), "n": model(port + 4)}
    with serving(tmp_path, port, models) as service:
        began_at = time.monotonic()
        jobs, took_s = [], []
        for number, change in enumerate(itertools.islice(changes(port), count)):
            jobs += [service.post_job(debate(conversations=3, rounds=ROUNDS, name=f"m{number}"))]
            if "n" in {each["id"] for each in service.get("/v1/models")["data"]}:
                jobs += [service.post_job(debate(model="n", rounds=ROUNDS, name=f"n{number}"))]
            asked_at = time.monotonic()
            answer = post_reload(service, change)
            took_s.append(time.monotonic() - asked_at)
            assert answer.status_code == 200, answer.text
            if number % 10 == 4:  # at times one comes while the one before is still acted on
                wait_settled_slowly(service)
        reload(service, lambda all_: models_of(all_).update(n=model(port + 4)))
        wait_settled_slowly(service)
        turns = sum(check_job(service, job) for job in jobs)
        took_s.sort()
        print(
            f"\n{count} reloads in {time.monotonic() - began_at:.0f} s under {turns} turns: "
            f"a reload took {took_s[len(took_s) // 2]:.3f} s in the middle, {took_s[-1]:.3f} s at most"
        )
        before = engines(service)
        assert reload(service) == {"unchanged": ["m", "n"]}
        assert engines(service) == before
        assert sorted(before) == sorted(each["id"] for each in service.get("/v1/workers")["workers"])


def wait_settled_slowly(service: Service) -> None:
    status = "/v1/status"
    wait_for(lambda: not service.get(status)["configuration"]["under_way"], "the workers are as wanted", LIMIT_S)


def check_job(service: Service, job_id: str) -> int:
    """Check that a job has ended with every turn in one attempt; return its number of turns."""
    job = service.wait_ended(job_id, LIMIT_S)
    assert job["state"] == "completed", job
    turns = 0
    for number in range(job["progress"]["conversations"]["total"]):
        transcript = service.get(f"/v1/jobs/{job_id}/conversations/q{number}")
        check_debate(transcript, ROUNDS)
        assert {len(turn["attempts"]) for turn in transcript["turns"]} == {1}
        turns += len(transcript["turns"])
    return turns


@pytest.mark.system
def test_reloads_keep_real_engines_whose_settings_stay(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """An engine with the same settings stays the same process, whatever else changes."""
    port = free_ports(8)
    with serving(tmp_path, port, {"m": model(port + 1)}) as service:
        before = engines(service)
        reload(service, lambda all_: models_of(all_).update(n=model(port + 4)))
        wait_settled(service)
        reload(service, lambda all_: models_of(all_)["n"].update(context=2048))
        wait_settled(service)
        reload(service, lambda all_: models_of(all_).pop("n"))
        wait_settled(service)
        assert engines(service) == before
