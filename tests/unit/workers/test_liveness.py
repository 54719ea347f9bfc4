"""Verdicts without an engine: the pure judge, and the detector of repetition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.liveness import (
    EngineObservations,
    Judgement,
    RequestObservations,
    Scope,
    StallLimits,
    Verdict,
    judge,
)
from workers.policy.pace import EnginePace
from workers.policy.repetition import Repetition, RepetitionLimits

LIMITS = StallLimits(prefill_s=120, decode_s=60)


READING = RequestObservations(has_token=False, progress_at=1000.0)


WRITING = RequestObservations(has_token=True, progress_at=1000.0)


SERVING = EngineObservations(is_serving=True)


def look(request: RequestObservations, engine: EngineObservations, after_s: float) -> tuple[Verdict, Scope | None]:
    told = judge(LIMITS, request, engine, 1000.0 + after_s)
    return told.verdict, told.scope


class TestJudge:
    @pytest.mark.parametrize(
        ("request_signs", "after_s", "verdict"),
        [
            (READING, 1, Verdict.PREFILLING),
            (WRITING, 1, Verdict.DECODING),
            (READING, 5, Verdict.SILENT),
            (WRITING, 59.9, Verdict.SILENT),
            (READING, 119.9, Verdict.SILENT),
            (READING, 120, Verdict.STALLED),
            (WRITING, 60, Verdict.STALLED),
        ],
    )
    def test_each_phase_has_its_limit(
        self, request_signs: RequestObservations, after_s: float, verdict: Verdict
    ) -> None:
        """Specification, "Progress": the limit is on progress, not on the time to the first token."""
        assert look(request_signs, SERVING, after_s)[0] is verdict

    def test_a_server_that_answers_others_may_hold_a_request_back(self) -> None:
        """It may do so while others show signs of life.

        Once it has begun to answer, or answers no request, its limit counts.
        """
        limits = StallLimits(prefill_s=120, decode_s=60, busy_s=900)
        waiting = RequestObservations(has_token=False, has_begun=False, progress_at=1000.0)

        def verdict(request: RequestObservations, after_s: float, answered_s: float | None) -> Verdict:
            at = None if answered_s is None else 1000.0 + answered_s
            engine = EngineObservations(is_serving=True, others_at=at, answering_at=at)
            return judge(limits, request, engine, 1000.0 + after_s).verdict

        assert verdict(waiting, 500, 499) is Verdict.SILENT
        assert verdict(waiting, 500, 381) is Verdict.SILENT  # from the end of another it has its whole limit
        assert verdict(waiting, 500, 380) is Verdict.STALLED
        assert verdict(waiting, 500, None) is Verdict.STALLED
        assert verdict(waiting, 1020, 1019) is Verdict.STALLED
        assert verdict(READING, 500, 499) is Verdict.STALLED

    def test_a_limit_of_null_never_stalls(self) -> None:
        """Null switches a limit off."""
        none = StallLimits(prefill_s=None, decode_s=None)
        assert judge(none, READING, SERVING, 1e9).verdict is Verdict.SILENT

    def test_without_a_process_the_engine_is_dead(self) -> None:
        """Whatever else is known."""
        assert look(READING, EngineObservations(is_serving=False), 1)[0] is Verdict.DEAD

    def test_the_prefill_limit_grows_with_the_prompt(self) -> None:
        """At the measured rate: 100,000 tokens at 50 a second take 2,000 seconds more."""
        speed = EnginePace().learned(tokens=1000, seconds=20, chars=4000, prompt_tokens=1000)
        assert (speed.tokens_per_s, speed.tokens_a_char) == (50, 0.25)
        long = RequestObservations(has_token=False, progress_at=1000.0, prefill_left_s=speed.seconds_for(100_000))
        assert look(long, SERVING, 2119)[0] is Verdict.SILENT
        assert look(long, SERVING, 2120)[0] is Verdict.STALLED
        slower = speed.learned(tokens=1000, seconds=100, chars=4000, prompt_tokens=1000)
        assert slower.tokens_per_s == 30
        frozen = slower.learned(tokens=64, seconds=600, chars=400, prompt_tokens=64)
        assert frozen.tokens_per_s == 10
        assert speed.learned(tokens=3, seconds=9, chars=12, prompt_tokens=3) == speed
        assert EnginePace().seconds_for(1e6) == 0

    @given(st.floats(0, 1e6), st.floats(0, 119))
    def test_a_rising_counter_prevents_every_kill(self, silent_s: float, ago: float) -> None:
        """If no other request explains the counter of a slot, it may be ours."""
        now = 1000.0 + silent_s
        risen = EngineObservations(is_serving=True, rose_at=now - ago, unexplained_at=now - ago)
        assert judge(LIMITS, READING, risen, now).scope is None

    @given(st.floats(120, 1e6))
    def test_a_sign_of_life_older_than_the_limit_prevents_no_verdict(self, silent_s: float) -> None:
        """The limit counts from the last sign of any kind."""
        now = 1000.0 + silent_s
        risen = EngineObservations(is_serving=True, rose_at=now - 120, unexplained_at=now - 120, others_at=now - 120)
        assert judge(LIMITS, READING, risen, now).scope is Scope.ENGINE

    def test_a_request_may_stall_alone(self) -> None:
        """Others progress and explain every slot that works: the request ends, and its engine does not."""
        others = EngineObservations(is_serving=True, rose_at=1060.0, others_at=1060.0, unexplained_at=None)
        assert look(WRITING, others, 60) == (Verdict.STALLED, Scope.REQUEST)

    def test_a_prompt_that_waits_behind_another_prompt_is_not_stalled(self) -> None:
        """llama-server reads one prompt after the other, so another prompt's progress explains the wait."""
        reading = EngineObservations(is_serving=True, rose_at=1119.0, others_at=1119.0, prefilling_at=1119.0)
        assert look(READING, reading, 120) == (Verdict.SILENT, None)
        assert look(WRITING, reading, 120) == (Verdict.STALLED, Scope.REQUEST)


