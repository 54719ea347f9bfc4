"""The facts that a real small model's summary keeps, by the wording of the request.

For each wording: the share of a talk's facts in its summary, and of an earlier summary's in the next one; and the share
of questions answered that need the summary, with one and without.

    python -m bench.studies.summaries [--seeds 8] [--wordings 6] [--port 9880]
"""

import argparse
from collections.abc import Iterator, Sequence
from statistics import mean, stdev
from string import Template
from typing import Any

from bench.parts.small_model import SmallModel, small_model
from bench.parts.talks import TALKS, Talk
from service.conversations.job.job import Agent, Conversation, Job, JobId
from service.conversations.job.wording import Wording
from service.conversations.talk.discussion import Discussion, Utterance
from service.conversations.talk.prompt_messages import PromptWriter, opened

ROUNDS, SUMMED = 4, 2
LONG, SHORT = 200, 60  # most tokens of a summary, and of an answer
TEMPERATURE = 0.8
ASKED = LONG * 2 // 3  # words
AGENTS = tuple(
    Agent(id=name, role="participant", model="m", system=f"You are {name}. Two sentences.", waits_for=frozenset())
    for name in ("anna", "bruno", "carla")
)
JOB = Job(id=JobId("j"), name="j", agents=AGENTS, conversations=())
WORDINGS = (
    Wording().sum_up,
    (
        "List the facts and decisions of the conversation above, one on each line, with names and numbers. "
        "At most $words words."
    ),
    "Sum up the conversation above with its names, numbers and decisions.",
    (
        "Sum up the conversation above: who said what, with names and numbers, what was decided, what is open. "
        "At most $words words."
    ),
    (
        "Before you go on, sum up what has been said so far, for yourself: who said what, what was decided, what is "
        "open. Write the summary alone, in at most $words words."
    ),
    (
        "You will forget the conversation above. Write down what you need to remember of it: facts, names, numbers, "
        "decisions, open questions. At most $words words."
    ),
)


def messages(
    talk: Talk, agent: Agent, addition: str | None = None, summary: str | None = None, question: str | None = None
) -> list[dict[str, Any]]:
    """Return a prompt with all rounds, or with ``summary`` in place of the first ones; "" leaves them out."""
    discussion, writer = Discussion(JOB), PromptWriter(JOB, Wording())
    for number, (name, words) in enumerate(talk.words):
        discussion.add(name, number // len(AGENTS), words)
    first = 0 if summary is None else SUMMED
    heard = [*discussion.heard_by(agent, ROUNDS if question is None else ROUNDS - 1, first)]
    if question is not None:
        asker = next(each.id for each in AGENTS if each is not agent)
        heard.append(Utterance(agent=asker, round=ROUNDS - 1, text=f"{agent.id}, {question}"))
    plain = Conversation(id="c", prompt=talk.prompt, rounds=ROUNDS)
    conversation = opened(plain, Wording(), first, summary or None)
    said = writer.messages(conversation, agent, ROUNDS, heard, [], is_told=False, addition=addition)
    system = f"{writer.context(agent)}\n\n{writer.system(conversation, agent, is_told=False)}"
    return [
        {"role": "system", "content": system},
        *({"role": each.role, "content": each.content} for each in said),
    ]


def kept(text: str, facts: Sequence[str]) -> float:
    """Return the share of facts in a text."""
    return mean(any(word in text.lower() for word in fact.split("|")) for fact in facts)


def summaries(service: SmallModel, wording: str, seeds: int, *, has_earlier: bool) -> Iterator[float]:
    """Yield the share that each summary keeps of a talk, or of the earlier summary at its start."""
    asked = Template(wording).safe_substitute(words=ASKED)
    for talk in TALKS:
        for agent in AGENTS:
            prompt = messages(talk, agent, asked, talk.summary if has_earlier else None)
            for seed in range(seeds):
                facts = [answer for _, answer in talk.questions] if has_earlier else talk.facts
                yield kept(answer(service, prompt, seed, LONG), facts)


def answers(service: SmallModel, seeds: int, *, has_summary: bool) -> Iterator[float]:
    """Yield 1 for each right answer, else 0."""
    for talk in TALKS:
        for question, right in talk.questions:
            for agent in AGENTS[1:]:
                prompt = messages(talk, agent, None, talk.summary if has_summary else "", question)
                for seed in range(seeds):
                    yield kept(answer(service, prompt, seed, SHORT), [right])


def answer(service: SmallModel, prompt: list[dict[str, Any]], seed: int, most: int) -> str:
    """Ask the engine directly."""
    body = {"messages": prompt, "seed": seed, "max_tokens": most, "temperature": TEMPERATURE}
    return service.ask(body)[0]


def told(shares: Iterator[float]) -> str:
    """Return a mean with its standard error."""
    values = list(shares)
    return f"{mean(values):.3f} +- {stdev(values) / len(values) ** 0.5:.3f}"


def main() -> None:
    """Print a line for each wording, and two for questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--wordings", type=int, default=len(WORDINGS))
    parser.add_argument("--port", type=int, default=9880)
    options = parser.parse_args()
    with small_model(options.port, {}) as service:
        print("kept of a talk   of a summary", flush=True)
        for wording in WORDINGS[: options.wordings]:
            of_talk, of_summary = (
                told(summaries(service, wording, options.seeds, has_earlier=has)) for has in (False, True)
            )
            print(f"{of_talk}   {of_summary}   {wording}", flush=True)
        for has, name in ((True, "with a summary"), (False, "where it is left out")):
            print(f"{told(answers(service, options.seeds, has_summary=has))} of questions answered {name}", flush=True)


if __name__ == "__main__":
    main()
