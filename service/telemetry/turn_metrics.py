"""Metrics of turns, counted as facts come: a few additions per turn, none per token."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from service.conversations.job.job import TurnKind
from service.conversations.job.states import ENDED_CONVERSATIONS
from service.conversations.record.measures import AttemptMeasures, RequestMeasures
from service.store.records import ConversationMoved, Record, TurnEnded, TurnMoved, TurnRequeued
from workers.tools.calls import ToolRecord

WAIT_BUCKETS: Final = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
JOB: Final = "job"
REQUEST: Final = "request"
MOST_TOOLS: Final = 100  # label values: jobs choose the names of tools


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """The series of one source and model, cached: looking one up takes as long as adding to it."""

    labels: tuple[str, str]
    wait: Histogram
    duration: Histogram
    first_token: Histogram
    token: Histogram


class TurnMetrics:
    """``model_name`` and ``tool_name`` bound the number of names; ``source`` is ``job`` or ``request``."""

    def __init__(
        self, registry: CollectorRegistry, model_name: Callable[[str], str], tool_name: Callable[[str], str]
    ) -> None:
        self._model_name = model_name
        self._tool_name = tool_name
        self._places: dict[tuple[str, str], _Place] = {}
        ended, place = ("source", "model", "outcome", "reason"), ("source", "model")

        def seconds(
            name: str, text: str, labels: Sequence[str] = place, buckets: Sequence[float] = WAIT_BUCKETS
        ) -> Histogram:
            return Histogram(f"roundhouse_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        def count(name: str, text: str, labels: Sequence[str]) -> Callable[..., Counter]:
            return cache(Counter(f"roundhouse_{name}", text, labels, registry=registry).labels)

        self._turns = count("turns", "Turns that have ended.", ended)
        self._attempts = count("attempts", "Attempts on slots that have ended.", ended)
        self._tokens = count("tokens", "Tokens of attempts that have ended.", (*place, "kind"))
        self._conversations = count("conversations", "Conversations that have ended.", ("outcome",))
        self._waits = seconds("queue_wait", "Time that turns waited for a slot.")
        self._durations = seconds("turn_duration", "Time of turns from becoming ready to their end.")
        self._first_tokens = seconds("time_to_first_token", "Time from getting a slot to the first token.")
        self._token_times = seconds(
            "time_per_output_token", "Mean time per token after the first.", place, TOKEN_BUCKETS
        )
        self._tools = Counter(
            "roundhouse_tool_calls", "Tool calls that models made.", ("tool", "outcome", "reason"), registry=registry
        )
        self._tool_times = seconds("tool_call", "Duration of tool calls.", ("tool",))

    def __repr__(self) -> str:
        return "<TurnMetrics>"

    def count_facts(self, facts: Iterable[Record]) -> None:
        """Count the moves and ends of jobs' turns."""
        for fact in facts:
            match fact:
                case TurnMoved() if fact.waited_s is not None:
                    self._place(JOB, fact.model).wait.observe(fact.waited_s)
                case TurnEnded():
                    self._end_turn(fact)
                case TurnRequeued() if fact.measures is not None:
                    self._count_attempt(JOB, fact.measures)
                    self._count_tools(fact.so_far.attempts[-1].tool_calls)
                case ConversationMoved() if fact.state in ENDED_CONVERSATIONS:
                    self._conversations(fact.state.value).inc()

    def take_request(self, request: RequestMeasures) -> None:
        """Count a client's ended request."""
        place = self._place(REQUEST, request.model)
        self._turns(*place.labels, request.outcome.value, request.reason or "").inc()
        place.wait.observe(request.waited_s)
        for attempt in request.attempts:
            self._count_attempt(REQUEST, attempt)
        if request.attempts:
            place.duration.observe(request.seconds)

    def _end_turn(self, fact: TurnEnded) -> None:
        turn, place = fact.turn, self._place(JOB, fact.model)
        if turn.kind is TurnKind.SUMMARY:  # counts as an attempt, not as a turn
            if fact.measures is not None:
                self._count_attempt(JOB, fact.measures)
            return
        self._turns(*place.labels, turn.state.value, turn.reason or "").inc()
        if fact.measures is None:  # it ended without a slot, and its attempts are counted already
            return
        self._count_attempt(JOB, fact.measures)
        self._count_tools(turn.tool_calls)
        if turn.queued_at is not None and turn.finished_at is not None:
            place.duration.observe(max(0.0, (turn.finished_at - turn.queued_at).total_seconds()))

    def _count_attempt(self, source: str, attempt: AttemptMeasures) -> None:
        place, used = self._place(source, attempt.model), attempt.used
        self._attempts(*place.labels, attempt.outcome.value, attempt.reason or "").inc()
        tokens = {
            "prompt": used.prompt_tokens,
            "cached": used.cached_tokens,
            "answer": used.answer_tokens,
            "wasted": used.wasted_tokens,
        }
        for kind, count in tokens.items():
            if count:
                self._tokens(*place.labels, kind).inc(count)
        if attempt.first_token_s is not None:
            place.first_token.observe(attempt.first_token_s)
        if attempt.token_s is not None:
            place.token.observe(attempt.token_s)

    def _place(self, source: str, model: str) -> "_Place":
        labels = (source, self._model_name(model))
        place = self._places.get(labels)
        if place is None:
            place = self._places[labels] = _Place(
                labels=labels,
                wait=self._waits.labels(*labels),
                duration=self._durations.labels(*labels),
                first_token=self._first_tokens.labels(*labels),
                token=self._token_times.labels(*labels),
            )
        return place

    def _count_tools(self, calls: Iterable[ToolRecord]) -> None:
        for call in calls:
            name = self._tool_name(call.name)
            outcome = "completed" if call.reason is None else "failed"
            self._tools.labels(name, outcome, call.reason or "").inc()
            self._tool_times.labels(name).observe(call.duration_s)
