"""A user's own code without Roundhouse: a gather over conversations, a semaphore of the slots, the openai package."""

import asyncio
from collections.abc import Sequence

import openai

from service.conversations.job.job import Agent, Conversation, Job, Mode


class AsAUserWould:
    """Runs jobs against an engine at ``url``."""

    def __init__(self, url: str, slots: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        self._free = asyncio.Semaphore(slots)

    async def run(self, jobs: Sequence[Job]) -> None:
        """Run all conversations of all jobs at once."""
        await asyncio.gather(*(self._converse(job, talk) for job in jobs for talk in job.conversations))
        await self._client.close()

    async def _converse(self, job: Job, talk: Conversation) -> None:
        if job.mode is Mode.FREE:
            await asyncio.gather(*(self._speak_freely(job, talk, agent) for agent in job.agents))
            return
        for number in range(talk.rounds):
            done = {agent.id: asyncio.Event() for agent in job.agents}
            await asyncio.gather(*(self._speak(job, talk, agent, number, done) for agent in job.agents))

    async def _speak_freely(self, job: Job, talk: Conversation, agent: Agent) -> None:
        for number in range(talk.rounds):
            await self._turn(job, talk, agent, number)

    async def _speak(
        self, job: Job, talk: Conversation, agent: Agent, number: int, done: dict[str, asyncio.Event]
    ) -> None:
        for other in agent.waits_for:
            await done[other].wait()
        await self._turn(job, talk, agent, number)
        done[agent.id].set()

    async def _turn(self, job: Job, talk: Conversation, agent: Agent, number: int) -> None:
        cue = f"You are {agent.id}. (Round {number + 1} of {talk.rounds})"
        async with self._free:
            stream = await self._client.chat.completions.create(
                model="m", stream=True, messages=[{"role": "user", "content": f"TOPIC-{job.id}-{talk.id}\n{cue}"}]
            )
            async for _ in stream:
                pass
