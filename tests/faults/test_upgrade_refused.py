"""An upgrade in place that is refused at the last moment.

The service goes on, with each turn once, as without it. The new code looks a second time, after the drain, if something
has changed since it agreed. Here a file changes during its first look, and the second look is held until the test has
caused the refusal: so the refusal comes after that look, at the very end.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.harness.audit import audit, under_load
from tests.harness.service import ROUNDHOUSE, Document, Service, debate, recorded, scripted_model
from tests.harness.upgrades import UPGRADE_LIMIT_S, upgrades_of
from tests.harness.waiting import wait_for

Ports = Callable[[int], int]
ECHO: Final = r"MARK-\w|TOPIC-\d+|SAY-\w+"  # the engine's answer to a question
REFUSED: Final = "store: refused, since this node runs"
SOAK_ROUNDS, ROUNDS = 100, 4
MOMENTS: Final = 20  # half of them while the new code looks, the others after that
LEAVING_S: Final = 2.0  # how long a client that has not sent all holds the last phase
LOOK: Final = """
import os, sys, time
if "--upgrade-check" in sys.orig_argv:
    folder = {folder!r}
    with open(os.path.join(folder, "looks"), "a") as looks:
        looks.write("x")
    if os.path.getsize(os.path.join(folder, "looks")) == 1 and {is_changing}:
        with open({config!r}, "a") as config:
            config.write("\\n")
    if os.path.getsize(os.path.join(folder, "looks")) == 2:
        open(os.path.join(folder, "held"), "w").close()
        while not os.path.exists(os.path.join(folder, "let_go")):
            time.sleep(0.01)
