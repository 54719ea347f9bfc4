"""A caller's words, for a turn that need not be named if only one waits for a caller."""

import json
from collections.abc import Sequence
from dataclasses import replace

from roundhouse_client.calls.job_calls import JOBS, awaited, get_conversation, get_document
from roundhouse_client.errors import NothingAwaited
from roundhouse_client.flows.asking import PATIENCE_S, ask
from roundhouse_client.flows.steps import Flow
from roundhouse_client.request import into, place, post
from roundhouse_client.values.transcripts import AwaitedTurn, Turn


def say(
    job_id: str,
    conversation_id: str,
    text: str,
    *,
    agent: str | None = None,
    round_number: int | None = None,
    patience_s: float = PATIENCE_S,
) -> Flow[Turn]:
    """Speak a turn that waits for a caller; the words are durable when this returns. A repeat changes nothing.

    ``agent`` and ``round_number`` default to those of the conversation's one turn that waits for a caller.

    Raises:
        NothingAwaited: no such turn waits, or several do.
        StateConflict: the turn does not wait for a caller, not yet or no longer, or was spoken with other words.
        InvalidRequest: the words do not fit the agent's validation.
        NotFound: there is no such job or conversation.
    """
    if agent is None or round_number is None:
        meant = yield from _turn_meant(job_id, conversation_id, text, agent, round_number, patience_s)
        agent, round_number = meant.agent, meant.round
    turn = place("conversations", conversation_id, "turns", agent, round_number)
    call = post(f"{JOBS}{place(job_id)}{turn}", into(Turn), {"text": text})
    return (yield from ask(replace(call, is_repeatable=True), patience_s))


def _turn_meant(
    job_id: str, conversation_id: str, text: str, agent: str | None, round_number: int | None, patience_s: float
) -> Flow[AwaitedTurn | Turn]:
    """Return the one turn that waits and fits, or that was spoken with the same words.

    Raises:
        NothingAwaited: no such turn waits, or several do.
    """
    listed = yield from ask(awaited(job_id, conversation_id, limit=1000), patience_s)
    fitting = [turn for turn in listed.awaited if agent in {None, turn.agent} and round_number in {None, turn.round}]
    spoken: Sequence[AwaitedTurn | Turn] = ()
    if not fitting and round_number is not None:
        turns = (yield from ask(get_conversation(job_id, conversation_id), patience_s)).turns
        same = (turn for turn in turns if turn.by == "caller" and (turn.round, turn.text) == (round_number, text))
        spoken = [turn for turn in same if agent in {None, turn.agent}]
    meant = fitting or spoken
    if len(meant) != 1:
        why = yield from _why_not_one(job_id, conversation_id, agent, fitting or listed.awaited, patience_s)
        raise NothingAwaited(why)
    return meant[0]


def _why_not_one(
    job_id: str, conversation_id: str, agent: str | None, known: Sequence[AwaitedTurn], patience_s: float
) -> Flow[str]:
    """Return why not exactly one turn fits; the job's document helps if the awaited turns do not show it.

    Raises:
        NotFound: there is no such conversation.
    """
    there = ", ".join(f"{turn.agent} in round {turn.round}" for turn in known)
    where = f"{conversation_id} of {job_id}"
    awaited_there = f"not exactly one turn is meant; {where} awaits {there}" if there else f"{where} awaits no caller"
    if not known:
        yield from ask(get_conversation(job_id, conversation_id), patience_s)
    if agent is None or any(turn.agent == agent for turn in known):
        return awaited_there
    posted = json.loads((yield from ask(get_document(job_id), patience_s)))
    kinds = {str(each.get("id")): each.get("by", "model") for each in posted["agents"]}
    callers = [name for name, kind in kinds.items() if kind == "caller"]
    if agent not in kinds:
        return f"job {job_id} has no agent {agent}; callers speak for {', '.join(callers) or 'none of its agents'}"
    if agent not in callers:
        return f"the agent {agent} is spoken by a model; callers speak for {', '.join(callers) or 'none'}"
    return awaited_there
