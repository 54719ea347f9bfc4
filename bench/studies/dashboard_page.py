"""The dashboard's cost in the browser: first paint, nodes, and tasks of the main thread, view by view.

A real Chromium looks at the service of ``bench.dashboard``: 10,000 conversations, 200 turns a second. Each view is
opened with an empty cache and watched for a while. A task is measured by the clock, which other programs stretch, and
by its own CPU time.

    python -m bench.studies.dashboard_page [--seconds N]
"""

import argparse
import os
import time
from dataclasses import dataclass
from typing import Final

from bench.dashboard import PORT, post_load, timed_service
from tests.harness.browser import Page, Work, browsing
from tests.harness.service import Service

URL: Final = f"http://127.0.0.1:{PORT}"
PAINT_MS, TASK_MS = 1000, 50
ROUNDS: Final = 30
TIMELINE: Final = """(() => {
  const titles = [...document.querySelectorAll('summary')];
  const folded = titles.find((each) => each.textContent.startsWith('Timeline'))?.parentNode;
  if (folded) folded.open = true;
  return document.querySelector('canvas')?.width > 0;
})()"""
PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A view: its first paint, its nodes, and its main thread's work."""

    paint_ms: float
    nodes: int
    opening: Work
    looking: Work


def main() -> None:
    """Print the cost of each view."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds that each view is watched")
    options = parser.parse_args()
    with timed_service() as service, browsing() as page:
        long_id, job_id = _post(service)
        page.send("Network.setCacheDisabled", cacheDisabled=True)
        _look(page, "#/", 1.0)  # a browser's first page includes the browser's own start
        views = {
            "overview": "#/",
            "jobs": "#/jobs",
            "a job": f"#/jobs/{job_id}",
            "a conversation": f"#/jobs/{job_id}/c0",
            f"a conversation of {2 * ROUNDS} turns": f"#/jobs/{long_id}/c0",
            "pools": "#/pools",
            "workers": "#/workers",
            "a worker": "#/workers/m-0",
            "models": "#/models",
            "usage": "#/usage",
            "post a job": "#/post",
        }
        seen = {name: _look(page, place, options.seconds) for name, place in views.items()}
        seen["the timeline of the job"] = _look(page, f"#/jobs/{job_id}", options.seconds, TIMELINE)
        assert page.complaints == [], page.complaints
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, each in seen.items():
        looking = each.looking
        print(
            f"{name}: first paint {each.paint_ms:.0f} ms, {each.nodes} nodes; longest task at the opening"
            f" {each.opening.longest_ms:.0f} ms ({each.opening.longest_cpu_ms:.0f} of CPU), then"
            f" {looking.longest_ms:.0f} ms ({looking.longest_cpu_ms:.0f} of CPU) of {looking.tasks},"
            f" {each.opening.over_50_ms + looking.over_50_ms} over 50 ms by the clock"
        )
    worst = max(each.paint_ms for each in seen.values())
    tasks = [work.longest_cpu_ms for each in seen.values() for work in (each.opening, each.looking)]
    print(f"worst: first paint {worst:.0f} ms, bound {PAINT_MS}; a task {max(tasks):.0f} ms of CPU, bound {TASK_MS}")


def _post(service: Service) -> tuple[str, str]:
    agents = [{"id": name, "model": "m"} for name in "ab"]
    long_id = service.post_job({"rounds": ROUNDS, "agents": agents, "conversations": [{"prompt": "Go."}]})
    return long_id, post_load(service)


def _look(page: Page, place: str, seconds: float, then: str = "true") -> Seen:
    page.open("about:blank")
    page.begin_trace()
    page.open(f"{URL}/{place}")
    page.wait("document.querySelector('#link [data-state=live]')", "the page is live")
    page.wait(PAINT, "something is painted")
    page.wait(then, "it is drawn")
    opening = page.end_trace()
    page.begin_trace()
    until, nodes = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        nodes = max(nodes, page.run("document.querySelectorAll('*').length"))
        time.sleep(0.5)
    return Seen(paint_ms=page.run(f"{PAINT}.startTime"), nodes=nodes, opening=opening, looking=page.end_trace())


if __name__ == "__main__":
    main()
