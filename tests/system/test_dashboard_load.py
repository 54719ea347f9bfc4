"""The browser's cost while 10,000 conversations run: bounded nodes, little work, and no leak.

``bench/studies/dashboard_page.py`` prints the times of each view; the bounds here are for a machine three times as
slow.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.harness.browser import LIMIT_S, Page, browsing
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import wait_for
from tests.system.test_dashboard import AGENTS, MOST_NODES, go

CONVERSATIONS = 10_000
A_PAGE = 100  # conversations of a job that are on the page
SLOW = 3  # times as slow as the machine that the bounds are for
PAINT_MS, TASK_MS = 1000 * SLOW, 50 * SLOW
LOOKING_MS = 50  # CPU time once a view is open: a tenth of it was measured
ROUNDS = 3
# How many elements, texts and attributes have changed in some seconds.
CHANGES = """(seconds) => new Promise((done) => {
  let count = 0;
  const observer = new MutationObserver((records) => { count += records.length; });
  observer.observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true });
  setTimeout(() => { observer.disconnect(); done(count); }, 1000 * seconds);
})"""
LOOK_S = 4
ATTEMPTS = 100_000
TRAP = '"attempts":[ \\ },{"conversation":'
# Makes the text of a timeline; returns how long it is.
MAKE = """(count, trap) => {
  const one = (number) => ({
    conversation: `q${number % 5000}`, agent: 'a', round: number % 20, number: 1, worker: `w-${number % 8}`,
    incarnation: 1, outcome: 'failed', started_s: number * 0.013123, row: number % 16, queued_s: number * 0.0129,
    finished_s: number * 0.0135, detail: number % 3 ? 'ends in },{' : trap, tools: ['},{'], prompt_tokens: 100,
  });
  window.made = { id: 'job-1', name: trap, workers: [], attempts: Array.from({ length: count }, (_, at) => one(at)) };
  window.text = JSON.stringify(window.made);
  return window.text.length;
}"""
READ = """(async () => {
  const { readPieces } = await import('/web/pieces.js');
  const told = await readPieces(new Response(window.text).body, 'attempts', 'conversation');
  const { attempts } = told;
  const { detail } = attempts.at(-1);
  window.told = told;
  await new Promise((done) => setTimeout(done));
  let isSame = true;
  for (let at = 0; at < attempts.length; at += 1) {
    isSame &&= JSON.stringify(attempts[at]) === JSON.stringify(window.made.attempts[at]);
    if (at % 1000 === 0) await new Promise((done) => setTimeout(done));
  }
  return { count: attempts.length, isSame, name: told.name, last: detail };
})()"""
EXAMPLE = "document.querySelector('#job')"
MOST_CHANGES = 4 * A_PAGE  # a second: a state, its colour and a count of each row, and what stands above


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    models = {"m": scripted_model(free_ports(2), replicas=2, slots=8, tokens=8, interval=0.02)}
    with serving(tmp_path_factory.mktemp("load"), free_ports(1), models) as running:
        yield running


@pytest.fixture(scope="module")
def job(service: Service) -> str:
    conversations = [{"id": f"c{number}", "prompt": "Go."} for number in range(CONVERSATIONS)]
    return service.post_job({"name": "many", "rounds": 20, "agents": AGENTS, "conversations": conversations})


@pytest.fixture
def page() -> Iterator[Page]:
    with browsing() as opened:
        yield opened
        assert opened.complaints == []


def views_of(job: str) -> dict[str, str]:
    """Return the views that such a job fills, each with words that show that it is drawn."""
    return {"#/": "many", "#/jobs": "many", f"#/jobs/{job}": "c99", f"#/jobs/{job}/c0": "round", "#/pools": "waits for"}


def test_ten_thousand_conversations_cost_the_browser_little(service: Service, page: Page, job: str) -> None:
    """Each view is painted at once, has few nodes, updates only changed parts, and never blocks the page."""
    for place, text in views_of(job).items():
        page.open("about:blank")
        page.begin_trace()
        page.open(f"{service.url}/{place}")
        page.wait_text(text)
        opening = page.end_trace()
        painted_ms = page.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        page.begin_trace()
        changes = page.run(f"({CHANGES})({LOOK_S})") / LOOK_S
        looking, nodes = page.end_trace(), page.run("document.querySelectorAll('*').length")
        print(f"{place}: painted in {painted_ms:.0f} ms, {nodes} nodes, {changes:.0f} changes/s, {opening}, {looking}")
        assert nodes < MOST_NODES, place
        assert changes <= MOST_CHANGES, place
        assert painted_ms < PAINT_MS, place
        assert opening.longest_cpu_ms < TASK_MS, place
        assert looking.longest_cpu_ms < LOOKING_MS, place
        if place == f"#/jobs/{job}":
            assert page.run("[...document.querySelectorAll('tbody')].at(-1).rows.length") == A_PAGE


def test_changing_views_leaves_nothing_behind(service: Service, page: Page, job: str) -> None:
    """Nodes, listeners and streams of earlier views are released."""
    page.open(f"{service.url}/#/post")
    page.wait_text("Post the job")
    page.wait(f"{EXAMPLE}.value.includes('model: m\\n')", "the example names a model of this service")
    held = settled_counts(page)
    for _ in range(ROUNDS):
        for place, text in views_of(job).items():
            go(page, place, text)
        go(page, "#/post", "Post the job")
    told: dict[str, float] = {}

    def is_back() -> bool:
        told.update(counts_of(page))
        return all(told[name] <= 1.2 * count for name, count in held.items())

    try:
        wait_for(is_back, "what was left is given back", LIMIT_S)
    finally:
        print(f"held {held}, then {told}")


def settled_counts(page: Page) -> dict[str, float]:
    """Return the counts of a page once they are stable: remains of loading are released a little later."""
    counts = [counts_of(page)]

    def is_settled() -> bool:
        counts.append(counts_of(page))
        return counts[-3:] == [counts[-1]] * 3

    wait_for(is_settled, "the page has settled", LIMIT_S)
    return counts[-1]


def counts_of(page: Page) -> dict[str, float]:
    """Return how many nodes and listeners the browser keeps, including detached ones."""
    page.send("HeapProfiler.collectGarbage")
    told = page.send("Performance.getMetrics")["metrics"]
    return {each["name"]: each["value"] for each in told if each["name"] in {"Nodes", "JSEventListeners"}}


def test_a_timeline_of_a_hundred_thousand_attempts_is_read_in_pieces(service: Service, page: Page, job: str) -> None:
    """No attempt is lost or shown twice, words that look like a boundary stay words, and the page stays responsive."""
    page.open(f"{service.url}/#/jobs/{job}")
    page.wait_text("Timeline of slots")
    made = page.run(f"({MAKE})({ATTEMPTS}, {json.dumps(TRAP)})")
    page.begin_trace()
    told = page.run(READ)
    work = page.end_trace()
    print(f"{made / 1e6:.1f} MB, {work}")
    assert told == {"count": ATTEMPTS, "isSame": True, "name": TRAP, "last": TRAP}
    assert work.longest_cpu_ms < TASK_MS
