"""Several workers of one model, and the prompts cached by their engines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

READ_S = 2.0  # for any prompt


def solo(name: str, prompt: str, **fields: object) -> Document:
    agents = [{"id": "a", "model": "m", "system": "You speak."}]
    return {"name": name, "agents": agents, "conversations": [{"id": "c", "prompt": prompt}], **fields}


def seats(service: Service, job_id: str) -> list[str]:
    """Return the workers that have had or have a turn of a job, in the order of rounds."""
    turns = service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"]
    return [turn["worker"] for turn in turns if turn["worker"]]


@pytest.mark.system
def test_a_turn_waits_for_its_warm_worker_but_not_for_ever(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A turn that never ends occupies its worker.

    The status shows the reason of the wait; then it goes to the other.
    """
    models = {"m": scripted_model(free_ports(2), replicas=2, prefill=READ_S, prompt_tokens=4000, mute_on="NEVER")}
    with serving(tmp_path, free_ports(1), models) as service:
        stuck = [service.post_job(solo(f"stuck-{number}", "NEVER")) for number in range(3)]
        wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 3, "three of four slots are taken")
        ours = service.post_job(solo("ours", "Speak.", rounds=2))
        wait_for(lambda: seats(service, ours), "ours has the fourth")
        stuck.append(service.post_job(solo("urgent", "NEVER", priority=9)))
        wait_for(lambda: service.get("/v1/status")["pools"]["ready"] == 1, "the urgent one waits")
        (warm,) = seats(service, ours)
        wait_for(lambda: seats(service, stuck[-1]) == [warm], "it has taken the slot of ours")
        (other,) = {"m-0", "m-1"} - {warm}
        on_other = next(job for job in stuck[:3] if seats(service, job) == [other])
        service.http.post(f"/v1/jobs/{on_other}/cancel").raise_for_status()
        wait_for(lambda: service.get(f"/v1/workers/{other}")["slots"]["in_use"] == 1, "the other one has a slot")
        (head,) = service.get("/v1/status")["heads"]["ready"]
        assert head["waits_for"].startswith(f"a slot of {warm}, which has its prompt in its cache"), head
        assert service.wait_ended(ours)["state"] == "completed"
        assert seats(service, ours) == [warm, other]
        for job in stuck:
            service.http.post(f"/v1/jobs/{job}/cancel").raise_for_status()
