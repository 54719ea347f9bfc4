"""What ``GET /v1/jobs/{id}/timeline`` answers, for the description of the surface; what is not known is left out."""

from service.api.schemas import Body
from service.conversations.states import JobState, TurnState


class TimelineWorker(Body):
    """A worker, and on how many rows the attempts on it lie."""

    id: str
    rows: int
    model: str | None = None
    slots: int | None = None


class TimelineState(Body):
    """A worker is in a state from a moment on."""

    worker: str
    at_s: float
    state: str
    incarnation: int
    because: str


class TimelineIncident(Body):
    """An engine broke or was killed."""

    worker: str
    at_s: float
    incarnation: int
    reason: str
    because: str
    exit: str | None = None


class TimelineAttempt(Body):
    """One attempt of a turn: it waited until ``started_s``, and held a slot from then on."""

    conversation: str
    agent: str
    round: int
    number: int
    worker: str
    incarnation: int
    outcome: TurnState
    started_s: float
    row: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    reason: str | None = None
    detail: str | None = None
    tools: list[str] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class TimelineOut(Body):
    """A job's timeline; all times are in seconds after ``origin``."""

    id: str
    name: str
    state: JobState
    origin: str
    until_s: float
    workers: list[TimelineWorker]
    states: list[TimelineState]
    incidents: list[TimelineIncident]
    attempts: list[TimelineAttempt]
