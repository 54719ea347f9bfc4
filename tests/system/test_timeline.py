"""The file of ``roundhouse timeline`` in a real browser: it draws, zooms and explains, and runs no foreign script."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from service.conversations.job.states import JobState, TurnState
from service.timeline.chart import page_pieces
from service.timeline.rows import lay_rows
from service.timeline.spans import Span
from service.timeline.timeline import Timeline, WorkerRows
from tests.harness.browser import Page
from tests.harness.service import debate, run_command, scripted_model, serving

STATIC = Path(__file__).parents[2] / "service" / "web" / "static"
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
CRASH = "DIE-HERE"
CANVAS = "document.querySelector('.tl-canvas')"
# How many pixels of the canvas are of a custom property's colour.
PIXELS = """(name) => {
  const canvas = document.querySelector('.tl-canvas'), probe = document.createElement('i');
  probe.style.color = `var(--tl-${name})`;
  document.querySelector('.tl').append(probe);
  const wanted = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
  probe.remove();
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += wanted.every((part, place) => data[at + place] === part);
  return count;
}"""
ZOOM = """(async () => {
  const canvas = document.querySelector('.tl-canvas'), tasks = [];
  const box = canvas.getBoundingClientRect();
  for (let step = 0; step < 40; step++) {
    const event = { deltaY: step < 25 ? -240 : 360, clientX: box.left + 600, clientY: box.top + 200 };
    canvas.dispatchEvent(new WheelEvent('wheel', { ...event, bubbles: true, cancelable: true }));
    const painted = new Promise((done) => requestAnimationFrame((at) => setTimeout(done, 0, at)));
    tasks.push(-(await painted) + performance.now());
  }
  return tasks;
})()"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Path:
    """The file of a real job in which an engine died, and whose name is hostile."""
    folder = tmp_path_factory.mktemp("timeline")
    models = {"m": scripted_model(free_ports(1), interval=0.02, die_on=CRASH, die_once=str(folder / "died"))}
    with serving(folder, free_ports(1), models) as service:
        job = debate(conversations=6, rounds=2, name=f"debate {HOSTILE}")
        job["conversations"][2]["prompt"] += f" {CRASH}"
        job_id = service.post_job(job)
        service.wait_ended(job_id)
        done = run_command("timeline", job_id, "--url", service.url, "-o", str(folder / "job.html"))
        assert done.returncode == 0, done.stderr
    return folder / "job.html"


def opened(page: Page, file: Path, scheme: str = "light", width: int = 1280) -> None:
    page.resize(width)
    page.colour(scheme)
    page.open(file.as_uri())
    page.wait(f"{CANVAS} && {CANVAS}.width > 0 && document.querySelector('.tl-range').textContent", "it is drawn")


def pixels(page: Page, name: str) -> int:
    return int(page.run(f"({PIXELS})({json.dumps(name)})"))


def mouse(page: Page, kind: str, x: float, y: float, **more: Any) -> None:  # noqa: ANN401 - the protocol's
    box = page.run(f"(({{left, top}}) => [left, top])({CANVAS}.getBoundingClientRect())")
    page.send("Input.dispatchMouseEvent", type=kind, x=box[0] + x, y=box[1] + y, **more)


