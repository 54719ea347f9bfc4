"""The guardians of a span, as they are: what one says, and what its silence and its end do to the others.

Source: specification, "Spans".
"""

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import psutil
import pytest

from tests.harness.waiting import is_alive, wait_until
from workers.process.child import Command, EngineProcess, run_engine
from workers.process.lifelines import HELLO_BYTES, NONCE_BYTES

pytestmark = pytest.mark.system
KEY = "ab" * 32
ENGINE = (sys.executable, "-I", "-S", "-c", "import time\nwhile True: time.sleep(0.01)")
GONE_S = 1.0


@asynccontextmanager
async def gang(port: int, size: int = 2, **places: Mapping[str, object]) -> AsyncIterator[list[EngineProcess]]:
    """Run a member per rank; ``places`` change the place of a rank (``r1={...}``)."""
    async with AsyncExitStack() as stack:
        members = []
        for rank in range(size):
            place = {"rank": rank, "size": size, "address": "127.0.0.1", "port": port, "key": KEY, "join_s": 20.0}
            span = {**place, "lease_s": 60.0, **places.get(f"r{rank}", {})}
            command = Command(argv=ENGINE, env=dict(os.environ), span=span)
            members.append(await stack.enter_async_context(run_engine(command, lambda _stream, _data: None)))
        yield members


def connected(members: list[EngineProcess]) -> bool:
    return len(members[0].members) == len(members) - 1 and all(0 in each.members for each in members[1:])


def gone(members: list[EngineProcess]) -> bool:
    return all(each.is_gone for each in members)


async def test_members_tell_each_other_how_they_do(free_ports: Callable[[int], int]) -> None:
    """CPU time, stopped processes, and the silence of the service, which its word ends."""
    async with gang(free_ports(1), 3) as members:
        await wait_until(lambda: connected(members), "all are connected")
        os.kill(members[2].pid, signal.SIGSTOP)
        await wait_until(lambda: bool(members[0].members[2].stopped), "the stopped process shows")
        assert str(members[2].pid) in members[0].members[2].stopped[0]
        os.kill(members[2].pid, signal.SIGCONT)
        await wait_until(lambda: members[0].members[2].service_s > 1, "the service has said nothing")
        members[2].renew(has_lease=True)
        await wait_until(lambda: members[0].members[2].service_s < 1, "the service has spoken")
        assert not members[0].members[2].stopped


@pytest.mark.parametrize("hit", [0, 1, 2])
@pytest.mark.parametrize("part", ["engine", "guardian"])
async def test_the_end_of_one_ends_all(free_ports: Callable[[int], int], part: str, hit: int) -> None:
    """Within a second, and the others know which one ended first, and that no engine was the cause."""
    async with gang(free_ports(1), 3) as members:
        await wait_until(lambda: connected(members), "all are connected")
        os.kill(members[hit].pid if part == "engine" else members[hit].guardian_pid, signal.SIGKILL)
        await wait_until(lambda: gone(members), "all are gone", GONE_S)
        said = {"engine": "its engine ended with signal 9", "guardian": "its guardian is gone"}[part]
        for rank, member in enumerate(members):
            if rank != hit:
                parted = member.exit.parted
                assert parted is not None
                assert (parted.member, parted.because, parted.is_outside) == (hit, said, True)


async def test_silence_ends_a_member_only_with_its_own_lease(free_ports: Callable[[int], int]) -> None:
    """A stopped guardian is silent: the member whose lease goes on waits, the one whose lease is over ends."""
    short = {"lease_s": 1.0}
    async with gang(free_ports(1), 3, r0={"lease_s": 60.0}, r2=short) as members:
        await wait_until(lambda: connected(members), "all are connected")
        leader = psutil.Process(members[0].guardian_pid)
        leader.suspend()
        try:
            await wait_until(lambda: members[2].is_gone, "the one without a lease ends", 20)
            assert is_alive(members[1].pid)
            assert members[2].exit.parted is not None
            assert "is silent" in members[2].exit.parted.because
        finally:
            leader.resume()
        await wait_until(lambda: gone(members), "all are gone", GONE_S)


async def test_a_member_that_never_comes_ends_the_others(free_ports: Callable[[int], int]) -> None:
    """Its time is the start's; the reason names it."""
    async with gang(free_ports(1), 1, r0={"size": 2, "join_s": 0.5}) as members:
        await wait_until(lambda: gone(members), "it is gone", 5)
        parted = members[0].exit.parted
        assert parted is not None
        assert (parted.member, parted.because) == (1, "member 1 has not connected")


async def test_strangers_are_no_members(free_ports: Callable[[int], int]) -> None:
    """Noise, a wrong key and a second member of the same rank are let go, and harm nothing."""
    port = free_ports(1)
    async with gang(port, 2) as members:
        await wait_until(lambda: connected(members), "both are connected")
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes([1]) + bytes(HELLO_BYTES - 1), bytes(1000)):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
                assert len(link.recv(NONCE_BYTES)) == NONCE_BYTES
                link.sendall(said)
                if said:
                    with suppress(ConnectionResetError):  # it was closed with bytes unread
                        assert link.recv(100) == b""
        held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(40)]
        await wait_until(lambda: connected(members), "both go on")
        for link in held:
            link.close()
        assert not gone(members)


async def test_an_engine_whose_key_is_another_never_joins(free_ports: Callable[[int], int]) -> None:
    """Both wait until their time is over."""
    async with gang(free_ports(1), 2, r0={"join_s": 1.0}, r1={"key": "cd" * 32, "join_s": 1.0}) as members:
        await wait_until(lambda: gone(members), "both are gone", 10)
        assert members[0].exit.parted is not None
        assert "has not connected" in members[0].exit.parted.because
