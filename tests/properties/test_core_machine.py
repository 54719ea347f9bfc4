"""The scheduling core under any sequence of events, checked against a model that only counts.

A turn that may start on a free slot does, held turns start in time, and everything ends.
"""

from collections.abc import Mapping
from itertools import cycle, product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, GroupBy, Job, JobId, Mode, OnFailure, SpokenBy, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import Condition, TurnDigest, Until
from service.scheduling.core import events
from service.scheduling.core.blame import SourceDistrusted, SourceTrusted, SuspectsCleared, Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading
from service.scheduling.core.trials import MOST_REST_S

MODELS = ("m", "n")
LONG = "x" * 1000
UNTIL: tuple[Until, ...] = (
    (),
    (Condition(signal="stop"),),
    (Condition(answer_tokens=5), Condition(unchanged=1), Condition(agree=("a0", "a1"))),
)
ON_FAILURE = dict(zip(product(MODELS, (1, 2, 3)), cycle(OnFailure), strict=False))
SHARES: tuple[Mapping[str | None, float] | None, ...] = (None, {}, {"alice": 3.0, "bob": 0.5})
SLOTS = {"w0": ("m", 2), "w1": ("m", 1), "w2": ("n", 3)}


class Auditor(RuleBasedStateMachine):
    """Sends the reports that a scheduler may get, and audits the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.shares, self.now = "progress", SHARES[0], 0.0
        self.group_by: GroupBy | None = None
        self.core = self.make_core()
        self.jobs: dict[JobId, Job] = {}
        self.ready_workers: set[str] = set()
        self.flying: dict[TurnKey, str] = {}
        self.completed: set[TurnKey] = set()
        self.ended: set[TurnKey] = set()
        self.digests: dict[TurnKey, TurnDigest] = {}
        self.absent: dict[tuple[JobId, str], int] = {}  # turns that never exist, since a condition ended a conversation
        self.ended_talks: set[tuple[JobId, str]] = set()
        self.ended_jobs: set[JobId] = set()
        self.cut_off: set[TurnKey] = set()
        self.is_closing = False
        self.failed: set[TurnKey] = set()
        self.trials: set[TurnKey] = set()
        self.held: set[TurnKey] = set()  # at any time since the restart
        self.cancelled: set[JobId] = set()
        self.waiting: set[TurnKey] = set()  # ready turns
        self.is_paused = False
        self.tools: dict[TurnKey, int] = {}  # turns with running tools, and the number of their hold
        self.timers: set[tuple[TurnKey, int]] = set()  # all that were set since the restart
        self.lent: set[TurnKey] = set()  # turns in flight on no slot
        self.lost: set[TurnKey] = set()
        self.awaited: set[TurnKey] = set()
        self.left: set[tuple[JobId, str]] = set()  # conversations that only callers can move

    def make_core(self) -> SchedulingCore:
        return SchedulingCore(POLICIES[self.policy], group_by=self.group_by, shares=self.shares)

    def seated(self, worker: str) -> list[TurnKey]:
        """Return the turns on slots of a worker."""
        return [key for key, other in self.flying.items() if other == worker and key not in self.lent]

    def tell(self, event: events.Event) -> None:
        for action in self.core.handle(event):
            match action:
                case events.TurnIsReady() | events.AwaitTurn():
                    self.audit_waiting(action)
                case events.StartTurn():
                    self.audit_start(action)
                case events.DeferTurn():
                    self.audit_wait(action)
                case _ if isinstance(action, events.OfSlot):
                    self.follow_slot(action)
                case events.CutOffTurn():
                    assert action.key in self.flying
                    self.cut_off.add(action.key)
                case events.ConversationEnded():
                    self.audit_end(action)
                case events.ConversationReleased():
                    self.audit_release(action)
                case events.JobEnded():
                    self.audit_job(action.job_id)
                case _:
                    pass

    def audit_waiting(self, action: events.TurnIsReady | events.AwaitTurn) -> None:
        assert action.key not in self.ended
        (self.waiting if isinstance(action, events.TurnIsReady) else self.awaited).add(action.key)

    def audit_wait(self, action: events.DeferTurn) -> None:
        assert action.key not in self.held, "a turn waits for its worker once"
        self.held.add(action.key)

    def follow_slot(self, action: events.OfSlot) -> None:
        match action:
            case events.LendSlotLater():
                self.tools[action.key] = action.number
                self.timers.add((action.key, action.number))
            case events.LendSlot():
                assert action.key in self.tools
                assert action.key not in self.lent | self.trials
                self.lent.add(action.key)
            case events.TakeBackSlot():
                assert action.key not in self.tools
                assert action.worker == self.flying[action.key]
                assert action.worker in self.ready_workers
                self.lent.remove(action.key)
            case events.LoseSlot():
                self.lost.add(action.key)

    def audit_end(self, action: events.ConversationEnded) -> None:
        conversation = (action.job_id, action.conversation_id)
        assert conversation not in self.ended_talks
        self.ended_talks.add(conversation)
        assert not any(key[:2] == conversation for key in self.flying)
        self.waiting = {key for key in self.waiting if key[:2] != conversation}
        self.awaited = {key for key in self.awaited if key[:2] != conversation}
        assert not self.ended & set(action.unspoken)
        assert action.state is not ConversationState.COMPLETED or not action.unspoken
        self.ended.update(action.unspoken)
        self.absent[conversation] = action.absent

    def audit_release(self, action: events.ConversationReleased) -> None:
        conversation = (action.job_id, action.conversation_id)
        assert not any(key[:2] == conversation for key in self.flying.keys() | self.waiting)
        assert action.awaited == {key for key in self.awaited if key[:2] == conversation} != set()
        self.left.add(conversation)

    def audit_job(self, job_id: JobId) -> None:
        if any(job_id == of_job for of_job, _ in self.left):
            return
        assert job_id not in self.ended_jobs
        self.ended_jobs.add(job_id)
        absent = sum(count for (of_job, _), count in self.absent.items() if of_job == job_id)
        assert len({key for key in self.ended if key.job_id == job_id}) + absent == self.jobs[job_id].total_turns

    def audit_start(self, action: events.StartTurn) -> None:
        key = action.key
        assert not self.is_paused
        self.waiting.discard(key)
        job = self.jobs[key.job_id]
        agent = next(each for each in job.agents if each.id == key.agent_id)
        assert not self.is_closing
        assert action.worker in self.ready_workers
        company = self.seated(action.worker)
        assert not (action.is_suspect and company), "a suspect is tried alone"
        assert not (self.trials & set(company)), "whoever tries a suspect takes nothing else"
        if action.is_suspect:
            self.trials.add(key)
        conversation = next(each for each in job.conversations if each.id == key.conversation_id)
        assert SLOTS[action.worker][0] == conversation.cast_agent(agent).model
        assert key not in self.flying
        assert key not in self.ended
        for other in job.agents:
            before = TurnKey(key.job_id, key.conversation_id, other.id, key.round - 1)
            is_heard = job.mode is Mode.ROUNDS or (other is agent and job.mode is Mode.FREE) or other.id == job.leader
            assert key.round == 0 or not is_heard or self.is_over(before, other)
            if other.id in agent.waits_for:
                assert self.is_over(TurnKey(key.job_id, key.conversation_id, other.id, key.round), other)
        earlier = [TurnKey(key.job_id, key.conversation_id, agent.id, number) for number in range(key.round)]
        assert agent.on_failure is not OnFailure.LEAVE or not self.failed & set(earlier), "whoever has left is silent"
        if job.leader is not None and agent.id != job.leader:
            choice = TurnKey(key.job_id, key.conversation_id, job.leader, key.round)
            assert self.digests[choice].chosen == agent.id, "whoever is named speaks"
        self.flying[key] = action.worker

    def to_name(self, key: TurnKey) -> list[str | None]:
        """Return the agents that a turn may name: only a leader names any, and none that has left."""
        job = self.jobs[key.job_id]
        if job.leader != key.agent_id:
            return [None]
        left = {each.agent_id for each in self.failed if each[:2] == key[:2]}
        there = (each for each in job.agents[1:] if each.on_failure is not OnFailure.LEAVE or each.id not in left)
        return [*(agent.id for agent in there), None]

    def is_over(self, key: TurnKey, agent: Agent) -> bool:
        """Return whether others need not wait for a turn.

        It was spoken, or its agent was silent, or has left before.
        """
        rounds = range(key.round + 1) if agent.on_failure is OnFailure.LEAVE else (key.round,)
        silent = {TurnKey(key.job_id, key.conversation_id, agent.id, number) for number in rounds}
        return key in self.completed or (agent.on_failure is not OnFailure.END and bool(self.failed & silent))

    def land(self, data: st.DataObject) -> TurnKey:
        key = data.draw(st.sampled_from(sorted(self.flying)))
        if data.draw(st.booleans()):
            tokens = st.integers(0, 10_000)
            spent = events.TurnSpent(key=key, fresh_tokens=data.draw(tokens), answer_tokens=data.draw(tokens))
            self.tell(spent)
        self.take_off(key)
        return key

    def take_off(self, key: TurnKey) -> None:
        del self.flying[key]
        self.tools.pop(key, None)
        for kept in (self.cut_off, self.trials, self.lent, self.lost):
            kept.discard(key)

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        shares=st.sampled_from(SHARES),
        group_by=st.none() | st.sampled_from(GroupBy),
    )
    def choose(self, policy: str, shares: Mapping[str | None, float] | None, group_by: GroupBy | None) -> None:
        self.policy, self.shares, self.group_by = policy, shares, group_by
        self.core = self.make_core()

    @rule(
        mode=st.sampled_from(Mode),
        count=st.integers(1, 3),
        rounds=st.integers(1, 3),
        edges=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
        models=st.lists(st.sampled_from(MODELS), min_size=4, max_size=4),
        agents=st.integers(1, 4),
        posted=st.tuples(
            st.sampled_from((None, "alice", "bob")), st.integers(-1, 1), st.sampled_from(UNTIL), st.integers(1, 8)
        ),
    )
    def admit(
        self,
        mode: Mode,
        count: int,
        rounds: int,
        edges: set[tuple[int, int]],
        models: list[str],
        agents: int,
        posted: tuple[str | None, int, Until, int],
    ) -> None:
        owner, priority, until, caller = posted  # an agent's place, if there is one
        mode = Mode.ROUNDS if mode is Mode.LED and agents == 1 else mode
        job_id = JobId(f"j{len(self.jobs)}")
        speakers = tuple(
            Agent(
                id=f"a{number}",
                role="",
                model="" if number == caller else models[number],
                by=SpokenBy.CALLER if number == caller else SpokenBy.MODEL,
                system=LONG,
                on_failure=OnFailure.END if mode is Mode.LED and number == 0 else ON_FAILURE[models[number], count],
                waits_for=frozenset(f"a{low}" for low, high in edges if low < high == number and mode is Mode.ROUNDS),
            )
            for number in range(agents)
        )
        casts = [{}, {agent.id: replace(agent, model=models[-1]) for agent in speakers[:2] if agent.model}, {}]
        job = Job(
            id=job_id,
            name=job_id,
            agents=speakers,
            conversations=tuple(
                Conversation(id=f"c{number}", prompt="", rounds=rounds, until=until, cast=casts[number])
                for number in range(count)
            ),
            priority=priority,
            mode=mode,
            leader="a0" if mode is Mode.LED else None,
            owner=owner,
        )
        self.jobs[job_id] = job
        self.tell(events.JobAdmitted(job=job))

    @rule(worker=st.sampled_from(sorted(SLOTS)))
    def worker_gets_ready(self, worker: str) -> None:
        model, slots = SLOTS[worker]
        self.ready_workers.add(worker)
        self.tell(events.WorkerReady(worker=worker, model=model, slots=slots))

    @rule(worker=st.sampled_from(sorted(SLOTS)))
    def worker_is_lost(self, worker: str) -> None:
        self.ready_workers.discard(worker)
        self.tell(events.WorkerNotReady(worker=worker))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def turn_completes(self, data: st.DataObject) -> None:
        key = self.land(data)
        self.completed.add(key)
        self.ended.add(key)
        tokens = st.integers(0, 10_000)
        reading = data.draw(
            st.none() | st.builds(PromptReading, fresh_tokens=tokens, seconds=st.floats(0, 1000), context_tokens=tokens)
        )
        until = self.jobs[key.job_id].conversations[0].until
        is_fulfilled = bool(until) and until[0].is_of_a_turn and data.draw(st.integers(0, 3)) == 0
        digest = TurnDigest(
            fulfils=(0,) * is_fulfilled,
            words=data.draw(st.integers(0, 1)),
            tokens=data.draw(st.integers(0, 2)),
            chosen=data.draw(st.sampled_from(self.to_name(key))),
        )
        self.digests[key] = digest
        self.tell(events.TurnCompleted(key=key, seconds=data.draw(st.floats(0, 100)), reading=reading, digest=digest))

    @precondition(lambda self: self.flying.keys() - self.lost - self.lent)
    @rule(data=st.data(), tokens=st.integers(0, 10_000), are_slow=st.booleans())
    def tools_begin(self, data: st.DataObject, tokens: int, *, are_slow: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.flying.keys() - self.lost - self.lent)))
        model = SLOTS[self.flying[key]][0]
        self.tools.pop(key, None)
        self.tell(events.ToolsBegan(key=key, model=model, tools=[f"slow={are_slow}"], context_tokens=tokens))
        if are_slow and key in self.tools:
            self.tell(events.LendingDue(key=key, number=self.tools[key]))

    @precondition(lambda self: self.timers)
    @rule(data=st.data())
    def timer_fires(self, data: st.DataObject) -> None:
        """Let the timer of any tools fire, perhaps of an earlier message or of an ended attempt."""
        key, number = data.draw(st.sampled_from(sorted(self.timers)))
        is_late, were_lent = self.tools.get(key) != number, set(self.lent)
        self.tell(events.LendingDue(key=key, number=number))
        assert not (is_late and self.lent - were_lent)

    @precondition(lambda self: self.tools)
    @rule(data=st.data(), seconds=st.floats(0, 100))
    def tools_end(self, data: st.DataObject, seconds: float) -> None:
        key = data.draw(st.sampled_from(sorted(self.tools)))
        del self.tools[key]
        self.tell(events.ToolsEnded(key=key, tools=[f"slow={key in self.lent}"], seconds=seconds))

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def lost_turn_ends(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.lost)))
        self.take_off(key)
        self.tell(events.TurnInterrupted(key=key))

    @rule()
    def nothing_is_to_start(self) -> None:
        self.is_paused = True
        self.tell(events.Paused())

    @precondition(lambda self: self.is_paused)
    @rule()
    def turns_may_start(self) -> None:
        self.is_paused = False
        self.tell(events.Unpaused())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold_is_over(self, data: st.DataObject) -> None:
        """Let a timer fire, whether its turn still waits or not."""
        self.tell(events.DeferralOver(key=data.draw(st.sampled_from(sorted(self.held)))))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def turn_is_rejected(self, data: st.DataObject) -> None:
        self.tell(events.TurnRejected(key=self.land(data)))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def turn_is_interrupted(self, data: st.DataObject) -> None:
        trial = data.draw(st.none() | st.sampled_from(Trial))
        self.tell(events.TurnInterrupted(key=self.land(data), trial=trial))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), is_distrusted=st.booleans())
    def job_is_judged(self, data: st.DataObject, *, is_distrusted: bool) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        self.tell(SourceDistrusted(source=job_id) if is_distrusted else SourceTrusted(source=job_id))

    @rule(owner=st.sampled_from(("alice", "bob")), model=st.sampled_from(MODELS), is_distrusted=st.booleans())
    def key_is_judged(self, owner: str, model: str, *, is_distrusted: bool) -> None:
        source = (owner, model)
        self.tell(SourceDistrusted(source=source) if is_distrusted else SourceTrusted(source=source))

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(events.TimeTold(at=self.now))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def suspects_are_cleared(self, data: st.DataObject) -> None:
        suspects = [key for model in MODELS for key in self.core.view.queues.ready_turns(model).suspects]
        cleared = data.draw(st.lists(st.sampled_from(suspects), unique=True)) if suspects else []
        self.tell(SuspectsCleared(keys=tuple(cleared)))

    @precondition(lambda self: self.awaited)
    @rule(data=st.data(), is_said=st.booleans())
    def caller_speaks(self, data: st.DataObject, *, is_said: bool) -> None:
        """Let a caller speak, in time or late. An unclaimed conversation is claimed with its words."""
        key = data.draw(st.sampled_from(sorted(self.awaited)))
        self.say(key, TurnDigest(words=data.draw(st.integers(0, 1))) if is_said else None)

    def say(self, key: TurnKey, digest: TurnDigest | None) -> None:
        """Store a caller's turn, or its failure, and report it."""
        is_said, digest = digest is not None, digest or TurnDigest()
        self.awaited.remove(key)
        self.ended.add(key)
        (self.completed if is_said else self.failed).add(key)
        self.digests[key] = digest
        if key[:2] in self.left:
            self.claim(key[:2])
        else:
            self.tell(events.CallerSpoke(key=key, digest=digest, reason=None if is_said else "not_said"))

    def claim(self, conversation: tuple[JobId, str]) -> None:
        """Admit a conversation that was left."""
        self.left.remove(conversation)
        self.awaited = {key for key in self.awaited if key[:2] != conversation}
        job = self.jobs[conversation[0]]
        part = replace(job, conversations=tuple(each for each in job.conversations if each.id == conversation[1]))
        done = {key: (self.state_of(key), "reason") for key in self.ended if key[:2] == conversation}
        digests = {key: digest for key, digest in self.digests.items() if key[:2] == conversation}
        is_cancelled = job.id in self.cancelled
        self.tell(events.JobAdmitted(job=part, ended=done, digests=digests, is_cancelled=is_cancelled))

    @rule()
    def service_is_killed_and_started_again(self) -> None:
        """Restart the core with what the store was given."""
        self.core = self.make_core()
        self.held.clear()
        self.waiting.clear()
        self.is_paused = False
        self.flying.clear()
        self.tools.clear()
        self.timers.clear()
        self.lent.clear()
        self.lost.clear()
        self.trials.clear()
        self.cut_off.clear()
        self.ready_workers.clear()
        self.awaited.clear()
        self.left.clear()
        self.ended_talks = {conversation for conversation in self.ended_talks if conversation[0] in self.ended_jobs}
        for job_id, job in self.jobs.items():
            if job_id not in self.ended_jobs:
                done = {key: (self.state_of(key), "reason") for key in self.ended if key.job_id == job_id}
                digests = {key: digest for key, digest in self.digests.items() if key.job_id == job_id}
                is_cancelled = job_id in self.cancelled
                self.tell(events.JobAdmitted(job=job, ended=done, digests=digests, is_cancelled=is_cancelled))

    def state_of(self, key: TurnKey) -> TurnState:
        if key in self.failed:
            return TurnState.FAILED
        return TurnState.COMPLETED if key in self.completed else TurnState.CANCELLED

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def turn_fails(self, data: st.DataObject) -> None:
        key = self.land(data)
        self.ended.add(key)
        self.failed.add(key)
        self.tell(events.TurnFailed(key=key, reason="engine_rejected"))

    @precondition(lambda self: self.cut_off)
    @rule(data=st.data())
    def turn_is_cut_off(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.cut_off)))
        self.take_off(key)
        self.ended.add(key)
        self.tell(events.TurnCutOff(key=key))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def job_is_cancelled(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        if job_id not in self.ended_jobs:
            self.cancelled.add(job_id)
        self.tell(events.JobCancelled(job_id=job_id))
        for conversation in [each for each in self.left if each[0] == job_id]:
            self.claim(conversation)

    @invariant()
    def pools_by_model_add_up(self) -> None:
        """Check that the figures of all models add up to the totals."""
        by_model, of_all = self.core.view.by_model(), dict(self.core.view.of_all())
        assert {pool: sum(counts[pool] for counts in by_model.values()) for pool in of_all} == of_all

    @invariant()
    def pools_slots_reservations_and_charges_agree(self) -> None:
        """Use the core's own check: no turn is in two pools, and every count matches what it counts."""
        assert not any(self.core.check())

    def tries(self, worker: str) -> bool:
        """Return whether a suspect is on a worker, which takes no other turn then."""
        return any(self.core.view.is_on_trial(key) for key in self.flying if self.flying[key] == worker)

    @invariant()
    def no_worker_is_oversubscribed(self) -> None:
        for worker, (_, slots) in SLOTS.items():
            assert len(self.seated(worker)) <= slots

    @invariant()
    def whose_tools_have_ended_has_its_slot_back(self) -> None:
        """Check that a turn whose tools have ended gets its slot back first.

        It waits only for the turns on the slots.
        """
        for key in self.lent - self.tools.keys() - self.lost:
            worker = self.flying[key]
            assert worker in self.ready_workers, "it is lost"
            assert len(self.seated(worker)) == SLOTS[worker][1] or self.tries(worker)

    @precondition(lambda self: not self.is_paused)
    @invariant()
    def no_slot_is_idle_while_a_turn_could_run(self) -> None:
        for model in MODELS:
            tries, ready = self.core.view.trial_worker(model), self.core.view.queues.ready_turns(model)
            assert tries is None or ready.suspects or self.tries(tries)
            free = sum(
                max(0, slots - len(self.seated(worker)))
                for worker, (offered, slots) in SLOTS.items()
                if offered == model and worker in self.ready_workers - {tries} and not self.tries(worker)
            )
            assert not (free and ready.queued), "a suspect may wait; nobody else does"
            if tries is not None and not self.is_closing:
                assert any(worker == tries for worker in self.flying.values()), "whoever is reserved is used"

    @invariant()
    def whoever_is_held_waits_for_a_full_worker(self) -> None:
        waiting = [self.core.view.queues.ready_turns(model).deferred for model in MODELS]
        for key, worker in (held for each in waiting for held in each.items()):
            assert worker in self.ready_workers
            assert len(self.seated(worker)) == SLOTS[worker][1]
            assert key not in self.ended

    def has_more(self) -> bool:
        """Return whether a turn starts once those of distrusted keys have let the others go first for long enough."""
        self.time_passes(MOST_REST_S)
        return bool(self.flying)

    def teardown(self) -> None:
        """Let everything run to its end: every job ends, and every turn exactly once."""
        if self.is_paused:
            self.turns_may_start()
        for worker in SLOTS:
            self.worker_gets_ready(worker)
        while self.flying or self.awaited or self.has_more():
            if not self.flying and self.awaited:
                self.say(min(self.awaited), TurnDigest())
                continue
            key = min(self.flying)
            self.take_off(key)
            self.completed.add(key)
            self.ended.add(key)
            digest = self.digests[key] = TurnDigest(chosen=self.to_name(key)[0])
            self.tell(events.TurnCompleted(key=key, digest=digest))
        assert set(self.ended_jobs) == set(self.jobs)
        assert set(self.core.view.of_all().values()) == {0}


TestAuditor = Auditor.TestCase
TestAuditor.settings = settings(max_examples=150, stateful_step_count=40)
