"""One request from first generation to outcome: the engine is asked, its calls run, and it is asked again.

The only place where transport errors become outcomes.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

import anyio
import msgspec
from msgspec.structs import replace

from transport.client import EngineClient
from transport.errors import (
    EngineError,
    without_frames,
)
from transport.request import ChatRequest, Constraint, Thought, ToolCall
from workers.errors import AdapterUnknown
from workers.outcome import Completed, FailureReason, Outcome, RequestFailed
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer, Finish, Phase
from workers.requests.answer_begins import AnswerBegins
from workers.requests.asking import Excuse, ask_fairly
from workers.requests.bios_words import BiosFrame, BiosWords
from workers.requests.constraints import call_constraint
from workers.requests.halves import GoingOn, HalfAnswer, may_begin_late, request_for_rest
from workers.requests.prompts.render import ToolBudget, fallback_of, note_after, render_messages
from workers.requests.prompts.stack import RECORDED, ToolExchange
from workers.requests.recording import begin_record, is_mute, record_tokens
from workers.requests.request import CONSTRAINTS, Demand, Request, SlotHolder
from workers.requests.request_ends import broken_off, declined, failure_of, is_refused, loop_failure, overdrawn
from workers.requests.stored_half import is_answer_to
from workers.tools.call_parser import Fallback, ParsedMessage, read_message
from workers.tools.calls import MessageTools, ToolLimits, read_arguments, signal_of
from workers.tools.runner import ToolRunner

SERVER_ERROR: Final = 500
# Admits a generation to a shared KV cache, or returns how its request ends for lack of room.
Admit = Callable[[Answer, ChatRequest], Awaitable[Outcome | None]]
AdmitPrompt = Callable[[Answer, int, bytes | None, int], Awaitable[Outcome | None]]


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings shared by all requests of a worker."""

    adapted: Callable[[str | None], tuple[str, Mapping[str, object]]]  # adapter to model name and parameters
    bios: BiosWords  # for requests without a frame of their own
    context: str
    constrain: Callable[[Constraint], Mapping[str, object] | None]
    thought: Callable[[Mapping[str, object]], Awaitable[Thought]]  # the model's own thought before an answer
    tool_limits: ToolLimits
    runner: ToolRunner | None
    repetition: RepetitionLimits
    request_s: float | None
    sends_tools: bool  # else the engine refuses them, and only the prompt describes them to the model
    forces_calls: bool  # else the engine itself makes a model call a tool when it must
    now: Callable[[], datetime]
    cache_scope: Callable[[str | None], str | None]  # scope of shared prefixes: of an owner, or of all
    version: Callable[[], int | None]  # version of the engine's weights
    begins: AnswerBegins  # whether its engine goes on with half an answer
    is_others: bool  # the server is attached: a connection is kept for one owner
    excuse: Excuse | None = None  # finds out whether the engine serves others
    admit: Admit | None = None
    admit_prompt: AdmitPrompt | None = None  # the same for relayed requests


async def converse(client: EngineClient, settings: RequestSettings, request: Request, answer: Answer) -> Outcome:
    """Return how ``request`` ended; ``answer`` holds the parts received, at any moment."""
    with anyio.move_on_after(settings.request_s) as answer.deadline:
        return await ToolLoop(client, settings, request, answer).run()
    return RequestFailed(
        reason=FailureReason.DEADLINE, detail=f"not answered within request_s = {settings.request_s or 0:g} s"
    )


