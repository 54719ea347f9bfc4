"""The rollouts of jobs for their readers: rows of recorded tokens, each as soon as its conversation can be read.

Nothing runs before a reader asks: what is recorded is durable with its turn, and the order of rows with the first
wanted. A conversation is read once it has ended, with all others of its group, and with its reward if its job names a
source.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Final
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import msgspec

from service.config.schema import RolloutsConfig
from service.conversations.document.posted_rollouts import PostedRollouts, read_rollouts
from service.conversations.job.job import JobId
from service.conversations.job.states import ENDED_CONVERSATIONS, ENDED_JOBS
from service.conversations.record.episode import EpisodeOrigin, Prompts, episode_of
from service.conversations.record.rollout import (
    ROWS_A_CONVERSATION,
    Reward,
    Row,
    RowPlace,
    SpokenTokens,
    chains_of,
    rows_of,
)
from service.conversations.record.transcript import Turn, transcript_document
from service.errors import Fault, NothingRecorded, RewardInvalid, StoreUnavailable
from service.node.jobs import Jobs
from service.node.prompt_history import PromptHistory
from service.node.rewards import find_reward
from service.scheduling.keeping.token_keeper import TokenKeeper
from service.store import conversation_rows, job_rows, rollout_rows, session_rows
from service.store.store import Store

CONVERSATIONS_A_PIECE: Final = 32  # made ready in one write
READ_AHEAD: Final = 64
REWARDS_AT_ONCE: Final = 8
ROOM_S: Final = 60.0  # between two counts of the bytes of recorded tokens
DELIVERED: Final = "delivered"
LOOK_S: Final = 0.5  # between two looks at a job that another node runs


class RolloutForm(StrEnum):
    """The form of rollouts."""

    ROWS = "rows"  # one object a chain, with flat arrays
    EPISODE = "episode"  # one object a conversation, as verifiers has them


class RolloutsWanted(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's wishes: rows with a number above ``after``, also of turns that are not whole (``partial``)."""

    form: RolloutForm = RolloutForm.ROWS
    after: int = 0
    partial: bool = False
    wait_s: float | None = None  # None: until the job has ended


