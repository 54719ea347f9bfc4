"""A conversation's rollouts as an episode of verifiers: a trace for each chain, its messages as nodes. Pure.

Source: verifiers 0.4.0, ``v1/episode.py``, ``v1/trace.py`` and ``v1/graph.py``. A node's mask has an entry for each of
its tokens, and its logprobs one for each token that the model wrote. A trace whose record is not whole, whose reward
has failed or whose conversation has not completed is not ``ok``, and a trainer leaves it out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from service.conversations.job.states import ConversationState
from service.conversations.record.rollout import Chain, Row
from service.conversations.record.token_arrays import RecordedMessage
from transport.request import Message

FINISHES: Final = frozenset({"stop", "length", "tool_calls"})  # the words that verifiers know
Node = dict[str, Any]
Texts = Mapping[tuple[str, int], str]  # by agent and round
Prompts = Mapping[tuple[str, int], Sequence[Sequence[Message]]]


class EpisodeOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The head of an episode: job, conversation and prompt; ``judge`` is an agent whose words give the reward."""

    job: str
    name: str
    conversation: str
    prompt: str
    judge: str | None = None


def episode_of(
    origin: EpisodeOrigin, rows: Sequence[tuple[Row, Chain]], texts: Texts, prompts: Prompts
) -> dict[str, object]:
    """Return the episode of a conversation's rows, of which there is at least one.

    ``texts`` are those of its completed turns, ``prompts`` theirs, one for each message of a turn.
    """
    last, _ = rows[-1]
    task: Node = {"type": "Task", "data": {"name": origin.conversation, "prompt": origin.prompt}}
    versions = [each for row, _ in rows for each in row.versions if each is not None]
    policy = {"start": min(versions), "end": max(versions)} if versions else None
    traces = [_trace(origin, task, row, chain, _nodes_of(chain, texts, prompts)) for row, chain in rows]
    return {
        "number": last.number,
        "id": f"{origin.job}/{origin.conversation}",
        "env": {"id": "roundhouse", "name": origin.name},
        "task": task,
        "group": {"id": f"{origin.job}/{last.group or origin.conversation}"},
        "run": {
            "type": "train",
            "id": origin.job,
            "work": {"type": "train", "step": max(versions, default=0), "policy": policy},
        },
        "ok": all(trace["ok"] for trace in traces),
        "traces": traces,
    }


def _trace(origin: EpisodeOrigin, task: Node, row: Row, chain: Chain, parts: tuple[list[Node], list[Node]]) -> Node:
    nodes, calls = parts
    has_ended = row.state == ConversationState.COMPLETED
    faults = [
        *([] if has_ended else [("ConversationNotCompleted", f"the conversation has {row.state}")]),
        *([("RecordNotWhole", f"not whole: {', '.join(row.partial)}")] if row.partial else []),
        *([] if row.reward_error is None else [("RewardFailed", row.reward_error)]),
    ]
    return {
        "id": f"{origin.job}/{origin.conversation}/{row.agent}/{row.chain}",
        "task": task,
        "agent": {"config": {}, "name": row.agent, "trainable": row.agent != origin.judge},
        "nodes": nodes,
        "calls": calls,
        "rewards": {} if row.reward is None else {"reward": {"score": row.reward, "weight": 1.0}},
        "metrics": row.metrics,
        "info": {
            "number": row.number,
            "rounds": row.rounds,
            "sample": row.sample,
            "weight_versions": [each.versions for _, each in chain.messages],
            "behind": row.behind,
            "logprobs_mode": row.logprobs_mode,
            "params": row.params,
            "partial": row.partial,
        },
        "is_completed": has_ended,
        "ok": not faults,
        "errors": [{"type": kind, "message": message} for kind, message in faults],
        "stop_condition": "error" if faults else "agent_completed",
    }


def _nodes_of(chain: Chain, texts: Texts, prompts: Prompts) -> tuple[list[Node], list[Node]]:
    nodes: list[Node] = []
    calls: list[Node] = []
    consumed = 0  # messages of the prompt that stand in earlier nodes
    shown = _shown(chain, prompts)
    for place, ((number, message), prompt) in enumerate(zip(chain.messages, shown, strict=True)):
        read = [_message(each) for each in prompt[consumed:]] or [{"role": "user", "content": ""}]
        for index, each in enumerate(read):
            ids = message.prompt if index == len(read) - 1 else []
            nodes.append(_node(nodes, each, ids, [False] * len(ids), []))
        later = shown[place + 1] if place + 1 < len(shown) else ()
        written = later[len(prompt)] if len(later) > len(prompt) and later[len(prompt)].role == "assistant" else None
        content = {"role": "assistant", "content": texts[chain.agent, number]} if written is None else _message(written)
        known = message.logprobs if message.logprobs is not None and None not in message.logprobs else []
        nodes.append({**_node(nodes, content, message.ids, [True] * len(message.ids), known), "sampled": True})
        calls.append(_call(len(nodes) - 1, message))
        consumed = len(prompt) + 1
    return nodes, calls


def _shown(chain: Chain, prompts: Prompts) -> list[Sequence[Message]]:
    """Return the prompt of each message of a chain; that of a turn's last message is its last one."""
    counts = Counter(number for number, _ in chain.messages)
    places: Counter[int] = Counter()
    found: list[Sequence[Message]] = []
    for number, _ in chain.messages:
        known = prompts.get((chain.agent, number)) or [()]
        left = counts[number] - places[number]
        found.append(known[max(0, len(known) - left)])
        places[number] += 1
    return found


def _node(
    nodes: Sequence[Node], message: Node, ids: Sequence[int], mask: Sequence[bool], logprobs: Sequence[float | None]
) -> Node:
    parent = len(nodes) - 1 if nodes else None
    return {"parent": parent, "message": message, "token_ids": ids, "mask": mask, "logprobs": logprobs}


def _message(message: Message) -> Node:
    """Return a message in the form of verifiers, whose calls are flat."""
    calls = [
        {"id": call.id, "type": "function", "name": call.name, "arguments": call.arguments} for call in message.calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        **({"tool_calls": calls} if calls else {}),
        **({} if message.call_id is None else {"tool_call_id": message.call_id}),
    }


def _call(node: int, message: RecordedMessage) -> Node:
    return {
        "node": node,
        "finish_reason": message.stop_reason if message.stop_reason in FINISHES else None,
        "usage": {
            "prompt_tokens": message.begins_at + len(message.prompt),
            "completion_tokens": len(message.ids),
        },
    }