"""
_NEVER = threading.Event()


class Window:
    """The new code's second look, which waits until the test releases it; a service gives up on it after a minute."""

    def __init__(self, folder: Path, config: Path) -> None:
        self._folder = folder
        self._config = config
        folder.mkdir()
        self.change_at_first_look(is_changing=True)

    def change_at_first_look(self, *, is_changing: bool) -> None:
        """Let a file change while the new code looks for the first time, or not."""
        look = LOOK.format(folder=str(self._folder), config=str(self._config), is_changing=is_changing)
        (self._folder / "sitecustomize.py").write_text(look)

    @property
    def looks(self) -> int:
        """Return how often the new code has looked."""
        return (self._folder / "looks").stat().st_size

    @property
    def path(self) -> str:
        """Return the variables with which a service's programs find it."""
        return os.pathsep.join((str(self._folder), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)

    def wait_held(self) -> None:
        wait_for((self._folder / "held").exists, "the new code looks a second time", UPGRADE_LIMIT_S)

    def let_go(self) -> None:
        (self._folder / "let_go").touch()

    def reset(self) -> None:
        """Prepare for the next upgrade."""
        for name in ("looks", "held", "let_go"):
            (self._folder / name).unlink(missing_ok=True)


def interpreter_of(folder: Path) -> Path:
    """Return a copy of our interpreter in an environment of its own."""
    ours = Path(sys.executable).parent.parent
    (folder / "bin").mkdir(parents=True)
    shutil.copy(ours / "pyvenv.cfg", folder)
    (folder / "lib").symlink_to(ours / "lib")
    python = folder / "bin" / "python"
    python.symlink_to(sys.executable)
    return python


class Refusable:
    """A service whose upgrades a test can have refused after the last look."""

    def __init__(self, folder: Path, port: int) -> None:
        self.record = folder / "record"
        self.python = interpreter_of(folder / "environment")
        self.gate = folder / "gate"  # turns of a held job go on when it is there
        model = scripted_model(port + 1, echo=ECHO, hold=r"/[\w/.-]+/gate", interval=0.05, record=str(self.record))
        models = {"m": {**model, "timeouts": {"stop_grace_s": UPGRADE_LIMIT_S}}}
        self.service = Service(folder / "a", port, models, {"drain_s": 0.3})
        self.window = Window(folder / "window", self.service.config)
        self.service.command = (str(self.python), ROUNDHOUSE)
        self.service.environment["PYTHONPATH"] = self.window.path

    def post_held(self) -> str:
        """Post a job whose turns are asked, and not answered until ``gate`` exists; some wait in the queue."""
        job = debate(conversations=3, rounds=2)
        for agent in job["agents"]:
            agent["system"] += f" {self.gate}"
        job_id = self.service.post_job(job)
        wait_for(lambda: self.service.get("/v1/status")["pools"]["in_flight"] == 2, "turns are held")
        return job_id

    def ask(self) -> None:
        """Ask for an upgrade; return when the new code looks a second time."""
        agreed = self.service.http.post("/v1/upgrade", timeout=UPGRADE_LIMIT_S)
        assert agreed.status_code == 202, agreed.text
        self.window.wait_held()

    def wait_refused(self, because: str) -> None:
        """Return when the upgrade is refused, for this reason."""
        wait_for(lambda: self._is_serving() and upgrades_of(self.service)["phase"] == "idle", "it has an end")
        now = upgrades_of(self.service)
        assert (now["upgrades"], because in str(now["last"]["detail"])) == (0, True), now

    def _is_serving(self) -> bool:
        assert self.service.process is not None
        assert self.service.process.poll() is None, f"the service has ended: {self.service.log()[-3000:]}"
        return True

    def engine(self) -> int:
        return int(self.service.get("/v1/workers/m-0")["pid"])

    def has_ended(self, job_id: str) -> bool:
        """Return whether a job has ended; its callers speak when they are awaited."""
        self._is_serving()
        assert REFUSED not in self.service.log(), self.service.log()[-3000:]
        for turn in self.service.get(f"/v1/jobs/{job_id}/awaited")["awaited"]:
            assert say(self.service, job_id, turn["conversation"], turn["round"]) in (200, 201, 409)
        return self.service.get(f"/v1/jobs/{job_id}")["state"] not in ("queued", "running")

    def check(self, job_id: str) -> None:
        """Check that each turn is there once, as the engine or its caller said it."""
        wait_for(lambda: self.has_ended(job_id), f"job {job_id} has ended", UPGRADE_LIMIT_S)
        assert self.service.get(f"/v1/jobs/{job_id}")["state"] == "completed"
        said = {words_of(json.dumps(request["messages"])) for request in recorded(self.record)}
        for talk in self.service.get(f"/v1/jobs/{job_id}/result")["conversations"]:
            assert talk["turns"]
            for turn in talk["turns"]:
                words = words_of(turn["text"])
                if turn["by"] == "caller":
                    assert words == (f"SAY-{talk['id']}{turn['round']}",)
                else:
                    assert words[0] == f"MARK-{turn['agent']}"
                    assert words in said
                    assert Counter(each["outcome"] for each in turn["attempts"])["completed"] == 1
        counts = Counter(
            (told["conversation"], told["agent"], told["round"])
            for told in events_of(self.service, job_id)
            if told["state"] == "completed"
        )
        assert set(counts.values()) == {1}


@contextmanager
def refusable(folder: Path, port: int) -> Iterator[Refusable]:
    """Run such a service for a block, and check that it stops well."""
    made = Refusable(folder, port)
    service = made.service
    try:
        service.start()
        yield made
        assert service.get("/v1/status")["store"]["trouble"] is None
        assert service.stop() == 0, service.log()[-3000:]
        log = service.log()
        assert [text for text in (REFUSED, "Traceback", "is ready already") if text in log] == []
    finally:
        made.window.let_go()
        service.http.close()
        if service.process is not None and service.process.poll() is None:
            service.kill()


def words_of(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(ECHO, text)))


def events_of(service: Service, job_id: str) -> list[Document]:
    """Return the events of a job's turns."""
    blocks = service.http.get(f"/v1/jobs/{job_id}/events").text.split("\n\n")
    told = [dict(line.split(": ", 1) for line in block.splitlines() if ": " in line) for block in blocks]
    return [json.loads(event["data"]) for event in told if event.get("event") == "turn"]


def callers_job() -> Document:
    """Return a job of two conversations, each begun by a caller in either round."""
    ann = {"id": "n", "model": "m", "system": "You are MARK-n.", "speak_after_within_round": ["guest"]}
    talks = [{"id": name, "prompt": f"TOPIC-{at}."} for at, name in enumerate("cd")]
    return {"agents": [{"id": "guest", "by": "caller"}, ann], "rounds": 2, "conversations": talks}


def path_of(job_id: str, conversation: str, number: int) -> str:
    return f"/v1/jobs/{job_id}/conversations/{conversation}/turns/guest/{number}"


def words(conversation: str, number: int) -> Document:
    return {"text": f"SAY-{conversation}{number}"}


