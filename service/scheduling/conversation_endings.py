"""What follows where conversations and jobs begin, end or leave, and where turns end without a slot."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import assert_never

from service.conversations.job import Agent, JobId, TurnKey
from service.conversations.states import ConversationState, TurnState
from service.scheduling.core import events
from service.scheduling.core.blame.blame import Blame
from service.scheduling.prompts import JobPrompts
from service.scheduling.turns import Turns
from service.store import records
from service.store.records import Record
from workers.outcome import FailureReason

Conversation = events.ConversationStarted | events.ConversationEnded


class ConversationEndings:
    """Forgets what is over and makes its records; it shares what it writes with the scheduler, in the same task.

    ``released`` are the conversations that were left to other nodes, with the models that they need next.
    """

    def __init__(self, jobs: MutableMapping[JobId, JobPrompts], turns: Turns, blame: Blame) -> None:
        self._jobs = jobs
        self._turns = turns
        self._blame = blame
        self.released: dict[tuple[JobId, str], Sequence[str]] = {}

    def __repr__(self) -> str:
        return f"<ConversationEndings jobs={len(self._jobs)}>"

    def move(self, action: events.Move, now: datetime) -> Iterable[Record]:
        """Note how far a conversation or a job has come; return the records of it, made as they are asked for."""
        match action:
            case events.ConversationStarted():
                return [_moved(action, ConversationState.RUNNING, None, now)]
            case events.ConversationEnded():
                self._blame.forget(action.unspoken)
                self._jobs[action.job_id].forget(action.conversation_id)
                return self._end_conversation(action, self._jobs[action.job_id].agents, now)
            case events.ConversationReleased():
                self._jobs[action.job_id].forget(action.conversation_id)
                self._blame.forget(self._turns.leave(action.job_id, action.conversation_id))
                self.released[action.job_id, action.conversation_id] = action.models
            case events.JobEnded():
                del self._jobs[action.job_id]
                self._blame.forget_job(action.job_id)
            case _:
                assert_never(action)
        return []

    def fail(self, key: TurnKey, detail: str) -> Record:
        """Fail a turn that waits for what cannot come."""
        agent = self._jobs[key.job_id].agents[key.agent_id]
        turn = self._turns.end_waiting(key, agent, TurnState.FAILED, FailureReason.ENGINE_UNREACHABLE, detail)
        self._blame.forget([key])
        self._turns.keep_unstored(turn)
        return records.TurnEnded(turn=turn, at=datetime.now(UTC), model=agent.model)

    def _end_conversation(
        self, ended: events.ConversationEnded, agents: Mapping[str, Agent], now: datetime
    ) -> Iterator[Record]:
        for key in ended.unspoken:
            agent = agents[key.agent_id]
            turn = self._turns.end_waiting(key, agent, TurnState.CANCELLED, FailureReason.CANCELLED)
            yield records.TurnEnded(turn=turn, at=now, model=agent.model)
        yield _moved(ended, ended.state, ended.reason, now)


def _moved(action: Conversation, state: ConversationState, reason: str | None, at: datetime) -> Record:
    return records.ConversationMoved(
        job_id=action.job_id, conversation_id=action.conversation_id, state=state, reason=reason, at=at
    )
