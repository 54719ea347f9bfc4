"""Everything at once for long: jobs, forks, callers, cancels, chats, kills, reloads, upgrades; each turn is checked."""

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import httpx
import psutil

from tests.harness.reloads import models_of, post_reload
from tests.harness.service import Document, Service, debate, recorded, scripted_model
from tests.harness.waiting import LIMIT_S

ECHO: Final = r"MARK-\w|TOPIC-\d+|SAY-[\w-]+"  # the engine's answer to a question
PATIENCE_S: Final = 120.0  # time for a job, over kills and upgrades
OPEN_JOBS: Final = 8
KEPT_JOBS: Final = 200  # older ones are deleted, so that the store does not grow for ever
REFUSALS: Final = frozenset({429, 502, 503, 504})  # answers to a chat whose engine has just been killed
_never = threading.Event()


@dataclass(slots=True)
class Seen:
    """The observations of a run; ``gaps`` are health answers, each with its time and duration in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    rss_mib: list[tuple[float, float]] = field(default_factory=list)
    upgrading: list[tuple[float, float]] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Return a quantile of the health answers outside upgrades, in seconds."""
        calm = sorted(gap for at, gap in self.gaps if not any(begin <= at <= end for begin, end in self.upgrading))
        return calm[min(len(calm) - 1, int(share * len(calm)))]

    def rss_at(self, second: float) -> float:
        """Return the memory at a time, the mean of the minute around it: single samples jump with the allocator."""
        near = [mib for at, mib in self.rss_mib if abs(at - second) <= 30.0]
        return sum(near) / len(near)


