"""The judgement on engines of others (specification, "Engines of others"), pure: time is passed in."""

from typing import Any

import pytest

from service.cli.engine_probe import (
    ANSWERED,
    BUSY_S,
    DENIED,
    HANGS,
    LOADING,
    REFUSED,
    SILENT,
    STALE_S,
    UNSURE,
    WORKS,
    HttpAnswer,
    Look,
    Reading,
    Tree,
    decode_counts,
    judge,
    target_of,
    wants_canary,
)

LIMIT_S = 120.0
STILL = {"vllm:iteration_tokens_total_count": 7.0}
MOVED = {"vllm:iteration_tokens_total_count": 8.0}
HOLDERS = {"100": 5}


def seen(at: float, **more: object) -> Look:
    """A look that took no time, at an engine that counts and answers no canary."""
    given: dict[str, object] = {"boot": "b", "engine": "vllm", "path": "/metrics", "counters": STILL, "canary": SILENT}
    return Look(**{"at": at, "ended_at": at, **given, **more})


def tree(cpu_s: float, **more: object) -> Tree:
    return Tree(holders=HOLDERS, cpu={"100": cpu_s}, **more)


def judged(*looks: Look, limit_s: float = LIMIT_S) -> Reading:
    """The verdict on the last look."""
    reading: Reading | None = None
    for look in looks:
        reading = judge(reading, look, limit_s)
    assert reading is not None
    return reading


def silent_for(seconds: float, **more: object) -> list[Look]:
    """Looks every 10 s."""
    return [seen(float(at), **more) for at in range(0, int(seconds) + 1, 10)]


def working_tree(cores: float, seconds: float, **more: object) -> list[Look]:
    """Looks every 10 s at an engine whose processes use so many cores."""
    looks = silent_for(seconds)
    for look in looks:
        look.tree = tree(cores * look.at, **more)
    return looks


def test_an_engine_that_counts_steps_hangs_after_the_limit() -> None:
    """Both are needed: counters that stand still, and canaries without an answer, for the whole limit."""
    assert judged(*silent_for(110)).verdict == SILENT
    hung = judged(*silent_for(120))
    assert hung.verdict == HANGS
    assert hung.reason == "no sign of life for 120 s of 120 s: its counters stand still, and it answers no canary"


@pytest.mark.parametrize("sign", [{"counters": MOVED}, {"canary": ANSWERED}, {"has_moved": True}])
def test_one_sign_of_life_starts_the_count_again(sign: dict[str, Any]) -> None:
    """A canary that waits behind others proves nothing while the counters move, and the reverse."""
    looks = [*silent_for(110), seen(115, **sign)]
    assert judged(*looks).verdict == WORKS
    after = {"counters": MOVED} if "counters" in sign else {}
    assert judged(*looks, seen(120, **after), seen(230, **after)).verdict == SILENT
    assert judged(*looks, seen(120, **after), seen(240, **after)).verdict == HANGS


def test_counters_that_go_down_are_a_new_start() -> None:
    """A restarted engine counts from zero."""
    assert judged(*silent_for(110), seen(121, counters={"vllm:iteration_tokens_total_count": 0.0})).verdict == WORKS


def test_the_first_reading_of_a_silent_engine_is_no_proof() -> None:
    """Nothing is known of the time before."""
    assert judged(seen(5000)).verdict == SILENT


@pytest.mark.parametrize("change", ["boot", "gap", "back"])
def test_a_reading_of_another_time_does_not_count(change: str) -> None:
    """After a boot, a gap or a clock that went back nothing is known of the time between."""
    last = {
        "boot": seen(125, boot="c"),
        "gap": seen(110 + 2 * LIMIT_S + 1),
        "back": seen(3),
    }
    assert judged(*silent_for(110), last[change]).verdict == SILENT


def test_calls_farther_apart_than_a_short_limit_count() -> None:
    """An orchestrator calls every 30 s, whatever the limit is."""
    assert STALE_S > 30
    assert judged(seen(0), seen(30), limit_s=5.0).verdict == HANGS


def test_another_process_at_the_port_starts_the_count_again() -> None:
    """It has the counters of the one before if both have counted nothing."""
    looks = working_tree(0.0, 110)
    other = seen(121, tree=Tree(holders={"100": 9}, cpu={"100": 0.0}))
    assert judged(*looks, other).verdict == SILENT


def test_an_engine_that_computes_is_busy() -> None:
    """A prompt of 100 s is one batch on a CPU: nothing is counted, no canary answered."""
    assert judged(*working_tree(0.9, 100), limit_s=10.0).verdict == WORKS
    assert judged(*working_tree(0.9, 200)).verdict == WORKS
    assert judged(*working_tree(0.9, LIMIT_S + BUSY_S + 10)).verdict == HANGS


def test_looks_in_quick_succession_see_what_the_last_measurement_saw() -> None:
    """The clock of processes ticks a hundred times a second, so two looks of one moment measure nothing."""
    looks = working_tree(0.9, 120)
    quick = seen(120.3, tree=tree(0.9 * 120))
    assert judged(*looks, quick, limit_s=10.0).verdict == WORKS
    assert judged(*silent_for(120), seen(121, tree=tree(9.0))).verdict == UNSURE


