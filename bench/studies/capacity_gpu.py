"""A GPU's KV cache lent by slots of full length, by tokens, or to all at once: turns per second, simulated.

The scheduling core is real; the engine is a model of vLLM on one H100 with an 8B model: continuous batching, chunked
prefill, a prefix cache, and preemption by recomputing. A step takes as long as the slower of its memory traffic
(weights, and the cache of all decoding turns) and its arithmetic: R. Pope et al., "Efficiently scaling transformer
inference" (2022), section 2, with NVIDIA's numbers for the H100 SXM (3.35 TB/s, 989 TFLOP/s dense) and half of each.

    python -m bench.studies.capacity_gpu [--conversations 400] [--rounds 4]
"""

import argparse
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from service.conversations.job.job import Agent, Conversation, Job, JobId, TurnKey
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.kv_budgets import KvUse
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading
from workers.policy.kv_share import KvShare

CONTEXT, KV_TOKENS, MOST = 32_768, 300_000, 256
WEIGHTS_BYTES, KV_BYTES = 16e9, 131_072  # Llama 3 8B in bfloat16: 32 layers, 8 heads of 128 for keys and values each
BYTES_S, FLOP_S, USED = 3.35e12, 989e12, 0.5
PARAMETERS = 8e9
CHUNK = 8192  # most prompt tokens read in one step
USE_S, LOOK_S = 0.5, 2.0  # as in service.scheduling.scheduler and workers.health.kv_watch
Place = tuple[str, str, str]


@dataclass(eq=False)
class Running:
    """One turn on the engine."""

    key: TurnKey
    prompt: int
    answer: int
    ready_at: float
    fresh: int = 0  # tokens not read yet
    written: int = 0
    first_at: float | None = None

    @property
    def tokens(self) -> int:
        """Its present tokens in the cache."""
        return self.prompt - self.fresh + self.written


@dataclass
class Engine:
    """A batch, its queue, and the cached tokens of idle prompts."""

    batch: list[Running] = field(default_factory=list)
    queue: deque[Running] = field(default_factory=deque)
    idle: OrderedDict[Place, int] = field(default_factory=OrderedDict)
    preemptions: int = 0
    read: int = 0

    def admit(self, turn: Running) -> None:
        """Queue a turn."""
        self.queue.append(turn)

    def step(self) -> tuple[float, list[Running]]:
        """Make one step: return its duration and the ended turns."""
        self._fill()
        room = CHUNK
        reading = 0
        for turn in self.batch:
            if turn.fresh:
                chunk = min(turn.fresh, room)
                turn.fresh -= chunk
                room -= chunk
                reading += chunk
        decoding = [turn for turn in self.batch if not turn.fresh]
        for turn in decoding:
            turn.written += 1
        self._shrink()
        self.read += reading
        traffic = WEIGHTS_BYTES + KV_BYTES * sum(turn.tokens for turn in decoding)
        work = 2 * PARAMETERS * (reading + len(decoding))
        ended = [turn for turn in self.batch if turn.written >= turn.answer]
        self.batch = [turn for turn in self.batch if turn.written < turn.answer]
        for turn in ended:
            self.idle[turn.key[:3]] = turn.tokens
            self.idle.move_to_end(turn.key[:3])
        return max(traffic / BYTES_S, work / FLOP_S) / USED, ended

    def _fill(self) -> None:
        taken = sum(turn.prompt + turn.written for turn in self.batch)
        while self.queue and len(self.batch) < MOST:
            turn = self.queue[0]
            if self.batch and taken + turn.prompt + turn.written > 0.99 * KV_TOKENS:
                return
            self.queue.popleft()
            known = min(self.idle.pop(turn.key[:3], 0), turn.prompt - 1)
            turn.fresh = turn.prompt + turn.written - known
            taken += turn.prompt + turn.written
            self.batch.append(turn)
            self._evict(taken)

    def _shrink(self) -> None:
        taken = sum(turn.prompt + turn.written for turn in self.batch)
        while taken > KV_TOKENS and len(self.batch) > 1:
            turn = self.batch.pop()
            taken -= turn.prompt + turn.written
            self.queue.appendleft(turn)
            self.preemptions += 1
        self._evict(taken)

    def _evict(self, taken: int) -> None:
        kept = sum(self.idle.values())
        while kept and taken + kept > KV_TOKENS:
            kept -= self.idle.popitem(last=False)[1]


@dataclass(frozen=True)
class Told:
    """The figures of one way."""

    rate: float
    most: int
    preemptions: int
    read: int
    first_p95: float
    wait_median: float
    wait_largest: float


