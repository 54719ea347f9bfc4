"""Jobs drawn word by word: each level of each factor is one way to write a part of a job.

A job carries the answers of its agents' engines: some answers for each agent, valid and invalid, of which one is drawn
for each request.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

Document = dict[str, Any]
Row = Mapping[str, str]
FACTORS: Mapping[str, Sequence[str]] = {
    "mode": ("rounds", "chain", "fan", "free", "queued", "led"),
    "view": ("own", "shared"),
    "until": ("none", "says", "matches", "field", "signal", "agree", "unchanged", "tokens", "own"),
    "validation": ("none", "choices", "judged", "pattern", "schema"),
    "cast": ("none", "system", "params", "model", "tools", "validation"),
    "variables": ("none", "given"),
    "tools": ("none", "structured", "text"),
    "markup": ("off", "on"),
    "memory": ("all", "rounds", "summary", "summed", "tokens", "auto"),
    "callers": ("none", "speaks", "silent", "otherwise"),
    "on_failure": ("end", "skip", "leave"),
    "fork": ("none", "all", "before", "rounds", "set", "times"),
    "seeds": ("none", "seed", "warm"),
    "prompts": ("none", "some", "all"),
    "sight": ("open", "some", "closed"),
    "continuation": ("model", "off", "over"),
    "record": ("none", "job", "agent", "reward"),
}
CHOICES = ["yes", "no", "no opinion"]
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["agree", "differ"]}, "count": {"type": "integer"}},
    "required": ["verdict"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
FINISH = {"type": "function", "function": {"name": "finish", "description": "Say that all is said."}}
VALID: Mapping[str, Sequence[str]] = {
    "choices": (
        "yes",
        "No",
        "no opinion",
        "**yes**",
        '"no"',
        "Yes.",
        "I have no opinion!",
        "No idea, but yes",
        "<think>no?</think>yes",
    ),
    "pattern": ("abc1", "b2", "<think>a?</think>c3"),
    "schema": (
        '{"verdict": "agree"}',
        '{"verdict": "differ", "count": 2}',
        '```json\n{"verdict": "Agree"}\n```'.replace("Agree", "agree"),
        '<think>{}</think>{"verdict": "agree"}',
    ),
}
INVALID: Mapping[str, Sequence[str]] = {
    "choices": ("maybe", "yes and no", "", "<think>yes"),
    "pattern": ("abc", "", "<think>a1</think>none"),
    "schema": ("no JSON", '{"verdict": "maybe"}', "", '{"count": 1}'),
}
PLAIN = (
    "Yes.",
    "yes",
    "Let us go.",
    "Words {n}.",
    "Words {n}, and more.",
    "no",
    '{"verdict": "agree"}',
    "",
    "  ",
    "$agent",
)
THOUGHTS = ("<think>Hidden {n}.</think>Words {n}.", "<thinking>hm</thinking>yes")
MARKED = (
    "<think>Hidden {n}.</think><answer>Aloud {n}.</answer>",
    "<wait/>",
    "Plain {n}.",
    "<think>All of it {n}",
    "<answer>yes</answer>",
    "<speak>One {n}.</speak> aside <speak>Two.</speak>",
)


def call(name: str, **arguments: object) -> Document:
    """Return an answer with a structured call."""
    return {"content": "", "tool_calls": [{"id": f"call_{name}", "name": name, "arguments": json.dumps(arguments)}]}


@dataclass(slots=True)
class DrawnJob:
    """A job to be posted, with the answers of its agents.

    ``fork`` says how to make a job that begins with its record.
    """

    key: str
    document: Document
    row: Row
    answers: dict[str, list[Document]] = field(default_factory=dict)
    says: dict[str, list[str]] = field(default_factory=dict)  # words of callers
    fork: str = "none"


def draw_row(chance: Random, only: Sequence[str] | None = None) -> dict[str, str]:
    """Draw a level of each factor, or of some, with the first levels of all others."""
    while True:
        row = {name: levels[0] for name, levels in FACTORS.items()}
        row |= {name: chance.choice(FACTORS[name]) for name in only or FACTORS if chance.random() < 0.7}
        if refusal_of(row) is None:
            return row


REFUSALS: Mapping[str, Callable[[Row], bool]] = {
    "in a shared view nobody sums up for itself": lambda row: (
        (row.get("view"), row.get("memory")) == ("shared", "summary")
    ),
    "an agent of another model sums up for nobody": lambda row: (
        (row.get("cast"), row.get("memory")) == ("model", "summed")
    ),
}


def refusal_of(row: Row) -> str | None:
    """Return why a job's parser refuses these levels; None if it accepts them."""
    return next((name for name, is_so in REFUSALS.items() if is_so(row)), None)


