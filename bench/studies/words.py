"""The effect of the words that Roundhouse puts around a job on its answers, with a real small model.

Each set of turns is asked through Roundhouse, once with the engine's constraint and once without. A question that can
be asked alone is also asked alone: the author's system prompt and the question, straight to the engine. For each: first
answers that are valid, those that were cut by length, empty ones, answers that repeat a sentence of ours, tokens of
prompts and answers a turn, and tokens of our own words in a prompt.

    python -m bench.studies.words [--turns 200] [--only "choices;debate"] [--port 9870]
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from bench.parts.small_model import SmallModel, small_model
from bench.parts.words_set import DATES, PEOPLE, PERSON, REVIEWS, TOPICS, YES_NO
from service.conversations.job.validation import Validation
from service.conversations.job.wording import Wording
from workers.requests.bios_words import BiosWords

TEMPERATURE = 0.3
LONG = 60  # tokens of an answer in words
SAMPLED = 40  # prompts of a set whose words are counted
Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Set:
    """Turns of one kind; ``validation`` is that of the last agent."""

    name: str
    agents: Sequence[Document]
    prompts: Sequence[str]
    validation: Document | None = None
    rounds: int = 1
    job: Document = field(default_factory=dict)
    alone: bool = True  # whether its questions can be asked alone


def sets() -> list[Set]:
    """Return all sets."""
    speakers = [
        {"id": "pro", "system": "You argue for yes. Give one short reason."},
        {"id": "con", "system": "You argue for no. Give one short reason."},
    ]
    judge = {"id": "judge", "system": "You judge the question.", "speak_after_within_round": ["pro", "con"]}
    yes_no = {"choices": ["yes", "no"]}
    debate: Document = {"agents": [*speakers, judge], "prompts": TOPICS, "rounds": 3, "validation": yes_no}
    return [
        Set(
            name="choices",
            agents=[{"id": "judge", "system": "Answer with exactly one word: yes or no."}],
            prompts=YES_NO,
            validation=yes_no,
        ),
        Set(name="choices untold", agents=[{"id": "judge"}], prompts=YES_NO, validation=yes_no),
        Set(
            name="three choices",
            agents=[{"id": "reader", "system": "Say whether the review is positive, negative or neutral."}],
            prompts=REVIEWS,
            validation={"choices": ["positive", "negative", "neutral"]},
        ),
        Set(
            name="schema",
            agents=[{"id": "clerk", "system": "Give name, age and city as JSON."}],
            prompts=PEOPLE,
            validation={"json_schema": PERSON},
        ),
        Set(
            name="pattern",
            agents=[{"id": "clerk", "system": "Give the date as YYYY-MM-DD."}],
            prompts=DATES,
            validation={"pattern": r"^[0-9]{4}-[01][0-9]-[0-3][0-9]$"},
        ),
        Set(
            name="markup",
            agents=[{"id": "judge", "system": "Think first, then say yes or no.", "markup": True}],
            prompts=YES_NO,
            validation=yes_no,
            alone=False,
        ),
        Set(name="debate", **debate, alone=False),
        Set(name="debate, shared", **debate, job={"view": "shared"}, alone=False),
        Set(
            name="alone in rounds",
            agents=[{"id": "writer", "system": "You write an essay. Each time write the next two sentences."}],
            prompts=TOPICS,
            rounds=4,
            alone=False,
        ),
        Set(
            name="free mode",
            agents=speakers,
            prompts=TOPICS,
            rounds=4,
            job={"mode": "free"},
            alone=False,
        ),
    ]


@dataclass
class Counts:
    """Counts over the first answers of a set."""

    turns: int = 0
    valid: int = 0
    judged: int = 0
    cut: int = 0
    empty: int = 0
    echoes: int = 0
    read: int = 0
    written: int = 0
    ours: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    def line(self, name: str) -> str:
        """Return the counts as a line."""
        share = f"{self.valid / max(1, self.judged - self.cut):6.1%}" if self.judged else "     -"
        ours = f"{mean(self.ours):5.1f} {max(self.ours):3d} {max(self.last):3d}" if self.ours else "    -   -   -"
        return (
            f"{name:34s} {self.turns:5d} {share} {self.cut:4d} {self.empty:5d} {self.echoes:6d} "
            f"{self.read / self.turns:7.1f} {self.written / self.turns:6.1f}  {ours}"
        )


def sentences() -> list[str]:
    """Return the sentences of our own words that an answer might repeat."""
    words, bios = Wording(), BiosWords()
    texts = [words.context, words.shared_context, words.invalid, words.choices_demand, words.schema_demand]
    texts += [bios.tools, bios.signals, bios.json_calls, bios.markup_calls, bios.markup]
    plain = [re.sub(r"\$\w+", "\0", text) for text in texts]
    pieces = {piece.strip(" .:\n") for text in plain for piece in re.split(r"[.;\n\0]", text)}
    return [piece for piece in pieces if len(piece.split()) >= 4] + ["(Round "]


def through(service: SmallModel, asked: Set, turns: int, constrain: str) -> Counts:
    """Ask a set through Roundhouse."""
    counts, seed = Counts(), 0
    while counts.turns < turns:
        seed += 1
        agents = [agent_of(agent, asked, constrain, seed) for agent in asked.agents]
        job = {
            "name": asked.name, "agents": agents, "rounds": asked.rounds, **asked.job,
            "conversations": [{"prompt": prompt} for prompt in asked.prompts],
        }  # fmt: skip
        result = service.run(job)
        for talk, prompt in zip(result["conversations"], asked.prompts, strict=True):
            texts = [prompt, *(each["text"] for each in talk["turns"])]
            texts += [agent.get("system", "") for agent in asked.agents]
            authors = sorted(texts, key=len, reverse=True)  # longest first: one may contain another
            for turn in talk["turns"]:
                if turn["attempts"]:
                    add_turn(service, counts, asked, (result["id"], talk["id"]), turn, authors)
    return counts


def agent_of(agent: Document, asked: Set, constrain: str, seed: int) -> Document:
    """Return an agent for a job; the last one has the validation."""
    params = {"temperature": TEMPERATURE, "seed": seed, "max_tokens": LONG}
    made = {**agent, "model": "small", "params": params}
    if asked.validation is not None and agent is asked.agents[-1]:
        made["validation"] = {**asked.validation, "constrain": constrain, "retries": 3 if len(asked.agents) > 1 else 0}
    return made


def add_turn(
    service: SmallModel, counts: Counts, asked: Set, place: tuple[str, str], turn: Document, authors: Sequence[str]
) -> None:
    """Count one turn; ``place`` is its job and conversation, ``authors`` the words that are not ours."""
    first = turn["attempts"][0]
    has_validation = asked.validation is not None and turn["agent"] == asked.agents[-1]["id"]
    add_answer(counts, asked, first["text"], turn["finish_reason"], has_validation=has_validation)
    counts.read += turn["usage"]["prompt_tokens"] or 0
    counts.written += turn["usage"]["completion_tokens"] or 0
    if len(counts.ours) < SAMPLED:
        messages = [each for each in service.prompt(*place, turn) if each["role"] != "assistant"]
        counts.ours.append(service.tokens(without("\n".join(each["content"] for each in messages), authors)))
        counts.last.append(service.tokens(after_last(messages[-1]["content"], authors)))


def without(text: str, pieces: Iterable[str]) -> str:
    """Return our own words in a prompt, without the author's and agents' words and quoted names."""
    for piece in filter(None, pieces):
        text = text.replace(piece, "")
    return re.sub(r"^\w+: *$", "", text, flags=re.MULTILINE).strip()


def after_last(text: str, pieces: Iterable[str]) -> str:
    """Return our own words after the conversation's last one."""
    ends = (text.rfind(piece) + len(piece) for piece in pieces if piece and piece in text)
    return text[max(ends, default=0) :].strip()


