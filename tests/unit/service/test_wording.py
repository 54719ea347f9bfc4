"""Text around a job's own words: its place, its amount, and who decides on it."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from msgspec.structs import replace

from service.conversations.job.job import Agent, Job, View
from service.conversations.job.validation import Validation
from service.conversations.job.wording import (
    ConversationWords,
    Phrases,
    Wording,
    decode_clock,
    decode_models,
    encode_clock,
    encode_models,
    phrase_fault,
    wording_of,
)
from service.conversations.talk.discussion import Spoken, shared_before, visible_before
from service.conversations.talk.prompt_messages import PromptWriter, Rejected, agent_request, changes_of_retry
from service.conversations.talk.prompt_record import PromptRecord
from tests.harness.jobs import DEBATE, agent, job
from transport.request import Message
from workers.requests.bios_words import BiosPolicy, Clock
from workers.requests.prompts.render import ToolBudget, render_messages

BEGAN = datetime(2026, 11, 22, 21, 17, 42, tzinfo=timezone(timedelta(hours=1), "CET"))
LATER = datetime(2026, 11, 22, 23, 59, tzinfo=UTC)
ALL = {("a", 0): "Yes.", ("b", 0): "No.", ("m", 0): "So.", ("a", 1): "Still.", ("b", 1): "Never."}


def asked(
    made: Job,
    listener: Agent,
    round_number: int,
    spoken: Spoken,
    wording: Wording | None = None,
    rejected: tuple[Rejected, ...] = (),
    *,
    is_told: bool = False,
) -> list[tuple[str, str]]:
    """Return the messages that an engine is sent."""
    before = shared_before if made.view is View.SHARED else visible_before
    words = ConversationWords(began_at=BEGAN, models={"m": wording or Wording()})
    record = PromptRecord(rejected=len(rejected), is_told=is_told)
    place = (made.conversations[0], listener, round_number)
    request = agent_request(made, place, words, before(made, listener, round_number, spoken), rejected, record, LATER)
    assert request.frame is not None
    sent = render_messages(request, request.frame, ToolBudget(iterations=8, has_fallback=True))
    return [(message.role, message.content) for message in sent]


def test_an_agents_role_stands_first_and_no_text_of_ours_last() -> None:
    """Specification, "Words around a job": text of ours at the end could be answered in place of the question."""
    made = job(*DEBATE, rounds=2)
    context = "You are m. Several agents take part; others' words carry their names. Answer only as yourself."
    assert asked(made, DEBATE[2], 1, ALL) == [
        ("system", f"{context}\n\nNow: Sunday, 2026-11-22 21:10 CET\n\nYou are m."),
        ("user", "Topic 0.\n\na: Yes.\n\nb: No."),
        ("assistant", "So."),
        ("user", "a: Still.\n\nb: Never."),
    ]


def test_a_single_agent_in_one_round_gets_only_the_question_and_the_time() -> None:
    """A question asked through Roundhouse stays the question."""
    alone = agent("judge")
    assert asked(job(alone), alone, 0, {}) == [
        ("system", "Now: Sunday, 2026-11-22 21:10 CET\n\nYou are judge."),
        ("user", "Topic 0."),
    ]
    chair = replace(alone, role="chair")
    assert asked(job(chair), chair, 0, {})[0][1].startswith("You are judge (chair).\n\n")


def test_no_message_is_empty() -> None:
    """A single agent over several rounds hears no other between its answers."""
    alone = agent("a")
    messages = asked(job(alone, rounds=2), alone, 1, {("a", 0): "One."})
    assert [content for _, content in messages[1:]] == ["Topic 0.", "One.", "..."]


def test_the_time_is_the_conversations_unless_an_operator_chooses_the_present() -> None:
    """A changing time would make each prompt new to the prefix cache."""
    present = wording_of(BiosPolicy(clock=Clock.NOW))
    made = job(*DEBATE, rounds=2)
    assert "21:10 CET" in asked(made, DEBATE[0], 1, ALL)[0][1]
    assert "Monday, 2026-11-23 00:50 CET" in asked(made, DEBATE[0], 1, ALL, present)[0][1]


def test_an_earlier_prompt_begins_the_next_one() -> None:
    """Rounds and re-prompts extend one prefix."""
    made = job(*DEBATE, rounds=2)
    first = asked(made, DEBATE[0], 0, {})
    again = asked(made, DEBATE[0], 0, {}, rejected=(("Hm.", "too short"),))
    second = asked(made, DEBATE[0], 1, ALL)
    assert again[: len(first)] == second[: len(first)] == first


def test_only_the_last_answer_is_shown_with_its_fault() -> None:
    """A model copies what it is shown."""
    rejected = (("Hm.", "too short"), ("Well.", "too vague"))
    assert [content for _, content in asked(job(agent("a")), agent("a"), 0, {}, rejected=rejected)[2:]] == [
        "Well.",
        Wording().invalid.replace("$reason", "too vague"),
    ]


def test_a_shared_view_is_one_text_for_all_and_ends_with_each_agents_own_part() -> None:
    """Specification, "Views": an engine reads each new word once, not once for each agent."""
    made = replace(job(*DEBATE, rounds=2), view=View.SHARED, system="Debate.")
    texts = {each.id: asked(made, each, 1, ALL) for each in DEBATE}
    context = "Several agents take part; all words carry their speakers' names."
    clock = "Now: Sunday, 2026-11-22 21:10 CET"
    assert {messages[0] for messages in texts.values()} == {("system", f"{context}\n\n{clock}\n\nDebate.")}
    shared = "Topic 0.\n\na: Yes.\n\nb: No.\n\nm: So.\n\n"
    assert texts["a"][1:] == [("user", f"{shared}You are a.\n\na:")]
    assert texts["b"][1:] == [("user", f"{shared}You are b.\n\nb:")]
    assert texts["m"][1:] == [("user", f"{shared}a: Still.\n\nb: Never.\n\nYou are m.\n\nm:")]


def test_visibility_holds_in_a_shared_view() -> None:
    """An agent that may not read a word is not shown it."""
    agents = (agent("a", visible_to=["b"]), agent("b"), agent("c"))
    made = replace(job(*agents, rounds=2), view=View.SHARED)
    spoken = {("a", 0): "Secret.", ("b", 0): "Open.", ("c", 0): "Mine."}
    assert ["Secret" in str(asked(made, each, 1, spoken)) for each in agents] == [True, True, False]


def test_an_author_may_replace_each_text() -> None:
    """``prompts`` of a job are used as given in every case, for a single agent too."""
    given = Phrases(
        context="$who of $agents.", cue="$agent, $round/$rounds:", quote="<$agent> $words", invalid="No: $reason"
    )
    alone = replace(job(agent("a")), prompts=given)
    messages = asked(alone, agent("a"), 0, {}, rejected=(("Hm.", "why"),))
    assert messages[0][1].startswith("a of a.\n\n")
    assert [content for _, content in messages[1:]] == ["Topic 0.\n\na, 1/1:", "Hm.", "No: why"]
    debate = replace(job(*DEBATE), prompts=given)
    assert asked(debate, DEBATE[2], 0, {("a", 0): "Yes.", ("b", 0): "No."})[1][1] == (
        "Topic 0.\n\n<a> Yes.\n\n<b> No.\n\nm, 1/1:"
    )


def test_an_operator_replaces_texts_for_a_model_and_the_author_has_the_last_word() -> None:
    """``bios`` of a model apply first, then ``prompts`` of a job."""
    wording = wording_of(BiosPolicy(cue="Operator's.", quote="$agent: $words"))
    spoken = {("a", 0): "Yes.", ("b", 0): "No."}
    assert asked(job(*DEBATE), DEBATE[2], 0, spoken, wording)[1][1] == "Topic 0.\n\na: Yes.\n\nb: No.\n\nOperator's."
    made = replace(job(*DEBATE), prompts=Phrases(cue="Author's."))
    assert asked(made, DEBATE[2], 0, spoken, wording)[1][1] == "Topic 0.\n\na: Yes.\n\nb: No.\n\nAuthor's."


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("cue", "$round of $rounds for $$5", None),
        ("cue", "$words", "$words is not one of"),
        ("quote", "${agent}: $words", None),
        ("invalid", "5$", "no name"),
        ("context", "$agents and $role", None),
    ],
)
def test_an_unknown_placeholder_in_a_text_is_refused(name: str, text: str, fault: str | None) -> None:
    """The post of the job reports it."""
    found = phrase_fault(name, text)
    assert found is None if fault is None else fault in (found or "")


@pytest.mark.parametrize(
    ("validation", "demand"),
    [
        (Validation(retries=0, choices=("yes", "no")), "Answer with exactly one of: yes, no."),
        (Validation(retries=0, pattern=r"\d+"), r"Answer with text that matches the regular expression \d+"),
        (
            Validation(retries=0, json_schema={"type": "object"}),
            'fits this schema and nothing else: {"type": "object"}',
        ),
    ],
)
def test_what_an_answer_must_be_is_one_line_where_no_engine_enforces_it(validation: Validation, demand: str) -> None:
    """The line is in the system message of an agent's own view, and beside the agent's own words in a shared one."""
    judge = replace(agent("j"), validation=validation)
    for made in (job(judge), replace(job(judge), view=View.SHARED)):
        assert not any(demand in content for _, content in asked(made, judge, 0, {}))
        told = asked(made, judge, 0, {}, is_told=True)
        assert demand in told[1 if made.view is View.SHARED else 0][1]


def test_stored_texts_are_used_again() -> None:
    """A conversation keeps the texts that it began with."""
    models = {"m": wording_of(BiosPolicy(template="$now", cue="$round")), "n": Wording()}
    assert decode_models(encode_models(models)) == models
    assert decode_clock(encode_clock(BEGAN)) == BEGAN
    assert decode_clock(encode_clock(BEGAN)).tzname() == "CET"


def test_a_second_retry_samples_differently() -> None:
    """With the same seed and temperature a small model repeats itself."""
    params = {"seed": 7, "temperature": 0.3}
    assert [changes_of_retry(params, count) for count in range(4)] == [
        {},
        {},
        {"seed": 8, "temperature": 0.5},
        {"seed": 9, "temperature": 0.7},
    ]
    assert changes_of_retry({"temperature": 1.5}, 3) == {"temperature": 1.5}
    assert changes_of_retry({"seed": -1}, 3) == {}


def test_the_last_message_is_the_users_in_every_view() -> None:
    """Many chat templates insist on strict alternation."""
    made = job(*DEBATE)
    writer = PromptWriter(made, Wording())
    messages = writer.messages(made.conversations[0], DEBATE[0], 0, (), (), is_told=False, addition="Mind the calls.")
    assert messages == (Message(role="user", content="Topic 0.\n\nMind the calls."),)