class Simulation:
    """One way to lend the cache, over one job."""

    def __init__(self, way: str, job: Job, lengths: "Lengths") -> None:
        slots = {"slots": KV_TOKENS // CONTEXT, "tokens": MOST, "thrown": 10**6}[way]
        self._core = SchedulingCore(POLICIES["critical_path"])
        self._job = job
        self._lengths = lengths
        self._is_lent = way == "tokens"
        self._slots = slots
        self._engine = Engine()
        self._share = KvShare()
        self._now = 0.0
        self._ready: dict[TurnKey, float] = {}
        self._in_flight: dict[TurnKey, Running] = {}
        self._contexts: dict[Place, int] = {}
        self.waits: list[tuple[int, float]] = []
        self.firsts: list[float] = []

    def run(self) -> Told:
        """Run the job to its end."""
        self._open()
        self._act(self._core.handle(events.JobAdmitted(job=self._job)))
        use_at, look_at, most, turns = USE_S, LOOK_S, 0, 0
        while self._in_flight:
            took, ended = self._engine.step()
            self._now += took
            most = max(most, len(self._engine.batch) + len(ended))
            for turn in (*self._engine.batch, *ended):
                if turn.written and turn.first_at is None:
                    turn.first_at = self._now
                    self.firsts.append(self._now - turn.ready_at)
            turns += len(ended)
            if ended:
                self._act(self._core.handle(*map(self._end, ended)))
            if self._is_lent and self._now >= use_at:
                use_at = self._now + USE_S
                uses = {t.key: KvUse(prompt=t.prompt, answer=t.written) for t in self._engine.batch}
                self._act(self._core.handle(events.KvUseTold(uses=uses)))
            if self._is_lent and self._now >= look_at:
                look_at = self._now + LOOK_S
                before, self._share = self._share, self._share.looked(self._engine.preemptions)
                if before.part != self._share.part:
                    self._open()
        self.waits.sort()
        largest = [wait for _, wait in self.waits[-max(1, len(self.waits) // 10) :]]
        return Told(
            rate=turns / self._now,
            most=most,
            preemptions=self._engine.preemptions,
            read=self._engine.read,
            first_p95=statistics.quantiles(self.firsts, n=20)[-1],
            wait_median=statistics.median(wait for _, wait in self.waits),
            wait_largest=statistics.median(largest),
        )

    def _open(self) -> None:
        kv = int(KV_TOKENS * self._share.part) if self._is_lent else None
        ready = events.WorkerReady(
            worker="w", model="m", slots=self._slots, kv_tokens=kv, most_answer=1024, shares_prefixes=True
        )
        self._act(self._core.handle(ready))

    def _act(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            if isinstance(action, events.TurnIsReady):
                self._ready[action.key] = self._now
            elif isinstance(action, events.StartTurn):
                key, place = action.key, action.key[:3]
                prompt = self._contexts.get(place) or self._lengths.prompt(key.conversation_id)
                prompt += self._lengths.heard(key)
                turn = Running(key, min(prompt, CONTEXT - 1200), self._lengths.answer(key), self._ready[key])
                self._in_flight[key] = turn
                self.waits.append((turn.prompt, self._now - turn.ready_at))
                self._engine.admit(turn)

    def _end(self, turn: Running) -> events.TurnCompleted:
        del self._in_flight[turn.key]
        self._contexts[turn.key[:3]] = turn.prompt + turn.written
        reading = PromptReading(
            fresh_tokens=turn.prompt, seconds=1.0, context_tokens=turn.tokens, answer_tokens=turn.written
        )
        return events.TurnCompleted(key=turn.key, seconds=self._now - turn.ready_at, reading=reading)


class Lengths:
    """Lengths in tokens, drawn once per turn: first prompts of 2,000 on average, with a wide spread."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, conversation_id: str) -> int:
        """Return the first prompt of a conversation's agents."""
        return int(min(CONTEXT * 0.6, max(200, self._draw("prompt", conversation_id, 7.2, 0.9))))

    def answer(self, key: TurnKey) -> int:
        """Return the answer of a turn."""
        return int(min(1024, max(20, self._draw("answer", key.conversation_id, str(key), 5.4, 0.7))))

    def heard(self, key: TurnKey) -> int:
        """Return the tokens of others since the agent's last turn."""
        return 250 if key.round else 0

    def _draw(self, *what: object) -> float:
        *names, middle, width = what
        chance = Random(f"{self._seed}/{names}")
        return math.exp(float(str(middle)) + float(str(width)) * chance.gauss(0, 1))


def job_of(conversations: int, rounds: int, lengths: "Lengths") -> Job:
    """Return a job of two agents whose answers are bounded; a token is four characters."""
    agents = tuple(
        Agent(id=f"a{number}", role="", model="m", system="", params={"max_tokens": 1024}) for number in range(2)
    )
    talks = tuple(
        Conversation(id=f"c{number}", prompt="word" * lengths.prompt(f"c{number}"), rounds=rounds)
        for number in range(conversations)
    )
    return Job(id=JobId("j"), name="j", agents=agents, conversations=talks)


WAYS: Final = ("slots", "tokens", "thrown")


def main() -> None:
    """Measure all three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    job = job_of(options.conversations, options.rounds, Lengths(1))
    rates: dict[str, float] = {}
    for way in WAYS:
        told = Simulation(way, job, Lengths(1)).run()
        rates[way] = told.rate
        print(f"{way:7} {told}  {told.rate / rates['slots']:.2f} x", flush=True)


if __name__ == "__main__":
    main()
