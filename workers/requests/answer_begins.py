"""Whether one engine goes on with half an answer, and how it is asked to.

What its template makes of the beginning is read before each request: a template that rewrites it would change the
answer without a word. What an incarnation refuses is not tried again.
"""

import logging
from collections.abc import Callable

from msgspec.structs import replace

from transport.client import EngineClient
from transport.errors import EngineError, EngineRejected
from transport.request import ChatRequest
from workers.outcome import Outcome, RequestFailed
from workers.requests.halves import GoingOn, HalfAnswer, obstacle_in, rest_of, stops_in

logger = logging.getLogger(__name__)


class AnswerBegins:
    """The beginnings of answers that one worker's engine is asked to go on with; ``incarnation`` is its number."""

    def __init__(self, worker: str, client: EngineClient, incarnation: Callable[[], int]) -> None:
        self._worker = worker
        self._client = client
        self._incarnation = incarnation
        self._refused_by: int | None = None
        self.refusals = 0
        self.fault: str | None = None  # why the present engine is not asked to go on

    def __repr__(self) -> str:
        return f"<AnswerBegins {self._worker} fault={self.fault}>"

    async def prepare(self, chat: ChatRequest, half: HalfAnswer) -> tuple[ChatRequest, GoingOn] | None:
        """Return the request to go on with half an answer; None if the engine must write it from its beginning."""
        if self._refused_by != self._incarnation():
            self._refused_by = self.fault = None
        query, fault = self._client.dialect.begun, self.fault or obstacle_in(chat.params)
        stops = stops_in(chat.params)
        while query is not None and fault is None and (begun := half.begun(stops)) is not None:
            asked = replace(chat, begun=begun)
            try:
                reading = await self._client.read_begun(asked)
            except EngineError as error:
                fault = str(error)
                if isinstance(error, EngineRejected):
                    self._switch_off(fault)
                break
            fault = reading.fault
            rest = rest_of(chat.params, reading.tokens)
            if fault is None and rest is not None:
                going_on = GoingOn(begun=begun, tokens=reading.tokens, echoes=query.echoes)
                return replace(asked, params=rest), going_on
            half = half.shortened()  # all tokens had come, but not the end of the answer
        if half.text or half.reasoning:
            self.refusals += 1
            logger.info("worker %s: half an answer is written from its beginning: %s", self._worker, fault)
        return None

    def note_refused(self, outcome: Outcome) -> None:
        """Record that the present engine refused to go on, or went on with other words."""
        self.refusals += 1
        strayed = "the engine goes on with other words than the beginning of the answer"
        self._switch_off(outcome.detail if isinstance(outcome, RequestFailed) else strayed)

    def _switch_off(self, fault: str) -> None:
        self._refused_by, self.fault = self._incarnation(), fault
        logger.warning("worker %s: answers that break off do not go on: %s", self._worker, fault)