class Rollouts:
    """Reads rollouts and takes rewards.

    ``version_of`` returns the present version of a model's weights, None without one. ``rows`` counts those delivered
    and those left out, by why.
    """

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        prompts: PromptHistory,
        tokens: TokenKeeper,
        version_of: Callable[[str], int | None],
        config: Callable[[], RolloutsConfig],
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._version_of = version_of
        self._prompts = prompts
        self._tokens = tokens
        self._config = config
        self._locks: WeakValueDictionary[JobId, anyio.Lock] = WeakValueDictionary()  # one settles a job at a time

    def __repr__(self) -> str:
        return f"<Rollouts {dict(self._tokens.rows)}>"

    async def run(self) -> None:
        """Tell the keeper of tokens how many bytes the store has and may have, until cancelled."""
        while True:
            self._tokens.most_mib = self._config().most_mib
            if self._tokens.most_mib is not None:
                with suppress(StoreUnavailable):
                    used = [await self._store.read(size) for size in (rollout_rows.size, session_rows.size)]
                    self._tokens.used = sum(used)
            await anyio.sleep(ROOM_S)

    async def check_recorded(self, job_id: JobId) -> PostedRollouts:
        """Return a job, as far as rollouts go.

        Raises:
            JobNotFound: there is no such job.
            NothingRecorded: it records no tokens.
        """
        posted = await self._posted(job_id)
        if not posted.are_any:
            raise NothingRecorded(job_id)
        return posted

    async def lines(self, job_id: JobId, posted: PostedRollouts, wanted: RolloutsWanted) -> AsyncIterator[bytes]:
        """Yield rollouts as JSON lines, until the job has ended and all are read, or the reader's time is over."""
        until = None if wanted.wait_s is None else anyio.current_time() + wanted.wait_s
        # The last conversation that was begun may have further rows.
        place, after = max(0, wanted.after // ROWS_A_CONVERSATION - 1), wanted.after
        while True:
            change = self._jobs.watch.next_change_towards_end(job_id)
            has_ended = (await self._store.read(job_rows.job, job_id)).state in ENDED_JOBS
            has_more = await self._settle(job_id, posted)
            while page := await self._store.read(rollout_rows.ready, job_id, place, READ_AHEAD):
                for number, conversation_id in page:
                    place = number
                    for line in await self._read(job_id, posted, number, conversation_id, wanted):
                        if line[0] > after:
                            yield line[1]
            left_s = None if until is None else until - anyio.current_time()
            if has_more:  # also beyond the reader's time: what can be read is not left out
                continue
            if has_ended or self._jobs.watch.is_closed or (left_s is not None and left_s <= 0):
                return
            with anyio.move_on_after(LOOK_S if left_s is None else min(LOOK_S, left_s)):
                await change.wait()

    async def put_reward(self, job_id: JobId, conversation_id: str, agent: str | None, reward: Reward) -> bool:
        """Store a reward, durable when this returns; return whether it is new.

        Raises:
            JobNotFound: there is no such job.
            NothingRecorded: it records no tokens.
            RewardInvalid: it has no such conversation or agent.
            RewardConflict: there is another reward.
        """
        posted = await self.check_recorded(job_id)
        states = await self._store.read(conversation_rows.states, job_id)
        agents = [each.id for each in posted.agents]
        if conversation_id not in states:
            raise RewardInvalid(
                [Fault(path="conversation", message=f"the job has no conversation {conversation_id!r}")]
            )
        if agent is not None and agent not in agents:
            raise RewardInvalid([Fault(path="agent", message=f"the job has no agent {agent!r}")])
        return await self._store.write(rollout_rows.put_reward, (job_id, conversation_id, agent or ""), reward)

    async def _posted(self, job_id: JobId) -> PostedRollouts:
        document = await self._store.read(job_rows.document, job_id)
        return await anyio.to_thread.run_sync(read_rollouts, document)

    async def _settle(self, job_id: JobId, posted: PostedRollouts) -> bool:
        """Let a piece of the conversations that have ended be read; return whether there are more."""
        lock = self._locks.get(job_id)
        if lock is None:
            lock = self._locks[job_id] = anyio.Lock()
        async with lock:
            waiting = await self._store.read(rollout_rows.unready, job_id)
            if waiting and any(each.sample is not None for each in posted.conversations):
                states = await self._store.read(conversation_rows.states, job_id)
                named = posted.named
                open_groups = {
                    sample.group
                    for name, state in states.items()
                    if state not in ENDED_CONVERSATIONS and (sample := named[name].sample) is not None
                }
                waiting = [
                    name
                    for name in waiting
                    if (sample := named[name].sample) is None or sample.group not in open_groups
                ]
            if piece := waiting[:CONVERSATIONS_A_PIECE]:
                rewards = await self._rewards(job_id, posted, piece)
                await self._store.write(rollout_rows.make_ready, job_id, piece, rewards)
            return len(waiting) > len(piece)

    async def _rewards(
        self, job_id: JobId, posted: PostedRollouts, names: Sequence[str]
    ) -> dict[str, dict[str, Reward]]:
        if posted.reward is None:
            return {}
        found: dict[str, dict[str, Reward]] = {}
        places = anyio.CapacityLimiter(REWARDS_AT_ONCE)
        source = posted.reward

        async def find(name: str) -> None:
            async with places:
                if await self._store.read(rollout_rows.rewards, job_id, name):
                    return  # a caller's comes first
                spoken = await self._store.read(rollout_rows.spoken, job_id, name)
                record = await self._store.read(conversation_rows.record, job_id, name)
                transcript = {"job": job_id, **transcript_document(record)}
                turns = [turn for turn, _ in spoken]
                found[name] = {"": await find_reward(source, turns, transcript, self._config().reward_s)}

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(find, name)
        return found

    async def _read(
        self, job_id: JobId, posted: PostedRollouts, number: int, conversation_id: str, wanted: RolloutsWanted
    ) -> list[tuple[int, bytes]]:
        """Return the lines of one conversation, each with its number."""
        found = _Found(
            place=(job_id, conversation_id),
            number=number,
            state=await self._store.read(rollout_rows.state_of, job_id, conversation_id),
            spoken=await self._store.read(rollout_rows.spoken, job_id, conversation_id),
            rewards=await self._store.read(rollout_rows.rewards, job_id, conversation_id),
            prompts=await self._prompts.by_message(job_id, conversation_id)
            if wanted.form is RolloutForm.EPISODE
            else {},
        )
        lines, outcomes = await anyio.to_thread.run_sync(self._lines_of, posted, found, wanted)
        self._tokens.rows.update(outcomes)
        return lines

    def _lines_of(
        self, posted: PostedRollouts, found: "_Found", wanted: RolloutsWanted
    ) -> tuple[list[tuple[int, bytes]], list[str]]:
        job_id, conversation_id = found.place
        conversation = posted.named[conversation_id]
        sample = conversation.sample
        rows = rows_of(
            RowPlace(
                job=job_id,
                conversation=conversation_id,
                state=found.state,
                first=found.number * ROWS_A_CONVERSATION,
                group=None if sample is None else sample.group,
                sample=0 if sample is None else sample.number,
                samples=1 if sample is None else sample.of,
            ),
            chains_of((each for _, each in found.spoken if each is not None), [each.id for each in posted.agents]),
            found.rewards,
            lambda agent: self._version_of(posted.model_of(agent, conversation) or ""),
        )
        most = posted.limit_of(conversation)
        judged = [(row, chain, outcome_of(row, most, is_partial=wanted.partial)) for row, chain in rows]
        outcomes = [outcome for *_, outcome in judged]
        kept = [(row, chain) for row, chain, outcome in judged if outcome == DELIVERED]
        if wanted.form is RolloutForm.ROWS or not kept:
            return [(row.number, msgspec.json.encode(row) + b"\n") for row, _ in kept], outcomes
        origin = EpisodeOrigin(
            job=job_id,
            name=posted.name,
            conversation=conversation_id,
            prompt=posted.prompt_of(conversation),
            judge=None if posted.reward is None else posted.reward.agent,
        )
        texts = {(turn.key.agent_id, turn.key.round): turn.text for turn, _ in found.spoken}
        episode = episode_of(origin, kept, texts, found.prompts)
        return [(kept[-1][0].number, msgspec.json.encode(episode) + b"\n")], outcomes


def outcome_of(row: Row, most: int | None, *, is_partial: bool) -> str:
    """Return whether a row is delivered, or why not; ``is_partial`` lets rows pass that are not whole."""
    if most is not None and row.behind is not None and max(row.behind) > most:
        return "stale"
    return "partial" if row.partial and not is_partial else DELIVERED


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """The stored parts of a conversation's rollouts."""

    place: tuple[JobId, str]
    number: int
    state: str
    spoken: Sequence[tuple[Turn, SpokenTokens | None]]
    rewards: Mapping[str, Reward]
    prompts: Prompts
