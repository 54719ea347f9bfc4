"""The table of ``ReadyJudge.verdict``: each row, and the order of the rows."""

from msgspec.structs import replace

from service.conversations.job.job import Mode, TurnKey
from service.conversations.talk.turn_order import Place
from service.scheduling.core.backlog import Estimates
from service.scheduling.core.dispatch import Dispatcher, ReadyVerdict
from service.scheduling.core.events import JobAdmitted, WorkerReady
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.kv_budgets import KvNeed
from service.scheduling.core.live import LiveConversation, LiveJob
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import CacheLocation
from service.scheduling.core.queue.ready_queue import ReadyTurn
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.room_keeper import RoomKeeper
from tests.harness.jobs import agent, job, key

KV = 1000  # tokens
OTHER = key("x", conversation=7, name="other")


class Scene:
    """A dispatcher with one job of agents a and b, and two workers of two slots each: ``w`` with a bounded cache."""

    def __init__(self, *, is_free: bool = False, kv_tokens: int | None = None, slots: int = 1) -> None:
        posted = job(replace(agent("a"), slots=slots), agent("b"))
        self.live = LiveJob(JobAdmitted(job=replace(posted, mode=Mode.FREE) if is_free else posted), Estimates())
        self.conversation = LiveConversation(self.live, posted.conversations[0], 1)
        self.live.conversations["c0"] = self.conversation
        self.in_flight = InFlightPool()
        self.room = RoomKeeper(self.in_flight)
        self.dispatcher = Dispatcher({posted.id: self.live}, ReadyPool(POLICIES["fifo"]), self.in_flight, self.room, [])
        self.in_flight.open("w", "m", 2, kv_tokens)
        self.room.note_worker(WorkerReady(worker="w", model="m", slots=2, kv_tokens=kv_tokens, most_answer=10))

    def turn(self, name: str = "a", *, is_front: bool = False, owner: str | None = None) -> ReadyTurn:
        place = Place(self.live.places[name], 0)
        return ReadyTurn(
            key=self.conversation.key(place),
            job_priority=0,
            rounds_completed=0,
            conversation_order=1,
            agent_order=place.agent,
            ready_order=1,
            path=1.0,
            is_front=is_front,
            owner=owner,
        )

    def occupy(self, worker: str, tokens: int, turn: TurnKey = OTHER) -> None:
        """Put another job's turn on a slot."""
        self.in_flight.add(turn, worker, KvNeed(prompt=tokens, answer=0))

    def press(self) -> None:
        """Fill the caches with contexts of agents between two turns, and half of them with turns."""
        self.room.working_set.end_turn(key("y", conversation=8, name="other"), "m", KV)
        self.occupy("w", KV // 2)

    def know(self, worker: str) -> None:
        """Cache the prompt of a on a worker: reading it on another takes a minute."""
        self.dispatcher.costs.speeds.learn("m", 1.0, None)
        self.dispatcher.costs.note_worker(WorkerReady(worker=worker, model="m", slots=1, read_s=0.1))
        self.conversation.note_cache(0, CacheLocation(worker=worker, tokens=600))

    def fill(self, worker: str, model: str = "m") -> None:
        """Open another worker with every slot in use."""
        self.in_flight.open(worker, model, 1)
        self.occupy(worker, 0, key("z", name=worker))


def test_a_turn_of_an_ending_job_waits_for_no_slot() -> None:
    """This row comes before all others: the turn needs no trial either."""
    scene = Scene()
    scene.live.is_cancelled = scene.live.is_distrusted = True
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.ENDED
    assert scene.dispatcher.judge.verdict(scene.turn(), "m", worker="w") is ReadyVerdict.ENDED


def test_a_turn_of_a_distrusted_job_or_key_gets_a_trial() -> None:
    """Unless it was on a slot and so had its trial. A key is distrusted at one model only."""
    scene = Scene()
    scene.live.is_distrusted = True
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.TRIED
    assert scene.dispatcher.judge.verdict(scene.turn(is_front=True), "m") is ReadyVerdict.STARTED
    scene.live.is_distrusted = False
    scene.dispatcher.judge.distrusted.add(("alice", "m"))
    assert scene.dispatcher.judge.verdict(scene.turn(owner="alice"), "m") is ReadyVerdict.TRIED
    assert scene.dispatcher.judge.verdict(scene.turn(owner="bob"), "m") is ReadyVerdict.STARTED
    assert scene.dispatcher.judge.verdict(scene.turn(owner="alice"), "n", worker="w") is ReadyVerdict.STARTED


def test_a_turn_that_would_begin_a_conversation_is_blocked_while_caches_are_full() -> None:
    """Conversations that have begun go on, and so do turns that were on a slot."""
    scene = Scene(kv_tokens=KV)
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.STARTED
    scene.press()
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.BLOCKED
    assert scene.dispatcher.judge.verdict(scene.turn(is_front=True), "m") is ReadyVerdict.STARTED
    scene.conversation.is_started = True
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.STARTED


def test_in_free_mode_a_turn_is_passed_with_one_of_its_conversation() -> None:
    """In rounds it may start, since the order within a round does not change what agents hear."""
    for is_free, verdict in ((True, ReadyVerdict.PASSED), (False, ReadyVerdict.STARTED)):
        scene = Scene(is_free=is_free)
        assert scene.dispatcher.judge.verdict(scene.turn("b"), "m", [scene.turn("a")]) is verdict


def test_a_turn_without_room_is_passed() -> None:
    """Room is slots of one worker, and tokens of its cache."""
    scene = Scene(slots=2)
    assert scene.dispatcher.judge.verdict(scene.turn("a"), "m") is ReadyVerdict.STARTED
    scene.occupy("w", 0)
    assert scene.dispatcher.judge.verdict(scene.turn("a"), "m") is ReadyVerdict.PASSED
    assert scene.dispatcher.judge.verdict(scene.turn("a"), "m", worker="w") is ReadyVerdict.PASSED
    assert scene.dispatcher.judge.verdict(scene.turn("b"), "m") is ReadyVerdict.STARTED
    scene = Scene(kv_tokens=KV)
    scene.occupy("w", KV - 50)
    scene.conversation.is_started = True
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.PASSED
    assert scene.dispatcher.judge.verdict(scene.turn(), "m", worker="w") is ReadyVerdict.PASSED


def test_a_turn_is_deferred_for_the_full_worker_with_its_prompt() -> None:
    """Not if that worker has a free slot, nor if the turn was on a slot or is offered one, nor in free mode."""
    scene = Scene()
    scene.fill("v")
    scene.know("v")
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.DEFERRED
    assert scene.dispatcher.judge.verdict(scene.turn(is_front=True), "m") is ReadyVerdict.STARTED
    assert scene.dispatcher.judge.verdict(scene.turn().after_deferral(), "m") is ReadyVerdict.STARTED
    assert scene.dispatcher.judge.verdict(scene.turn(), "m", worker="w") is ReadyVerdict.STARTED
    scene.know("w")
    assert scene.dispatcher.judge.verdict(scene.turn(), "m") is ReadyVerdict.STARTED
    free = Scene(is_free=True)
    free.fill("v")
    free.know("v")
    assert free.dispatcher.judge.verdict(free.turn(), "m") is ReadyVerdict.STARTED
