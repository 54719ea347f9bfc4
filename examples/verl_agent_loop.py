"""An agent loop for verl 0.9: each sample is a conversation of a Roundhouse job.

docs/how-to/train-on-conversations.md has the rest of a training run.

In the file of ``actor_rollout_ref.rollout.agent.agent_loop_config_path``::

    - name: roundhouse
      _target_: verl_agent_loop.RoundhouseLoop
      url: http://127.0.0.1:8080
      job: rollouts.yaml
      agent: pupil
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from roundhouse_client import Client, RolloutRow, load_job
from roundhouse_client.rollouts import filled_logprobs, hold_conversations

SAMPLED = ("temperature", "top_p", "top_k")  # the job has all other parameters


def output_of(row: RolloutRow, most_prompt: int, most_response: int) -> AgentLoopOutput:
    """Return a row as verl takes it.

    Raises:
        ValueError: it is longer than verl's tensors, which cut nothing.
    """
    if len(row.prompt_ids) > most_prompt or len(row.completion_ids) > most_response:
        sizes = f"{len(row.prompt_ids)} and {len(row.completion_ids)}"
        raise ValueError(f"a rollout of {sizes} tokens; raise rollout.prompt_length and rollout.response_length")
    versions = [version for version in row.versions if version is not None] or [0]
    return AgentLoopOutput(
        prompt_ids=list(row.prompt_ids),
        response_ids=list(row.completion_ids),
        response_mask=list(row.mask),
        response_logprobs=None if row.logprobs is None or None in filled_logprobs(row) else filled_logprobs(row),
        reward_score=row.reward,
        num_turns=2 * len(row.params),
        metrics=AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "reward_extra_info": dict(row.metrics),
        },
    )


@register("roundhouse")
class RoundhouseLoop(AgentLoopBase):
    """Holds a conversation for each sample."""

    def __init__(self, *given: object, url: str, job: str, agent: str, **others: object) -> None:
        super().__init__(*given, **others)
        self._url = url
        self._job = load_job(job)
        self._agent = agent

    async def run(self, sampling_params: dict[str, Any], **sample: Sequence[Any]) -> AgentLoopOutput:
        """Return the rollout of one sample."""
        params = {name: sampling_params[name] for name in SAMPLED if name in sampling_params}
        row = await asyncio.to_thread(self._hold, list(sample["raw_prompt"]), params)
        return output_of(row, self.rollout_config.prompt_length, self.rollout_config.response_length)

    def _hold(self, prompt: list[Any], params: dict[str, Any]) -> RolloutRow:
        with Client(self._url) as client:
            (row,) = hold_conversations(self._job, [prompt], client=client, agent=self._agent, params=params)
        return row
