"""The dashboard's views of lanes, devices, swaps, weights and adapters, in a real Chromium.

A stand-in for NVML provides two GPUs, and programs play their engines and vLLM; adapters are the embedded engine's.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.behaviour.test_lanes import lanes_at, lanes_of, placed, talk
from tests.behaviour.test_trainer_client import write_checkpoint
from tests.engines.adapters import write_gguf_adapter
from tests.harness.axe import axe_script, violations
from tests.harness.browser import LIMIT_S, Page, on_overview
from tests.harness.devices import FIRST, SECOND, TOTAL_MIB, Machine
from tests.harness.programs import PROGRAMS
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import wait_for
from tests.system.test_dashboard import go, picture

# The rows of the table with a caption, each as its cells by their titles.
ROWS = """(caption) => {
  const table = [...document.querySelectorAll('table')].find((each) => each.caption?.textContent === caption);
  const titles = [...(table?.tHead.rows[0].cells ?? [])].map((cell) => cell.textContent);
  const told = (row) => Object.fromEntries([...row.cells].map((cell, at) => [titles[at], cell.textContent]));
  return [...(table?.tBodies[0].rows ?? [])].map(told);
}"""
LANES = "Lanes, device by device"
UPDATES = "Weight updates of org/vl"
ADAPTERS = "Adapters of tiny"
WIDTHS = (360, 768, 1400)
UPDATABLE = "org/vl"  # a model with changing weights; its name has a slash, as many names have


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        yield Machine(tmp_path_factory.mktemp("machine") / "gpus", patch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("launched", "one", "two"):
        write_checkpoint(folder / name)
    for seed, name in enumerate(("clerk", "poet", "judge"), start=1):
        write_gguf_adapter(folder / f"{name}.gguf", seed)
    return folder


@pytest.fixture(scope="module")
def service(machine: Machine, folder: Path, tiny_model: Path, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """Return a service with three models for two lanes per GPU, one with adapters, and one whose weights change."""
    restart = {"initial_s": 0.1, "max_s": 0.2, "failures": 50}
    tiny = {
        "engine": "embedded", "model": str(tiny_model), "args": {"threads": 1}, "port": free_ports(1), "slots": 2,
        "adapters": {"clerk": str(folder / "clerk.gguf")}, "max_adapters": 3, "restart": restart,
    }  # fmt: skip
    vl = {
        "engine": "vllm", "model": str(folder / "launched"), "replicas": 2, "slots": 2,
        "command": [sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py")],
        "args": {"fault-file": str(folder / "fault")}, "restart": restart,
    }  # fmt: skip
    long = placed(interval=0.05, tokens=4000)
    models = {"alpha": long, "beta": long, "gamma": placed(), "tiny": tiny, UPDATABLE: vl}
    machine.use(FIRST, 4200)
    machine.use(SECOND, 9300)
    lanes = lanes_at(free_ports(2), 1)
    lanes["ports"] = [lanes["ports"][0], lanes["ports"][0] + 1]  # one a GPU
    with serving(folder / "s", free_ports(1), models, {"roots": [str(folder)]}, gpus=lanes) as running:
        yield running


@pytest.fixture
def shown(service: Service, page: Page) -> Iterator[Page]:
    """Return the page on the overview, live, and check at the end of the test that it had no errors."""
    with on_overview(page, service.url, 1400) as live:
        yield live


def rows(page: Page, caption: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = page.run(f"({ROWS})({json.dumps(caption)})")
    return found


def facts(page: Page, section: str) -> dict[str, str]:
    """Return the terms and values of a model."""
    at = json.dumps(f'section[aria-label="{section}"] dl > div')
    pairs = f"[...document.querySelectorAll({at})].map((each) => [...each.children].map((part) => part.textContent))"
    return dict(page.run(pairs))


def wait_rows(page: Page, caption: str, told: str, *expected: Document) -> None:
    """Wait until the rows of a table have these cells."""

    def are_there() -> bool:
        found = rows(page, caption)
        if len(found) != len(expected):
            return False
        return all(want.items() <= row.items() for want, row in zip(expected, found, strict=True))

    try:
        wait_for(are_there, told, LIMIT_S)
    except AssertionError as error:
        error.add_note(f"{caption}: {rows(page, caption)}")
        raise


def test_lanes_show_models_their_loads_and_the_times(service: Service, shown: Page, machine: Machine) -> None:
    """Two models speak on two GPUs, a third waits for a lane and gets one; memory is that of the last look."""
    go(shown, "#/lanes", "Lanes, device by device")
    long = service.post_job(talk(["alpha", "beta"], name="long", rounds=1, talks=1))
    shown.wait(f"({ROWS})('{LANES}').filter((row) => row.Phase === 'ready').length === 2", "both are loaded")
    assert sorted(row["Model"] for row in rows(shown, LANES)) == ["alpha", "beta"]
    other = service.post_job(talk(["gamma"], name="other", rounds=1, talks=1))
    shown.wait(f"({ROWS})('{LANES}').some((row) => row.Next === 'gamma')", "one is kept for the third")
    look_closely(shown, "lanes-swap")
    service.http.post(f"/v1/jobs/{long}/cancel").raise_for_status()
    assert service.wait_ended(other)["state"] == "completed"
    shown.wait(f"({ROWS})('{LANES}').some((row) => row.Model === 'gamma' && row.Phase === 'ready')", "it is there")
    told = [(lane["lane"], lane["resident"][0], str(lane["swaps"]), lane["device"]) for lane in lanes_of(service)]
    assert [(row["Lane"], row["Model"], row["Swaps"], row["Device"]) for row in rows(shown, LANES)] == told
    assert sorted(swaps for _, _, swaps, _ in told) == ["1", "2"]
    (swapped,) = [row for row in rows(shown, LANES) if row["Swaps"] == "2"]
    assert [each.split()[0] for each in swapped["Last loads"].split(", ")][1] == "gamma"
    machine.use(FIRST, 6100)
    wait_rows(
        shown, "Devices", "both devices are shown as they are",
        {"Device": FIRST, "State": "in use", "Memory": f"6,100 of {TOTAL_MIB:,} MiB", "Models": told[0][1]},
        {"Device": SECOND, "State": "in use", "Memory": f"9,300 of {TOTAL_MIB:,} MiB", "Models": told[1][1]},
    )  # fmt: skip
    width = shown.run("document.querySelector('.bar [data-kind=used]').style.width")
    assert width == "61%"
    shown.click('tbody a[href$="lane-0"]')
    shown.wait_text("Incarnation")
    assert "Swaps" in shown.text


def test_updates_of_weights_are_shown_as_they_run(service: Service, shown: Page, folder: Path) -> None:
    """Done, running with the phase, and failed with the error of each worker."""
    fault = folder / "fault"
    path = f"/v1/models/{UPDATABLE}/weights/update"
    go(shown, "#/models", "No update since the service started.")
    assert {name for name in ("gamma", "tiny", UPDATABLE) if "Version" in facts(shown, name)} == {UPDATABLE}
    service.http.post(path, json={"checkpoint": str(folder / "one")}).raise_for_status()
    first = {"Version": "1", "State": "completed", "Phase": "", "From": str(folder / "one"), "Error": ""}
    wait_rows(shown, UPDATES, "the update is shown", first)
    told = {"Version": "1", "Checkpoint": str(folder / "one"), "On workers": "2 of 2"}
    assert told.items() <= facts(shown, UPDATABLE).items()
    fault.write_text(json.dumps([{"port": 0, "phase": "receive", "do": "hold"}]))
    service.http.post(path, json={"checkpoint": str(folder / "two"), "wait": False}).raise_for_status()
    running = {"Version": "2", "State": "running", "Phase": "receive", "Took": ""}
    wait_rows(shown, UPDATES, "it is shown under way", running, first)
    look_closely(shown, "models-update")
    fault.write_text(json.dumps([{"port": 0, "phase": "receive", "do": "fail"}]))
    wait_rows(shown, UPDATES, "it has failed", {"Version": "2", "State": "failed", "Phase": "receive"}, first)
    error = rows(shown, UPDATES)[0]["Error"]
    assert all(f"{UPDATABLE}-{number}: receive: 500" in error for number in range(2))
    fault.unlink()
    look_closely(shown, "models-failed")
    wait_for(lambda: facts(shown, UPDATABLE)["On workers"] == "2 of 2", "both have the old weights again", LIMIT_S)
    assert facts(shown, UPDATABLE)["Version"] == "1"


def test_adapters_come_and_go(service: Service, shown: Page, folder: Path) -> None:
    """Configured, loaded at run time with its size and workers, and unloaded, without a reload."""
    path = "/v1/models/tiny/adapters"
    clerk = {"Adapter": "clerk", "Loaded": "configured", "Workers": "tiny-0", "Source": str(folder / "clerk.gguf")}
    go(shown, "#/models", "clerk")
    wait_rows(shown, ADAPTERS, "the configured one is shown", clerk)
    assert not rows(shown, "Adapters of gamma")
    service.http.post(path, json={"name": "poet", "path": str(folder / "poet.gguf")}).raise_for_status()
    poet = {"Adapter": "poet", "Size": "15 KiB", "Workers": "tiny-0", "Source": str(folder / "poet.gguf")}
    wait_rows(shown, ADAPTERS, "the loaded one is shown", clerk, poet)
    assert rows(shown, ADAPTERS)[1]["Loaded"] not in {"", "configured"}
    look_closely(shown, "models-adapters")
    service.http.delete(f"{path}/poet").raise_for_status()
    wait_rows(shown, ADAPTERS, "it is gone", clerk)


def test_a_model_shows_its_settings_and_is_unloaded_and_loaded(service: Service, shown: Page) -> None:
    """Engine, file, context, slots, and the memory of its processes."""
    go(shown, "#/models", "Engines of tiny")
    told = facts(shown, "tiny")
    assert told["File"].endswith(".gguf")
    assert "MiB of the host" in told["Memory"] or "GiB of the host" in told["Memory"]
    assert {"Engine", "Context", "Slots"} <= told.keys()
    button = (
        "[...document.querySelectorAll('section[aria-label=tiny] button')].find((each) => each.textContent === '%s')"
    )
    shown.run("window.confirm = () => true")
    shown.run(f"{button % 'Unload'}.click()")
    shown.wait(
        "document.querySelector('section[aria-label=tiny] .state').textContent === 'not loaded'", "it is unloaded"
    )
    assert service.get("/v1/workers/tiny-0")["state"] == "stopped"
    shown.run(f"{button % 'Load'}.click()")
    shown.wait("document.querySelector('section[aria-label=tiny] .state').textContent === 'ready'", "it is loaded")


def test_the_keyboard_reaches_lanes_and_their_tables(shown: Page) -> None:
    """On a phone the row of views and the tables scroll: the focused element and the current place are visible."""
    shown.resize(360)
    go(shown, "#/lanes", LANES)
    current = "document.querySelector('[aria-current=page]').getBoundingClientRect()"
    assert shown.run(f"{current}.left >= 0 && {current}.right <= innerWidth"), "the view's name is in sight"
    stops = []
    for _ in range(4):
        shown.press("Tab")
        stops.append(
            shown.run("((at) => at.hasAttribute('aria-labelledby') ? 'table' : at.innerText)(document.activeElement)")
        )
        box = "document.activeElement.getBoundingClientRect()"
        assert shown.run(f"{box}.left >= 0 && {box}.left < innerWidth"), stops
        assert shown.run("getComputedStyle(document.activeElement).outlineStyle") != "none", stops
    assert stops == ["table", "table", "lane-0", "lane-1"]
    shown.press("Enter")
    shown.wait_text("Incarnation")
    assert shown.run("location.hash") == "#/workers/lane-1"


def look_closely(page: Page, name: str) -> None:
    """Check and keep a view at each width, light and dark: no overflow, and no finding of axe-core."""
    script, faults = axe_script(), []
    for scheme in ("light", "dark"):
        page.colour(scheme)
        faults += [f"{scheme}: {fault}" for fault in violations(page, script)]
        for width in WIDTHS:
            page.resize(width)
            wide = page.run("document.documentElement.scrollWidth")
            faults += [f"{wide} px wide at {width} px"] if wide > width else []
            picture(page, f"{name}-{width}-{scheme}")
    page.colour("light")
    page.resize(WIDTHS[-1])
    assert faults == [], name