class ToolLoop:
    """The loop of one request; an assistant message with calls costs one iteration, however many calls it has."""

    def __init__(self, client: EngineClient, settings: RequestSettings, request: Request, answer: Answer) -> None:
        self._client = client
        self._settings = settings
        self._request = request
        self._answer = answer
        self._tools = {tool.name: tool for tool in request.tools}
        self._exit_names = {tool.name for tool in request.exit_tools}
        self._documented = (*request.tools, *request.exit_tools)
        limits = settings.tool_limits
        self._budget = ToolBudget(iterations=limits.iterations, has_fallback=limits.fallback, stuck=limits.stuck)
        # One time for the whole request: a new time would change the prompt of each iteration.
        self._frame = request.frame or BiosFrame(words=settings.bios, context=settings.context, now=settings.now())

    def __repr__(self) -> str:
        return f"<ToolLoop {self._request.job_name} {self._answer!r}>"

    async def run(self) -> Outcome:
        """Ask, run tools, ask again, until there is an answer or a failure."""
        demand = self._request.demand
        is_last = not self._documented or (demand is not None and demand.at_once)
        while True:
            is_last = is_last or self._left <= 0
            outcome = await self._ask(is_constrained=is_last)
            if not isinstance(outcome, Completed):
                return outcome
            reading = self._read()
            calls = [call for call in reading.calls if call.name not in self._exit_names]
            if not calls:
                if is_last or demand is None or await _is_met(demand, reading.text):
                    return outcome
                is_last = True  # ask again with the constraint, which tools did not allow before
                del self._answer.recorded[-1:]  # the conversation goes on without this answer
                continue
            if self._left <= 0:
                return overdrawn([call.name for call in calls], self._budget, self._answer.exchanges)
            failed = await self._run_tools(reading, calls)
            if failed is not None:
                return failed

    @property
    def _left(self) -> int:
        return self._budget.left(self._answer.exchanges)

    async def _ask(self, *, is_constrained: bool) -> Outcome:
        try:
            model, params = self._settings.adapted(self._request.adapter)
        except AdapterUnknown as error:
            return RequestFailed(reason=FailureReason.ADAPTER_UNLOADED, detail=str(error))
        chat = ChatRequest(
            model=model,
            messages=render_messages(self._request, self._frame, self._budget, self._answer.exchanges),
            params={**await self._params(is_constrained=is_constrained), **params},
            tools=self._documents,
            cache_scope=self._settings.cache_scope(self._request.cache_owner),
            # The use of a shared cache is counted by the tokens that have come.
            is_watched=self._request.is_watched or self._settings.admit is not None,
            records=self._request.records,
        )
        half = self._answer.begins_with  # only the first message goes on
        if half is not None:
            outcome = await self._go_on(chat, half)
            if outcome is not None:
                return outcome
        return await self._generate(chat)

    async def _go_on(self, chat: ChatRequest, half: HalfAnswer) -> Outcome | None:
        """Return how a message that an earlier attempt has begun ended; None if it is asked for from its beginning."""
        begins, demand = self._settings.begins, self._request.demand
        rest = request_for_rest(chat, half, demand if self._answer.keeps_thought else None, self._settings.constrain)
        try:
            asked = None if rest is None or not is_answer_to(half, chat) else await begins.prepare_chat(rest, half)
        except EngineError as error:
            return broken_off(without_frames(error))
        if asked is None:
            return None
        outcome = await self._generate(*asked)
        generation = self._answer.generation
        if is_refused(outcome) or generation.has_strayed:
            begins.note_refused(outcome, is_certain=not generation.is_in_doubt)
            self._answer.generation = generation.without_words()
            return None
        return outcome

    async def _generate(self, chat: ChatRequest, going_on: GoingOn | None = None) -> Outcome:
        chars = _chars_of(chat)
        self._answer.asked = chat
        self._answer.begin_generation(self._settings.repetition, chars, going_on)
        outcome = None if self._settings.admit is None else await self._settings.admit(self._answer, chat)
        if outcome is None:
            outcome = await self._ask_engine(chat, chars, going_on)
        self._answer.phase = Phase.US
        if not isinstance(outcome, Completed):
            return outcome
        loop = self._answer.loops.find_loop(is_over=True)
        if loop is not None:
            return loop_failure(loop)
        is_recorded, version = chat.records is not None, self._settings.version
        return (await record_tokens(self._client, chat, self._answer, version()) if is_recorded else None) or outcome

    async def _ask_engine(self, chat: ChatRequest, chars: int, going_on: GoingOn | None) -> Outcome:
        """Return how one generation ended; ``chars`` is the size of its prompt."""
        answer, settings = self._answer, self._settings
        answer.is_mute = chat.records is not None and is_mute(self._client)
        scope = self._request.owner or "" if settings.is_others else None  # connections are kept by scope

        async def ask() -> None:
            answer.begin_again(settings.repetition, chars, going_on)
            try:
                if chat.records is not None:
                    await begin_record(self._client, chat, answer)
                await self._client.stream(chat, answer.generation, scope)
            finally:
                answer.phase = Phase.US  # until it is asked again the engine's silence means nothing

        def has_begun() -> bool:
            return answer.generation.first_token_at is not None

        excuse = settings.excuse if going_on is None else None  # it is asked for all of it instead
        error = await ask_fairly(ask, has_begun, excuse, is_others=settings.is_others)
        if error is None:
            return Completed(finish_reason=answer.generation.finish_reason or "unknown")
        outcome = None if going_on is None else declined(error, answer.generation)
        return outcome or failure_of(error, has_pool=settings.admit is not None)

    async def _params(self, *, is_constrained: bool) -> dict[str, object]:
        """Return the caller's parameters; constraining ones only if nothing but an answer is expected."""
        params = dict(self._request.params)
        demand = self._request.demand
        self._answer.constrained_by, self._answer.keeps_thought = None, False
        if not is_constrained and self._must_call(params):
            kept = {name: value for name, value in params.items() if name not in CONSTRAINTS}
            forced = self._settings.constrain(call_constraint([*self._tools.values(), *self._request.exit_tools]))
            return {**kept, **(forced or {}), "tool_choice": "none"}
        if demand is None:
            return params
        if demand.constraint is not None:
            own = self._settings.constrain(await self._after_thought(demand, params)) or {} if is_constrained else {}
        else:
            own = {name: params.pop(name) for name in CONSTRAINTS & params.keys()}
        if is_constrained and own:
            self._answer.constrained_by = next(iter(own))
            self._answer.keeps_thought = self._client.dialect.thoughts is not None and may_begin_late(demand)
            params |= own
            if self._documents:
                params["tool_choice"] = "none"  # engines accept no grammar beside tools that may be called
        return params

    def _must_call(self, params: Mapping[str, object]) -> bool:
        """Whether the model must call a tool now, as text: only in the first of its messages.

        One that had to call in every message would never answer.
        """
        is_first = not self._answer.exchanges and self._request.tools
        is_read = fallback_of(self._request, self._budget) is Fallback.JSON
        return bool(is_first and is_read and self._settings.forces_calls and params.get("tool_choice") == "required")

    async def _after_thought(self, demand: Demand, params: Mapping[str, object]) -> Constraint:
        """Return the constraint of an answer, after the thought that its model begins by itself.

        A retry answers at once: the thought before it may have left no room for an answer. A thought that the prompt
        begins must end first, since llama.cpp takes all text before that end for the thought. A schema allows thoughts
        by itself: llama.cpp turns it into a grammar that knows the template.
        """
        constraint = demand.constraint
        assert constraint is not None  # noqa: S101 - the caller has checked
        self._answer.thought = constraint.thought
        if constraint.json_schema is not None:
            return constraint
        own = await self._settings.thought(params)
        if demand.at_once:
            own = Thought.ENDED if own is Thought.OPEN else Thought.NONE
        if own is not Thought.NONE:
            self._answer.thought = own
        return replace(constraint, thought=self._answer.thought)

    @property
    def _documents(self) -> tuple[Mapping[str, object], ...]:
        if not self._settings.sends_tools:
            return ()
        return tuple(tool.document for tool in self._documented)

    def _read(self) -> ParsedMessage:
        answer, generation = self._answer, self._answer.generation
        names = {*self._tools, *self._exit_names}
        fallback = fallback_of(self._request, self._budget) if names else None
        reading = read_message(generation.text, generation.tool_call_fragments, fallback, names)
        is_after = answer.constrained_by and (generation.reasoning or answer.thought is not Thought.NONE)
        answer.take_words(reading.text.lstrip() if is_after else reading.text)
        answer.has_unread_call = reading.has_unread_call
        whole = reading.calls[:-1] if self._is_cut_off(reading) else reading.calls
        answer.signals += [signal_of(call) for call in whole if call.name in self._exit_names]
        return reading

    def _is_cut_off(self, reading: ParsedMessage) -> bool:
        """Whether the last call of a message was cut off, or may have been."""
        finish = self._answer.finish
        return finish in (Finish.CUT_OFF, Finish.FILTERED) or (reading.is_open and finish is Finish.UNKNOWN)

    async def _run_tools(self, reading: ParsedMessage, calls: Sequence[ToolCall]) -> Outcome | None:
        """Run the calls of one message and add them to the conversation; return the outcome if that ends it."""
        answer = self._answer
        desk = MessageTools(
            self._tools,
            self._settings.runner,
            self._settings.tool_limits,
            self._request.job_name,
            self._request.journal,
        )
        answer.phase = Phase.TOOLS
        lost = None
        try:
            if self._request.slot is not None:
                self._request.slot.begin_tools([call.name for call in calls], answer.context_tokens)
            results = await desk.run(
                calls,
                answer.iterations_used,
                reading.text,
                answer.tool_calls,
                reading.fallback,
                cut_off=calls[-1] if self._is_cut_off(reading) and calls[-1] is reading.calls[-1] else None,
            )
            if self._request.slot is not None:
                lost = await self._wait_for_slot(self._request.slot)
        finally:
            answer.phase = Phase.US
        if isinstance(results, RequestFailed):
            return results
        answer.iterations_used += 1
        in_order = iter(results)  # in the order of the calls; ids are the engine's, and may repeat
        exchange = ToolExchange(
            written=answer.generation.text,
            text=reading.text,
            calls=tuple(map(_wellformed, reading.calls)),
            results=tuple(RECORDED if call.name in self._exit_names else next(in_order) for call in reading.calls),
            fallback=reading.fallback,
        )
        answer.exchanges.append(exchange)
        answer.exchanges[-1] = replace(exchange, note=note_after(answer.exchanges, self._frame, self._budget))
        return lost

    async def _wait_for_slot(self, slot: SlotHolder) -> Outcome | None:
        """Return when the engine may be asked; waiting for other turns does not count against the time limit."""
        began_at = anyio.current_time()
        lost = await slot.end_tools()
        if self._answer.deadline is not None:
            self._answer.deadline.deadline += anyio.current_time() - began_at
        return lost


async def _is_met(demand: Demand, text: str) -> bool:
    return demand.is_met is not None and await demand.is_met(text)


def _chars_of(chat: ChatRequest) -> int:
    begun = 0 if chat.begun is None else len(chat.begun.text) + len(chat.begun.reasoning)
    return begun + sum(len(message.content) for message in chat.messages)


def _wellformed(call: ToolCall) -> ToolCall:
    """Return a call fit for a history: later requests with malformed arguments would be refused."""
    if read_arguments(call.arguments) is None or not call.arguments.strip():
        return ToolCall(id=call.id, name=call.name, arguments="{}")
    return call
