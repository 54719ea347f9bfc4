"""A real headless Chromium, driven over its DevTools protocol; Debian's package is ``chromium``."""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.harness.processes import running_program
from tests.harness.waiting import wait_for

LIMIT_S = 30.0
MOST_BYTES = 64 * 2**20  # the largest message is a screenshot
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the page's main thread did in a block: its longest task, by the clock and by its own CPU time, in ms."""

    tasks: int = 0
    longest_ms: float = 0.0
    longest_cpu_ms: float = 0.0  # what others on the machine do is not in it
    over_50_ms: int = 0  # tasks, by the clock


class Page:
    """One tab; its errors are in ``complaints``."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self._traced: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Have the browser do something; return its answer."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=LIMIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def begin_trace(self) -> None:
        """Begin to record every task of the browser."""
        self._traced.clear()
        self.send("Tracing.start", transferMode="ReportEvents", traceConfig={"includedCategories": ["toplevel"]})

    def end_trace(self) -> Work:
        """Return the tasks of the page's main thread since; other threads and processes are left out."""
        self.send("Tracing.end")
        while (message := json.loads(self._connection.recv(timeout=LIMIT_S))).get(
            "method"
        ) != "Tracing.tracingComplete":
            self._note(message)
        return _work_of(self._traced)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Tracing.dataCollected":
            self._traced += message["params"]["value"]
        elif message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def run(self, script: str) -> Any:  # noqa: ANN401 - JSON of the page
        """Return the value of an expression, awaited if it is a promise."""
        told = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def open(self, url: str) -> None:
        """Go to an address; return when the page has loaded."""
        self.send("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}", f"{url} has loaded")

    def wait(self, condition: str, what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until an expression holds."""
        try:
            wait_for(lambda: self.run(f"Boolean({condition})"), what, limit_s)
        except AssertionError as error:
            error.add_note(f"the page complains: {self.complaints}; it shows: {self.text}")
            raise

    def wait_text(self, text: str, limit_s: float = LIMIT_S) -> None:
        """Wait until the page shows a text."""
        self.wait(f"document.body?.innerText.includes({json.dumps(text)})", f"the page shows {text!r}", limit_s)

    @property
    def text(self) -> str:
        """Return the text of the page."""
        return str(self.run("document.body?.innerText"))

    def click(self, selector: str) -> None:
        """Click an element, once it is there."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(found, f"there is {selector}")
        self.run(f"{found}.click()")

    def write(self, selector: str, text: str) -> None:
        """Put a text into a field, as a person types it."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.focus(), {found}.select()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"Enter": "\r", " ": " "}.get(key)
        told: dict[str, object] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", **told, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **told)

    def resize(self, width: int, height: int = 900) -> None:
        """Give it the width of a device."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )

    def colour(self, scheme: str) -> None:
        """Show it ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Write a picture of the page, down to its end."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


def _work_of(events: list[dict[str, Any]]) -> Work:
    threads = {(each["pid"], each["tid"]) for each in events if each.get("args", {}).get("name") == "CrRendererMain"}
    tasks = [each for each in events if each["ph"] == "X" and (each["pid"], each["tid"]) in threads]
    outer = [each for each in tasks if each["name"].endswith("RunTask")]
    assert outer, "the browser has told of no task"
    times = [each["dur"] / 1000 for each in outer]
    cpu = max(each.get("tdur", each["dur"]) for each in outer) / 1000
    return Work(
        tasks=len(outer), longest_ms=max(times), longest_cpu_ms=cpu, over_50_ms=sum(each > 50 for each in times)
    )


@contextmanager
def browsing() -> Iterator[Page]:
    """Run a browser with one tab for a block."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "Chromium is needed: apt-get install chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with running_program(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            told = folder / "DevToolsActivePort"
            wait_for(lambda: told.exists() and told.read_text().count("\n"), "the browser is there", LIMIT_S)
            port = told.read_text().split()[0]
            with connect(_tab(f"http://127.0.0.1:{port}"), max_size=MOST_BYTES, proxy=None) as connection:
                page = Page(connection)
                yield page
                connection.send(json.dumps({"id": 0, "method": "Browser.close"}))
            process.wait(LIMIT_S)


@contextmanager
def on_overview(page: Page, url: str, width: int) -> Iterator[Page]:
    """Show the overview of a service, live, in light colours; check that the page has no errors meanwhile."""
    page.resize(width)
    page.colour("light")
    page.complaints.clear()
    page.open(f"{url}/#/")
    page.wait("document.querySelector('#link [data-state=live]')", "the page is live")
    yield page
    assert page.complaints == []


def _tab(url: str) -> str:
    tabs = [tab for tab in httpx.get(f"{url}/json", trust_env=False).json() if tab["type"] == "page"]
    return str(tabs[0]["webSocketDebuggerUrl"])
