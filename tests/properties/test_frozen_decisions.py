"""The core decides as it did before, word for word; ``test_simulated_node`` holds records so.

Digests change only in a commit of their own, which names the sentence of the specification that it corrects:
``RENEW_FROZEN=1 pytest tests/properties/test_frozen_decisions.py -m ""`` writes them.
"""

import pytest

from service.conversations.job.job import TurnKey
from tests.harness.core_course import Course
from tests.harness.frozen import digests_of, frozen, run_seeds

COURSES, CHUNKS = 30, 5


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.system) for chunk in range(1, CHUNKS))])
def test_the_core_decides_as_before(chunk: int) -> None:
    """Events in, actions out, in 150 runs: turns, tools, callers, programs, heirs, trials, lost models, restarts."""
    seeds = range(chunk * COURSES, (chunk + 1) * COURSES)
    ran = run_seeds("core_course", seeds)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    assert digests_of(ran) == frozen("core_course", digests_of(ran))


def test_a_lost_turn_is_found() -> None:
    """Each kind of queued turn is accounted for: a lost one is a fault of the core."""
    found: set[str] = set()
    for seed in range(40):
        course = Course(seed)
        course.run(steps=60, drains=False)
        for live in course.core._flow.jobs.values():
            for talk in live.conversations.values():
                for kind, keys in (("awaited", talk.awaited), ("open", talk.open)):
                    if keys and talk.ending is None and not live.is_cancelled and not talk.order.is_over:
                        lost: TurnKey = min(keys)
                        setattr(talk, kind, type(keys)(keys - {lost}))
                        faults = [fault for fault in course.core.check() if fault and str(lost) in fault]
                        assert faults, f"{lost} was {kind}"
                        setattr(talk, kind, keys)
                        found.add(kind)
    assert found == {"awaited", "open"}