def repeats(*pieces: str, lines: int | None = 8) -> str | None:
    """Return the detector's verdicts on these pieces and their end."""
    detector = Repetition(RepetitionLimits(lines=lines))
    for piece in pieces:
        found = detector.feed(piece)
        if found is not None:
            return found
    return detector.end_text()


class TestRepetition:
    def test_the_same_line_again_and_again_is_a_loop(self) -> None:
        """Specification, "Repetition": the last line needs no line break, and pieces may be cut anywhere."""
        assert repeats("I see.\n" * 7) is None
        assert "8 times" in (repeats("I see.\n" * 7 + "I see.") or "")
        assert repeats(*("I see.\n" * 8)) is not None
        assert repeats("  I see.\n\n" * 8) is not None
        assert repeats("I see.\n" * 7 + "No.\n" + "I see.\n" * 7) is None
        assert repeats("I see.\n" * 3, lines=3) is not None
        assert repeats("I see.\n" * 1000, lines=None) is None

    @pytest.mark.parametrize(
        "text",
        [
            "\n" * 500,
            "```\n" * 50,
            "|---|---|\n" * 50,
            "----\n" * 50,
            "```\n" + "    0, 0,\n" * 40 + "```\n",
            "".join(f"```python\nprint({number})\n```\n" for number in range(50)),
            "}\n" * 60,
            "no " * 60,
            "=" * 2000,
            "".join(f"| {number} | same |\n" for number in range(200)),
        ],
    )
    def test_lines_that_repeat_for_a_reason_are_no_loop(self, text: str) -> None:
        """Code fences and their contents, table rules, blank lines, braces, a short chant."""
        assert repeats(text) is None

    @pytest.mark.parametrize(
        "text",
        [
            "round and round " * 100,
            "ha" * 400,
            "first\nsecond\nthird, and again\n" * 40,
            "x" * 700,
            " " * 5000,
            "\n" * 5000,
            "```\n" + "mov ax, bx\n" * 70,
            "a whole paragraph of quite some length, in which nothing else is said than this one thing. " * 12,
        ],
        ids=["phrase", "syllable", "three lines", "letter", "blanks", "blank lines", "in a fence", "paragraph"],
    )
    def test_a_loop_without_line_breaks_is_found(self, text: str) -> None:
        """One phrase may repeat, or several lines."""
        assert repeats(*(text[start : start + 37] for start in range(0, len(text), 37))) is not None

    @given(st.lists(st.text(alphabet="abc de\n.", min_size=1, max_size=40), max_size=60, unique=True))
    def test_text_that_goes_on_is_no_loop(self, pieces: list[str]) -> None:
        """However it is cut, the detector's verdict on a text with only new lines is the same."""
        text = "".join(f"{number} {piece}" for number, piece in enumerate(pieces))
        if len(set(text.split("\n"))) == len(text.split("\n")):
            assert repeats(*text, lines=8) == repeats(text, lines=8)


def test_a_judgement_says_how_long_it_has_been() -> None:
    """Users are shown the time."""
    assert judge(LIMITS, WRITING, SERVING, 1010.0) == Judgement(verdict=Verdict.SILENT, silent_s=10.0, limit_s=60)
