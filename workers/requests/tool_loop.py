"""One request from its first generation to its outcome: the engine is asked, its calls are run, and it is asked again.

The only place where the wire's errors become outcomes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import anyio

from transport.client import EngineClient
from transport.errors import ContextOverflow, EngineError, EngineOverloaded, EngineRejected
from transport.request import ChatRequest, Message, ToolCall
from workers.errors import AdapterUnknown
from workers.outcome import Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer, Phase
from workers.requests.generation import Generation
from workers.requests.prompts.bios import BiosFacts, BiosPolicy, bios_prompt
from workers.requests.prompts.stack import stack_messages, tool_messages
from workers.requests.request import Request
from workers.tools.call_parser import Fallback, ParsedMessage, read_message
from workers.tools.calls import MessageTools, ToolLimits, read_arguments, signal_of
from workers.tools.runner import ToolRunner

RECORDED = '{"recorded": true}'  # what a signal is answered with, where the template wants every call answered


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """How a worker's requests are run; the same for all of them."""

    adapted: Callable[[str | None], tuple[str, Mapping[str, object]]]  # an adapter to the model's name, and parameters
    bios: BiosPolicy
    tool_limits: ToolLimits
    runner: ToolRunner | None
    repetition: RepetitionLimits
    request_s: float | None
    sends_tools: bool  # or else the engine refuses them, and the model is told of them in words alone
    now: Callable[[], datetime]
    cache_scope: Callable[[], str | None]  # prefixes are shared within it alone


async def converse(client: EngineClient, manner: RequestSettings, request: Request, answer: Answer) -> Outcome:
    """Return how ``request`` ended; ``answer`` holds what came, at any moment."""
    with anyio.move_on_after(manner.request_s) as answer.deadline:
        return await ToolLoop(client, manner, request, answer).run()
    return RequestFailed(
        reason=FailureReason.DEADLINE, detail=f"not answered within request_s = {manner.request_s or 0:g} s"
    )


