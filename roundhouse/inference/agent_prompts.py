"""The prompts of an engine's agents, and the words of an answer that each step shows."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Literal

from msgspec import structs

from roundhouse.inference.lane_news import LaneAgent
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
