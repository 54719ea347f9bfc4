"""The page on forks, run as written except for its model."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Document, scripted_model, serving

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fork-and-compare.md"
LIMIT_S = 120.0


def jobs() -> dict[str, str]:
    return dict(re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.system
def test_the_page_does_what_it_says(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its commands run in order, then its job file; the forks outlive their source."""
    commands = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert jobs().keys() == {"debate.yaml", "judged.yaml"}
    (tmp_path / "debate.yaml").write_text(jobs()["debate.yaml"])
    (tmp_path / "judged.yaml").write_text(jobs()["judged.yaml"])
    post, tidy = commands.split("curl ", 1)
    judged = "sed -i s/JOB/$JOB/ judged.yaml\nJUDGED=$(roundhouse submit --wait judged.yaml)\n"
    told = 'echo "$JOB $LONGER $OTHER $MANY $JUDGED"\n'
    wait = "for each in $LONGER $OTHER $MANY; do roundhouse watch $each >watched; done\n"
    with serving(tmp_path, free_ports(1), {"small": scripted_model(free_ports(1), slots=8, chooses=True)}) as service:
        script = f"set -eu\n{post}{judged}{wait}curl -sS {tidy.replace('http://127.0.0.1:8080', service.url)}\n{told}"
        done = subprocess.run(
            ["bash", "-c", script],  # noqa: S607
            cwd=tmp_path,
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "ROUNDHOUSE_URL": service.url},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        source, longer, other, many, judge = done.stdout.split()[-5:]
        assert service.http.get(f"/v1/jobs/{source}").status_code == 404

        def spoken(job_id: str) -> list[Document]:
            found: list[Document] = service.get(f"/v1/jobs/{job_id}/result")["conversations"]
            return found

        own = {job: [t for t in spoken(job)[0]["turns"] if t["inherited"] is None] for job in (longer, other, judge)}
        assert [(turn["agent"], turn["round"]) for turn in own[other]] == [("con", 1)]
        assert {turn["round"] for turn in own[longer]} == {2, 3}
        assert {(turn["agent"], turn["round"]) for turn in own[judge]} == {("pro", 2), ("judge", 2)}
        assert len(spoken(many)) == 100
        assert "con: " in json.dumps(service.get(f"/v1/jobs/{judge}/conversations/cars/turns/judge/2/prompt"))
