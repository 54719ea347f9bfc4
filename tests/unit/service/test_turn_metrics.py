"""Metrics of turns, and the bound of their series when users choose the names."""

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.record.measures import AttemptMeasures, RequestMeasures, UsageCounts
from service.conversations.record.transcript import Turn
from service.store.records import ConversationMoved, TurnEnded, TurnMoved
from service.telemetry.metrics import MOST_MODELS, OTHER, CappedNames, Metrics
from service.telemetry.turn_metrics import MOST_TOOLS
from workers.tools.calls import ToolRecord

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = TurnKey(JobId("j"), "c", "a", 0)
HOSTILE = [f'{number}\ud800\n"{"x" * (number % 1000)}' for number in range(10_000)]
ATTEMPT = AttemptMeasures(
    model="m",
    worker="m-0",
    incarnation=1,
    outcome=TurnState.COMPLETED,
    reason=None,
    began_at=NOW,
    seconds=2.0,
    used=UsageCounts(turns=1, attempts=1, prompt_tokens=10, cached_tokens=4, answer_tokens=5, slot_s=2.0),
    usage=(10, 4, 5),
    first_token_s=0.2,
    token_s=0.03,
)


class Told:
    """The text of an exposition, without the buckets of histograms."""

    def __init__(self, metrics: Metrics) -> None:
        families = text_string_to_metric_families(metrics.exposition().decode())
        self.samples = [each for family in families for each in family.samples if not each.name.endswith("_bucket")]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples with this name and these labels; None if there are none."""
        found = [
            each.value
            for each in self.samples
            if each.name == f"roundhouse_{name}" and labels.items() <= each.labels.items()
        ]
        return sum(found) if found else None

    def values(self, name: str, label: str) -> set[str]:
        return {each.labels[label] for each in self.samples if each.name == f"roundhouse_{name}"}


def ended(model: str = "m", tool: str = "t", attempt: AttemptMeasures | None = ATTEMPT) -> TurnEnded:
    call = ToolRecord(iteration=0, id="1", name=tool, arguments={}, result=1, duration_s=0.5)
    turn = Turn(
        key=KEY, state=TurnState.COMPLETED, tool_calls=(call,), queued_at=NOW, finished_at=NOW + timedelta(seconds=3)
    )
    measures = None if attempt is None else replace(attempt, model=model)
    return TurnEnded(turn=turn, at=NOW, model=model, measures=measures)


def test_a_turn_is_counted_with_its_tokens_and_times() -> None:
    """Each is counted once, at the turn's end."""
    metrics = Metrics(["m"])
    started = TurnMoved(key=KEY, state=TurnState.IN_FLIGHT, worker="m-0", at=NOW, model="m", waited_s=1.5)
    over = ConversationMoved(
        job_id=KEY.job_id, conversation_id="c", state=ConversationState.COMPLETED, reason=None, at=NOW
    )
    metrics.turns.count_facts([started, ended(), over])
    told = Told(metrics)
    assert told.value("turns_total", source="job", model="m", outcome="completed", reason="") == 1
    assert told.value("attempts_total", source="job", model="m", outcome="completed", reason="") == 1
    kinds = {"prompt": 10, "cached": 4, "answer": 5, "wasted": None}
    assert {kind: told.value("tokens_total", source="job", kind=kind) for kind in kinds} == kinds
    assert told.value("queue_wait_seconds_sum", source="job", model="m") == 1.5
    assert told.value("turn_duration_seconds_sum", source="job", model="m") == 3.0
    assert told.value("time_to_first_token_seconds_sum", source="job", model="m") == 0.2
    assert told.value("time_per_output_token_seconds_sum", source="job", model="m") == 0.03
    assert told.value("tool_calls_total", tool="t", outcome="completed", reason="") == 1
    assert told.value("conversations_total", outcome="completed") == 1


def test_a_turn_that_ends_without_a_slot_does_not_count_its_attempts_again() -> None:
    """They were counted as they ended, with their tools."""
    metrics = Metrics(["m"])
    metrics.turns.count_facts([ended(attempt=None)])
    told = Told(metrics)
    assert [told.value(name) for name in ("turns_total", "attempts_total", "tool_calls_total")] == [1, None, None]


def test_a_clients_request_counts_beside_turns_of_jobs() -> None:
    """The label ``source`` separates them. A request that never had a slot has no attempts and no time on a slot."""
    metrics = Metrics(["m"])
    request = RequestMeasures(
        key=KEY,
        path="/v1/chat/completions",
        model="m",
        adapter=None,
        outcome=TurnState.COMPLETED,
        reason=None,
        began_at=NOW,
        seconds=2.5,
        waited_s=0.5,
        attempts=[ATTEMPT],
    )
    gone = replace(request, outcome=TurnState.CANCELLED, reason="cancelled", attempts=[])
    metrics.turns.take_request(request)
    metrics.turns.take_request(gone)
    told = Told(metrics)
    assert told.value("turns_total", source="request", outcome="completed", reason="") == 1
    assert told.value("turns_total", source="request", outcome="cancelled", reason="cancelled") == 1
    assert told.value("attempts_total", source="request") == 1
    assert told.value("turn_duration_seconds_count", source="request") == 1
    assert told.value("queue_wait_seconds_count", source="request") == 2


def test_no_name_that_users_choose_adds_series_without_bound() -> None:
    """There are 10,000 models and tools with names of any length and characters.

    The exposition is bounded and valid.
    """
    metrics = Metrics(["m"])
    metrics.turns.count_facts([ended(model=name, tool=name) for name in HOSTILE])
    metrics.turns.count_facts([ended()])  # the configured model has its place, however late it comes
    told = Told(metrics)
    models, tools = told.values("turns_total", "model"), told.values("tool_calls_total", "tool")
    assert {"m", OTHER} <= models
    assert (len(models), len(tools)) == (MOST_MODELS + 2, MOST_TOOLS + 1)
    assert told.value("tool_calls_total", tool=OTHER) == len(HOSTILE) + 1 - MOST_TOOLS
    assert len(told.samples) < 30 * (MOST_MODELS + MOST_TOOLS)


def test_a_name_keeps_its_place() -> None:
    """The first names keep theirs, and a name that came too late is never shown later."""
    names = CappedNames(2, known=["known"])
    assert [names(name) for name in ("a", "b", "a", "known", "b")] == ["a", OTHER, "a", "known", OTHER]
