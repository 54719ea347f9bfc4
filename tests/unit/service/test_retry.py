import pytest

from service.scheduling.retry import Strikes, Suspicion, strike
from tests.unit.service.jobs import key
from workers.outcome import EngineFailed, FailureReason


def failed(reason: FailureReason, *, death: bool) -> EngineFailed:
    return EngineFailed(reason=reason, detail="", brought_down=death)


DEATH = failed(FailureReason.ENGINE_DIED, death=True)
COLLATERAL = failed(FailureReason.ENGINE_DIED, death=False)
REFUSAL = failed(FailureReason.ENGINE_REJECTED, death=False)
BROKEN = failed(FailureReason.ENGINE_UNREACHABLE, death=False)


@pytest.mark.parametrize(
    ("failures", "has_other", "ending"),
    [
        ([DEATH], False, None),
        ([DEATH, DEATH], False, FailureReason.POISONED),
        ([DEATH] * 9, True, None),
        ([failed(FailureReason.STALLED_DECODE, death=True)] * 2, False, FailureReason.POISONED),
        ([COLLATERAL] * 99, False, None),
        ([REFUSAL] * 4, False, None),
        ([REFUSAL] * 5, False, FailureReason.ENGINE_REJECTED),
        ([REFUSAL, BROKEN] * 2 + [BROKEN], False, FailureReason.ENGINE_UNREACHABLE),
        ([REFUSAL] * 4 + [DEATH], False, None),
    ],
)
def test_a_turn_is_tried_again_until_it_was_the_cause(
    failures: list[EngineFailed], has_other: bool, ending: FailureReason | None
) -> None:
    """Contract 5.5: until it has brought down two incarnations; a neighbour of the cause is never charged."""
    strikes, reason = Strikes(), None
    for number, each in enumerate(failures):
        assert reason is None, f"given up before failure {number}"
        strikes, reason = strike(strikes, each, has_other_suspect=has_other)
    assert reason is ending


def test_suspicion_falls_on_who_was_aboard() -> None:
    """A death is charged to the suspect of that incarnation, and to everybody where there was none."""
    suspicion = Suspicion()
    suspicion.board("w", 2, key("a"))
    assert suspicion.falls_on_another("w", 2, key("b"))
    assert not suspicion.falls_on_another("w", 2, key("a"))
    assert not suspicion.falls_on_another("w", 3, key("b"))
    assert not suspicion.falls_on_another("v", 2, key("b"))
    suspicion.leave(key("a"))
    assert not suspicion.falls_on_another("w", 2, key("b"))