def say(service: Service, job_id: str, conversation: str, number: int) -> int:
    """Speak for a caller; return the status."""
    path = path_of(job_id, conversation, number)
    return service.http.post(path, json=words(conversation, number)).status_code


def begin_to_say(service: Service, job_id: str, conversation: str, number: int) -> tuple[socket.socket, bytes]:
    """Speak for a caller on a slow connection; return the connection, and what is still to be sent."""
    body = json.dumps(words(conversation, number)).encode()
    head = f"POST {path_of(job_id, conversation, number)} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1])), timeout=UPGRADE_LIMIT_S)
    connection.sendall(head.encode() + body[:5])
    return connection, body[5:]


def change_file(subject: Refusable) -> Callable[[], None]:
    """Change the file meanwhile, as a deployment does: a blank line is enough."""
    with subject.service.config.open("a") as file:
        file.write("\n")
    return lambda: None


def stop_engine(subject: Refusable) -> Callable[[], None]:
    """Have an engine replaced that does not end yet."""
    pid = subject.engine()
    os.kill(pid, signal.SIGSTOP)
    assert subject.service.http.post("/v1/workers/m-0/restart").status_code == 202
    wait_for(lambda: subject.service.get("/v1/workers/m-0")["state"] == "stopping", "its engine is being stopped")
    return lambda: os.kill(pid, signal.SIGCONT)


def take_interpreter(subject: Refusable) -> Callable[[], None]:
    """Rebuild the environment meanwhile."""
    subject.python.unlink()
    return lambda: subject.python.symlink_to(sys.executable)


def spoil_interpreter(subject: Refusable) -> Callable[[], None]:
    """Put something else in its place that may be run: only the very last step fails, with all claims left."""
    subject.python.unlink()
    subject.python.write_bytes(b"\x7fELF nothing")
    subject.python.chmod(0o755)
    return lambda: None


PLACES: dict[str, tuple[Callable[[Refusable], Callable[[], None]], str]] = {
    "the files were changed": (change_file, "changed"),
    "an engine is being stopped": (stop_engine, "is stopping its engine"),
    "the interpreter cannot be run": (take_interpreter, "cannot be run"),
    "the interpreter is no program": (spoil_interpreter, "cannot be run"),
}


@pytest.mark.system
@pytest.mark.parametrize("place", PLACES)
def test_after_a_late_refusal_results_are_recorded_as_before(tmp_path: Path, free_ports: Ports, place: str) -> None:
    """Turns in the queue go on, and the service records their engines' answers, which it still owns."""
    refuse, because = PLACES[place]
    with refusable(tmp_path, free_ports(2)) as subject:
        service = subject.service
        job = subject.post_held()
        subject.ask()
        assert service.get("/v1/status")["pools"]["ready"] == 6
        subject.gate.touch()
        undo = refuse(subject)
        subject.window.let_go()
        subject.wait_refused(because)
        undo()
        later = service.post_job(debate(conversations=2))
        for each in (job, later):
            subject.check(each)


@pytest.mark.system
@pytest.mark.parametrize("place", PLACES)
def test_requests_that_wait_are_answered_after_a_late_refusal(tmp_path: Path, free_ports: Ports, place: str) -> None:
    """One comes while the upgrade drains, and waits for it; each is answered once."""
    refuse, because = PLACES[place]
    said = {"role": "user", "content": "TOPIC-7."}
    with refusable(tmp_path, free_ports(2)) as subject, ThreadPoolExecutor() as tasks:
        service = subject.service
        subject.post_held()
        subject.ask()
        chat = {"model": "m", "messages": [said]}
        asked = [
            tasks.submit(service.http.post, "/v1/chat/completions", json={**chat, "stream": is_streamed}, timeout=60.0)
            for is_streamed in (False, True)
        ]
        wait_for(lambda: service.get("/v1/status")["pools"]["ready"] >= 8, "they wait")
        subject.gate.touch()
        undo = refuse(subject)
        subject.window.let_go()
        subject.wait_refused(because)
        undo()
        answers = [each.result() for each in asked]
    assert [each.status_code for each in answers] == [200, 200], [each.text for each in answers]
    assert all(each.text.count("TOPIC-7") == 1 for each in answers)


