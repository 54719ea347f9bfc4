"""The messages and parameters that a turn must be asked with, from the words that its agent has heard.

Source: specification, "Prompt composition", "Views", "Words around a job", "BIOS prompt", "Constraints". Where they
give no words of their own, those are taken that docs/reference tells, and in ``TOLD`` those that it does not.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

from tests.reference.job import Agent, Document, Talk

Message = dict[str, Any]
BOUNDS = ("max_tokens", "max_completion_tokens", "n_predict")
OWN_CONSTRAINTS = ("grammar", "json_schema", "response_format", "structured_outputs", "guided_json")
NOW = re.compile(r"Now: \w+day, \d{4}-\d\d-\d\d \d\d:\d\d \w+")
SOME_TIME = "Now: SOME TIME"
ANY_REASON = "\0"  # stands for words that are not specified
JOURNAL = (
    "You began this turn before, and were interrupted or asked to answer again. "
    "These calls of tools were made then, and need not be made again:"
)
TOLD = {
    "markup": (
        "Write <think>...</think> around what others must not read, <answer>...</answer> around what you say, or "
        "<wait/> to say nothing."
    ),
    "tools": "You can call tools, and are given their results before you answer:",
    "signals": "You can send signals, which are called like tools; nothing comes back. Send one near the end:",
    "json_calls": (
        "To call one in words, let your whole answer be one JSON object:\n"
        '{"tool_calls": [{"name": "NAME", "arguments": {}}]}'
    ),
    "markup_calls": (
        "To call one, write its arguments as a JSON object:\n"
        '<tool_request name="NAME">{}</tool_request>\n'
        "Its result comes back as <observation>JSON</observation>."
    ),
    "sum_up": (
        "List the facts and decisions of the conversation above, one on each line, with names and numbers, and what is "
        "still open. At most $words words."
    ),
    "omitted": "(What was said in rounds 1 to $last is left out.)",
    "summed": "(Rounds 1 to $last, summed up: $summary)",
}


@dataclass(frozen=True, slots=True)
class Model:
    """One model as the operator has configured it."""

    context: int
    params: Document = field(default_factory=dict)
    bios: Document = field(default_factory=dict)
    iterations: int = 8


@dataclass(frozen=True, slots=True)
class Heard:
    """The words of one turn that another agent reads; None means that the agent has left."""

    agent: Agent
    round: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Opening:
    """The rounds that a turn is not shown: those before ``first``, and the summary that stands for them."""

    first: int = 0
    summary: str | None = None

    def put_behind(self, prompt: str) -> str:
        if not self.first:
            return prompt
        line = TOLD["omitted"] if self.summary is None else TOLD["summed"]
        return joined(prompt, Template(line).substitute(last=self.first, summary=self.summary or ""))


def joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


class Prompts:
    """The prompts of one agent of a conversation."""

    def __init__(self, talk: Talk, agent: Agent, model: Model) -> None:
        self._talk = talk
        self._agent = agent
        self._model = model
        given = {name: text for name, text in model.bios.items() if text is not None}
        self._given: Mapping[str, str] = {**given, **talk.prompts}
        self._is_shared = talk.view == "shared"

    def _put(self, piece: str, default: str, agent: Agent, **names: object) -> str:
        text = self._given.get(piece, default)
        return Template(text).safe_substitute(agent=agent.id, role=agent.role, who=agent.who, **names)

    # The system message

    def system(self, *, is_told: bool) -> Message | None:
        """Return the system message, if there is one; the clock's time is ``SOME_TIME``."""
        agent, talk = self._agent, self._talk
        own = "" if self._is_shared else joined(agent.system, self._demand() if is_told else "")
        text = joined(self._bios(), talk.system, own)
        return {"role": "system", "content": text} if text else None

    def _bios(self) -> str:
        bios, tools = self._model.bios, self._tools()
        if not bios.get("enabled", True):
            return ""
        budget = f"Tool iterations: {self._model.iterations}" if self._agent.tools else ""
        template = bios.get("template")
        if template is not None:
            return Template(template).safe_substitute(context=self._context(), tools=tools)
        return joined(self._context(), tools, "\n".join(line for line in (budget, SOME_TIME) if line))

    def _context(self) -> str:
        agent, others = self._agent, self._talk.everybody
        if self._is_shared:
            default = "Several agents take part; all words carry their speakers' names." if len(others) > 1 else ""
        elif len(others) > 1:
            default = (
                "You are $who. Several agents take part; others' words carry their names. Answer only as yourself."
            )
        else:
            default = "You are $who." if agent.who != agent.id else ""
        return self._put("context", default, agent, agents=", ".join(others))

    def _tools(self) -> str:
        agent = self._agent
        parts = [TOLD["markup"]] if agent.markup else []
        for intro, tools in (("tools", agent.tools), ("signals", agent.exit_tools)):
            if tools:
                parts.append("\n".join([TOLD[intro], *map(_line_of, tools)]))
        if agent.tools or agent.exit_tools:
            parts.append(TOLD["markup_calls"] if agent.markup else TOLD["json_calls"])
        return "\n\n".join(parts)

    def _demand(self) -> str:
        schema = (self._agent.validation or {}).get("json_schema")
        return f"Answer with JSON that fits this schema and nothing else: {json.dumps(schema, ensure_ascii=False)}"

    # The conversation

    def messages(
        self,
        number: int,
        heard: Iterable[Heard],
        opening: Opening,
        rejected: tuple[str, str] | None = None,
        *,
        is_told: bool = False,
        addition: str = "",
    ) -> list[Message]:
        """Return the messages of a turn of a round; ``rejected`` is the last answer that was not valid, and why."""
        talk, agent = self._talk, self._agent
        heard = [each for each in heard if each.text is None or each.text.strip()]
        prompt = opening.put_behind(talk.prompt)
        if self._is_shared:
            cue = self._put("cue", "$who:", agent, round=number + 1, rounds=talk.rounds)
            demand = self._demand() if is_told else ""
            text = joined(prompt, *map(self._quote, heard), agent.system, demand, cue)
            messages = [{"role": "user", "content": text}]
        else:
            messages = self._alternate(number, heard, prompt)
        if rejected is not None:
            answer, reason = rejected
            messages.append({"role": "assistant", "content": answer if answer.strip() else "..."})
            messages.append({"role": "user", "content": self._put("invalid", INVALID, agent, reason=reason)})
        if addition:
            messages[-1] = {**messages[-1], "content": joined(messages[-1]["content"], addition)}
        first = self.system(is_told=is_told)
        return messages if first is None else [first, *messages]

    def _alternate(self, number: int, heard: Sequence[Heard], prompt: str) -> list[Message]:
        messages: list[Message] = []
        shown = [prompt]
        for each in heard:
            if each.agent.id == self._agent.id and each.text is not None:
                messages += [self._user(each.round, shown), {"role": "assistant", "content": each.text}]
                shown = []
            else:
                shown.append(self._quote(each))
        return [*messages, self._user(number, shown)]

    def _user(self, number: int, shown: Sequence[str]) -> Message:
        cue = self._put("cue", "", self._agent, round=number + 1, rounds=self._talk.rounds)
        return {"role": "user", "content": joined(*shown, cue) or "..."}

    def _quote(self, each: Heard) -> str:
        if each.text is None:
            return self._put("left", "$who has left.", each.agent)
        return self._put("quote", "$agent: $words", each.agent, round=each.round + 1, words=each.text)

    # The parameters

    def params(self, rejections: int, *, is_constrained: bool) -> dict[str, Any]:
        """Return the parameters of a request after this many rejected answers."""
        agent, model = self._agent, self._model
        params: dict[str, Any] = {**model.params}
        if not any(name in {**params, **agent.params} for name in BOUNDS):
            params["max_tokens"] = model.context * 3 // 4
        params |= agent.params
        retry = rejections - 1  # the first retry samples as before
        if retry > 0 and isinstance(params.get("seed"), int) and params["seed"] >= 0:
            params["seed"] += retry
        if retry > 0 and isinstance(params.get("temperature"), int | float):
            warmer = min(1.0, round(params["temperature"] + 0.2 * retry, 3))
            params["temperature"] = max(params["temperature"], warmer)
        has_own = any(name in params for name in OWN_CONSTRAINTS)
        if is_constrained and not has_own:
            params |= self._constraint()
        if is_constrained and (agent.tools or agent.exit_tools) and (has_own or self._constraint()):
            params["tool_choice"] = "none"
        if not is_constrained:
            params = {name: value for name, value in params.items() if name not in OWN_CONSTRAINTS}
        return params

    def summary_params(self) -> dict[str, Any]:
        """Return the parameters with which it sums up, but for the bound of the summary."""
        given = {**self._model.params, **self._agent.params}
        left_out = {*OWN_CONSTRAINTS, *BOUNDS, "stop", "tool_choice", "min_tokens", "parallel_tool_calls"}
        return {name: value for name, value in given.items() if name not in left_out}

    @property
    def is_told(self) -> bool:
        """Return whether the prompt says what the answer has to be."""
        wanted = self._wanted()
        return bool(wanted.get("json_schema")) and self._agent.markup

    @property
    def is_held(self) -> bool:
        """Return whether the engine gets a constraint if only an answer is expected."""
        return bool(self._constraint()) or any(name in self._agent.params for name in OWN_CONSTRAINTS)

    def _wanted(self) -> Document:
        wanted = self._agent.validation or {}
        return wanted if wanted.get("constrain", "auto") == "auto" else {}

    def _constraint(self) -> dict[str, Any]:
        """Return llama-server's constraint; a grammar whose text is not specified is ``...``."""
        wanted = self._wanted()
        if wanted.get("json_schema") is not None:
            schema = {"name": "answer", "schema": wanted["json_schema"]}
            return {} if self._agent.markup else {"response_format": {"type": "json_schema", "json_schema": schema}}
        if wanted.get("choices"):
            choices = " | ".join(json.dumps(each) for each in wanted["choices"])
            return {"grammar": "..." if self._agent.markup else f"root ::= {choices}\n"}
        return {"grammar": "..."} if wanted.get("pattern") is not None else {}

    def tools(self) -> list[dict[str, Any]]:
        """Return the tool definitions sent with the messages."""
        documents = [*self._agent.tools, *self._agent.exit_tools]
        return [{name: each[name] for name in ("type", "function") if name in each} for each in documents]

    def exchange(self, answer: Document, results: Sequence[Any], left: int) -> list[Message]:
        """Return the messages that follow an answer with calls; results are JSON values, ``ANY_REASON`` in any text."""
        note = f"({left} tool iterations left)" if left else "(no tool iterations left)"
        if not self._model.bios.get("enabled", True):
            note = ""
        calls = answer.get("tool_calls")
        if calls:
            texts = [*map(json.dumps, results)]
            texts[-1] = joined(texts[-1], note)
            own = [
                {"id": each["id"], "type": "function", "function": {k: each[k] for k in ("name", "arguments")}}
                for each in calls
            ]
            message: Message = {"role": "assistant", "content": answer["content"], "tool_calls": own}
            pairs = zip(calls, texts, strict=True)
            return [message, *({"role": "tool", "tool_call_id": c["id"], "content": text} for c, text in pairs)]
        written = {"role": "assistant", "content": answer["content"]}
        if self._agent.markup:
            text = "\n".join(f"<observation>{json.dumps(each)}</observation>" for each in results)
        else:
            names = [each["name"] for each in json.loads(answer["content"])["tool_calls"]]
            told = [{"name": name, "result": each} for name, each in zip(names, results, strict=True)]
            text = json.dumps({"tool_results": told})
        return [written, {"role": "user", "content": joined(text, note)}]


INVALID = "Your answer is not valid: $reason. Answer again, with nothing else."


def _line_of(tool: Document) -> str:
    function = tool["function"]
    schema = function.get("parameters") or {}
    wanted = schema.get("required", ())
    fields = [
        f"{name}{'' if name in wanted else '?'}: {each.get('type', 'any')}"
        for name, each in schema.get("properties", {}).items()
    ]
    signature = f"- {function['name']}({', '.join(fields)})"
    return f"{signature}: {function['description']}" if function.get("description") else signature