class LongRun:
    """The loops of a run against one service; each has its own thread, connection and chance."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.seen = Seen()
        self._seed = seed
        self._began_at = time.monotonic()
        self._is_over = threading.Event()
        self._is_closing = threading.Event()  # no new work; running work ends
        self._open: dict[str, Document] = {}
        self._ended: list[str] = []
        self._lock = threading.Lock()

    @property
    def now_s(self) -> float:
        """The seconds since the run began."""
        return time.monotonic() - self._began_at

    def loops(self, *, upgrades: bool) -> list[Callable[[], None]]:
        """Return the loops; without ``upgrades`` the process stays the same."""
        changes = [(12.0, self._kill), (40.0, self._reload), *([(180.0, self._upgrade)] if upgrades else [])]
        return [
            self._every(0.25, self._post, "post"),
            self._every(0.2, self._check, "check"),
            self._every(0.5, self._say, "say"),
            self._every(0.3, self._chat, "chat"),
            self._every(0.05, self._look, "look"),
            self._every(5.0, self._weigh, "weigh"),
            *(self._every(pause_s, change, change.__name__) for pause_s, change in changes),
        ]

    def _every(self, pause_s: float, act: Callable[[httpx.Client, Random], None], name: str) -> Callable[[], None]:
        def loop() -> None:
            chance = Random(f"{self._seed}/{name}")  # noqa: S311
            with httpx.Client(base_url=self.service.url, timeout=LIMIT_S, trust_env=False) as http:
                while not self._is_over.is_set():
                    try:
                        act(http, chance)
                    except httpx.TransportError as error:
                        self.seen.counts[f"{name}: {type(error).__name__}"] += 1
                    except Exception as error:  # noqa: BLE001 - a finding, not the end of the others
                        self.seen.faults.append(f"{name}: {error!r}")
                    self._is_over.wait(pause_s * (0.5 + chance.random()))

        return loop

    # Work

    def _post(self, http: httpx.Client, chance: Random) -> None:
        if len(self._open) >= OPEN_JOBS or self._is_closing.is_set():
            return
        kind = chance.choice(["debate", "debate", "debate", "caller", "fork", "cancel"])
        job = debate(conversations=chance.randrange(1, 4), rounds=chance.randrange(1, 4), name=kind)
        if kind == "caller":
            guest = {"id": "guest", "by": "caller", "speak_after_within_round": ["m"]}
            job["agents"].append(guest)
        source = chance.choice(self._ended[-20:]) if self._ended else None
        if kind == "fork" and source is not None:
            job["conversations"] = [{"id": f"q{n}", "from": {"job": source, "conversation": "q0"}} for n in range(2)]
            job["rounds"] = 5
        answer = http.post("/v1/jobs", json=job, headers={"Idempotency-Key": f"{self._seed}-{time.monotonic_ns()}"})
        if answer.status_code not in (200, 202):
            self._note_refusal("post", answer)
            return
        job_id = answer.json()["id"]
        with self._lock:
            self._open[job_id] = {**job, "posted_s": self.now_s}
        if kind == "cancel":
            self._is_over.wait(chance.random())
            http.post(f"/v1/jobs/{job_id}/cancel")

    def _note_refusal(self, what: str, answer: httpx.Response) -> None:
        self.seen.counts[f"{what}: {answer.status_code}"] += 1
        if answer.status_code not in REFUSALS | {404, 409}:
            self.seen.faults.append(f"{what}: {answer.status_code} {answer.text[:300]}")

    def _check(self, http: httpx.Client, _chance: Random) -> None:
        """Check the ended jobs, and delete the oldest."""
        for job_id, job in list(self._open.items()):
            answer = http.get(f"/v1/jobs/{job_id}")
            if answer.status_code != 200:
                self._note_refusal("look", answer)
                continue
            state = answer.json()["state"]
            if state in ("queued", "running"):
                if self.now_s - job["posted_s"] > PATIENCE_S:
                    self.seen.faults.append(f"{job_id} {job['name']} is {state} after {PATIENCE_S:g} s: {answer.text}")
                    with self._lock:
                        del self._open[job_id]
                continue
            told = http.get(f"/v1/jobs/{job_id}/result")
            if told.status_code != 200:
                self._note_refusal("result", told)
                continue
            events = http.get(f"/v1/jobs/{job_id}/events").text
            self.seen.faults += [f"{job_id}: {fault}" for fault in faults_of(job, state, told.json(), events)]
            self.seen.counts[f"jobs {state}"] += 1
            self.seen.counts["turns"] += sum(len(talk["turns"]) for talk in told.json()["conversations"])
            with self._lock:
                del self._open[job_id]
            if state == "completed" and job["name"] == "debate":
                self._ended.append(job_id)
            if len(self._ended) > KEPT_JOBS:
                http.delete(f"/v1/jobs/{self._ended.pop(0)}", params={"heirs": "drop"})

    def _say(self, http: httpx.Client, _chance: Random) -> None:
        for turn in http.get("/v1/awaited").json().get("awaited", []):
            path = f"/v1/jobs/{turn['job']}/conversations/{turn['conversation']}/turns/{turn['agent']}/{turn['round']}"
            answer = http.post(path, json={"text": f"SAY-{turn['conversation']}-{turn['round']}"})
            if answer.status_code in (200, 201):
                self.seen.counts["said"] += 1
            else:
                self._note_refusal("say", answer)

    def _chat(self, http: httpx.Client, chance: Random) -> None:
        number = chance.randrange(10**6)
        body = {"model": "m", "messages": [{"role": "user", "content": f"TOPIC-{number}."}]}
        answer = http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            self._note_refusal("chat", answer)
            return
        self.seen.counts["chats"] += 1
        text = answer.json()["choices"][0]["message"]["content"]
        if text.strip() != f"TOPIC-{number}":
            self.seen.faults.append(f"chat {number} was answered {text!r}")

    # Trouble

    def _kill(self, http: httpx.Client, chance: Random) -> None:
        workers = http.get("/v1/workers").json()["workers"]
        ready = [worker["pid"] for worker in workers if worker["state"] == "ready"]
        if ready and not self._is_closing.is_set():
            with suppress(ProcessLookupError):
                os.kill(chance.choice(ready), signal.SIGKILL)
                self.seen.counts["kills"] += 1

    def _reload(self, _http: httpx.Client, chance: Random) -> None:
        def change(document: Document) -> None:
            models_of(document)["n"]["env"] = {"ROUND": str(chance.randrange(10**6))}

        answer = post_reload(self.service, change)
        self.seen.counts[f"reload {answer.status_code}"] += 1
        if answer.status_code not in (200, 409, 503):
            self.seen.faults.append(f"reload: {answer.text}")

    def _upgrade(self, http: httpx.Client, _chance: Random) -> None:
        if self.now_s < 60.0:
            return
        began_s = self.now_s
        before = http.get("/v1/upgrade").json()["upgrades"]
        answer = http.post("/v1/upgrade", timeout=60.0)
        self.seen.counts[f"upgrade {answer.status_code}"] += 1
        until = time.monotonic() + 60.0
        while answer.status_code == 202 and time.monotonic() < until:
            with suppress(httpx.TransportError, KeyError, ValueError):
                now = http.get("/v1/upgrade").json()
                if now["upgrades"] > before or now["phase"] == "idle":
                    break
            _never.wait(0.1)
        self.seen.upgrading.append((began_s - 0.5, self.now_s + 2.0))

    # Looking

    def _look(self, _http: httpx.Client, _chance: Random) -> None:
        at, asked_at = self.now_s, time.monotonic()
        with httpx.Client(timeout=60.0, trust_env=False) as fresh:
            answer = fresh.get(f"{self.service.url}/healthz")
        self.seen.gaps.append((at, time.monotonic() - asked_at))
        if answer.status_code != 200:
            self.seen.faults.append(f"healthz: {answer.status_code}")

    def _weigh(self, _http: httpx.Client, _chance: Random) -> None:
        assert self.service.process is not None
        self.seen.rss_mib.append((self.now_s, psutil.Process(self.service.process.pid).memory_info().rss / 2**20))

    def finish(self) -> None:
        """Post no more jobs, and wait until all have ended."""
        self._is_closing.set()
        until = time.monotonic() + PATIENCE_S
        while self._open and time.monotonic() < until:
            _never.wait(0.2)
        if self._open:
            self.seen.faults.append(f"not ended: {list(self._open)}")
        self._is_over.set()


def faults_of(job: Document, state: str, result: Document, events: str) -> Iterator[str]:
    """Yield the faults of an ended job: each turn must be there once, with the words of its own conversation."""
    if state != "completed" and (job["name"], state) != ("cancel", "cancelled"):
        yield f"{job['name']} is {state}"
    for talk in result["conversations"]:
        places = Counter((turn["agent"], turn["round"]) for turn in talk["turns"])
        if set(places.values()) - {1}:
            yield f"{talk['id']}: a turn is there twice"
        if state == "completed" and len(places) != job["rounds"] * len(job["agents"]):
            yield f"{talk['id']}: {len(places)} turns of {job['rounds']} rounds of {len(job['agents'])}"
        for turn in talk["turns"]:
            if turn["state"] == "completed":
                yield from (f"{talk['id']}: {fault}" for fault in _faults_of_turn(talk["id"], turn, job["name"]))
    if set(_told(events).values()) - {1}:
        yield "an event of an end was told twice"


def _faults_of_turn(conversation: str, turn: Document, kind: str) -> Iterator[str]:
    words = re.findall(ECHO, turn["text"])
    if turn["by"] == "caller":
        if words != [f"SAY-{conversation}-{turn['round']}"]:
            yield f"the caller said {words} in round {turn['round']}"
        return
    if words[:1] != [f"MARK-{turn['agent']}"]:
        yield f"{turn['agent']} said {turn['text']!r}"
    if kind != "fork" and f"TOPIC-{conversation[1:]}" not in words:
        yield f"{turn['agent']} said words of another conversation: {turn['text']!r}"
    done = sum(each["outcome"] == "completed" for each in turn["attempts"])
    if not turn.get("inherited") and done != 1:
        yield f"{done} attempts of {turn['agent']} in round {turn['round']} are completed"


def _told(events: str) -> Counter[tuple[str, str, int]]:
    """Count the events of completed turns by their places."""
    told = [
        json.loads(block.partition("data: ")[2].partition("\n")[0])
        for block in events.split("\n\n")
        if "event: turn" in block
    ]
    return Counter(
        (each["conversation"], each["agent"], each["round"]) for each in told if each["state"] == "completed"
    )


def _tracebacks(log: str) -> list[int]:
    """Return where the service's own tracebacks begin in its log; those of engines stand within lines."""
    return [found.start() for found in re.finditer("^Traceback", log, re.MULTILINE)]


