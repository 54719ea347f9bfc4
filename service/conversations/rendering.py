"""From a conversation to the messages of one agent's request. Pure.

An agent's own words are the assistant's, all others' are the user's, each with its speaker's name. Consecutive words of
others are one message, since many chat templates insist on strict alternation.
"""

from service.conversations.job import Agent, Conversation, Job
from service.conversations.visibility import Spoken, Utterance, visible_before
from transport.request import Message


def render_conversation(
    job: Job, conversation: Conversation, agent: Agent, round_number: int, spoken: Spoken
) -> tuple[Message, ...]:
    """Return what ``agent`` is shown before it speaks in ``round_number``; the last message is always the user's."""
    messages: list[Message] = []
    shown: list[str] = [conversation.prompt]
    for utterance in visible_before(job, agent, round_number, spoken):
        if utterance.agent == agent.id:
            shown.append(_cue(agent, utterance.round, conversation.rounds))
            messages.append(Message(role="user", content="\n\n".join(shown)))
            messages.append(Message(role="assistant", content=utterance.text))
            shown = []
        else:
            shown.append(_quote(utterance))
    shown.append(_cue(agent, round_number, conversation.rounds))
    messages.append(Message(role="user", content="\n\n".join(shown)))
    return tuple(messages)


def _quote(utterance: Utterance) -> str:
    return f"{utterance.agent} said:\n{utterance.text}"


def _cue(agent: Agent, round_number: int, rounds: int) -> str:
    return f"You are {agent.id}. It is your turn, in round {round_number + 1} of {rounds}."
