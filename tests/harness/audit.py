"""Load through the public surface, and an auditor that uses only that surface: are the promises kept?"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import httpx

from tests.harness.service import Document, check_debate, debate
from tests.harness.waiting import LIMIT_S, wait_for

Said = dict[tuple[str, str, str, int], str]  # job, conversation, agent, round -> text of a completed turn
AT_ONCE = 6  # jobs that have not ended, at any time


class Load:
    """Posts small debates as long as it runs, each until it is acknowledged, and reads their words meanwhile."""

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        self.urls = urls
        self.acknowledged: dict[str, Document] = {}
        self.read: Said = {}
        self.faults: list[str] = []
        self._seed = seed
        self._is_over = threading.Event()
        self._open: set[str] = set()

    def post_always(self) -> None:
        chance, number = Random(f"{self._seed}/post"), 0  # noqa: S311
        with httpx.Client(timeout=LIMIT_S, trust_env=False) as http:
            while not self._is_over.is_set():
                if len(self._open) >= AT_ONCE:
                    self._is_over.wait(0.01)
                    continue
                number += 1
                rounds = chance.randrange(1, 4)
                job = debate(conversations=chance.randrange(1, 4), rounds=rounds)
                key = {"Idempotency-Key": f"{self._seed}-{number}"}
                while not self._is_over.is_set():
                    try:
                        answer = http.post(f"{chance.choice(self.urls)}/v1/jobs", json=job, headers=key)
                    except httpx.TransportError:
                        self._is_over.wait(0.02)
                        continue
                    if answer.status_code in (200, 202):
                        self.acknowledged[answer.json()["id"]] = job
                        self._open.add(answer.json()["id"])
                        break
                    if answer.status_code != 503:
                        self.faults.append(answer.text)
                        return
                    self._is_over.wait(0.05)

    def read_always(self) -> None:
        """Read conversations of open jobs: a turn that was read as completed must not change."""
        chance = Random(f"{self._seed}/read")  # noqa: S311
        with httpx.Client(timeout=LIMIT_S, trust_env=False) as http:
            while not self._is_over.is_set():
                for job_id in list(self._open):
                    url = chance.choice(self.urls)
                    try:
                        state = http.get(f"{url}/v1/jobs/{job_id}")
                        talk = http.get(f"{url}/v1/jobs/{job_id}/conversations/q0")
                    except httpx.TransportError:
                        continue
                    if talk.status_code == 200:
                        self._take(job_id, talk.json())
                    elif talk.status_code != 503:
                        self.faults.append(f"{job_id}: {talk.text}")
                    if state.status_code == 200 and state.json()["state"] not in ("queued", "running"):
                        self._open.discard(job_id)
                self._is_over.wait(0.05)

    def _take(self, job_id: str, talk: Document) -> None:
        for turn in talk["turns"]:
            if turn["state"] != "completed":
                continue
            place = (job_id, talk["id"], turn["agent"], turn["round"])
            if self.read.setdefault(place, turn["text"]) != turn["text"]:
                self.faults.append(f"{place} was read as {self.read[place]!r} and then as {turn['text']!r}")

    def stop(self) -> None:
        self._is_over.set()


@contextmanager
def under_load(urls: Sequence[str], seed: int = 0) -> Iterator[Load]:
    """Load services for a block."""
    load = Load(urls, seed)
    threads = [threading.Thread(target=run) for run in (load.post_always, load.read_always)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join()


def audit(load: Load, url: str, limit_s: float = 120.0) -> Counter[str]:
    """Check that every acknowledged job has ended whole, each turn once, as it was read; return the counts."""
    assert load.faults == []
    counts: Counter[str] = Counter()
    with httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False) as http:
        until = time.monotonic() + limit_s
        for job_id, job in load.acknowledged.items():
            wait_for(
                lambda name=job_id: http.get(f"/v1/jobs/{name}").json().get("state") not in ("queued", "running"),  # type: ignore[misc]
                f"job {job_id} has ended",
                max(1.0, until - time.monotonic()),
            )
            assert http.get(f"/v1/jobs/{job_id}").json()["state"] == "completed", job_id
            told = [json.loads(line) for line in http.get(f"/v1/jobs/{job_id}/result?format=jsonl").text.splitlines()]
            assert len(told) == len(job["conversations"])
            for talk in told:
                check_debate(talk, job["rounds"])
                counts["turns"] += len(talk["turns"])
                counts["attempts"] += sum(len(turn["attempts"]) for turn in talk["turns"])
                for turn in talk["turns"]:
                    place = (job_id, talk["id"], turn["agent"], turn["round"])
                    assert load.read.get(place, turn["text"]) == turn["text"], f"{place} has changed"
            _audit_events(http.get(f"/v1/jobs/{job_id}/events").text, job)
            counts["jobs"] += 1
    return counts


def _audit_events(text: str, job: Document) -> None:
    events = [
        dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        for block in text.split("\n\n")
        if block
    ]
    numbered = [event for event in events if "id" in event]
    assert [int(event["id"]) for event in numbered] == list(range(1, len(numbered) + 1))
    ended = Counter(
        (told["conversation"], told["agent"], told["round"])
        for told in (json.loads(event["data"]) for event in numbered if event["event"] == "turn")
        if told["state"] == "completed"
    )
    assert set(ended.values()) == {1}
    assert len(ended) == len(job["conversations"]) * len(job["agents"]) * job["rounds"]
    assert [event["event"] for event in numbered].count("end") == 1