def press(page: Page, key: str, *, shift: bool = False) -> None:
    text = {"text": key} if len(key) == 1 else {}
    page.send("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=8 * shift, **text)
    page.send("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=8 * shift)


def shown_range(page: Page) -> str:
    return str(page.run("document.querySelector('.tl-range').textContent"))


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_file_draws_what_happened(page: Page, written: Path, tmp_path: Path, scheme: str, width: int) -> None:
    """Answers, failures, waits and the engine's death, in light and dark, at three widths; no overflow."""
    opened(page, written, scheme, width)
    for name in ("completed", "failed", "queue", "incident", "ready"):
        assert pixels(page, name) > 20, name
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert "1 engine broke" in page.text
    page.picture(tmp_path / f"timeline-{scheme}-{width}.png")
    assert page.complaints == []


def test_foreign_names_are_only_shown(page: Page, written: Path) -> None:
    """A name that is a script stays text; the policy would stop it as well."""
    opened(page, written)
    assert page.run("document.title") == f"debate {HOSTILE}: timeline"
    assert page.run("document.querySelectorAll('script').length") == 2
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.complaints == []
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.taken = 1'}))")
    assert page.run("window.taken === undefined")
    page.wait("true", "the browser has told")
    assert any("Content Security Policy" in each for each in page.complaints)
    page.complaints.clear()


def test_wheel_drag_and_buttons_zoom_and_move(page: Page, written: Path) -> None:
    """The point under the pointer stays there; the view never leaves the whole."""
    opened(page, written)
    whole = shown_range(page)
    assert whole.startswith("all ")
    mouse(page, "mouseWheel", 700, 90, deltaX=0, deltaY=-400)
    page.wait(f"document.querySelector('.tl-range').textContent !== {json.dumps(whole)}", "the wheel zooms")
    picture = f"{CANVAS}.toDataURL()"
    before = page.run(picture)
    mouse(page, "mousePressed", 700, 90, button="left", buttons=1, clickCount=1)
    mouse(page, "mouseMoved", 500, 90, button="left", buttons=1)
    mouse(page, "mouseReleased", 500, 90, button="left", clickCount=1)
    page.wait(f"{picture} !== {json.dumps(before)}", "a drag moves")
    page.run("[...document.querySelectorAll('.tl-bar button')].find((each) => each.textContent === 'Fit').click()")
    page.wait(f"document.querySelector('.tl-range').textContent === {json.dumps(whole)}", "Fit shows all")
    assert page.complaints == []


def test_the_pointer_shows_what_is_under_it(page: Page, written: Path) -> None:
    """An attempt's wait, first token and outcome; a worker's state, and why its engine broke."""
    opened(page, written)
    tip = "document.querySelector('.tl-tip')"
    mouse(page, "mouseMoved", 170, 22 + 34 + 20 + 9)
    page.wait(f"!{tip}.hidden", "there is something")
    told = str(page.run(f"{tip}.textContent"))
    for word in ("agent", "round 1", "waited", "first token", "worker m-0, engine 1", "outcome"):
        assert word in told
    mouse(page, "mouseMoved", 600, 22 + 34 + 10)
    page.wait(f"{tip}.textContent.includes('state')", "the worker's state is told")
    mouse(page, "mouseMoved", 5, 5)
    page.wait(f"{tip}.hidden", "nothing is there")
    assert page.complaints == []


def test_all_of_it_works_by_keys(page: Page, written: Path) -> None:
    """Screen readers get the details of an attempt, too."""
    opened(page, written)
    whole = shown_range(page)
    page.run("document.querySelector('.tl-scroll').focus()")
    press(page, "ArrowDown")
    page.wait("document.querySelector('.tl-details dd')", "an attempt has the focus")
    first = page.run("document.querySelector('.tl-details').textContent")
    press(page, "ArrowRight")
    page.wait(f"document.querySelector('.tl-details').textContent !== {json.dumps(first)}", "the next one has it")
    assert "round" in str(page.run("document.querySelector('[role=status]').textContent"))
    press(page, "+")
    page.wait(f"document.querySelector('.tl-range').textContent !== {json.dumps(whole)}", "plus zooms")
    press(page, "ArrowRight", shift=True)
    press(page, "0")
    page.wait(f"document.querySelector('.tl-range').textContent === {json.dumps(whole)}", "nought shows all")
    press(page, "Escape")
    page.wait("!document.querySelector('.tl-details dd')", "Escape lets go")
    assert page.complaints == []


def test_a_hundred_thousand_attempts_stay_smooth(page: Page, tmp_path: Path) -> None:
    """Only what is visible is drawn: a frame takes a fraction of the 50 ms that a hand feels."""
    chance, spans = Random(1), []  # noqa: S311
    for place in range(64):
        at = 0.0
        for number in range(100_000 // 64 + 1):
            end = at + chance.expovariate(1.2)
            outcome = TurnState.FAILED if chance.random() < 0.02 else TurnState.COMPLETED
            spans.append(
                Span(
                    conversation=f"q{place}", agent="a", round=number, number=1, worker=f"w-{place % 8}",
                    incarnation=1, outcome=outcome, queued_s=max(0.0, at - chance.random()), started_s=at,
                    first_token_s=at + (end - at) / 5, finished_s=end,
                )
            )  # fmt: skip
            at = end + chance.random() / 20
    laid, rows = lay_rows(spans)
    shown = Timeline(
        id="job-1", name="large", state=JobState.COMPLETED, origin="2026-11-23T12:00:00.000000Z", until_s=1500.0,
        workers=[WorkerRows(id=name, rows=count) for name, count in rows.items()], states=[], incidents=[],
        attempts=laid,
    )  # fmt: skip
    script, style = ((STATIC / f"timeline.{kind}").read_text() for kind in ("js", "css"))
    file = tmp_path / "large.html"
    file.write_bytes(b"".join(page_pieces(shown, script, style)))
    opened(page, file)
    frames = sorted(page.run(ZOOM))
    print(f"frames: median {frames[20]:.1f} ms, 9 of 10 below {frames[36]:.1f} ms, slowest {frames[-1]:.1f} ms")
    assert frames[20] < 50
    assert page.run("document.querySelectorAll('*').length") < 200
    assert page.complaints == []
