"""The prompts of one job's turns, made from its agents and its conversations so far."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from msgspec.structs import replace

from service.conversations.job.job import END, Job, Mode, PromptAt, SpokenBy, TurnKey, TurnKind
from service.conversations.job.states import TurnState
from service.conversations.job.until import NOTHING, TurnDigest, digest_of
from service.conversations.job.validation import chosen_in, read_words
from service.conversations.job.wording import ConversationWords, wording_of
from service.conversations.record.heritage import digest_of_inherited
from service.conversations.record.token_arrays import ChainEnd
from service.conversations.record.transcript import Attempt, Turn, UnfinishedTurn
from service.conversations.talk.prompt_messages import Rejected, agent_request, changes_of_retry
from service.conversations.talk.prompt_record import PromptRecord
from service.scheduling.asking.judging import Overruns
from service.scheduling.asking.memories import Memories
from service.scheduling.asking.talks import JobTalks
from workers.outcome import FailureReason
from workers.requests.bios_words import BiosPolicy
from workers.requests.request import Request
from workers.spec import WorkerSpec


class JobPrompts:
    """An unfinished job with the words for its prompts; written by the scheduler alone."""

    def __init__(self, job: Job) -> None:
        self.talks = JobTalks(job)
        self.job, self.agents, self.places = job, self.talks.agents, self.talks.places
        self.conversations, self.casts, self.words = self.talks.conversations, self.talks.casts, self.talks.words
        self.discussion, self.agent = self.talks.discussion, self.talks.agent
        self.chains: dict[tuple[str, str], ChainEnd] = {}  # by conversation and agent, if tokens are recorded
        self._known_tokens: dict[tuple[str, str], int] = {}  # by agent: the tokens of its last prompt and answer
        self.memories = Memories(self.talks)
        self.overruns = Overruns()
        # By conversation and model: the first weight version, if the conversation looks at it
        self._pins: dict[tuple[str, str], int] = {}

    def digest(self, key: TurnKey, fulfils: tuple[int, ...], words: str, tokens: int | None) -> TurnDigest:
        """Return the digest of a completed turn."""
        until = self.conversations[key.conversation_id].until
        agent = self.agent(key)
        read = read_words(words, agent.validation, has_markup=agent.by is not SpokenBy.CALLER)
        digest = digest_of(until, fulfils, read, tokens) if until else NOTHING
        if self.job.mode is not Mode.LED or key.agent_id != self.job.leader:
            return digest
        chosen = chosen_in(self.talks.may_name(key), words)
        return replace(digest, chosen=None if chosen == END else chosen)

    def forget(self, conversation_id: str) -> None:
        """Forget a conversation that has ended."""
        self.talks.forget_words(conversation_id)
        if self.memories.are_any:
            self.memories.forget_conversation(conversation_id)
        for agent_id in self.agents:
            self._known_tokens.pop((conversation_id, agent_id), None)
            if self.chains:
                self.chains.pop((conversation_id, agent_id), None)
        for place in [place for place in self._pins if place[0] == conversation_id]:
            del self._pins[place]

    def pin_weights(self, key: TurnKey, version: int | None) -> str | None:
        """Pin the weight version that a turn was made with; return a fault if its conversation has another."""
        conversation = self.conversations[key.conversation_id]
        if version is not None and (conversation.is_pinned or conversation.stale_after is not None):
            self._pins.setdefault((key.conversation_id, self.casts[key.conversation_id][key.agent_id].model), version)
        return self.check_weights(key, version)

    def check_weights(self, key: TurnKey, version: int | None) -> str | None:
        """Return a fault if a turn's conversation wants another weight version, or is stale."""
        model = self.casts[key.conversation_id][key.agent_id].model
        pinned = self._pins.get((key.conversation_id, model))
        if pinned is None or version is None:
            return None
        most = self.conversations[key.conversation_id].stale_after
        if not self.conversations[key.conversation_id].is_pinned and most is not None:
            words = f"begun with weights {pinned} of {model}, which has {version} by now: max_staleness is {most}"
            return None if version - pinned <= most else words
        return None if version == pinned else f"pinned to weights {pinned} of {model}, which has {version} by now"

    def own_tokens(self, key: TurnKey) -> int:
        """Return the tokens of a turn's prompt that its agent's last prompt and answer already had."""
        return self._known_tokens.get((key.conversation_id, key.agent_id), 0)

    def note_chain(self, turn: Turn) -> None:
        """Note where the tokens of an agent end with a turn; its next prompt may continue them."""
        place = turn.key.conversation_id, turn.key.agent_id
        if turn.recorded is None or turn.recorded.chain is None:
            self.chains.pop(place, None)
        else:
            self.chains[place] = turn.recorded.chain

    def compare_cache(self, turn: Turn) -> tuple[int, int]:
        """Return the tokens that an engine could take from its cache for a turn, and those that it took.

        An agent's next prompt begins with its last prompt and answer.
        """
        usage, place = turn.usage, (turn.key.conversation_id, turn.key.agent_id)
        known = self._known_tokens.get(place)
        if usage.prompt_tokens is not None:
            self._known_tokens[place] = usage.prompt_tokens + (usage.completion_tokens or 0)
        if known is None or usage.cached_tokens is None:
            return 0, 0
        return known, min(known, usage.cached_tokens)

    def hear_again(self, turns: Iterable[Turn], unfinished: Iterable[UnfinishedTurn] = ()) -> None:
        """Restore the turns of an earlier life of the service, each with what its prompt could show.

        Unfinished turns with rejected answers, or with half an answer, are asked again with the same words.
        """
        ends: dict[str, list[datetime]] = {}
        for turn in turns:
            self._hear_turn(turn, ends.setdefault(turn.key.conversation_id, []))
        for left in unfinished:
            asked = [each for each in left.attempts if each.prompt is not None] or left.attempts
            made_at = _prompted_at(asked)
            is_same = bool(left.rejected) or left.half is not None
            if self.job.mode is Mode.FREE and self.job.prompt_at is PromptAt.START and is_same and made_at:
                heard = _heard(asked, ends.get(left.key.conversation_id, []), made_at)
                self.discussion(left.key.conversation_id).make_prompt(left.key.agent_id, left.key.round, heard)
        if self.job.prompt_at is PromptAt.QUEUE:  # an agent that has not spoken was queued at the start
            for conversation_id in ends:
                for agent in self.job.agents:
                    self.discussion(conversation_id).make_prompt_once(agent.id, 0, 0)

    def _hear_turn(self, turn: Turn, earlier: list[datetime]) -> None:
        """Restore one turn; ``earlier`` holds the ends of the turns before it in its conversation.

        A failed turn counts by what it had heard: its agent's next words come after that.
        """
        if turn.kind is TurnKind.SUMMARY:
            if turn.is_heard:
                self.memories.hear_summary(turn)
            return
        conversation_id, agent_id, number = turn.key[1:]
        if turn.state is TurnState.COMPLETED and turn.inherited is None:
            self.pin_weights(turn.key, turn.weight_version)
            self.note_chain(turn)
        discussion = self.discussion(conversation_id)
        made_at = turn.queued_at if self.job.prompt_at is PromptAt.QUEUE else _prompted_at(turn.attempts)
        made_at = made_at or turn.started_at
        if self.job.mode is Mode.FREE and made_at is not None:
            # Only the source's record says how many turns an inherited turn has heard.
            attempts = turn.attempts if turn.inherited is None else ()
            discussion.make_prompt(agent_id, number, _heard(attempts, earlier, made_at))
        self.memories.hear_again(turn)
        if turn.is_heard:
            discussion.add(agent_id, number, None if turn.leaves else turn.text)
            if turn.finished_at is not None:
                # A caller's words may be older than those before them.
                earlier.append(max((turn.finished_at, *earlier[-1:])))
        if self.job.prompt_at is PromptAt.QUEUE:  # at its end the agent was queued again
            discussion.make_prompt(agent_id, number + 1, len(earlier))

    def digests(self, turns: Iterable[Turn]) -> dict[TurnKey, TurnDigest]:
        """Return the digests of completed turns in conversations that conditions or a leader may end.

        Inherited turns always have one.
        """
        digests: dict[TurnKey, TurnDigest] = {}
        turns = [turn for turn in turns if turn.kind is TurnKind.TURN]
        named = self._named(turns) if self.job.mode is Mode.LED else {}
        for turn in turns:
            is_judged = self.job.mode is Mode.LED or self.conversations[turn.key.conversation_id].until
            digest = NOTHING
            if turn.state is TurnState.COMPLETED and is_judged and turn.key.agent_id in self.agents:
                digest = self.digest(turn.key, turn.fulfils, turn.text, turn.usage.completion_tokens)
            if turn.inherited is not None:
                digest = digest_of_inherited(turn, digest)
                chosen = named.get((turn.key.conversation_id, turn.key.round))
                if chosen is not None and turn.key.agent_id == self.job.leader:
                    digest = replace(digest, chosen=chosen)
            if digest is not NOTHING:
                digests[turn.key] = digest
        return digests

    def _named(self, turns: Iterable[Turn]) -> dict[tuple[str, int], str]:
        """Return the agent that spoke in each inherited round: that is the one that the leader named."""
        keys = (turn.key for turn in turns if turn.inherited is not None and turn.key.agent_id != self.job.leader)
        return {(key.conversation_id, key.round): key.agent_id for key in keys}

    def hear_leave(self, key: TurnKey) -> None:
        """Record that an agent has left with a turn."""
        self.discussion(key.conversation_id).add(key.agent_id, key.round, None)

    # Words

    def choose_words(self, key: TurnKey, policy: BiosPolicy, now: datetime) -> ConversationWords | None:
        """Choose the words for a turn's model, if its conversation has none yet; return the new words."""
        new = self._words_with(key, policy, now)
        if new is self.words.get(key.conversation_id):
            return None
        self.words[key.conversation_id] = new
        return new

    def begin_words(self, conversation_id: str, now: datetime) -> ConversationWords | None:
        """Begin a conversation that speaks to no model yet; return its new words."""
        if conversation_id in self.words:
            return None
        self.words[conversation_id] = ConversationWords(began_at=now, models={})
        return self.words[conversation_id]

    def _words_with(self, key: TurnKey, policy: BiosPolicy, now: datetime) -> ConversationWords:
        """Return the words of a turn's conversation, with those for its model."""
        place, model = key.conversation_id, self.casts[key.conversation_id][key.agent_id].model
        words = self.words.get(place)
        if words is not None and model in words.models:
            return words
        models = {**(words.models if words else {}), model: wording_of(policy)}
        began_at = words.began_at if words else now
        return ConversationWords(began_at=began_at, models=models)

    def resume_words(self, words: Mapping[str, ConversationWords]) -> None:
        """Restore the words of begun conversations."""
        for conversation_id in self.conversations.keys() & words.keys():
            self.words[conversation_id] = words[conversation_id]

    def request(
        self,
        key: TurnKey,
        rejected: Sequence[Rejected],
        asked_at: datetime,
        spec: WorkerSpec,
        *,
        hears_all: bool,
        is_told: bool = False,
        addition: str | None = None,
    ) -> tuple[Request, PromptRecord]:
        """Return the request of an attempt that begins, and the record of its prompt.

        An attempt that ``hears_all`` is shown all words that are visible now, any other those of the prompt before.
        With ``is_told`` the prompt describes the required form of the answer. ``addition`` is said at the end.
        """
        agent, conversation = self.agent(key), self.conversations[key.conversation_id]
        discussion = self.discussion(key.conversation_id)
        if self.job.prompt_at is PromptAt.START and hears_all:
            make = discussion.make_prompt if agent.memory is None else discussion.make_prompt_once
            make(key.agent_id, key.round)  # the memory window was decided by the words heard then
        defaults = spec.defaults_beside(agent.params)
        first = self.memories.shown_from(key) if agent.memory is not None else 0
        record = PromptRecord(
            heard=discussion.heard_turns(key.agent_id, key.round),
            rejected=len(rejected),
            is_told=is_told,
            addition=addition,
            iterations=spec.tool_limits.iterations if agent.tools else 0,
            has_fallback=spec.tool_limits.fallback,
            stuck=spec.tool_limits.stuck,
            defaults=dict(defaults),
            changes=changes_of_retry({**defaults, **agent.params}, len(rejected)),
            from_round=first,
            is_summed=first > 0 and self.memories.summary_before(key, first) is not None,
        )
        words = self.words[key.conversation_id]
        heard = discussion.heard_by(agent, key.round, first)
        if first:
            conversation = self.memories.opened(key, record, words.models[agent.model])
        place = (conversation, agent, key.round)
        return agent_request(self.job, place, words, heard, rejected, record, asked_at), record


def _prompted_at(attempts: Sequence[Attempt]) -> datetime | None:
    """Return when the newest prompt was made; after a rejected answer that is the first rejected attempt's."""
    rejected = (each for each in attempts if each.reason == FailureReason.INVALID_ANSWER)
    made = next(rejected, attempts[-1] if attempts else None)
    return None if made is None else made.prompted_at


def _heard(attempts: Sequence[Attempt], ends: Sequence[datetime], made_at: datetime) -> int:
    """Return how many turns were visible when a prompt was made; without a record the turns' ends decide."""
    kept = attempts[-1].prompt if attempts else None
    return kept.heard if kept is not None and kept.heard is not None else bisect_right(ends, made_at)
