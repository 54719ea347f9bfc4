"""The dashboard in a real Chromium: its contents, at three widths, in light and dark, and with failures."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.axe import axe_script, violations
from tests.harness.browser import Page, on_overview
from tests.harness.proxy import cutting
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import wait_for

PICTURES = Path(__file__).parents[2] / "output" / "dashboard"
WIDTHS = (390, 1024, 1440)
HOSTILE = '<img src=x onerror="window.harmed=1"><script>window.harmed=1</script>'
AGENTS = [{"id": "pro", "model": "m"}, {"id": "con", "model": "m", "role": "opponent"}]
MOST_NODES = 5000
FIRST_PAINT_MS, LONGEST_TASK_MS = 1000, 50
# A task of a fixed size: on a slower machine all tasks take longer. The least of some runs is the machine's own time.
SAMPLES = 8  # no task of the page takes longer than so many of it: 6 were measured
SAMPLE_TASK = """Math.min(...[...Array(7)].map(() => {
  const began = performance.now();
  const words = {};
  for (let i = 0; i < 100000; i++) words[`w${i % 5000}`] = (words[`w${i % 5000}`] ?? "") + "x";
  return performance.now() - began;
}))"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """Return a service with a model that answers, one that is slow, and one with hostile words and a tool call."""
    folder = tmp_path_factory.mktemp("dashboard")
    calls = [{"id": name, "name": name, "arguments": json.dumps({"at": HOSTILE})} for name in ("look", "done")]
    says = {"content": f"<thinking>{HOSTILE}</thinking>{HOSTILE}", "tool_calls": calls[1:]}
    script = folder / "script.json"
    script.write_text(json.dumps([{"tool_calls": calls[:1]}, says]))
    (folder / "mytools.py").write_text("def look(at):\n    return {at: at}\n")
    hostile = scripted_model(free_ports(1), slots=1, script=str(script))
    models = {
        "m": scripted_model(free_ports(2), replicas=2, slots=2, tokens=30),
        "slow": scripted_model(free_ports(1), slots=2, tokens=4000, interval=0.05),
        "words": {**hostile, "tools": {"python": {"look": "mytools:look"}}},
    }
    with serving(folder, free_ports(1), models) as running:
        yield running


@pytest.fixture
def shown(service: Service, page: Page) -> Iterator[Page]:
    """Return the page on the overview, live, and check at the end of the test that it had no errors."""
    with on_overview(page, service.url, 1280) as live:
        yield live


@pytest.fixture(scope="module")
def debate(service: Service) -> str:
    """Return an ended job of two conversations."""
    both = [{"id": name, "prompt": "Go."} for name in ("cars", "bikes")]
    job = {"name": "debate", "rounds": 2, "agents": AGENTS, "conversations": both, "metadata": {"study": "A"}}
    job_id = service.post_job(job)
    service.wait_ended(job_id)
    return job_id


def go(page: Page, place: str, text: str) -> None:
    page.run(f"location.hash = {json.dumps(place)}")
    page.wait_text(text)


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.picture(PICTURES / f"{name}.png")
    print(f"picture: {PICTURES / name}.png")


def test_every_view_fits_every_width_and_is_accessible(service: Service, page: Page, debate: str) -> None:
    """At 390, 1,024 and 1,440 pixels, light and dark: no overflow, no finding of axe-core; pictures are kept."""
    script = axe_script()
    slow = service.post_job(
        {"name": "slow", "agents": [{"id": "a", "model": "slow"}], "conversations": [{"prompt": "Go."}] * 3}
    )
    guest = {"id": "guest", "by": "caller", "speak_after_within_round": ["pro"]}
    talks = [{"id": "talk", "prompt": "Go?"}]
    asked = service.post_job({"name": "asked", "agents": [AGENTS[0], guest], "conversations": talks})
    failing = {"id": "a", "model": "m", "validation": {"choices": ["never"], "retries": 0, "constrain": "off"}}
    failed = service.post_job({"name": "failing", "agents": [failing], "conversations": [{"prompt": "Go."}] * 3})
    service.wait_ended(failed)
    views = {
        "overview": ("#/", "Newest jobs"),
        "awaited": ("#/awaited", "asked / talk"),
        "asked": (f"#/jobs/{asked}/talk", "guest speaks in round 1"),
        "failed": (f"#/jobs/{failed}", "No answer was valid, over all retries."),
        "compare": (f"#/compare/{debate}/cars/{debate}/bikes", "turns,"),
        "fork": (f"#/post/{debate}/cars/con:1", "It begins with the words before con in round 2"),
        "jobs": ("#/jobs", "debate"),
        "job": (f"#/jobs/{debate}", "bikes"),
        "conversation": (f"#/jobs/{debate}/cars", "opponent, round 2"),
        "growing": (f"#/jobs/{slow}/c0", "in flight"),
        "post": ("#/post", "Example: a debate"),
        "chat": ("#/chat", "System text and parameters"),
        "again": (f"#/post/{debate}", "Post the job"),
        "pools": ("#/pools", "waits for a slot of slow"),
        "workers": ("#/workers", "slow-0"),
        "worker": ("#/workers/m-0", "No engine of this worker has broken"),
        "lanes": ("#/lanes", "No model is placed on lanes"),
        "models": ("#/models", "words"),
        "cluster": ("#/cluster", "this machine (this)"),
        "usage": ("#/usage", "Slot time"),
    }
    page.complaints.clear()
    page.open(f"{service.url}/#/")
    faults = []
    for name, (place, text) in views.items():
        go(page, place, text)
        page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        for scheme in ("light", "dark"):
            page.colour(scheme)
            faults += [f"{name} {scheme}: {fault}" for fault in violations(page, script)]
            for width in WIDTHS:
                page.resize(width)
                wide = page.run("document.documentElement.scrollWidth")
                faults += [f"{name} at {width} px is {wide} px wide"] if wide > width else []
                picture(page, f"{name}-{width}-{scheme}")
    for job in (slow, asked):
        service.http.post(f"/v1/jobs/{job}/cancel")
    assert faults == []
    assert page.complaints == []


def test_a_job_is_posted_and_grows_on_the_page(shown: Page) -> None:
    """From the form to the last word, without a reload; the number of nodes stays small."""
    shown.click('a[href="#/post"]')
    shown.wait(
        'document.querySelector("#job").value.includes("model: m\\n")', "the example names a model of this service"
    )
    shown.click("form button.main")
    shown.wait_text("completed")
    shown.click('a[href$="/cars"]')
    shown.wait_text("judge, round 1")
    shown.click("details summary")
    assert shown.run("document.querySelector('details').open")
    assert shown.run("document.querySelectorAll('*').length") < MOST_NODES


def test_the_timeline_of_a_job_is_drawn(shown: Page, debate: str) -> None:
    """When it is opened, inside the page and under its policy."""
    go(shown, f"#/jobs/{debate}", "Timeline of slots")
    shown.wait_text("Timeline of slots")
    shown.run(
        "[...document.querySelectorAll('summary')].find((each) => each.textContent === 'Timeline of slots').click()"
    )
    shown.wait("document.querySelector('canvas')?.width > 200", "the chart is there")
    shown.wait_text("8 attempts")
    picture(shown, "timeline-1280-light")


def test_refusals_are_shown_at_the_form(shown: Page) -> None:
    """Every fault by its path, as the service names it, with the input kept; broken JSON as well."""
    go(shown, "#/post", "Post the job")
    wrong = {"agents": [{"id": "a", "model": "m", "rloe": 1}], "conversations": [{"prompt": "Go."}], "moad": HOSTILE}
    shown.write("#job", json.dumps(wrong))
    shown.click("form button.main")
    shown.wait_text("agents[0].rloe")
    assert "moad" in shown.text
    assert shown.run("document.querySelector('#job').value") == json.dumps(wrong)
    assert shown.run("document.activeElement.id") == "job"
    shown.write("#job", "agents:\n  - id: a\n    rloe: 1\n")
    shown.click("form button.main")
    shown.wait_text("Line 3: agents[0].rloe")
    shown.write("#job", "{")
    shown.click("form button.main")
    shown.wait_text("This is not JSON")
    shown.complaints[:] = [each for each in shown.complaints if "422" not in each]  # the browser's own remark


def test_hostile_words_stay_words(service: Service, shown: Page) -> None:
    """Names, words, thoughts, arguments and results of tools are text everywhere."""
    look, done = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "done"))
    agent = {"id": "a", "model": "words", "role": HOSTILE, "markup": True, "tools": [look], "exit_tools": [done]}
    job = {"name": HOSTILE, "agents": [agent], "conversations": [{"id": "c", "prompt": HOSTILE}]}
    job_id = service.post_job({**job, "metadata": {HOSTILE: HOSTILE}})
    assert service.wait_ended(job_id)["state"] == "completed"
    for place in ("#/", "#/jobs", f"#/jobs/{job_id}", "#/pools"):
        go(shown, place, "onerror" if place != "#/pools" else "Pending")
    go(shown, f"#/jobs/{job_id}/c", "What was asked")
    shown.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    shown.wait("document.querySelectorAll('details details, details h3').length > 3", "what was asked is there")
    for title in ("Thoughts", "1 tool call", "1 signal"):
        assert title in shown.text
    assert shown.text.count("onerror") > 6
    assert shown.run("document.querySelectorAll('main img, main script').length") == 0
    assert shown.run("window.harmed") is None
    go(shown, f"#/jobs/{HOSTILE.partition('<script')[0]}", "There is no such job")
    shown.complaints[:] = [each for each in shown.complaints if "404" not in each]


def test_a_killed_engine_is_shown(service: Service, shown: Page) -> None:
    """Its restart, its incident with the signal, and the log that goes on, without a reload."""
    go(shown, "#/workers/m-1", "No engine of this worker has broken")
    before = service.get("/v1/workers/m-1")
    os.kill(before["pid"], signal.SIGKILL)
    shown.wait_text("killed by SIGKILL")
    wait_for(lambda: service.get("/v1/workers/m-1")["state"] == "ready", "the next engine is ready")
    shown.wait("document.querySelector('.head .state').dataset.state === 'ready'", "the page shows it")
    shown.wait("document.querySelectorAll('.incidents li').length === 1", "the incident is there")
    shown.wait("document.querySelector('.log').innerText.includes('#2 scripted engine')", "the log has followed")
    shown.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    shown.wait_text("Process")
    assert service.get("/v1/workers/m-1")["pid"] != before["pid"]


def test_a_broken_network_is_shown_and_recovers(service: Service, page: Page) -> None:
    """The banner gives the start; pauses grow; when the network is back the page goes on by itself."""
    port = int(service.url.rpartition(":")[2])
    with cutting(port) as proxy:
        address = proxy.url
        page.open(f"{address}/#/")
        page.wait("document.querySelector('#link [data-state=live]')", "the page is live")
        page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        proxy.cut_all()
        page.wait("!document.getElementById('banner').hidden", "the banner is shown")
        assert "No connection" in page.text
        assert "What you see is from" in page.text
        page.wait("/in [2-9] s/.test(document.getElementById('banner').innerText)", "the pauses have grown")
        page.send(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        page.wait("document.getElementById('banner').hidden", "the page has healed")
        assert page.run("document.querySelector('#link .state').dataset.state") == "live"
    page.complaints.clear()


def test_lists_are_refreshed_by_themselves(service: Service, page: Page) -> None:
    """New entries come without a click, also on a page that was opened without a connection."""
    with cutting(int(service.url.rpartition(":")[2])) as proxy:
        page.open(f"{proxy.url}/#/jobs")
        page.wait("document.querySelector('#link [data-state=live]')", "the page is live")
        job = {"agents": AGENTS, "conversations": [{"prompt": "Go."}]}
        service.wait_ended(service.post_job({**job, "name": "late"}))
        page.wait_text("late", 45.0)  # the list is asked for every 30 s
        page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        proxy.cut_all()
        page.wait("!document.getElementById('banner').hidden", "the banner is shown")
        service.wait_ended(service.post_job({**job, "name": "later"}))
        page.run("location.hash = '#/usage'")
        page.wait("document.querySelector('h1').innerText === 'Usage'", "the view is open")
        page.run("location.hash = '#/jobs'")
        assert "later" not in page.text
        page.send(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        page.wait_text("later")
        page.wait("document.getElementById('banner').hidden", "the page has healed")
    page.complaints.clear()


def test_the_keyboard_reaches_everything(service: Service, shown: Page) -> None:
    """The first stop skips to the content.

    Each further one is visible; Enter opens a view and moves the focus to it.
    """
    shown.open("about:blank")
    shown.open(f"{service.url}/#/")
    shown.wait("document.querySelector('h1')?.textContent === 'Overview'", "the page is there")
    shown.press("Tab")
    assert shown.run("document.activeElement.className") == "skip"
    stops = []
    for _ in range(10):
        shown.press("Tab")
        stops.append(shown.run("document.activeElement.innerText"))
        assert shown.run("getComputedStyle(document.activeElement).outlineStyle") != "none", stops
    assert stops[1:] == ["Overview", "Jobs", "Post a job", "Awaited", "Chat", "Pools", "Workers", "Models", "Usage"]
    shown.press("Enter")
    shown.wait("document.querySelector('h1')?.textContent === 'Usage'", "the view is there")
    assert shown.run("document.activeElement.id") == "main"


def test_the_page_is_quick(service: Service, shown: Page) -> None:
    """The first paint comes within a second; no task blocks the page later, though all of it changes each second."""
    shown.open("about:blank")
    shown.open(f"{service.url}/#/")
    paint = "performance.getEntriesByType('paint')"
    shown.wait(f"{paint}.length > 0", "something is painted")
    assert shown.run(f"{paint}[0].startTime") < FIRST_PAINT_MS
    shown.begin_trace()
    many = [{"id": f"c{number}", "prompt": "Go."} for number in range(300)]
    job_id = service.post_job({"name": "many", "rounds": 2, "agents": AGENTS, "conversations": many})
    go(shown, f"#/jobs/{job_id}", "c99")
    service.wait_ended(job_id)
    shown.wait_text("1,200 of 1,200")
    assert shown.run("[...document.querySelectorAll('table')].at(-1).querySelectorAll('tbody tr').length") == 100
    shown.run("[...document.querySelectorAll('button')].find((each) => each.textContent === 'Next').click()")
    shown.wait_text("c199")
    longest_ms, sample_ms = shown.end_trace().longest_cpu_ms, shown.run(SAMPLE_TASK)
    assert longest_ms <= max(LONGEST_TASK_MS, SAMPLES * sample_ms)  # by the clock other programs' work would count


def test_a_killed_service_is_reported_and_comes_back(
    tmp_path: Path, page: Page, free_ports: Callable[[int], int]
) -> None:
    """The page reports it, and continues by itself after the restart; the log counts from 1 again."""
    log = "document.querySelector('.log').innerText"
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}) as service:
        job_id = service.post_job({"name": "first", "agents": AGENTS, "conversations": [{"prompt": "Go."}]})
        service.wait_ended(job_id)
        os.kill(service.get("/v1/workers/m-0")["pid"], signal.SIGKILL)
        page.resize(1280)
        page.open(f"{service.url}/#/workers/m-0")
        page.wait(f"{log}.includes('#2 scripted engine')", "the log is there")
        page.run("window.same = true")
        service.kill()
        page.wait_text("No connection: Roundhouse cannot be reached")
        picture(page, "gone-1280-light")
        service.start()
        page.wait("document.getElementById('banner').hidden", "the page has healed")
        page.wait(f"{log}.includes('#1 scripted engine') && !{log}.includes('#2')", "the log is that of the new life")
        pid = service.get("/v1/workers/m-0")["pid"]
        page.wait(f"document.querySelector('.facts').innerText.includes('{pid}')", "so is the process")
        go(page, "#/jobs", "first")
        go(page, f"#/jobs/{job_id}", "completed")
        assert page.run("window.same"), "nobody has loaded the page again"
    page.complaints.clear()
