"""A generator for SkyRL 0.3: each prompt is a conversation of a Roundhouse job.

docs/how-to/train-on-conversations.md has the rest of a training run.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from roundhouse_client import Client, RolloutRow
from roundhouse_client.rollouts import filled_logprobs, hold_conversations

COLUMNS = (  # SkyRL reads all of them
    *("rollout_metrics", "trajectory_generation_times", "rollout_expert_indices", "is_last_step"),
    *("pixel_values", "image_grid_thw"),
)


def output_of(rows: Sequence[RolloutRow], trajectory_ids: object) -> GeneratorOutput:
    """Return rows as SkyRL takes them: a column each.

    Raises:
        ValueError: a row has no reward; the job names no source.
    """
    if any(row.reward is None for row in rows):
        raise ValueError("a rollout has no reward; name its source in the job (reward: ...)")
    logprobs = [filled_logprobs(row) for row in rows]
    has_all = not any(row.logprobs is None for row in rows) and not any(None in each for each in logprobs)
    return {
        **dict.fromkeys(COLUMNS),
        "prompt_token_ids": [list(row.prompt_ids) for row in rows],
        "response_ids": [list(row.completion_ids) for row in rows],
        "rewards": [row.reward for row in rows],
        "loss_masks": [list(row.mask) for row in rows],
        "stop_reasons": ["length" if row.stop_reason == "length" else "stop" for row in rows],
        "rollout_logprobs": logprobs if has_all else None,
        "trajectory_ids": trajectory_ids,
        "env_metrics": [dict(row.metrics) for row in rows],
    }


class RoundhouseGenerator(GeneratorInterface):
    """Holds a conversation for each prompt of a batch."""

    def __init__(self, url: str, job: Mapping[str, Any], agent: str, params: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._job = job
        self._agent = agent
        self._params = params

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the rollouts of a batch, in the order of its prompts."""
        rows = await asyncio.to_thread(self._hold, input_batch["prompts"])
        return output_of(rows, input_batch.get("trajectory_ids"))

    def _hold(self, prompts: Sequence[Any]) -> list[RolloutRow]:
        with Client(self._url) as client:
            return hold_conversations(self._job, prompts, client=client, agent=self._agent, params=self._params)