def test_an_engine_that_computes_nothing_hangs_after_the_limit() -> None:
    """Idle processes are a proof, also without counters."""
    assert judged(*working_tree(0.01, 110)).verdict == SILENT
    for look in (looks := working_tree(0.01, 120)):
        look.counters, look.engine = None, None
    assert judged(*looks).verdict == HANGS


def test_a_stopped_process_is_a_proof_while_others_compute() -> None:
    """A frozen worker is waited for by processes that may spin."""
    assert judged(*working_tree(1.0, 120, stopped="7 (VLLM::Worker)")).reason.endswith("7 (VLLM::Worker) is stopped")


def test_the_cpu_says_nothing_about_an_engine_on_a_gpu() -> None:
    """It may spin while its GPU hangs."""
    assert judged(*working_tree(1.0, 120, has_gpu=True)).verdict == HANGS


def test_a_compiler_below_an_engine_speaks_for_it() -> None:
    """The first request of its shape waits until kernels are made, for minutes."""
    assert judged(*working_tree(1.0, 500, has_gpu=True, compiler="ptxas")).verdict == WORKS


def test_llama_cpp_without_a_view_of_its_processes_may_compute_one_batch() -> None:
    """It counts batches, and one may take minutes on a CPU that is elsewhere."""
    assert judged(*silent_for(200, engine="llama.cpp")).verdict == UNSURE
    assert judged(*silent_for(LIMIT_S + BUSY_S, engine="llama.cpp")).verdict == HANGS


def test_no_counters_and_no_view_of_processes_are_never_a_proof() -> None:
    """A canary alone may wait behind others for ever."""
    assert judged(*silent_for(5000, counters=None)).verdict == UNSURE


@pytest.mark.parametrize(
    "look",
    [
        {"front": REFUSED, "counters": None, "canary": None},
        {"front": LOADING, "counters": None, "canary": None},
        {"front": DENIED, "counters": None, "canary": None},
        {"canary": DENIED},
        {"canary": REFUSED},
        {"asleep": "it is asleep"},
    ],
)
def test_what_cannot_be_asked_is_unknown(look: dict[str, Any]) -> None:
    """An engine that starts, refuses a key or sleeps owes nothing; the count starts again."""
    assert judged(*silent_for(110), seen(125, **look)).verdict == UNSURE
    assert judged(*silent_for(110), seen(125, **look), seen(130)).verdict == SILENT


def test_a_front_end_that_answers_nothing_hangs_if_its_engine_was_known() -> None:
    """One that has never answered may still be starting."""
    mute = {"front": SILENT, "counters": None, "canary": None}
    looks = [seen(float(at), **mute) for at in range(10, 131, 10)]
    assert judged(seen(0, canary=ANSWERED), *looks).verdict == HANGS
    assert judged(*(seen(look.at, **mute, engine=None) for look in looks)).verdict == UNSURE


def test_a_full_queue_counts_as_silence_if_the_engine_has_requests() -> None:
    """A hung engine's queue fills, and then it refuses."""
    assert judged(*silent_for(120, canary=REFUSED, requests=3)).verdict == HANGS


def test_a_canary_is_asked_only_if_nothing_else_can_tell() -> None:
    """It is a request, and it may wait."""
    proven = judged(seen(0, canary=ANSWERED))
    assert not wants_canary(proven, seen(5), LIMIT_S)
    assert wants_canary(proven, seen(5, requests=1), LIMIT_S)
    assert not wants_canary(proven, seen(5, requests=1, counters=MOVED), LIMIT_S)
    assert wants_canary(proven, seen(11), LIMIT_S)
    assert not wants_canary(proven, seen(11, asleep="it is asleep"), LIMIT_S)
    assert wants_canary(None, seen(0), LIMIT_S)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"[1, null]", b'{"internal_states": 7}', b"vllm:x NaN", b"<html>"])
def test_odd_answers_are_no_counts(body: bytes) -> None:
    """Anything may listen there."""
    look = Look()
    decode_counts(HttpAnswer(status=200, body=body), look)
    assert not look.counters


@pytest.mark.parametrize(
    ("url", "host", "port", "base"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://localhost", "localhost", 80, ""),
        ("https://u:p@models.example/a/v1/", "models.example", 443, "/a"),
        ("http://[::1]:30000/v1", "::1", 30000, ""),
    ],
)
def test_addresses_are_read(url: str, host: str, port: int, base: str) -> None:
    """With or without the path of OpenAI's API."""
    target = target_of(url)
    assert (target.host, target.port, target.base) == (host, port, base)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "x:y", "x:0", "x:70000", "http://[::1"])
def test_wrong_addresses_are_refused(url: str) -> None:
    """With a message instead of a verdict."""
    with pytest.raises(ValueError, match="address"):
        target_of(url)
