import math
import time
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from transport.events import Event, Finished, PromptProgress, ReasoningDelta, TextDelta, Timings, ToolCallDelta, Usage
from transport.request import Message
from workers.engine.launch import command_for
from workers.engine.launch.flags import render_flags
from workers.engine.log_ring import LogRing
from workers.errors import InvalidSpec, NoSlot
from workers.requests.answer import Answer
from workers.requests.generation import Generation
from workers.requests.in_flight import InFlightRequest
from workers.requests.prompts.bios import CONTEXT, BiosFacts, bios_prompt
from workers.requests.prompts.stack import stack_messages
from workers.requests.request import RequestId
from workers.requests.slots import Slots
from workers.spec import EngineKind, Flag, WorkerId, WorkerSpec


def spec(**fields: object) -> WorkerSpec:
    given: dict[str, object] = {
        "id": WorkerId("m-0"),
        "name": "m",
        "engine": EngineKind.LLAMA_SERVER,
        "model": "/models/m.gguf",
        "port": 9100,
        "slots": 3,
        "context": 2048,
    }
    return WorkerSpec(**{**given, **fields})  # type: ignore[arg-type]


class TestSlots:
    def test_a_lease_takes_a_slot_and_gives_it_back(self) -> None:
        """The block that takes it gives it back."""
        slots = Slots(2)
        with slots.lease_nowait(), slots.lease_nowait():
            assert slots.in_use == 2
            with pytest.raises(NoSlot):
                slots.lease_nowait()
        assert slots.in_use == 0

    def test_giving_back_twice_is_a_defect(self) -> None:
        """A double release raises an error; otherwise there would be a slot too many."""
        slots = Slots(1)
        lease = slots.lease_nowait()
        lease.release()
        with pytest.raises(RuntimeError, match="already"):
            lease.release()
        assert slots.in_use == 0


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "argv"),
        [
            ({"threads": 2}, ["--threads", "2"]),
            ({"cache_ram": 0}, ["--cache-ram", "0"]),
            ({"mlock": True, "jinja": False, "seed": None}, ["--mlock"]),
            ({"lora": ("a", "b")}, ["--lora", "a", "--lora", "b"]),
            ({"-ngl": 99}, ["-ngl", "99"]),
            ({"temp": 0.5}, ["--temp", "0.5"]),
        ],
    )
    def test_each_kind_of_value_becomes_its_flags(self, flags: dict[str, Flag], argv: list[str]) -> None:
        """Specification, "Engine launch": args are passed through unchecked."""
        assert render_flags(flags) == argv

    def test_settings_that_llama_server_leaves_open_are_given(self) -> None:
        """The port, the slots, the context of all slots, and a cache that is not shared."""
        ours = dict.fromkeys(("ROUNDHOUSE_API_KEYS", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"), "x")
        command = command_for(spec(args={"threads": 2}, env={"A": "1"}), {"PATH": "/bin", **ours})
        assert command.argv == (
            *("llama-server", "--model", "/models/m.gguf", "--alias", "m", "--host", "127.0.0.1", "--port", "9100"),
            *("--parallel", "3", "--ctx-size", "6144", "--metrics", "--slots", "--no-kv-unified", "--threads", "2"),
        )
        assert command.env == {"PATH": "/bin", "A": "1"}

    def test_a_command_replaces_the_program(self) -> None:
        """Specification, "Engine launch": the engine's ordinary flags follow it."""
        argv = command_for(spec(command=("nice", "srv"), model=None), {}).argv
        assert argv[:4] == ("nice", "srv", "--alias", "m")

    def test_a_repository_is_passed_as_one(self) -> None:
        """A model is a path or the id of a repository, as the engine takes it."""
        assert command_for(spec(model="org/repo:Q4"), {}).argv[1:3] == ("--hf-repo", "org/repo:Q4")

    def test_the_unified_cache_is_the_operators_choice(self) -> None:
        """Our default yields to args."""
        argv = command_for(spec(args={"kv_unified": True}), {}).argv
        assert "--no-kv-unified" not in argv
        assert "--kv-unified" in argv

    @pytest.mark.parametrize("name", ["port", "-np", "ctx_size", "--model"])
    def test_a_flag_of_llama_server_that_a_key_decides_is_refused(self, name: str) -> None:
        """Each setting is given in one place."""
        with pytest.raises(InvalidSpec, match=r"is decided by the key"):
            command_for(spec(args={name: 1}), {})


class TestLogRing:
    def test_lines_are_cut_from_any_chunks(self) -> None:
        """The pieces of output are not aligned with lines."""
        ring = LogRing()
        ring.begin_incarnation(1)
        for chunk in (b"on", b"e\r\ntw", b"o\n\xff", b"\n"):
            ring.add_output(1, chunk)
        assert [line.text for line in ring.tail(10)] == ["one", "two", "\ufffd"]
        assert [line.number for line in ring.tail(10, after=1)] == [2, 3]

    def test_memory_is_bounded(self) -> None:
        """A flood keeps the newest lines, and an endless line is cut."""
        ring = LogRing(max_lines=5)
        ring.begin_incarnation(1)
        for _ in range(100):
            ring.add_output(1, b"x" * 3000 + b"\n")
        ring.add_output(1, b"y" * 100_000)
        assert len(ring.tail(1000)) == 5
        assert max(len(line.text) for line in ring.tail(1000)) <= 8192

    def test_the_previous_incarnation_is_kept_and_older_ones_go(self) -> None:
        """The line that matters is often that of the engine that has just died."""
        ring = LogRing(max_lines=3)
        for incarnation in (1, 2, 3):
            ring.begin_incarnation(incarnation)
            ring.add_output(1, b"half a line of %d" % incarnation)
        ring.add_note("ours")
        told = [(line.incarnation, line.text) for line in ring.tail(10)]
        assert told == [(2, "half a line of 2"), (3, "half a line of 3"), (3, "[roundhouse] ours")]
        assert [line.incarnation for line in ring.tail(10, incarnation=2)] == [2]
        assert ring.tail(0) == ()


class TestPrompting:
    NOW = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)

    def test_the_bios_gives_the_setting_and_ends_with_what_changes(self) -> None:
        """Text that changes each minute stands last, so that prefix caches keep the rest."""
        bios = bios_prompt(BiosFacts(now=self.NOW))
        later = bios_prompt(BiosFacts(now=self.NOW.replace(minute=51)))
        assert bios.startswith(CONTEXT)
        assert bios.endswith("Saturday, 2026-11-21 09:30 UTC")
        assert bios[: bios.index("Now:")] == later[: later.index("Now:")]

    def test_the_order_is_bios_system_conversation(self) -> None:
        """Specification, "Message order": the order of messages is an invariant."""
        said = (Message(role="user", content="hi"),)
        assert stack_messages("BIOS", "SYSTEM", said) == (Message(role="system", content="BIOS\n\nSYSTEM"), *said)
        assert stack_messages("BIOS", "", said) == (Message(role="system", content="BIOS"), *said)
        assert stack_messages("", "", said) == said


class TestGeneration:
    def test_a_partial_answer_can_be_read_at_any_moment(self) -> None:
        """Output accumulates as it arrives."""
        times = iter([1.0, 2.0, 3.0, 4.0])
        generation = Generation(lambda: next(times))
        events: list[Event] = [PromptProgress(9, 0, 9, 1.0), ReasoningDelta("hm"), TextDelta("a"), TextDelta("b")]
        generation.touch()
        generation.receive(events[0])
        assert (generation.text, generation.first_token_at) == ("", None)
        generation.touch()
        for event in events[1:]:
            generation.receive(event)
        assert (generation.text, generation.reasoning, generation.first_token_at) == ("ab", "hm", 3.0)
        rest: list[Event] = [
            ToolCallDelta(0, "x", "f", "{}"),
            Finished("stop"),
            Usage(1, 2, 0),
            Timings(1, 1.0, 0, 2, 1.0),
        ]
        for event in rest:
            generation.receive(event)
        assert (generation.finish_reason, generation.usage, generation.output_tokens) == ("stop", Usage(1, 2, 0), 2)

    def test_bytes_and_events_are_separate_evidence(self) -> None:
        """A ping is a byte, but no progress of the model."""
        times = iter([0.0, 1.0, 2.0])
        generation = Generation(lambda: next(times))
        generation.touch()
        generation.receive(TextDelta("a"))
        generation.touch()
        assert (generation.last_byte_at, generation.last_progress_at) == (2.0, 1.0)


def test_the_tiny_model_is_made_once(tiny_model: Path, tmp_path: Path) -> None:
    """Two processes may ask at once; a half-made file is never seen, and a finished one is left alone."""
    from workers.engine.embedded.tiny_model import ensure_tiny_model  # noqa: PLC0415

    again = ensure_tiny_model(tmp_path / "models" / "tiny.gguf")
    made = again.stat().st_mtime_ns
    assert again.read_bytes() == tiny_model.read_bytes()
    assert ensure_tiny_model(again).stat().st_mtime_ns == made
    assert [path.name for path in again.parent.iterdir()] == ["tiny.gguf"]


async def test_a_requests_time_stands_still_with_its_engine() -> None:
    """A request that an update pauses must not end with ``deadline`` for it; a second pause changes nothing."""
    running = InFlightRequest(RequestId(1), "a job", Answer(time.monotonic))
    running.thaw()
    began_at = anyio.current_time()
    scope = running.answer.deadline = anyio.CancelScope(deadline=began_at + 5.0)
    running.freeze()
    running.freeze()
    assert scope.deadline == math.inf
    await anyio.lowlevel.checkpoint()
    running.thaw()
    rounding = 1e-6
    assert began_at + 5.0 - rounding <= scope.deadline <= anyio.current_time() + 5.0 + rounding
    running.thaw()
    assert scope.deadline < math.inf
