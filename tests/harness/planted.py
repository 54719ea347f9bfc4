"""Faults planted in the service, one at a time, each like a slip of a programmer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from service.conversations.document import job_parser
from service.conversations.job import until
from service.conversations.job.job import SpokenBy
from service.conversations.job.validation import Validation
from service.conversations.record import heritage, transcript
from service.conversations.talk import discussion, prompt_messages
from service.conversations.talk.discussion import Discussion
from service.conversations.talk.prompt_messages import PromptWriter
from service.scheduling import turn_record
from service.scheduling.asking import composed, judging, memories, prompts
from service.scheduling.asking.memories import Memories
from service.scheduling.asking.prompts import JobPrompts
from service.scheduling.asking.talks import JobTalks
from service.scheduling.core import flow
from workers.policy.continuation import Continuation
from workers.requests import answer_begins, tool_loop
from workers.requests.halves import HalfAnswer

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Planted:
    """One fault: the factors of the jobs that can meet it, of which some have a ``fixed`` level.

    With ``kills`` it is met only by jobs whose engines are killed.
    """

    name: str
    factors: Sequence[str]
    plant: Plant
    fixed: Mapping[str, str] = field(default_factory=dict)
    kills: bool = False


def around(owner: object, name: str, make: Callable[[Any], Any]) -> Plant:
    """Return what puts another function in place of one; ``make`` is given the one that stands there."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def without_last(true: Any) -> Any:  # noqa: ANN401
    return lambda *given, **named: true(*given, **named)[:-1]


def with_all_words(true: Any) -> Any:  # noqa: ANN401
    return lambda *given, **named: true(*given, **{**named, "hears_all": True})


def words_of_callers_lost(true: Any) -> Any:  # noqa: ANN401
    def add(self: Discussion, agent_id: str, number: int, words: str | None) -> None:
        is_caller = any(each.id == agent_id and each.by is SpokenBy.CALLER for each in self._job.agents)
        true(self, agent_id, number, "" if is_caller else words)

    return add


def casts_without_params(true: Any) -> Any:  # noqa: ANN401
    def extend(self: JobTalks, conversations: Any) -> None:  # noqa: ANN401
        true(self, conversations)
        self.casts = {
            place: {name: replace(each, params=self.agents[name].params) for name, each in cast.items()}
            for place, cast in self.casts.items()
        }

    return extend


def rounds_from_zero(true: Any) -> Any:  # noqa: ANN401
    def fill(template: str, name: str, role: str, **names: Any) -> str:  # noqa: ANN401
        names |= {"round": names["round"] - 1} if "round" in names else {}
        return str(true(template, name, role, **names))

    return fill


def skips_that_leave(true: Any) -> Any:  # noqa: ANN401
    def digest(agent: Any, reason: str | None) -> Any:  # noqa: ANN401
        made = true(agent, reason)
        return None if made is None else replace(made, leaves=not made.leaves)

    return digest


def not_warmer(true: Any) -> Any:  # noqa: ANN401
    def changes(params: Any, rejections: int) -> Any:  # noqa: ANN401
        return {name: value for name, value in true(params, rejections).items() if name != "temperature"}

    return changes


def thoughts_aloud(true: Any) -> Any:  # noqa: ANN401
    def read(text: str) -> Any:  # noqa: ANN401
        said = true(text)
        return replace(said, words=f"{said.thinking} {said.words}".strip())

    return read


def ends_a_token_late(true: Any) -> Any:  # noqa: ANN401
    def judge(self: until.Ends, number: int, *, is_unchanged: bool) -> Any:  # noqa: ANN401
        self._tokens -= 1
        made = true(self, number, is_unchanged=is_unchanged)
        self._tokens += 1
        return made

    return judge


def always_unchanged(true: Any) -> Any:  # noqa: ANN401
    return lambda self, number, *, is_unchanged: true(self, number, is_unchanged=is_unchanged or number > 0)


def of_any_agent(_: Any) -> Any:  # noqa: ANN401
    return lambda conditions, _agent: {n: each for n, each in enumerate(conditions) if each.is_of_a_turn}