class ToolLoop:
    """The loop of one request; one assistant message with calls costs one iteration, however many they are."""

    def __init__(self, client: EngineClient, manner: RequestSettings, request: Request, answer: Answer) -> None:
        self._client = client
        self._manner = manner
        self._request = request
        self._answer = answer
        self._tools = {tool.name: tool for tool in request.tools}
        self._exit_names = {tool.name for tool in request.exit_tools}
        self._conversation: list[Message] = list(request.conversation)
        self._now = manner.now()  # one time for the whole request: its iterations share the engine's prefix cache

    def __repr__(self) -> str:
        return f"<ToolLoop {self._request.job_name} {self._answer!r}>"

    async def run(self) -> Outcome:
        """Ask, run tools, ask again, until there is an answer or a failure."""
        limits = self._manner.tool_limits
        while True:
            left = limits.iterations - self._answer.iterations_used
            outcome = await self._ask(left)
            if not isinstance(outcome, Completed):
                return outcome
            reading = self._read()
            calls = [call for call in reading.calls if call.name not in self._exit_names]
            if not calls:
                return outcome
            if left <= 0:
                names = ", ".join(call.name for call in calls)
                return RequestFailed(
                    reason=FailureReason.TOOL_BUDGET,
                    detail=f"the model called {names} after its {limits.iterations} tool iterations",
                )
            failed = await self._run_tools(reading, calls)
            if failed is not None:
                return failed

    async def _ask(self, iterations_left: int) -> Outcome:
        facts = BiosFacts(
            now=self._now,
            tools=self._request.tools,
            exit_tools=self._request.exit_tools,
            iterations_left=max(0, iterations_left),
            fallback=self._fallback,
        )
        bios = bios_prompt(facts, self._manner.bios)
        try:
            model, params = self._manner.adapted(self._request.adapter)
        except AdapterUnknown as error:
            return RequestFailed(reason=FailureReason.ADAPTER_UNLOADED, detail=str(error))
        chat = ChatRequest(
            model=model,
            messages=stack_messages(bios, self._request.system, self._conversation),
            params={**self._request.params, **params},
            tools=self._documents,
            cache_scope=self._manner.cache_scope(),
            is_watched=self._request.is_watched,
        )
        chars = sum(len(message.content) for message in chat.messages)
        generation = self._answer.begin_generation(self._manner.repetition, chars)
        outcome = await ask_once(self._client, chat, generation)
        self._answer.phase = Phase.US
        loop = self._answer.find_loop(is_over=True) if isinstance(outcome, Completed) else None
        return outcome if loop is None else loop_failure(loop)

    @property
    def _documents(self) -> tuple[Mapping[str, object], ...]:
        if not self._manner.sends_tools:
            return ()
        return tuple(tool.document for tool in (*self._request.tools, *self._request.exit_tools))

    @property
    def _fallback(self) -> Fallback | None:
        if self._request.markup:
            return Fallback.MARKUP  # the agent's own protocol, whatever the operator thinks of text as calls
        return Fallback.JSON if self._manner.tool_limits.fallback else None

    def _read(self) -> ParsedMessage:
        generation = self._answer.generation
        names = {*self._tools, *self._exit_names}
        fallback = self._fallback if names else None
        reading = read_message(generation.text, generation.tool_call_fragments, fallback, names)
        self._answer.take_words(reading.text)
        self._answer.signals += [signal_of(call) for call in reading.calls if call.name in self._exit_names]
        return reading

    async def _run_tools(self, reading: ParsedMessage, calls: Sequence[ToolCall]) -> RequestFailed | None:
        """Run the calls of one message and put them into the conversation; return what ends the request, if any."""
        answer = self._answer
        desk = MessageTools(
            self._tools, self._manner.runner, self._manner.tool_limits, self._request.job_name, self._request.journal
        )
        answer.phase = Phase.TOOLS
        try:
            results = await desk.run(calls, answer.iterations_used, reading.text, answer.tool_calls)
        finally:
            answer.phase = Phase.US
        if isinstance(results, RequestFailed):
            return results
        answer.iterations_used += 1
        in_order = iter(results)  # in the order of the calls; ids are the engine's, and may repeat
        answered = [
            (_wellformed(call), RECORDED if call.name in self._exit_names else next(in_order)) for call in reading.calls
        ]
        self._conversation += tool_messages(reading, answer.generation.text, answered)
        return None


async def ask_once(client: EngineClient, chat: ChatRequest, generation: Generation) -> Outcome:
    """Return how one generation ended."""
    try:
        await client.stream(chat, generation)
    except EngineRejected as error:
        return _rejected(error)
    except EngineError as error:
        return EngineFailed(reason=FailureReason.ENGINE_UNREACHABLE, detail=str(error), brought_down=False)
    return Completed(finish_reason=generation.finish_reason or "unknown")


def loop_failure(what: str) -> RequestFailed:
    """Return the ending of a request whose model repeats itself."""
    return RequestFailed(reason=FailureReason.REPEATED_LINE_LOOP, detail=what)


def _wellformed(call: ToolCall) -> ToolCall:
    """Return the call as it may stand in a history: malformed arguments would be refused at every later request."""
    if read_arguments(call.arguments) is None or not call.arguments.strip():
        return ToolCall(id=call.id, name=call.name, arguments="{}")
    return call


def _rejected(error: EngineRejected) -> Outcome:
    if isinstance(error, ContextOverflow):
        return RequestFailed(reason=FailureReason.CONTEXT_OVERFLOW, detail=error.message)
    if error.is_about_the_request:
        return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=str(error))
    retry_after_s = error.retry_after_s if isinstance(error, EngineOverloaded) else None
    return EngineFailed(
        reason=FailureReason.ENGINE_REJECTED, detail=str(error), brought_down=False, retry_after_s=retry_after_s
    )
