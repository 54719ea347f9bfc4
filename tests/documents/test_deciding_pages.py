"""The job files of the pages on conversations that decide, each run as written except for its model."""

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.service import scripted_model, serving
from tests.harness.waiting import wait_for

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = ("let-a-conversation-decide", "put-a-person-or-a-program-in", "from-autogen", "long-conversations")
WORDS = {"support": "thanks", "approval": "yes", "person": "I approve."}  # the caller's words
ENDS = {  # possible ends of each, whatever its models say
    "review": {"rounds", "until"}, "jury": {"rounds", "until"}, "desk": {"rounds", "leader"}, "tutors": {"rounds"},
    "support": {"until"}, "approval": {"rounds"}, "reflection": {"rounds", "until"},
    "selector": {"rounds", "leader", "until"}, "person": {"until"}, "village": {"rounds"}, "committee": {"rounds"},
    "council": {"rounds"},
}  # fmt: skip


def jobs() -> dict[str, dict[str, Any]]:
    """Return the job files of the pages, by name."""
    texts = [(HOW_TO / f"{page}.md").read_text() for page in PAGES]
    found = (re.findall(r"^```yaml\n# \w+\.yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for text in texts)
    return {job["name"]: job for job in map(yaml.safe_load, chain.from_iterable(found))}


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(ENDS))
def test_a_job_of_the_pages_ends_as_described(name: str, tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A person's words are spoken when their turn is awaited."""
    job = jobs()[name]
    model = scripted_model(free_ports(1), slots=4, chooses=True)
    with serving(tmp_path, free_ports(1), {"small": model}) as service:
        job_id = service.post_job(job)
        caller = [agent["id"] for agent in job["agents"] if agent.get("by") == "caller"]
        for conversation in job["conversations"] if caller else ():
            path = f"/v1/jobs/{job_id}/awaited?conversation={conversation['id']}"
            wait_for(lambda at=path: service.get(at)["awaited"], "somebody is waited for")  # type: ignore[misc]
            place = f"/v1/jobs/{job_id}/conversations/{conversation['id']}/turns/{caller[0]}/0"
            assert service.http.post(place, json={"text": WORDS[name]}).status_code == 201
        assert service.wait_ended(job_id)["state"] == "completed"
        for talk in service.get(f"/v1/jobs/{job_id}/result")["conversations"]:
            ended_by = talk["ended_by"]
            assert (ended_by if isinstance(ended_by, str) else next(iter(ended_by))) in ENDS[name]


def test_every_job_of_the_pages_is_run() -> None:
    """The test's list is complete."""
    assert jobs().keys() == ENDS.keys()
