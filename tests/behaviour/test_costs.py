"""The cost of one turn and one request, in calls of our own functions: a count grows before a time does.

Counted on the virtual loop, so that each run makes the same calls. The store's thread and libraries are left out.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from starlette.types import Message

from service.api.app import build_app
from service.api.door.writer import WRITER
from service.config.source import LoadedConfig
from service.conversations.job.states import ENDED_JOBS
from service.node import glances
from service.node.conversation_list import ListQuery
from service.node.glances import Glances
from service.node.node import Node
from service.node.reloader import Reloader
from service.upgrade.upgrader import Upgrader
from tests.harness.quiet_node import on_node
from tests.harness.virtual import pass_time

OURS = tuple(str(Path(__file__).parents[2] / name) + "/" for name in ("service", "workers", "transport"))
# Shares, markup, findings and bounds are all on the request's way.
MOST_OF_A_TURN = 737
MOST_OF_A_REQUEST = 674  # its parameters and headers are known ones


class Calls:
    count = 0

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.count += 1


@contextmanager
def counting() -> Iterator[Calls]:
    """Count the calls of a block, in this thread."""
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def calls_of_turns(conversations: int) -> int:
    async def scenario(node: Node, _loaded: LoadedConfig) -> int:
        job = {
            "agents": [{"id": "a", "model": "m0", "system": "You are agent=a.", "params": {"max_tokens": 1}}],
            "conversations": [{"prompt": f"topic=c{number}"} for number in range(conversations)],
        }
        with counting() as calls:
            stored, _ = await node.door.post(job)
            while (await node.jobs.get(stored.id)).stored.state not in ENDED_JOBS:
                await pass_time(0.2)
        return calls.count

    return on_node(scenario)


def calls_of_requests(requests: int) -> int:
    async def scenario(node: Node, loaded: LoadedConfig) -> int:
        app = build_app(
            node, loaded.config, [], {}, Reloader(node, loaded, lambda: loaded), Upgrader(node, listener_fd=0)
        )
        body = b'{"model": "m0", "messages": [{"role": "user", "content": "agent=a. topic=c0"}], "max_tokens": 1}'
        with counting() as calls:
            for _ in range(requests):
                told: list[Message] = []

                async def receive() -> Message:
                    return {"type": "http.request", "body": body}

                async def send(message: Message, told: list[Message] = told) -> None:
                    told.append(message)

                await app(scope_of(body), receive, send)
                assert told[0]["status"] == 200
        return calls.count

    return on_node(scenario)


class ClosedWriter:
    """A writer to a client that stays connected."""

    def on_gone(self, tell: Callable[[], None]) -> None:
        """Call nothing back."""

    def forget_gone(self) -> None:
        """Forget nothing."""

    def note_whole(self, size: int) -> None:
        """Count nothing."""


def scope_of(body: bytes) -> dict[str, Any]:
    headers = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(body))}
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        WRITER: ClosedWriter(),
    }


def test_a_turn_makes_no_more_calls_than_before() -> None:
    """From a job's queue to the records of its end, on 16 slots."""
    few, many = calls_of_turns(20), calls_of_turns(120)
    assert (many - few) / 100 <= MOST_OF_A_TURN


def test_a_request_makes_no_more_calls_than_before() -> None:
    """From the middlewares around the surface to the answer."""
    few, many = calls_of_requests(20), calls_of_requests(120)
    assert (many - few) / 100 <= MOST_OF_A_REQUEST


def test_simultaneous_viewers_of_a_job_share_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, the document is read once, and the conversations once."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(glances, name)

        def call(*arguments: Any) -> Any:  # noqa: ANN401 - whatever it takes and returns
            calls[name] += 1
            return real(*arguments)

        return call

    for name in ("posted_heads", "lines_of", "texts_of", "page_of"):
        monkeypatch.setattr(glances, name, counted(name))

    async def scenario(node: Node, _loaded: LoadedConfig) -> int:
        agent = {"id": "a", "model": "m0", "system": "You are agent=a.", "params": {"max_tokens": 1}}
        talks = [{"prompt": f"topic=c{number}"} for number in range(20)]
        stored, _ = await node.door.post({"agents": [agent], "conversations": talks})
        looks = Glances(node.store, node.jobs)
        pages = []

        async def look(number: int) -> None:
            _, page = await looks.into(stored.id, ListQuery(text=f"c{number}"), 10)
            pages.append(page)

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(look, number)
        assert sorted(page.found for page in pages) == [1] * 10 + [1, 11]
        return len(pages)

    assert on_node(scenario) == 12
    assert calls == {"posted_heads": 1, "lines_of": 1, "texts_of": 1, "page_of": 12}
