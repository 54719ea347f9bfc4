"""Which requests are refused when several keys fill a queue, and the memory of their bodies."""

from datetime import UTC, datetime

import pytest
from starlette.types import Message

from service.api.body import HELD, SHARE, BufferedBodies, BufferedBody
from service.conversations.job.client_request import PostedRequest
from service.errors import QueueFull
from service.scheduling.core.blame import Blame
from service.scheduling.core.events import Event, JobCancelled, JobEnded
from service.scheduling.keeping.request import RelayedRequest
from service.scheduling.keeping.request_queue import QueueRules
from service.scheduling.keeping.requests import RelayedRequests
from service.scheduling.work import RunCounters


class Queue:
    """Requests that wait, since no core gives them slots."""

    def __init__(self, requests: int = 4, size: int = 10**6) -> None:
        limits = QueueRules(requests=requests, bytes=size)
        self.requests = RelayedRequests(Blame(), RunCounters(), self._take, limits)

    def _take(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, JobCancelled):
                self.requests.move(JobEnded(job_id=event.job_id), datetime.now(UTC))

    def post(self, owner: str, size: int = 10) -> RelayedRequest:
        body = b"x" * size
        posted = PostedRequest(path="/v1/chat/completions", body=body, name="m", model="m", owner=owner)
        return self.requests.submit(posted, slots=1)


def test_at_a_full_queue_the_newest_request_of_the_fullest_key_is_refused() -> None:
    """A key that fills the queue keeps no other out of it."""
    queue = Queue()
    greedy = [queue.post("greedy") for _ in range(4)]
    modest = queue.post("modest")
    assert [each.is_over for each in (*greedy, modest)] == [False, False, False, True, False]


def test_the_newcomer_is_refused_if_its_key_is_the_fullest() -> None:
    """It would be last among its key's requests."""
    queue = Queue()
    waiting = [queue.post("greedy") for _ in range(4)]
    with pytest.raises(QueueFull, match=r"server\.queue"):
        queue.post("greedy")
    assert not any(each.is_over for each in waiting)


def test_keys_with_equal_parts_keep_them() -> None:
    """Otherwise two keys would take each other's places for ever."""
    queue = Queue()
    waiting = [queue.post(owner) for owner in ("a", "b", "a", "b")]
    with pytest.raises(QueueFull):
        queue.post("a")
    assert not any(each.is_over for each in waiting)


def test_bodies_are_counted_as_well() -> None:
    """A few large bodies fill the memory as many small ones do."""
    queue = Queue(requests=100, size=1000)
    large = queue.post("greedy", 900)
    small = [queue.post("modest", 60) for _ in range(3)]
    assert large.is_over
    assert not any(each.is_over for each in small)
    with pytest.raises(QueueFull, match=r"limits\.queue_bytes"):
        queue.post("modest", 1001)


async def test_the_memory_of_bodies_is_released_at_their_end() -> None:
    """The end may be an answer or an error."""
    held: list[BufferedBody] = []

    async def app(scope: dict[str, object], _receive: object, _send: object) -> None:
        body = scope[HELD]
        assert isinstance(body, BufferedBody)
        held.append(body)
        body.add(600)
        with pytest.raises(QueueFull):
            body.add(600)
        raise OSError("its client has gone")

    bodies = BufferedBodies(app, queue_bytes=1000 // SHARE)  # type: ignore[arg-type]

    async def receive() -> Message:
        return {}

    async def send(_message: Message) -> None:
        return None

    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            await bodies({"type": "http"}, receive, send)
        assert bodies.bytes == 0
    assert len(held) == 3