@pytest.mark.system
@pytest.mark.parametrize("place", PLACES)
def test_callers_that_speak_during_a_refused_upgrade_are_heard(tmp_path: Path, free_ports: Ports, place: str) -> None:
    """One speaks before its end, one during it, and others after it: no conversation is claimed a second time."""
    refuse, because = PLACES[place]
    with refusable(tmp_path, free_ports(2)) as subject:
        service = subject.service
        talk = service.post_job(callers_job())
        wait_for(lambda: len(service.get(f"/v1/jobs/{talk}/awaited")["awaited"]) == 2, "both are awaited")
        job = subject.post_held()
        subject.ask()
        subject.gate.touch()
        undo = refuse(subject)
        assert say(service, talk, "c", 0) == 201
        connection, rest = begin_to_say(service, talk, "d", 0)
        with closing(connection):
            assert service.get("/v1/status")["pools"]["ready"] == 6
            subject.window.let_go()
            subject.wait_refused(because)
            undo()
            connection.sendall(rest)
            assert connection.recv(4096).startswith(b"HTTP/1.1 20")
        for each in (talk, job):
            subject.check(each)


@pytest.mark.system
def test_the_new_code_looks_once_if_nothing_has_changed(tmp_path: Path, free_ports: Ports) -> None:
    """A second look would leave slots idle for a second of each upgrade."""
    with refusable(tmp_path, free_ports(2)) as subject:
        subject.window.change_at_first_look(is_changing=False)
        agreed = subject.service.http.post("/v1/upgrade", timeout=UPGRADE_LIMIT_S)
        assert agreed.status_code == 202, agreed.text
        wait_for(lambda: upgrades_of(subject.service)["upgrades"] == 1, "it is upgraded", UPGRADE_LIMIT_S)
        assert subject.window.looks == 1


class Moments:
    """The moments of a file's change, drawn from ``MOMENTS``: during the new code's look, or later until the exec."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)  # noqa: S311

    def change_at_one(self, subject: Refusable, hold: Callable[[], socket.socket]) -> int:
        """Have a running upgrade refused at one of the moments; return which."""
        moment = self._chance.randrange(MOMENTS)
        late = moment - MOMENTS // 2
        if late < 0:
            rest(0.02 * moment)
            change_file(subject)
            subject.window.let_go()
            return moment
        with closing(hold()):  # its requests are not answered, and the last phase lasts
            subject.window.let_go()
            rest(LEAVING_S * late / (MOMENTS // 2))
            change_file(subject)
            wait_for(lambda: upgrades_of(subject.service)["phase"] in ("idle", "checking"), "it has an end")
        return moment


def rest(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0.0:
        _NEVER.wait(left)


@pytest.mark.system
def test_upgrades_that_are_refused_again_and_again_cost_nothing(
    tmp_path: Path, free_ports: Ports, request: pytest.FixtureRequest
) -> None:
    """At any moment, under load and with callers, a hundred times in a soak.

    No result is refused, and no service ends.
    """
    rounds = SOAK_ROUNDS if request.config.getoption("--soak") else ROUNDS
    moments, met, refused = Moments(seed=rounds), Counter[int](), 0
    with refusable(tmp_path, free_ports(2)) as subject:
        service, talks = subject.service, list[str]()
        with under_load([service.url]) as load:
            for _ in range(rounds):
                talks.append(service.post_job(callers_job()))
                wait_for(lambda: len(service.get(f"/v1/jobs/{talks[-1]}/awaited")["awaited"]) == 2, "they are awaited")
                subject.window.reset()
                before = upgrades_of(service)["upgrades"]
                subject.ask()
                assert say(service, talks[-1], "c", 0) == 201
                met[moments.change_at_one(subject, lambda: begin_to_say(service, talks[-1], "d", 0)[0])] += 1
                with suppress(AssertionError):
                    subject.wait_refused("changed")
                now = upgrades_of(service)
                refused += now["upgrades"] == before
                for talk in talks[-2:]:
                    with suppress(AssertionError):
                        subject.has_ended(talk)
                assert service.process is not None
                assert service.process.poll() is None, service.log()[-3000:]
                assert REFUSED not in service.log(), service.log()[-3000:]
        print(f"{rounds} upgrades, {refused} of them refused; moments: {dict(sorted(met.items()))}; {load.faults}")
        print(audit(load, service.url))
        for talk in talks:
            subject.check(talk)
        assert 2 * refused >= rounds
