"""What a model's template has it think before it answers, as its engine tells: asked once for each way to render it."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from transport.client import EngineClient
from transport.errors import EngineError
from transport.request import Thought

KNOWN: Final = 100  # ways to render a prompt of which it is known where their thought stands


class EngineThoughts:
    """One worker's; written by its requests. What an engine does not tell now is asked again by the next request.

    Another incarnation may have another template.
    """

    def __init__(self, client: EngineClient, incarnation: Callable[[], int]) -> None:
        self._client = client
        self._incarnation = incarnation
        self._known: dict[tuple[int, bytes], Thought] = {}

    def __repr__(self) -> str:
        return f"<EngineThoughts known={len(self._known)}>"

    async def before_answer(self, params: Mapping[str, object]) -> Thought:
        """Return what stands before the answer to a request with these parameters."""
        query = self._client.dialect.thoughts
        if query is None:
            return Thought.NONE
        shaping = {name: params[name] for name in query.params if name in params}
        key = self._incarnation(), msgspec.json.encode(shaping, order="sorted")
        if key not in self._known:
            try:
                thought = await self._client.read_thought(shaping)
            except EngineError:
                return Thought.NONE
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = thought
        return self._known[key]