@contextmanager
def long_run(folder: Path, port: int, seed: int, *, upgrades: bool) -> Iterator[LongRun]:
    """Run everything for a block; afterwards all posted jobs have ended, and so have the service and its engines."""
    flags: Document = {"echo": ECHO, "interval": 0.02, "record": str(folder / "record")}
    models = {
        "m": scripted_model(port + 1, replicas=2, slots=4, **flags),
        "n": scripted_model(port + 3, slots=2, **flags),
    }
    service = Service(folder / "s", port, models, {"drain_s": 5})
    service.start()
    run = LongRun(service, seed)
    threads = [threading.Thread(target=loop) for loop in run.loops(upgrades=upgrades)]
    for thread in threads:
        thread.start()
    try:
        yield run
    finally:
        run.finish()
        for thread in threads:
            thread.join()
        status, log = service.stop(), service.log()
        if status != 0:
            run.seen.faults.append(f"the service ended with {status}: {log[-3000:]}")
        run.seen.faults += [f"the service: {log[at - 600 : at + 4000]}" for at in _tracebacks(log)[:3]]
        asked = {tuple(re.findall(ECHO, json.dumps(each["messages"]))) for each in recorded(folder / "record")}
        run.seen.counts["different prompts"] = len(asked)
        left = [
            each.pid for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or [])
        ]
        run.seen.faults += [f"process {pid} is left" for pid in left]
        service.http.close()
