"""Each way in which an engine may break, with real processes: no innocent turn suffers, and killers are found."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, scripted_model, serving

TALK: Document = {"tokens": 8, "interval": 0.03}
LIMIT_S = 240.0
STALLS = {"prefill_stall_s": 2, "decode_stall_s": 2}
WAYS = [
    ("every=3:exit", 2),
    ("every=10:exit", 1),
    ("every=6:segv", 2),
    ("every=6:kill", 2),
    ("every=6:hang", 2),
    ("load=3:exit", 1),
    ("load=4:segv", 2),
    ("load=3:hang", 2),
    ("chance=0.2:exit", 2),
    ("chance=0.05:segv", 1),
    ("chance=0.05:hang", 2),
    ("chance=0.3:refuse", 2),
    ("age=4:exit", 1),
    ("age=3:exit", 2),
]


@pytest.fixture(autouse=True)
def only_in_a_soak(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--soak"):
        pytest.skip("make soak has the time; in virtual time it is tests/properties/test_blame.py")


def ends_of(service: Service, prompts: list[str]) -> Counter[tuple[str, str | None]]:
    """Run a conversation with one turn for each prompt; return how the turns have ended."""
    agents = [{"id": "a", "model": "m"}]
    job = service.post_job({"agents": agents, "conversations": [{"prompt": prompt} for prompt in prompts]})
    service.wait_ended(job, LIMIT_S)
    talks = service.get(f"/v1/jobs/{job}/result")["conversations"]
    return Counter((turn["state"], turn["reason"]) for talk in talks for turn in talk["turns"])


@pytest.mark.parametrize(("breaks", "workers"), WAYS)
def test_an_engine_that_breaks_costs_no_turn(
    tmp_path: Path, free_ports: Callable[[int], int], breaks: str, workers: int
) -> None:
    """By count, load, chance or age; by an exit, a signal, a hang or a refusal."""
    model = scripted_model(free_ports(workers), replicas=workers, slots=4, breaks=breaks, **TALK)
    with serving(tmp_path, free_ports(1), {"m": {**model, "timeouts": STALLS}}) as service:
        assert ends_of(service, [f"Question {number}." for number in range(40)]) == {("completed", None): 40}


@pytest.mark.parametrize("workers", [1, 2])
def test_only_killers_are_convicted(tmp_path: Path, free_ports: Callable[[int], int], workers: int) -> None:
    """Three deadly prompts among forty."""
    model = scripted_model(free_ports(workers), replicas=workers, slots=4, die_on="DEADLY", **TALK)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        prompts = [f"Question {number}." for number in range(40)]
        for place in (5, 6, 30):
            prompts[place] = "DEADLY"
        assert ends_of(service, prompts) == {("completed", None): 37, ("failed", "poisoned"): 3}