class JobDrawer:
    """Draws one job of a row."""

    def __init__(self, key: str, row: Row, chance: Random) -> None:
        self.key = key
        self.row = row
        self.chance = chance
        self.agents = [f"a{number}" for number in range(3 if row["mode"] == "led" else chance.choice((2, 3, 3)))]
        self.leader = self.agents[0] if row["mode"] == "led" else None
        self.caller = self.agents[-1] if row["callers"] != "none" else None
        self.speakers = [name for name in self.agents if name != self.caller]  # agents that a model speaks for
        self.judged = [name for name in self.speakers if name != self.leader] or self.speakers
        self.answers: dict[str, list[Document]] = {}

    def draw(self) -> DrawnJob:
        row, chance = self.row, self.chance
        agents = [self._agent(name) for name in self.agents]
        document: Document = {
            "name": self.key,
            "mode": {"queued": "free", "chain": "rounds", "fan": "rounds"}.get(row["mode"], row["mode"]),
            "view": row["view"],
            "rounds": chance.randint(2, 5),
            "agents": agents,
            "conversations": [],
        }
        if row["mode"] == "queued":
            document["prompt_at"] = "queue"
        if self.leader is not None:
            document["leader"] = self.leader
        if chance.random() < 0.5:
            document["system"] = "All of you$thing talk." if row["variables"] == "given" else "All of you $5 talk."
        if row["continuation"] != "model":
            document["continuation"] = "off" if row["continuation"] == "off" else {"over_weights": True}
        document |= self._record()
        if row["memory"] != "all":
            document["memory"] = self._memory()
        if row["prompts"] != "none":
            document["prompts"] = self._prompts()
        until = self._until()
        if until and row["until"] != "own":
            document["until"] = until
        document["conversations"] = [
            self._conversation(number, until, document) for number in range(chance.randint(1, 2))
        ]
        job = DrawnJob(self.key, document, row, self.answers, fork=row["fork"])
        if self.caller is not None and row["callers"] == "speaks":
            job.says = {self.caller: ["Yes!", "yes", "Words of a caller.", "no"]}
        return job

    # Agents

    def _agent(self, name: str) -> Document:
        row, chance, place = self.row, self.chance, self.agents.index(name)
        agent: Document = {"id": name}
        if chance.random() < 0.3:
            agent["role"] = "judge of $thing" if row["variables"] == "given" else "judge"
        if row["mode"] == "chain" and place:
            agent["speak_after_within_round"] = [self.agents[place - 1]]
        if row["mode"] == "fan" and name == self.agents[-1]:
            agent["speak_after_within_round"] = self.agents[:-1]
        if row["sight"] != "open":
            readers = [each for each in self.agents if chance.random() < 0.5] if row["sight"] == "some" else []
            agent["visible_to"] = readers
        if name == self.caller:
            return agent | self._of_caller()
        agent |= self._of_model(name)
        is_meant = name == self.judged[0] or chance.random() < 0.4
        agent |= self._extras(name) if is_meant else {}
        self.answers[name] = self._answers(name, agent, row["validation"] if "validation" in agent else "none")
        return agent

    def _of_caller(self) -> Document:
        kind, chance, failure = self.row["callers"], self.chance, self.row["on_failure"]
        agent: Document = {"by": "caller"}
        if kind != "speaks":
            agent["wait_s"] = chance.choice((0.5, 5))
        if kind == "otherwise":
            agent["otherwise"] = "yes"
        if kind == "silent":
            agent["on_failure"] = chance.choice(("skip", "leave", "end")) if failure == "end" else failure
        return agent

    def _of_model(self, name: str) -> Document:
        row, chance = self.row, self.chance
        params: Document = {"tag": f"{self.key}/{name}"}
        if row["seeds"] != "none":
            params["seed"] = chance.choice((7, 7, -1))
        if row["seeds"] == "warm":
            params["temperature"] = chance.choice((0, 0.5, 1.3))
        system = f"You are {name}, a $5 speaker."
        if row["variables"] == "given":
            system = f"You are {name} of $place, and say $$5 and ${{thing}}."
        return {"model": "m0", "system": system, "params": params}

    def _extras(self, name: str) -> Document:
        row = self.row
        extras: Document = {"markup": True} if row["markup"] == "on" else {}
        if row["tools"] != "none":
            extras["tools"] = [ADD]
        if row["until"] == "signal":
            extras["exit_tools"] = [FINISH]
        if row["record"] == "agent":
            extras["record"] = {"tokens": True}
        if name != self.leader and row["validation"] != "none":
            extras["validation"] = self._validation(row["validation"])
        if name != self.leader and row["on_failure"] != "end":
            extras["on_failure"] = row["on_failure"]
        return extras

    def _validation(self, kind: str) -> Document:
        kinds: Mapping[str, Document] = {
            "choices": {"choices": CHOICES},
            "judged": {"choices": CHOICES, "constrain": "off"},
            "pattern": {"pattern": "^[a-c]+[0-9]$"},
            "schema": {"json_schema": SCHEMA},
        }
        retries = self.chance.choice((None, 0, 1, 3, 4))
        return kinds[kind] | ({} if retries is None else {"retries": retries})

    def _answers(self, name: str, agent: Document, validation: str) -> list[Document]:
        """Return the engine's possible answers for an agent."""
        kind = {"judged": "choices"}.get(validation, validation)
        if name == self.leader:
            others = [each for each in self.agents if each != name]
            texts = [
                *others,
                *others,
                f"I ask {others[-1]}.",
                f"<think>{others[0]}?</think>{others[-1]}",
                "end",
                "nobody",
                "",
            ]
        elif kind != "none":
            texts = [*VALID[kind], *VALID[kind], *INVALID[kind]]
            texts += [f"<answer>{each}</answer>" for each in VALID[kind][:1]] if agent.get("markup") else []
        elif agent.get("markup"):
            texts = list(MARKED)
        else:
            texts = [*PLAIN, *THOUGHTS]
        answers: list[Document] = [{"content": text} for text in texts]
        answers += [{"content": text, "reasoning": "Kept apart {n}."} for text in texts[:2]]
        many = max(1, len(answers) // 3)
        if agent.get("tools"):
            answers += [self._call(agent, self.chance.randint(1, 3)) for _ in range(many)]
        if agent.get("exit_tools"):
            finish = call("finish")
            answers += [finish | {"content": texts[0]} for _ in range(max(1, many // 3))]
        return answers

    def _call(self, agent: Document, number: int) -> Document:
        if self.row["tools"] == "structured":
            return call("add", a=1, b=number)
        if agent.get("markup"):
            return {"content": f'<tool_request name="add">{{"a": 1, "b": {number}}}</tool_request>'}
        return {"content": f'{{"tool_calls": [{{"name": "add", "arguments": {{"a": 1, "b": {number}}}}}]}}'}

    # The rest of a job

    def _record(self) -> Document:
        kind = self.row["record"]
        record: Document = {"record": {"tokens": True, "logprobs": True}} if kind in ("job", "reward") else {}
        source = {"reward": {"agent": self.judged[0], "pattern": "[0-9]"}}
        return record | (source if kind == "reward" else {})

    def _memory(self) -> Document:
        kind, chance = self.row["memory"], self.chance
        if kind == "auto":
            return {"keep": "auto"}
        if kind == "tokens":
            return {"keep": {"tokens": chance.choice((20, 60))}}
        memory: Document = {"keep": {"rounds": chance.randint(1, 3)}}
        if kind in ("summary", "summed"):
            by = "self" if kind == "summary" else chance.choice(self.speakers)
            memory["summary"] = {"by": by, "max_tokens": 30}
            if chance.random() < 0.5:
                memory["summary"]["prompt"] = "Sum up all of it."
        return memory

    def _prompts(self) -> Document:
        some = {"quote": "$who said in round $round: $words", "cue": "Round $round of $rounds, $agent."}
        if self.row["prompts"] == "some":
            return some | {"cue": ""} if self.chance.random() < 0.2 else some
        more = {"context": "You are $who, one of $agents.", "invalid": "No: $reason!", "left": "$who is gone."}
        return some | more

    def _until(self) -> list[Document]:
        kind, chance, judged = self.row["until"], self.chance, self.judged[0]
        is_choice = self.row["validation"] in ("choices", "judged")
        says: Document = {"agent": judged, "says": ["Yes", "No"] if is_choice else ["yes", "let us  go."]}
        wanted: Mapping[str, list[Document]] = {
            "none": [],
            "says": [says],
            "matches": [{"agent": judged, "matches": "(?i)^y|no|1"}],
            "field": [{"agent": judged, "field": "verdict", "equals": "agree"}],
            "signal": [
                {"signal": "finish"},
                *([{"signal": "finish", "agent": judged}] if chance.random() < 0.3 else []),
            ],
            "agree": [{"agree": [name for name in self.agents if name != self.leader]}],
            "unchanged": [{"unchanged": 1}],
            "tokens": [{"answer_tokens": chance.randint(5, 40)}],
            "own": [says, {"answer_tokens": 30}],
        }
        until = wanted[kind]
        return [each for each in until if len(each.get("agree", "..")) > 1]

    def _conversation(self, number: int, until: list[Document], document: Document) -> Document:
        row, chance = self.row, self.chance
        given: Document = {"id": f"c{number}", "prompt": f"Talk of topic={self.key}c{number} for $5."}
        if row["variables"] == "given":
            given["prompt"] = f"Talk of topic={self.key}c{number} for $place, ${{thing}} and $$5, $$other."
            given["variables"] = {"place": f"Oslo $thing {number}", "thing": chance.choice((" 3", 4, True, 1.5))}
        if until and row["until"] == "own" and number == 0:
            given["until"] = until
        if row["cast"] != "none" and (number or chance.random() < 0.7):
            given["agents"] = {chance.choice(self.judged): self._cast()}
        if chance.random() < 0.2 and row["until"] != "unchanged":
            given["rounds"] = document["rounds"] + 1
        return given

    def _cast(self) -> Document:
        kind = self.row["cast"]
        casts: Mapping[str, Document] = {
            "system": {"system": "You are cast otherwise."},
            "params": {"params": {"top_p": 0.5, "seed": 9}},
            "model": {"model": "m1"},
            "tools": {"tools": [ADD]},
            "validation": {"validation": None},
        }
        return casts[kind]