OURS = sentences()


def add_answer(counts: Counts, asked: Set, text: str, finish_reason: str | None, *, has_validation: bool) -> None:
    """Count one answer."""
    counts.turns += 1
    counts.empty += not text.strip()
    repeated = [piece for piece in OURS if piece in text]
    counts.echoes += bool(repeated)
    if repeated and "-v" in sys.argv:
        print("   repeats", repeated, repr(text[:300]))
    if has_validation:
        counts.judged += 1
        counts.cut += finish_reason == "length"
        is_valid = validation_of(asked).fault_of(text, 5.0) is None
        counts.valid += is_valid and finish_reason != "length"


def validation_of(asked: Set) -> Validation:
    """Return the validation of a set's answers."""
    given: Mapping[str, Any] = asked.validation or {}
    return Validation(
        retries=0,
        choices=tuple(given.get("choices", ())),
        pattern=given.get("pattern"),
        json_schema=given.get("json_schema"),
    )


def alone(service: SmallModel, asked: Set, turns: int) -> Counts:
    """Ask each question alone: the author's system prompt and the question."""
    counts, seed = Counts(), 0
    while counts.turns < turns:
        seed += 1
        for prompt in asked.prompts:
            system = asked.agents[-1].get("system", "")
            messages = [{"role": "system", "content": system}] if system else []
            text, ended, usage = service.ask({
                "messages": [*messages, {"role": "user", "content": prompt}],
                "temperature": TEMPERATURE, "seed": seed, "max_tokens": LONG,
            })  # fmt: skip
            add_answer(counts, asked, text, ended, has_validation=True)
            counts.read += usage["prompt_tokens"]
            counts.written += usage["completion_tokens"]
    return counts


def main() -> None:
    """Print a line for each set and way of asking."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--port", type=int, default=9870)
    parser.add_argument("--bios", type=json.loads, default={}, help="the model's bios, JSON")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    wanted = [name.strip() for name in options.only.split(";") if name.strip()]
    print(f"{'':34s} turns  valid  cut empty repeat    read  written  ours: mean, most, last", flush=True)
    with small_model(options.port, options.bios) as service:
        for asked in sets():
            if wanted and asked.name not in wanted:
                continue
            if asked.validation is not None:
                print(through(service, asked, options.turns, "auto").line(f"{asked.name}, constrained"), flush=True)
            print(through(service, asked, options.turns, "off").line(f"{asked.name}, not constrained"), flush=True)
            if asked.alone:
                print(alone(service, asked, options.turns).line(f"{asked.name}, asked alone"), flush=True)


if __name__ == "__main__":
    main()
