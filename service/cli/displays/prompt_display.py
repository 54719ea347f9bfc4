"""What a person sees of the prompts of jobs that run in this process: each as it was really asked, once."""

import json
from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.rule import Rule

from service.cli.displays.console import plain
from service.conversations.job import JobId, TurnKey
from service.node.node import Node
from service.node.prompt_history import AskedPrompt

TURN: Final = "turn"
READY: Final = "ready"  # again, where the event has a reason


class PromptDisplay:
    """Prints the prompts of turns as their attempts end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._read: dict[JobId, int] = {}  # the number of each job's last event
        self._printed: dict[TurnKey, int] = {}  # how many attempts of each turn

    async def show(self, node: Node, jobs: Iterable[JobId]) -> None:
        """Print what was asked since the last look."""
        for job_id in jobs:
            events, _ = await node.jobs.events_after(job_id, self._read.get(job_id, 0))
            for event in events:
                self._read[job_id] = event.number
                if event.kind == TURN:
                    await self._show_turn(node, job_id, json.loads(event.data))

    async def _show_turn(self, node: Node, job_id: JobId, event: dict[str, object]) -> None:
        key = TurnKey(job_id, str(event["conversation"]), str(event["agent"]), int(str(event["round"])))
        if event["state"] in (READY, "in_flight") and not event.get("reason"):
            return
        asked = await node.prompts.of_turn(key)
        begin = self._printed.get(key, 0)
        for number, prompt in enumerate(asked[begin:], begin + 1):
            self._print(key, number, prompt)
        self._printed[key] = max(begin, len(asked))

    def _print(self, key: TurnKey, number: int, prompt: AskedPrompt) -> None:
        place = f"{key.conversation_id}, {key.agent_id}, round {key.round}, attempt {number}"
        self._console.print(Rule(plain(place), align="left"))
        if prompt.messages is None:
            self._line("(asked by an older version of Roundhouse, which kept no prompts)")
            return
        for message in prompt.messages:
            self._line(f"[{message.role}]\n{plain(message.content)}")
            for call in message.calls:
                self._line(f"[call] {plain(call.name)} {plain(call.arguments)}")
        self._line(f"[params] {plain(json.dumps(prompt.params, ensure_ascii=False))}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
