"""One incarnation of a worker whose engine spans several nodes: it runs parts that others lead until it leads one."""

import logging
from collections.abc import Callable

from typing_extensions import override

from workers.engine.incarnation import Incarnation, described
from workers.engine.launch.vllm import member_command
from workers.process.child import Command, EngineProcess, adopt_engine, run_engine
from workers.process.handed_over import HeldEngine
from workers.span_board import SpanBoard, SpanPart

logger = logging.getLogger(__name__)


class SpanIncarnation(Incarnation):
    """An engine that spans nodes; it ends when a generation that this node leads ends, or by its own failure."""

    @property
    @override
    def died_of_outside(self) -> bool:
        if self.part is not None and (is_outside := self.part.is_outside(self.exit)) is not None:
            return is_outside
        return super().died_of_outside

    @override
    async def _run(self, command: Command, on_begun: Callable[[], None], on_ready: Callable[[], None]) -> str:
        spans = self._starter.spans
        assert spans is not None  # noqa: S101 - its starter has a board
        while True:
            held, self._held = self._held, None
            part = await self._join(spans, held)
            because = "its generation is over"
            with spans.running(part), part.scope:
                own = member_command(self._spec, command, part.generation, part.rank)
                because = await self._take_part(part, own, held, on_begun, on_ready)
                named = because if self.exit is not None and self.exit.parted else f"{part.name}: {because}"
                spans.end_generation(part.generation, named)
            because = part.elsewhere or because
            ended_alone = not (part.has_ended_elsewhere(self.exit) or self.died_of_outside)
            if part.leads or ended_alone or not self.is_gone:  # beside processes that do not die no engine may start
                return because
            logger.info("worker %s: generation %d is over: %s", self._spec.id, part.generation.number, because)

    async def _join(self, spans: SpanBoard, held: HeldEngine | None) -> SpanPart:
        """Return this node's part of a generation: of a running engine's, or of the next that is formed."""
        if held is None or held.generation is None:
            self.part = None
            self._note_fault(f"waits until {self._spec.nodes} nodes offer devices for it")
            generation = await spans.wait_generation(self._spec, self._starter.devices)
        else:
            generation = held.generation
        self.part = SpanPart(generation, spans)
        return self.part

    async def _take_part(
        self,
        part: SpanPart,
        command: Command,
        held: HeldEngine | None,
        on_begun: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> str:
        if not part.leads:
            return await self._follow(part, command, held)
        if held is not None:
            return await self._adopt(held, on_begun, on_ready)
        return await self._start(self._keyed(command), on_begun, on_ready)

    async def _follow(self, part: SpanPart, command: Command, held: HeldEngine | None) -> str:
        """Run a part that another node leads; it serves no requests."""
        self._note_fault(f"is {part.name} of a span that {part.generation.name_of(0)} leads")
        take = self._log.add_output
        (await self._gate.enter(self._starter.devices)).release()
        async with run_engine(command, take) if held is None else adopt_engine(held.process, take) as self._engine:
            self._note_started(self._engine)
            return described(await self._engine.wait_gone(), part)

    @override
    def _note_started(self, engine: EngineProcess) -> None:
        super()._note_started(engine)
        if self.part is not None:
            self.part.attach(engine)
