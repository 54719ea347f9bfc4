"""Words of a caller, for a turn that need not be named where only one is awaited."""

from dataclasses import replace

from roundhouse_client.calls.job_calls import JOBS, awaited
from roundhouse_client.errors import NothingAwaited
from roundhouse_client.flows.asking import PATIENCE_S, ask
from roundhouse_client.flows.steps import Flow
from roundhouse_client.request import into, place, post
from roundhouse_client.values.transcripts import Turn


def say(
    job_id: str,
    conversation_id: str,
    text: str,
    *,
    agent: str | None = None,
    round_number: int | None = None,
    patience_s: float = PATIENCE_S,
) -> Flow[Turn]:
    """Speak a turn that is awaited; the words are durable when this returns. The same again changes nothing.

    Where ``agent`` or ``round_number`` is not given, it is that of the one turn of the conversation that is awaited.

    Raises:
        NothingAwaited: no such turn is, or several are.
        StateConflict: the turn is not awaited, not yet or not any more, or was spoken in other words.
        InvalidRequest: the words are not what the agent has to say.
        NotFound: there is no such job or conversation.
    """
    if agent is None or round_number is None:
        listed = yield from ask(awaited(job_id, conversation_id, limit=1000), patience_s)
        fitting = [
            turn for turn in listed.awaited if agent in {None, turn.agent} and round_number in {None, turn.round}
        ]
        if len(fitting) != 1:
            known = ", ".join(f"{turn.agent} in round {turn.round}" for turn in fitting) or "nobody"
            raise NothingAwaited(f"not one turn is awaited in {conversation_id} of {job_id}, but: {known}")
        agent, round_number = fitting[0].agent, fitting[0].round
    turn = place("conversations", conversation_id, "turns", agent, round_number)
    call = post(f"{JOBS}{place(job_id)}{turn}", into(Turn), {"text": text})
    return (yield from ask(replace(call, is_repeatable=True), patience_s))