def silent_quotes(true: Any) -> Any:  # noqa: ANN401
    def messages(self: PromptWriter, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        place = 3
        heard = [each if each.text is None or each.text.strip() else replace(each, text="...") for each in given[place]]
        return true(self, *given[:place], heard, *given[place + 1 :], **named)

    return messages


def with_the_whole_budget(true: Any) -> Any:  # noqa: ANN401
    return lambda params, tokens: {**true(params, tokens), "max_tokens": params["max_tokens"]}


def without_the_thought(true: Any) -> Any:  # noqa: ANN401
    def begun(self: HalfAnswer, stops: Any) -> Any:  # noqa: ANN401
        made = true(self, stops)
        return made and made.text and replace(made, reasoning="")

    return begun


def a_round_too_many(true: Any) -> Any:  # noqa: ANN401
    return lambda recorded, agent: true(recorded, agent) - {agent}


PLANTED: Sequence[Planted] = (
    Planted(
        "a shared view lacks the last words",
        ["view"],
        around(discussion, "shared_before", without_last),
        {"view": "shared"},
    ),
    Planted("an own view lacks the last words", ["sight"], around(discussion, "visible_before", without_last)),
    Planted(
        "visible_to is not looked at",
        ["mode", "view"],
        around(discussion, "is_visible_later", lambda _: lambda *_: True),
        {"sight": "closed"},
    ),
    Planted(
        "a caller's words are not shown",
        ["view"],
        around(Discussion, "add", words_of_callers_lost),
        {"callers": "speaks"},
    ),
    Planted(
        "a cast's params are dropped", ["mode"], around(JobTalks, "extend", casts_without_params), {"cast": "params"}
    ),
    Planted(
        "variables are not filled in systems",
        ["view"],
        around(prompt_messages, "fill", lambda _: lambda text, _values: text),
        {"variables": "given"},
    ),
    Planted(
        "rounds are told from zero",
        ["mode", "view"],
        around(prompt_messages, "_fill", rounds_from_zero),
        {"prompts": "some"},
    ),
    Planted(
        "a job's own words are not put",
        ["mode"],
        around(prompt_messages, "put", lambda _: lambda _given, wording: wording),
        {"prompts": "all"},
    ),
    Planted("silence leaves a trace", ["mode"], around(PromptWriter, "messages", silent_quotes)),
    Planted(
        "a seed is not another one in a retry",
        ["mode"],
        around(prompts, "changes_of_retry", lambda _: lambda *_: {}),
        {"validation": "choices", "seeds": "seed"},
    ),
    Planted(
        "a retry is not warmer",
        ["mode"],
        around(prompts, "changes_of_retry", not_warmer),
        {"validation": "pattern", "seeds": "warm"},
    ),
    Planted(
        "an answer that is not valid is taken",
        ["mode"],
        around(Validation, "fault_of", lambda _: lambda *_: None),
        {"validation": "pattern"},
    ),
    Planted(
        "constrain off is not looked at",
        ["mode"],
        around(
            composed,
            "constraint_of",
            lambda _: lambda agent: agent.validation.constraint() if agent.validation else None,
        ),
        {"validation": "judged"},
    ),
    Planted(
        "a summary is left out",
        ["mode"],
        around(Memories, "summary_before", lambda _: lambda *_: None),
        {"memory": "summary"},
    ),
    Planted(
        "a cut drops a round too many",
        ["mode"],
        around(memories, "first_shown", lambda true: lambda *given: true(*given) + (true(*given) > given[2])),
        {"memory": "rounds"},
    ),
    Planted(
        "a fork takes the turn too before which it begins",
        ["view"],
        around(heritage, "_behind", a_round_too_many),
        {"fork": "before"},
    ),
    Planted(
        "skip is taken for leave",
        ["view"],
        around(flow, "digest_of_failure", skips_that_leave),
        {"on_failure": "skip", "validation": "pattern"},
    ),
    Planted(
        "a condition of tokens is a token late",
        ["mode"],
        around(until.Ends, "_judge", ends_a_token_late),
        {"until": "tokens"},
    ),
    Planted(
        "all is said to be unchanged", ["mode"], around(until.Ends, "_judge", always_unchanged), {"until": "unchanged"}
    ),
    Planted(
        "a condition is judged on any agent",
        ["mode"],
        around(judging, "conditions_of", of_any_agent),
        {"until": "says"},
    ),
    Planted("thoughts are said aloud", ["mode"], around(turn_record, "read_markup", thoughts_aloud), {"markup": "on"}),
    Planted(
        "an iteration too few is told",
        ["mode"],
        around(
            tool_loop, "note_after", lambda true: lambda exchanges, *rest: true([*exchanges, *exchanges[-1:]], *rest)
        ),
        {"tools": "structured"},
    ),
    Planted(
        "a leader's choice is not heard",
        ["view"],
        around(
            discussion,
            "_led_before",
            lambda true: lambda job, *rest: (p for p in true(job, *rest) if p[0] != job.leader),
        ),
        {"mode": "led"},
    ),
    Planted(
        "continuation off is not looked at",
        ["mode"],
        around(job_parser, "_continuation", lambda _: lambda _given: Continuation.ON),
        {"continuation": "off"},
        kills=True,
    ),
    Planted(
        "an answer that goes on has its whole budget again",
        ["mode"],
        around(answer_begins, "rest_of", with_the_whole_budget),
        kills=True,
    ),
    Planted(
        "half an answer has lost its thought", ["mode"], around(HalfAnswer, "begun", without_the_thought), kills=True
    ),
    Planted(
        "an answer goes on after calls with newer words",
        ["view"],
        around(JobPrompts, "request", with_all_words),
        {"mode": "free", "tools": "structured"},
        kills=True,
    ),
    Planted(
        "no turn has gone on", ["mode"], around(transcript, "pairwise", lambda _: lambda _attempts: ()), kills=True
    ),
)
