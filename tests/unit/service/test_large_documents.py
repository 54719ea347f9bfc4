"""Large documents of one key are handled one at a time, beside those of other keys."""

import threading

import anyio
import msgspec

from service.conversations.callers import ANYBODY, Caller
from service.node.large_documents import LargeDocuments
from tests.harness.waiting import wait_until


async def test_one_key_has_one_thread() -> None:
    """Eight large jobs of one key at once would block the event loop eight times as long as one."""
    large, go, running = LargeDocuments(), threading.Event(), set[str]()
    first, second = (msgspec.structs.replace(ANYBODY, name=name) for name in ("first", "second"))

    def handle(name: str) -> str:
        running.add(name)
        assert go.wait(10)
        return name

    told: list[str] = []

    async def ask(caller: Caller, name: str) -> None:
        told.append(await large.handle(caller, handle, name))

    async with anyio.create_task_group() as tasks:
        for name in ("a", "b", "c"):
            tasks.start_soon(ask, first, name)
        await wait_until(lambda: running == {"a"}, "the first one is handled")
        tasks.start_soon(ask, second, "d")
        await wait_until(lambda: running == {"a", "d"}, "another key's is handled beside it")
        go.set()
    assert sorted(told) == ["a", "b", "c", "d"]
    assert repr(large) == "<LargeDocuments keys=[]>"
