"""The needs of turns in KV cache tokens: their prompts, and their expected answers. Pure.

A prompt's length is known from the agent's last turn, as its engine counted it, and from what others have said since.
Before an agent's first turn it is estimated from its characters. An answer is expected to be no longer than nearly all
answers of that agent so far, in any conversation; without them it may be as long as its bound. The engine's count of a
prompt replaces the estimate, and improves later ones.

The beginning that an agent's prompts have in common is shared where the engine shares it: the least number of tokens
that the engine had cached of the newest conversations' first prompts.

Source: specification, "Capacity in tokens".
"""

from bisect import insort
from collections import deque
from typing import Final

from service.conversations.job.job import Agent, Conversation, JobId, TurnKey
from service.scheduling.core.kv_budgets import KvNeed
from service.scheduling.core.queue.affinity import PromptReading
from transport.answer_bound import bound_of

NEWEST: Final = 50  # answers remembered per agent
LEAST: Final = 5  # answers before an estimate is made
QUANTILE: Final = 0.95
TOKENS_A_CHAR: Final = 0.5  # until prompts have shown it: high for English, right for code and CJK
MOST_A_CHAR: Final = 4.0  # bytes of a character that no token of several letters covers
SHARED: Final = 5  # first prompts by which the shared part is judged
TEMPLATE_TOKENS: Final = 64  # tokens around the author's words: roles, names, the BIOS of an agent without tools


class AnswerLengths:
    """The newest answers of one agent, in tokens."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []

    def __repr__(self) -> str:
        return f"<AnswerLengths {len(self._newest)}>"

    def add(self, tokens: int) -> None:
        """Add one answer."""
        if len(self._newest) == NEWEST:
            self._sorted.remove(self._newest.popleft())
        self._newest.append(tokens)
        insort(self._sorted, tokens)

    @property
    def expected(self) -> int | None:
        """The length that nearly no answer exceeds; None until enough are known."""
        if len(self._sorted) < LEAST:
            return None
        return self._sorted[min(len(self._sorted) - 1, int(QUANTILE * len(self._sorted)))]


class PromptLengths:
    """The lengths of one agent's first prompts by their characters: a line through them (least squares)."""

    def __init__(self) -> None:
        self._count = 0
        self._chars = self._tokens = self._spread = self._together = 0.0  # means, and sums of squares about them

    def __repr__(self) -> str:
        return f"<PromptLengths {self._count}>"

    def add(self, chars: int, tokens: int) -> None:
        """Add one prompt."""
        self._count += 1
        from_mean = chars - self._chars
        self._chars += from_mean / self._count
        self._spread += from_mean * (chars - self._chars)
        self._tokens += (tokens - self._tokens) / self._count
        self._together += from_mean * (tokens - self._tokens)

    def expected(self, chars: int) -> int:
        """Return the expected tokens of a prompt with ``chars`` characters."""
        if not self._count:
            return round(chars * TOKENS_A_CHAR) + TEMPLATE_TOKENS
        rate = self._together / self._spread if self._spread else TOKENS_A_CHAR
        return max(1, round(self._tokens + (chars - self._chars) * min(MOST_A_CHAR, max(0.0, rate))))


class _Spoken:
    """The known tokens of one conversation: those said in it, and each agent's cache after its last turn."""

    __slots__ = ("contexts", "counted", "heard", "newest", "said")

    def __init__(self) -> None:
        self.said = 0
        self.newest: dict[str, tuple[int, int]] = {}  # by agent: a round, and the tokens that it said then
        self.heard: dict[str, int] = {}  # by agent in flight: the said tokens that are in its prompt
        self.counted: dict[str, tuple[int, int]] = {}  # by agent: a round, and the counted tokens of its prompt then
        # By agent: the tokens in its cache, and how many of those said are among them
        self.contexts: dict[str, tuple[int, int]] = {}


NOTHING_SPOKEN: Final = _Spoken()  # never changed


