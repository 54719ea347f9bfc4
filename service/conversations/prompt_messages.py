"""From a conversation to the messages of one agent's request. Pure.

An agent's own words are the assistant's, all others' are the user's, each with its speaker's name. Consecutive words of
others are one message, since many chat templates insist on strict alternation.
"""

from collections.abc import Iterable, Sequence

from service.conversations.job import Agent, Conversation
from service.conversations.visibility import Utterance
from transport.request import Message

Rejected = tuple[str, str]  # an answer that was not valid, and why


def render_conversation(
    conversation: Conversation, agent: Agent, round_number: int, heard: Iterable[Utterance]
) -> tuple[Message, ...]:
    """Return what ``agent`` is shown before it speaks in ``round_number``; the last message is always the user's.

    ``heard`` is what it may read, in its order; a turn in which nothing was said leaves no trace.
    """
    messages: list[Message] = []
    shown: list[str] = [conversation.prompt]
    for utterance in heard:
        if not utterance.text.strip():
            continue
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


def render_rejections(rejected: Sequence[Rejected]) -> tuple[Message, ...]:
    """Return what follows in the prompt of a turn whose answers were not valid, each with the reason."""
    return tuple(
        message
        for answer, fault in rejected
        for message in (
            Message(role="assistant", content=answer),
            Message(role="user", content=f"Your answer is not valid: {fault}. Answer again, with nothing else."),
        )
    )


def render_told(messages: tuple[Message, ...], addition: str | None) -> tuple[Message, ...]:
    """Return a prompt with something said at its end, where it extends what was read of it before."""
    if addition is None:
        return messages
    last = messages[-1]
    return (*messages[:-1], Message(role=last.role, content=f"{last.content}\n\n{addition}"))


def _quote(utterance: Utterance) -> str:
    return f"{utterance.agent} said:\n{utterance.text}"


def _cue(agent: Agent, round_number: int, rounds: int) -> str:
    return f"You are {agent.id}. It is your turn, in round {round_number + 1} of {rounds}."
