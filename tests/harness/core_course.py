"""Seeded runs of the scheduling core: events are drawn, and each event and action is written in neutral words.

A run knows nothing of how the core works, only what a scheduler may report: turns end in all ways, tools run, prompts
are read, workers come and go, callers speak, programs come back, and the core restarts from its records. The words of a
line do not change when a class or a field is renamed, so their digest survives such changes.

    PYTHONHASHSEED=0 python -m tests.harness.core_course SEED [SEED ...] [--lines]
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any, Final

from service.conversations.job.job import (
    Agent,
    Conversation,
    GroupBy,
    Heritage,
    Job,
    JobId,
    Mode,
    OnFailure,
    SpokenBy,
    TurnKey,
)
from service.conversations.job.states import TurnState
from service.conversations.job.until import Condition, TurnDigest
from service.scheduling.core import events
from service.scheduling.core.blame import SourceDistrusted, SourceTrusted, SuspectsCleared, Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.kv_budgets import KvUse
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import CacheLocation, PromptReading
from service.scheduling.core.queue.fair_shares import Shares
from tests.harness.neutral_words import digest_of, line_of

STEPS: Final = 220
OWNERS: Final = ("alice", "bob")
WORKERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "m-0": {"model": "m", "slots": 2, "read_s": 0.001, "has_slot_caches": True},
    "m-1": {"model": "m", "slots": 1, "has_slot_caches": True},
    "n-0": {"model": "n", "slots": 4, "kv_tokens": 3000, "kv_block": 16, "most_answer": 200, "shares_prefixes": True},
    "n-1": {"model": "n", "slots": 3, "kv_tokens": 1500, "kv_block": 16, "most_answer": 200, "shares_prefixes": True},
    "o-0": {"model": "o", "slots": 1},
}


class Course:
    """One run of the core; ``lines`` is all its input and output."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)  # noqa: S311
        self.policy = self.chance.choice(sorted(POLICIES))
        shares: tuple[Shares, ...] = (None, {}, {"alice": 3.0, "bob": 0.5})
        self.shares = self.chance.choice(shares)
        self.group_by = self.chance.choice((None, None, *GroupBy))
        self.on_demand = self.chance.choice(((), ("m", "o")))
        self.lines: list[str] = []
        self.faults: list[str] = []
        self.jobs: dict[JobId, Job] = {}
        self.ended: dict[TurnKey, tuple[TurnState, str | None]] = {}
        self.digests: dict[TurnKey, TurnDigest] = {}
        self.over: set[JobId] = set()
        self.cancelled: set[JobId] = set()
        self.now = 0.0
        self.read_s = self.chance.choice((0.001, 0.001, 0.05))  # for a token of a prompt
        self.last_requests: list[TurnKey] = []
        self._begin()

    def _begin(self) -> None:
        self.core = SchedulingCore(
            POLICIES[self.policy], group_by=self.group_by, on_demand=self.on_demand, shares=self.shares
        )
        self.flying: dict[TurnKey, str] = {}
        self.cut_off: dict[TurnKey, None] = {}
        self.awaited: dict[TurnKey, None] = {}
        self.tools: dict[TurnKey, int] = {}
        self.lent: set[TurnKey] = set()
        self.lost: dict[TurnKey, None] = {}
        self.timers: list[events.Event] = []
        self.left: dict[tuple[JobId, str], frozenset[TurnKey]] = {}
        self.ended_talks: set[tuple[JobId, str]] = set()
        self.workers: dict[str, None] = {}
        self.is_paused = False

    def tell(self, said: str, *told: events.Event) -> None:
        """Hand events in, and follow the resulting actions."""
        self.lines.append(f"> {said}")
        for action in self.core.handle(*told):
            self.lines.append(f"< {line_of(action)}")
            self._follow(action)
        self.faults += [f"after {said}: {fault}" for fault in self.core.check() if fault]

    def _follow(self, action: events.Action) -> None:
        if (timer := timer_of(action)) is not None:
            self.timers.append(timer)
        match action:
            case events.ConversationEnded():
                self._end_talk(action)
            case events.ConversationReleased():
                self.left[action.job_id, action.conversation_id] = action.awaited
                self._forget_awaited(action.job_id, action.conversation_id)
            case events.JobEnded():
                if not any(job == action.job_id for job, _ in self.left):
                    self.over.add(action.job_id)
            case events.LendSlotLater():
                self.tools[action.key] = action.number
            case events.LendSlot() | events.TakeBackSlot():
                (self.lent.add if isinstance(action, events.LendSlot) else self.lent.discard)(action.key)
            case _:
                self._follow_turn(action)

    def _follow_turn(self, action: events.Action) -> None:
        match action:
            case events.StartTurn():
                self.flying[action.key] = action.worker
            case events.AwaitTurn():
                self.awaited[action.key] = None
            case events.LoseSlot():
                self.lost[action.key] = None
            case events.CutOffTurn():
                self.cut_off[action.key] = None
            case events.AbandonTurn():
                self.ended[action.key] = (TurnState.FAILED, "engine_unreachable")
            case _:
                pass

    def _end_talk(self, action: events.ConversationEnded) -> None:
        self.ended_talks.add((action.job_id, action.conversation_id))
        self._forget_awaited(action.job_id, action.conversation_id)
        for key in action.unspoken:
            self.ended[key] = (TurnState.CANCELLED, action.reason)

    def _forget_awaited(self, job_id: JobId, name: str) -> None:
        self.awaited = {key: None for key in self.awaited if key[:2] != (job_id, name)}

    # Drawn events

    def run(self, steps: int = STEPS, *, drains: bool = True) -> None:
        """Draw the events, then let everything run to its end."""
        ways = {
            self._post: 8, self._get_ready: 12, self._lose_worker: 3, self._complete: 34, self._fail: 4,
            self._interrupt: 6, self._reject: 3, self._use_tools: 8, self._end_tools: 8, self._fire: 12,
            self._read: 10, self._spend: 5, self._grow: 6, self._speak: 8, self._ask: 10, self._cancel: 1,
            self._pause: 2, self._judge: 3, self._lose_model: 2, self._restart: 1, self._claim: 5,
            self._judge_answer: 2, self._spoil: 1, self._keep_idle: 1,
        }  # fmt: skip
        for _ in range(steps):
            self.now += self.chance.expovariate(1)
            self.chance.choices(list(ways), list(ways.values()))[0]()
        if drains:
            self._drain()

    def _pick(self, keys: Iterable[Any]) -> Any:  # noqa: ANN401 - whatever is picked from
        known = list(keys)
        return self.chance.choice(known) if known else None

    def _post(self) -> None:
        chance = self.chance
        job_id, owner = JobId(f"j{len(self.jobs)}"), chance.choice((None, *OWNERS))
        count = chance.randint(1, 4)
        mode = chance.choice((Mode.ROUNDS, Mode.ROUNDS, Mode.FREE, Mode.LED)) if count > 1 else Mode.ROUNDS
        caller = chance.randrange(count) if chance.random() < 0.25 and count > 1 else None
        if mode is Mode.LED and caller == 0:
            caller = None
        agents = tuple(self._draw_agent(each, mode, is_caller=each == caller) for each in range(count))
        until = chance.choice(
            ((), (), (Condition(signal="stop"),), (Condition(answer_tokens=300), Condition(unchanged=1)))
        )
        ends = {agent.id: chance.randint(0, 1) for agent in agents}
        is_heir = mode is Mode.ROUNDS and chance.random() < 0.3
        heritage = Heritage(source=(JobId("s"), "c"), ends=ends, first=ends, turns=sum(ends.values()))
        spoken = [agent for agent in agents if agent.model]
        cast = {spoken[0].id: _moved(spoken[0], "o")} if chance.random() < 0.1 else {}
        job = Job(
            id=job_id,
            name=job_id,
            agents=agents,
            conversations=tuple(
                Conversation(
                    id=f"c{each}",
                    prompt="p" * chance.choice((10, 400)) if not is_heir else "",
                    rounds=chance.randint(1, 3) + is_heir,
                    until=until,
                    cast=cast if each == 1 else {},
                    heritage=heritage if is_heir else Heritage(),
                )
                for each in range(chance.randint(1, 6))
            ),
            priority=chance.randint(-1, 1),
            mode=mode,
            leader="a0" if mode is Mode.LED else None,
            owner=owner,
        )
        self.jobs[job_id] = job
        ended = {}
        if is_heir:
            ended = {
                TurnKey(job_id, talk.id, name, number): (TurnState.COMPLETED, None)
                for talk in job.conversations
                for name, upto in ends.items()
                for number in range(upto)
            }
            self.ended |= ended
            self.digests |= {key: TurnDigest(is_inherited=True) for key in ended}
        cached = {}
        if chance.random() < 0.2 and spoken:
            key = TurnKey(job_id, "c0", spoken[0].id, ends[spoken[0].id] if is_heir else 0)
            cached = {key: CacheLocation(worker=chance.choice(sorted(WORKERS)), tokens=100)}
        digests = {key: self.digests[key] for key in ended}
        about = [mode.value, owner, count, [talk.rounds for talk in job.conversations], caller, is_heir]
        self.tell(f"post {job_id} {about}", events.JobAdmitted(job=job, ended=ended, digests=digests, cached=cached))

    def _draw_agent(self, number: int, mode: Mode, *, is_caller: bool) -> Agent:
        chance = self.chance
        waits = {f"a{low}" for low in range(number) if mode is Mode.ROUNDS and chance.random() < 0.3}
        is_leader = mode is Mode.LED and number == 0
        return Agent(
            id=f"a{number}",
            role="",
            model="" if is_caller else chance.choice("mmnno"),
            by=SpokenBy.CALLER if is_caller else SpokenBy.MODEL,
            system="s" * chance.choice((0, 200)),
            adapter=chance.choice((None, None, "x")),
            slots=chance.choice((1, 1, 1, 1, 2)),
            on_failure=OnFailure.END if is_leader else chance.choice(list(OnFailure)),
            waits_for=frozenset(waits),
        )

    def _get_ready(self) -> None:
        worker = self._pick(sorted(WORKERS.keys() - self.workers.keys()) or sorted(WORKERS))
        self.workers[worker] = None
        self.tell(f"{worker} is ready", events.WorkerReady(worker=worker, **WORKERS[worker]))

    def _lose_worker(self) -> None:
        worker = self._pick(self.workers)
        if worker is not None:
            del self.workers[worker]
            returns = self.chance.random() < 0.7
            self.tell(f"{worker} is gone {returns}", events.WorkerNotReady(worker=worker, returns=returns))

    def _lose_model(self) -> None:
        model, is_elsewhere = self.chance.choice("mno"), self.chance.random() < 0.5
        self.tell(f"{model} is lost {is_elsewhere}", events.ModelLost(model=model, is_elsewhere=is_elsewhere))
        if self.chance.random() < 0.8:
            self.tell(f"{model} is there", events.ModelRegained(model=model))

    def _land(self, *, may_wait: bool = False) -> TurnKey | None:
        key: TurnKey | None = self._pick(key for key in self.flying if may_wait or key not in self.tools)
        if key is not None:
            self._take_off(key)
        return key

    def _take_off(self, key: TurnKey) -> None:
        del self.flying[key]
        self.tools.pop(key, None)
        self.lost.pop(key, None)
        self.cut_off.pop(key, None)
        self.lent.discard(key)

    def _complete(self) -> None:
        if self.cut_off and self.chance.random() < 0.5:
            key = self._pick(self.cut_off)
            self._take_off(key)
            self.ended[key] = (TurnState.CANCELLED, "cancelled")
            self.tell(f"{key} was cut off", events.TurnCutOff(key=key))
        elif self.lost and self.chance.random() < 0.5:
            key = self._pick(self.lost)
            self._take_off(key)
            self.tell(f"{key} lost its slot", events.TurnInterrupted(key=key))
        elif (key := self._land()) is not None:
            self._end_well(key)

    def _end_well(self, key: TurnKey) -> None:
        chance, job = self.chance, self.jobs[key.job_id]
        until = job.conversations[0].until
        named: list[str | None] = [None]
        if job.leader == key.agent_id:
            left = {
                each.agent_id for each, (state, _) in self.ended.items() if each[:2] == key[:2] and state == "failed"
            }
            there = (each for each in job.agents[1:] if each.on_failure is not OnFailure.LEAVE or each.id not in left)
            named = [*(each.id for each in there), None]
        fulfils = (0,) if until and until[0].is_of_a_turn and chance.random() < 0.2 else ()
        tokens = chance.randint(0, 300)
        digest = TurnDigest(fulfils=fulfils, words=chance.randint(0, 2), tokens=tokens, chosen=chance.choice(named))
        self.ended[key], self.digests[key] = (TurnState.COMPLETED, None), digest
        seconds, reading = None, None
        if chance.random() < 0.9:
            fresh = chance.randint(1, 500)
            seconds, context = (
                chance.uniform(0, 20 if self.read_s < 0.01 else 1),
                fresh + chance.randint(0, 500) + tokens,
            )
            reading = PromptReading(
                fresh_tokens=fresh, seconds=fresh * self.read_s, context_tokens=context, answer_tokens=tokens
            )
        if job.name == "request":
            self.last_requests.append(key)
        said = f"{key} completes {seconds and round(seconds, 6)} {tokens} {digest.chosen} {fulfils}"
        self.tell(said, events.TurnCompleted(key=key, seconds=seconds, reading=reading, digest=digest))

    def _fail(self) -> None:
        if (key := self._land(may_wait=True)) is not None:
            reason = self.chance.choice(("engine_rejected", "poisoned", "invalid_answer"))
            self.ended[key] = (TurnState.FAILED, reason)
            self.tell(f"{key} fails {reason}", events.TurnFailed(key=key, reason=reason))

    def _interrupt(self) -> None:
        if (key := self._land(may_wait=True)) is not None:
            trial = self.chance.choice((None, *Trial))
            self.tell(f"{key} is interrupted {trial}", events.TurnInterrupted(key=key, trial=trial))

    def _reject(self) -> None:
        if (key := self._land()) is not None:
            self.tell(f"{key} is rejected", events.TurnRejected(key=key))

    def _use_tools(self) -> None:
        key = self._pick(key for key in self.flying if key not in self.tools and key not in self.lost)
        if key is not None:
            name, tokens = self.chance.choice(("fast", "slow")), self.chance.randint(0, 4000)
            event = events.ToolsBegan(key=key, model=self._model(key), tools=[name], context_tokens=tokens)
            self.tell(f"{key} uses {name} {tokens}", event)

    def _end_tools(self) -> None:
        key = self._pick(self.tools)
        if key is not None:
            del self.tools[key]
            seconds = self.chance.choice((0.1, 30.0))
            name = "slow" if seconds > 1 else "fast"
            self.tell(f"{key} has used {name}", events.ToolsEnded(key=key, tools=[name], seconds=seconds))

    def _judge_answer(self) -> None:
        key = self._pick(key for key in self.flying if key not in self.tools and key not in self.lost)
        if key is not None:
            self.tell(f"{key} is judged", events.AnswerWhole(key=key))
            self._take_off(key)
            self._end_well(key)

    def _fire(self) -> None:
        if self.timers:
            timer = self.timers.pop(self.chance.randrange(len(self.timers)))
            number = self.timers and ""
            self.tell(f"time of {getattr(timer, 'key', number)}", timer)

    def _read(self) -> None:
        key = self._pick(self.flying)
        if key is not None:
            seconds = self.chance.choice((0.0, 0.5, 8.0))
            self.tell(f"{key} is read {seconds}", events.PromptRead(key=key, seconds=seconds))

    def _spend(self) -> None:
        key = self._pick(self.flying)
        if key is not None:
            fresh, seconds, is_told = (
                self.chance.randint(0, 9000),
                self.chance.uniform(0, 9),
                self.chance.random() < 0.8,
            )
            spent = events.TurnSpent(
                key=key, fresh_tokens=fresh, answer_tokens=fresh // 7, seconds=seconds, is_told=is_told
            )
            self._take_off(key)
            self.ended[key] = (TurnState.COMPLETED, None)
            self.tell(
                f"{key} has spent {fresh} {is_told}, completes", spent, events.TurnCompleted(key=key, seconds=1.0)
            )

    def _grow(self) -> None:
        uses = {
            key: KvUse(prompt=self.chance.randint(1, 900), answer=self.chance.randint(0, 300))
            for key in self.flying
            if self.chance.random() < 0.5
        }
        self.tell(f"{len(uses)} grow", events.KvUseTold(uses=uses))

    def _speak(self) -> None:
        key = self._pick(self.awaited)
        if key is not None:
            self._say(key, is_said=self.chance.random() < 0.8)

    def _say(self, key: TurnKey, *, is_said: bool) -> None:
        del self.awaited[key]
        digest = TurnDigest(words=self.chance.randint(0, 2)) if is_said else TurnDigest()
        self.ended[key] = (TurnState.COMPLETED, None) if is_said else (TurnState.FAILED, "not_said")
        self.digests[key] = digest
        spoke = events.CallerSpoke(key=key, digest=digest, reason=None if is_said else "not_said")
        self.tell(f"{key} is said {is_said}", spoke)

    def _claim(self) -> None:
        """Admit a released conversation, as another node or a caller's words bring it back."""
        name = self._pick(self.left)
        if name is None:
            return
        awaited = self.left.pop(name)
        if awaited:
            key = min(awaited)
            self.ended[key], self.digests[key] = (TurnState.COMPLETED, None), TurnDigest(words=1)
        self._admit(self.jobs[name[0]], [name[1]])

    def _admit(self, job: Job, names: Iterable[str]) -> None:
        chosen = tuple(talk for talk in job.conversations if talk.id in names)
        part = Job(**{field: getattr(job, field) for field in job.__struct_fields__} | {"conversations": chosen})
        ended = {key: how for key, how in self.ended.items() if key[0] == job.id and key[1] in names}
        digests = {key: self.digests[key] for key in ended if key in self.digests}
        suspects = {}
        going_on = [key for key in self.suspected if key[0] == job.id and key[1] in names and key not in ended]
        for key in going_on:
            suspects[key] = self.chance.choice(list(Trial))
        admitted = events.JobAdmitted(
            job=part, ended=ended, digests=digests, suspects=suspects, is_cancelled=job.id in self.cancelled
        )
        self.tell(f"admit {job.id} {[talk.id for talk in chosen]} {len(ended)} {going_on}", admitted)

    suspected: frozenset[TurnKey] = frozenset()

    def _restart(self) -> None:
        """Begin with a new core, which knows what is recorded."""
        self.suspected = frozenset(key for key in self.flying if self.jobs[key.job_id].name != "request")
        ended_talks = self.ended_talks
        self._begin()
        self.ended_talks = ended_talks
        self.lines.append("> restart")
        for job in list(self.jobs.values()):
            names = [talk.id for talk in job.conversations if (job.id, talk.id) not in ended_talks]
            if job.id not in self.over and names and job.name != "request":
                self._admit(job, names)
        self.suspected = frozenset()

    def _ask(self) -> None:
        """Send a client's request: a job of one turn, perhaps of a program that was answered before."""
        job_id, chance = JobId(f"r{len(self.jobs)}"), self.chance
        agent = Agent(id="a0", role="", model=chance.choice("mmno"), system="")
        owner = chance.choice((None, *OWNERS))
        talk = Conversation(id="c0", prompt="", prompt_chars=200, rounds=1)
        self.jobs[job_id] = Job(id=job_id, name="request", agents=(agent,), conversations=(talk,), owner=owner)
        program = None
        if chance.random() < 0.8:
            last = self.last_requests.pop() if self.last_requests and chance.random() < 0.7 else None
            known = chance.randint(100, 900) if last else 0
            program = events.ProgramReturn(last=last, pause_s=chance.choice((0.01, 0.2, 5.0)), known_tokens=known)
        self.tell(
            f"ask {job_id} {agent.model} {owner} {program}", events.JobAdmitted(job=self.jobs[job_id], program=program)
        )

    def _cancel(self) -> None:
        job_id = self._pick(self.jobs.keys() - self.over and [each for each in self.jobs if each not in self.over])
        if job_id is not None:
            self.cancelled.add(job_id)
            self.tell(f"cancel {job_id}", events.JobCancelled(job_id=job_id))

    def _spoil(self) -> None:
        going_on = [
            (job.id, talk.id)
            for job in self.jobs.values()
            for talk in job.conversations
            if job.name != "request" and job.id not in self.over and (job.id, talk.id) not in self.ended_talks
        ]
        name = self._pick(name for name in going_on if name not in self.left)
        if name is not None:
            self.tell(f"spoil {name}", events.ConversationSpoiled(job_id=name[0], conversation_id=name[1]))

    def _pause(self) -> None:
        self.is_paused = not self.is_paused
        self.tell(f"pause {self.is_paused}", events.Paused() if self.is_paused else events.Unpaused())

    def _judge(self) -> None:
        source: Any = self.chance.choice(OWNERS), self.chance.choice("mno")
        if self.chance.random() < 0.5 and (job_id := self._pick(self.jobs)):
            source = job_id
        kind = self.chance.choice((SourceDistrusted, SourceTrusted))
        self.tell(f"{kind is SourceTrusted} {source}", kind(source=source), events.TimeTold(at=self.now))
        suspects = [key for model in "mno" for key in self.core.view.queues.ready_turns(model).suspects]
        if suspects and self.chance.random() < 0.5:
            self.tell(f"clear {suspects[0]}", SuspectsCleared(keys=(suspects[0],)))

    def _keep_idle(self) -> None:
        self.tell("idle", events.SlotsReserved(owner=self.chance.choice((None, *OWNERS)), model="m", slot_s=3.0))

    def _model(self, key: TurnKey) -> str:
        return str(WORKERS[self.flying[key]]["model"])

    def _drain(self) -> None:
        """Let everything run to its end: every job ends."""
        if self.is_paused:
            self._pause()
        for worker in WORKERS:
            self.workers[worker] = None
            self.tell(f"{worker} is ready", events.WorkerReady(worker=worker, **WORKERS[worker]))
        for _ in range(20_000):
            self.now += 30.0
            if self.left:
                self._claim()
            elif self.timers:
                self.tell("time", self.timers.pop())
            elif self.flying:
                self._take_off(key := min(self.flying))
                self._end_well(key)
            elif self.awaited:
                self._say(min(self.awaited), is_said=True)
            elif any(self.core.view.of_all().values()):
                self.tell("later", events.TimeTold(at=self.now))
            else:
                break
        going_on = [job.id for job in self.jobs.values() if job.id not in self.over and job.name != "request"]
        self.faults += [f"{going_on} never ended"] if going_on else []


def timer_of(action: events.Action) -> events.Event | None:
    """Return the event that follows an action by itself, some time later; None where there is none."""
    match action:
        case events.DeferTurn():
            return events.DeferralOver(key=action.key)
        case events.LendSlotLater():
            return events.LendingDue(key=action.key, number=action.number)
        case events.HoldSlot():
            return events.HoldOver(key=action.key, seconds=action.seconds)
        case events.ContinueCancel():
            return events.JobCancelled(job_id=action.job_id)
        case _:
            return None


def _moved(agent: Agent, model: str) -> Agent:
    return Agent(**{field: getattr(agent, field) for field in agent.__struct_fields__} | {"model": model})


def main() -> None:
    """Print the digest of each seed's course, and its faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--lines", action="store_true", help="print what went in and came out")
    options = parser.parse_args()
    for seed in options.seeds:
        course = Course(seed)
        course.run()
        if options.lines:
            print("\n".join(course.lines))
        print(seed, digest_of(course.lines), len(course.lines), course.faults[:3])
        sys.exit(1) if course.faults else None


if __name__ == "__main__":
    main()
