"""Agents on lanes: the place of each, their prompts, and the words of an answer that each step shows."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import structs

from service.conversations.job.markup import read_markup
from service.conversations.job.wording import wording_of
from transport.answer_bound import laid_over
from workers.engine.launch import takes_tools
from workers.requests.answer import Answer
from workers.requests.bios_words import BiosFrame
from workers.requests.prompts.render import ToolBudget, render_messages
from workers.requests.request import Request, parse_tools, user_conversation
from workers.spec import WorkerSpec
from workers.tools.thoughts import without_thoughts

Step = Literal["think", "plan", "act"]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a checkpoint: the model of the lanes, its pinned lane, and its adapter if it has one."""

    model: str
    lane: str
    adapter: str | None = None


class LaneAgent:
    """An agent and the place of its checkpoint; ``params`` are the generation parameters of all its runs."""

    def __init__(self, agent_id: str, served: Served, params: Mapping[str, object]) -> None:
        self.id = agent_id
        self.served = served
        self.params = params
        self.turn = asyncio.Lock()  # its runs are done in their order
        self.last_lane = ""  # where its last run was

    def __repr__(self) -> str:
        return f"<LaneAgent {self.id} {self.served}>"


class AgentPrompts:
    """Makes requests with the common beginning of all prompts: the BIOS if it is on, then ``system``."""

    def __init__(self, spec: WorkerSpec, system: str) -> None:
        self._spec = spec
        self._common = Request(
            job_name="",
            system=system,
            conversation=user_conversation(""),
            tools=tuple(parse_tools(spec.tools)),
            markup=True,
            is_watched=False,
        )

    def __repr__(self) -> str:
        return f"<AgentPrompts of {len(self._common.tools)} tools>"

    def warmed(self) -> WorkerSpec:
        """Return the specification of engines that read the common beginning when they start."""
        limits = self._spec.tool_limits
        budget = ToolBudget(iterations=limits.iterations, has_fallback=limits.fallback, stuck=limits.stuck)
        messages = render_messages(self._common, self._frame(), budget)
        return replace(
            self._spec,
            warm_up="".join(each.content for each in messages if each.role == "system"),
            warm_up_tools=[tool.document for tool in self._common.tools] if takes_tools(self._spec) else [],
        )

    def request(
        self, agent: LaneAgent, prompt: str, step: Step, max_tokens: int, params: Mapping[str, object]
    ) -> Request:
        """Return a run's request, with the time of now; ``params`` override the agent's."""
        return structs.replace(
            self._common,
            job_name=agent.id,
            conversation=user_conversation(prompt),
            tools=() if step == "think" else self._common.tools,
            params=laid_over({**agent.params, **params}, {"max_tokens": max_tokens}),
            adapter=agent.served.adapter,
            frame=self._frame(),
        )

    def _frame(self) -> BiosFrame:
        """Return a job's words: the rest of the tool budget stands behind each result, so that the prefix stays."""
        return BiosFrame(words=wording_of(self._spec.bios).bios, context="", now=datetime.now().astimezone())


def words_of(answer: Answer, step: Step) -> str:
    """Return the words of an answer for a step: all with thoughts, all without them, or those said aloud."""
    if step == "act":
        return read_markup(answer.text).words
    if step == "plan":
        return without_thoughts(answer.text)
    return f"<thinking>{answer.reasoning}</thinking>\n{answer.text}" if answer.reasoning else answer.text
