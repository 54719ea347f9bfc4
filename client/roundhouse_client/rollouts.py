"""Rollouts for training: readers of both forms, conversations for a trainer's prompts, and TRL's rollout function."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from roundhouse_client.client import Client
from roundhouse_client.decoding import decode, parse
from roundhouse_client.errors import RoundhouseError
from roundhouse_client.values.rollout_rows import RolloutRow

REWARD: Final = "rollout_reward"  # the key under which TRL hands the rows' rewards to reward functions
Prompt = str | Sequence[Mapping[str, Any]]


class RolloutMissing(RoundhouseError):
    """A conversation has no row to train on."""


def read_rows(lines: Iterable[str | bytes]) -> Iterator[RolloutRow]:
    """Yield the rows of a file or an answer of ``form=rows``.

    Raises:
        AnswerMalformed: a line is no row.
    """
    for line in lines:
        if line.strip():
            yield decode(RolloutRow, parse(line))


def read_episodes(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a file or an answer of ``form=episode``, for ``verifiers.v1.WireEpisode``."""
    for line in lines:
        if line.strip():
            yield json.loads(line)


def hold_conversations(
    job: Mapping[str, Any],
    prompts: Sequence[Prompt],
    *,
    client: Client,
    agent: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> list[RolloutRow]:
    """Hold a conversation of ``job`` for each prompt; return a row of the trained ``agent`` for each, in their order.

    ``job`` is a job document; its conversations are left out, and it records tokens. A prompt is text, or messages of
    which one is the user's and another may be the system's, which is then that of the agent. The agent may be left out
    where the job has one. ``params`` are added to its own. Where its chain breaks, its last chain counts, whose prompt
    holds all before it. This blocks until all conversations have ended.

    Raises:
        ValueError: the job does not say which agent is trained, or records no tokens; or a prompt has another form.
        RolloutMissing: a conversation has no whole row.
        RoundhouseError: any other error of its tree.
    """
    trained = trained_agent(job, agent)
    agents = [
        {**each, "params": {**each.get("params", {}), **params}} if params and each["id"] == trained else each
        for each in job["agents"]
    ]
    conversations = [_conversation(number, prompt, trained) for number, prompt in enumerate(prompts)]
    posted = client.post_job({**job, "agents": agents, "conversations": conversations})
    rows: dict[str, RolloutRow] = {}
    for row in client.read_rollouts(posted.id, partial=True):
        if row.agent == trained:
            rows[row.conversation] = row
    return [_usable(rows, str(number), posted.id) for number in range(len(prompts))]


def trained_agent(job: Mapping[str, Any], agent: str | None = None) -> str:
    """Return the id of the agent that is trained: the one that is named, or the only one.

    Raises:
        ValueError: there is no such agent, or its tokens are not recorded.
    """
    names = [each["id"] for each in job["agents"] if each.get("by", "model") == "model"]
    if agent is None and len(names) != 1:
        raise ValueError(f"agent: the job has {len(names)} agents; name the one that is trained")
    trained = names[0] if agent is None else agent
    if trained not in names:
        raise ValueError(f"agent: the job has no agent {trained!r} that a model speaks for")
    own = next(each for each in job["agents"] if each["id"] == trained)
    if not (own.get("record") or job.get("record") or {}).get("tokens"):
        raise ValueError("record: the job records no tokens; give record: {tokens: true, logprobs: true}")
    return trained


def trl_rollout_func(
    job: Mapping[str, Any],
    *,
    client: Client | None = None,
    agent: str | None = None,
    before: Callable[[Any], object] | None = None,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a ``rollout_func`` for TRL's ``GRPOTrainer``, which holds a conversation of ``job`` for each prompt.

    Prompts, ``job`` and ``agent`` are those of ``hold_conversations``. ``before`` is called with the trainer before
    each batch, and can hand its weights to the engines.

    The function returns TRL's ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``env_mask``, and the rewards of the
    rows under ``rollout_reward``: ``trl_reward`` passes them on.

    Raises:
        ValueError: the job does not say which agent is trained, or records no tokens.
    """
    trained = trained_agent(job, agent)
    known = client or Client()

    def roll(prompts: list[Any], trainer: object) -> dict[str, Any]:
        if before is not None:
            before(trainer)
        return _as_trl(hold_conversations(job, prompts, client=known, agent=trained))

    return roll


def trl_reward(**columns: Sequence[Any]) -> list[float]:
    """Return the rewards of the rows: a reward function for TRL beside ``trl_rollout_func``.

    Raises:
        RolloutMissing: a row has none.
    """
    rewards = columns[REWARD]
    if None in rewards:
        raise RolloutMissing("a row has no reward; name its source in the job (reward: ...)")
    return [float(reward) for reward in rewards]


def _conversation(number: int, prompt: Prompt, agent: str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"id": str(number), "prompt": prompt}
    said = {message["role"]: message["content"] for message in prompt}
    if len(said) != len(prompt) or not {"user"} <= said.keys() <= {"system", "user"}:
        raise ValueError("a prompt of messages has one of the user, and may have one of the system before it")
    cast = {"agents": {agent: {"system": said["system"]}}} if "system" in said else {}
    return {"id": str(number), "prompt": said["user"], **cast}


def _usable(rows: Mapping[str, RolloutRow], name: str, job_id: str) -> RolloutRow:
    row = rows.get(name)
    if row is None:
        raise RolloutMissing(f"conversation {name} of {job_id} has no rollout: see its transcript")
    if row.state != "completed":
        raise RolloutMissing(f"conversation {name} of {job_id} has {row.state}: see its transcript")
    if {*row.partial} - {"logprobs"} or not row.completion_ids:
        raise RolloutMissing(f"conversation {name} of {job_id} is not whole: {', '.join(row.partial) or 'no tokens'}")
    return row


def _as_trl(rows: Sequence[RolloutRow]) -> dict[str, Any]:
    have_logprobs = all(row.logprobs is not None for row in rows)
    return {
        "prompt_ids": [list(row.prompt_ids) for row in rows],
        "completion_ids": [list(row.completion_ids) for row in rows],
        "logprobs": [filled_logprobs(row) for row in rows] if have_logprobs else None,
        "env_mask": [list(row.mask) for row in rows],
        REWARD: [row.reward for row in rows],
    }


def filled_logprobs(row: RolloutRow) -> list[float | None]:
    """Return a row's logprobs for a tensor: 0.0 at tokens that were only read, None where the engine gave none."""
    return [0.0 if not mask else value for mask, value in zip(row.mask, row.logprobs or (), strict=True)]
