"""Takes the README's picture of the dashboard in Chromium, from a real run of a gallery job on the small model.

    .venv/bin/python -m tools.take_pictures docs/pictures

It needs Chromium, like tests/system.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import yaml

from tests.harness.browser import Page, browsing
from tests.harness.service import Service, serving
from tests.harness.waiting import wait_for
from workers.models.small_model import ensure_small_model

GALLERY: Final = Path(__file__).parents[1] / "examples"
ENGINE: Final = {"engine": "embedded", "model": "roundhouse:small", "replicas": 2, "slots": 2, "context": 2048}
PARAMS: Final = {"max_tokens": 60, "temperature": 0.3, "repeat_penalty": 1.15, "seed": 7}
PORT, ENGINE_PORT = 9180, 9190
WIDTH, HEIGHT = 1000, 900
KILL_AFTER: Final = 4
LIMIT_S: Final = 180.0


def main() -> None:
    """Run a job and take the picture."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    ensure_small_model()
    small = {**ENGINE, "params": PARAMS, "port": ENGINE_PORT, "args": {"threads": 1}}
    with (
        tempfile.TemporaryDirectory() as name,
        serving(Path(name), PORT, {"small": small}) as service,
        browsing() as page,
    ):
        _take(service, page, target)


def _take(service: Service, page: Page, target: Path) -> None:
    """Take the page, with timeline, of a job during which an engine was killed."""
    job = service.post_job(yaml.safe_load((GALLERY / "debate.yaml").read_text()))
    wait_for(lambda: service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"] >= KILL_AFTER, "turns have ended")
    busy = max(service.get("/v1/workers")["workers"], key=lambda worker: worker["slots"]["in_use"])
    os.kill(busy["pid"], signal.SIGKILL)
    service.wait_ended(job, LIMIT_S)
    page.colour("light")
    page.resize(WIDTH, HEIGHT)
    page.open(f"{service.url}/#/jobs/{job}")
    page.wait_text("museums")
    page.run(
        "[...document.querySelectorAll('summary')].find((each) => each.textContent.startsWith('Timeline')).click()"
    )
    page.wait("document.querySelector('canvas')?.width > 200", "the chart is there")
    page.picture(target / "dashboard.png")
    print(f"{target}: {(target / 'dashboard.png').stat().st_size} bytes")


if __name__ == "__main__":
    main()