class TurnNeeds:
    """Learns from every ended turn; forgets a conversation with its end."""

    def __init__(self) -> None:
        self._spoken: dict[tuple[JobId, str], _Spoken] = {}
        self._answers: dict[tuple[JobId, str], AnswerLengths] = {}
        self._prompts: dict[tuple[JobId, str], PromptLengths] = {}
        self._shared: dict[tuple[JobId, str], deque[int]] = {}

    def __repr__(self) -> str:
        return f"<TurnNeeds conversations={len(self._spoken)}>"

    @property
    def conversations(self) -> int:
        """The number of conversations with estimates."""
        return len(self._spoken)

    @property
    def agents(self) -> int:
        """The number of agents with estimates of prompts or answers."""
        return len({*self._answers, *self._prompts, *self._shared})

    def prompt_tokens(self, key: TurnKey, agent: Agent, conversation: Conversation) -> int:
        """Return the tokens of a turn's prompt: as counted by the engine, or as expected."""
        spoken = self._spoken.get((key.job_id, key.conversation_id), NOTHING_SPOKEN)
        counted = spoken.counted.get(key.agent_id)
        if counted is not None and counted[0] == key.round:
            return counted[1]
        if key.agent_id in spoken.contexts:
            context, said = spoken.contexts[key.agent_id]
            return context + spoken.said - said + TEMPLATE_TOKENS
        lengths = self._prompts.get((key.job_id, key.agent_id)) or PromptLengths()
        return lengths.expected(len(agent.system) + conversation.chars) + spoken.said

    def answer_tokens(self, key: TurnKey, agent: Agent, most: int) -> int:
        """Return the expected tokens of a turn's answer; ``most`` bounds it if the agent's parameters do not."""
        bound = bound_of(agent.params) or most
        lengths = self._answers.get((key.job_id, key.agent_id))
        expected = lengths.expected if lengths is not None else None
        return bound if expected is None else min(bound, expected)

    def need(self, key: TurnKey, agent: Agent, conversation: Conversation, most: int) -> KvNeed:
        """Return a turn's need of a KV cache."""
        prompt = self.prompt_tokens(key, agent, conversation)
        known = self._shared.get((key.job_id, key.agent_id), ())
        shared = min(prompt, *known) if len(known) == SHARED else 0
        prefix = (key.job_id, key.agent_id) if shared else None
        return KvNeed(prompt=prompt, answer=self.answer_tokens(key, agent, most), shared=shared, prefix=prefix)

    def tell(self, key: TurnKey, agent: Agent, conversation: Conversation, prompt: int) -> None:
        """Record a prompt's tokens as counted by its engine; repeats change nothing."""
        spoken = self._spoken.setdefault((key.job_id, key.conversation_id), _Spoken())
        if key.agent_id not in spoken.contexts and key.agent_id not in spoken.counted:
            lengths = self._prompts.setdefault((key.job_id, key.agent_id), PromptLengths())
            lengths.add(len(agent.system) + conversation.chars, prompt - spoken.heard.get(key.agent_id, 0))
        spoken.counted[key.agent_id] = key.round, prompt

    def start(self, key: TurnKey, agent: Agent, *, hears_all: bool) -> None:
        """Record the words that a turn hears: in rounds those of earlier rounds, and of agents that it waits for."""
        spoken = self._spoken.get((key.job_id, key.conversation_id))
        if spoken is None:
            return
        unheard = (
            tokens
            for other, (number, tokens) in spoken.newest.items()
            if not hears_all and number == key.round and other not in agent.waits_for
        )
        spoken.heard[key.agent_id] = spoken.said - sum(unheard)

    def learn(self, key: TurnKey, agent: Agent, conversation: Conversation, reading: PromptReading) -> None:
        """Learn from a turn that has ended."""
        context, answer = reading.context_tokens, reading.answer_tokens
        self.tell(key, agent, conversation, context - answer)
        spoken = self._spoken[key.job_id, key.conversation_id]
        heard = spoken.heard.pop(key.agent_id, 0)
        if key.agent_id not in spoken.contexts:
            had = self._shared.setdefault((key.job_id, key.agent_id), deque(maxlen=SHARED))
            had.append(max(0, context - answer - reading.fresh_tokens))
        del spoken.counted[key.agent_id]
        spoken.said += answer
        spoken.newest[key.agent_id] = key.round, answer
        spoken.contexts[key.agent_id] = context, heard + answer
        self._answers.setdefault((key.job_id, key.agent_id), AnswerLengths()).add(answer)

    def forget_conversation(self, job_id: JobId, conversation_id: str) -> None:
        """Forget a conversation that has ended or left."""
        self._spoken.pop((job_id, conversation_id), None)

    def forget_job(self, job_id: JobId, agents: "list[str]") -> None:
        """Forget the agents of a job that has ended."""
        for agent in agents:
            self._answers.pop((job_id, agent), None)
            self._prompts.pop((job_id, agent), None)
            self._shared.pop((job_id, agent), None)
