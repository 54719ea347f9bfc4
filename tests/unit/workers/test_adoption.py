"""Which engines the next program adopts, and how a worker's state is restored."""

import dataclasses
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from workers.engine.log_ring import LogRing
from workers.handover import launch_of
from workers.policy.adoption import NOT_WANTED, OTHER_ADAPTERS, OTHER_LAUNCH, Adoption, Launch, plan_adoption
from workers.process.child import OutputFrames
from workers.process.handed_over import HeldEngine, HeldFleet, HeldGuardian, HeldPace, HeldProcess, HeldWorker
from workers.process.identity import EngineExit
from workers.spec import EngineKind, WorkerId, WorkerSpec

ONE = Launch(worker="m-0", model="m", digest="a", adapters={}, may_have_more=False)


def test_an_engine_that_would_be_started_the_same_way_is_kept() -> None:
    """Others are ended, each with its reason, and their workers start again if they still exist."""
    wanted = [ONE, replace(ONE, worker="m-1"), replace(ONE, worker="n-0", model="n")]
    running = [ONE, replace(ONE, worker="m-1", digest="b"), replace(ONE, worker="x-0", model="x")]
    assert plan_adoption(running, wanted) == Adoption(
        kept=("m-0",), ended={"m-1": OTHER_LAUNCH, "x-0": NOT_WANTED}, started=("m-1", "n-0")
    )
    assert plan_adoption([], wanted) == Adoption(kept=(), ended={}, started=("m-0", "m-1", "n-0"))


def test_a_lane_keeps_the_model_that_it_has() -> None:
    """A lane has one worker per model: the running engine decides which of them is restored."""
    lane = [replace(ONE, worker="lane0", model=model, digest=model) for model in "abc"]
    assert plan_adoption([lane[1]], lane) == Adoption(kept=("lane0",), ended={}, started=())
    gone = plan_adoption([replace(lane[1], digest="other")], lane)
    assert gone == Adoption(kept=(), ended={"lane0": OTHER_LAUNCH}, started=("lane0",))


def test_an_engine_is_kept_only_with_the_adapters_that_are_wanted() -> None:
    """llama-server numbers adapters, so their order counts; vLLM may have more than are wanted, but not fewer."""
    has = replace(ONE, adapters={"p": "/p", "q": "/q"})
    assert plan_adoption([has], [has]).kept == ("m-0",)
    for other in ({"q": "/q", "p": "/p"}, {"p": "/p"}, {"p": "/p", "q": "/other"}):
        assert plan_adoption([has], [replace(ONE, adapters=other)]).ended == {"m-0": OTHER_ADAPTERS}
    more = replace(ONE, adapters={"p": "/p"}, may_have_more=True)
    assert plan_adoption([has], [more]).kept == ("m-0",)
    assert plan_adoption([ONE], [more]).ended == {"m-0": OTHER_ADAPTERS}


def test_an_engine_is_compared_by_what_it_is_started_with() -> None:
    """Flags, variables and the address count; settings that only the service uses do not."""
    spec = WorkerSpec(id=WorkerId("m-0"), name="m", engine=EngineKind.LLAMA_SERVER, model="./a.gguf", port=9000)
    same = launch_of(spec, {})
    assert launch_of(dataclasses.replace(spec, params={"max_tokens": 3}), {"HOME": "elsewhere"}) == same
    others = [
        dataclasses.replace(spec, port=9001),
        dataclasses.replace(spec, model="./b.gguf"),
        dataclasses.replace(spec, args={"threads": 2}),
        dataclasses.replace(spec, env={"A": "b"}),
        dataclasses.replace(spec, slots=7),
    ]
    assert len({same.digest, *(launch_of(each, {}).digest for each in others)}) == 1 + len(others)
    adapted = launch_of(dataclasses.replace(spec, adapters={"p": "/p.gguf"}), {})
    assert (adapted.digest, adapted.adapters) == (same.digest, {"p": "/p.gguf"})


def test_a_fleet_is_restored_as_it_was_written() -> None:
    """It goes through JSON, with half a frame of output and half a line of the log."""
    log = LogRing()
    log.begin_incarnation(3)
    log.add_output(1, b"one\ntw")
    guardian = HeldGuardian(pid=5, started=6, orders_fd=7, output_fd=8, reports_fd=9, output=b"\x01\xff", reports=b"{")
    engine = HeldEngine(
        incarnation=3,
        process=HeldProcess(guardian=guardian, pid=10, started=11),
        key="secret",
        was_ready=True,
        holds=["operator"],
        failed_at=[1.5],
        paused_at=[],
        last_exit=EngineExit(signal=9, max_rss_bytes=4),
        log=log.hand_over_lines(),
    )
    pace = HeldPace(rates=[100.0], tokens_a_char=0.25, steps_s=[0.01], errors=[0.1])
    worker = HeldWorker(
        id="m-0", model="m", launch="x", engine=engine, pace=pace, adapters={"p": "/p"}, numbers={"p": 1}, weights=2
    )
    fleet = HeldFleet(run="mark", workers=[worker])
    assert msgspec.json.decode(msgspec.json.encode(fleet), type=HeldFleet) == fleet
    assert fleet.descriptors == [7, 8, 9]


def test_a_log_goes_on_in_the_middle_of_a_line() -> None:
    """The numbers continue, and the line is complete in the end."""
    first, second = LogRing(), LogRing()
    first.begin_incarnation(1)
    first.add_output(1, b"one\ntw")
    second.restore(first.hand_over_lines())
    second.add_output(1, b"o\nthree\n")
    assert [(line.number, line.text) for line in second.tail(9)] == [(1, "one"), (2, "two"), (3, "three")]
    assert second.bytes_taken == len(b"one\ntwo\nthree\n")
    assert all(line.at_utc <= datetime.now(UTC) for line in second.tail(9))


def test_a_frame_goes_on_where_it_was_cut() -> None:
    """The next program has the beginning, and the pipe has the rest."""
    data = b"\x01\x00\x00\x00\x03abc\x02\x00\x00\x00\x01z"
    for at in range(len(data) + 1):
        seen: list[tuple[int, bytes]] = []
        first = OutputFrames(lambda stream, part: seen.append((stream, part)))  # noqa: B023
        first.feed(data[:at])
        OutputFrames(lambda stream, part: seen.append((stream, part)), first.begun).feed(data[at:])  # noqa: B023
        assert seen == [(1, b"abc"), (2, b"z")]
