"""The errors of an inference engine, as its callers see them.

InferenceError
├── UnknownAgent     no agent of that id is registered
├── AgentExists      an agent of that id is registered already
├── NoLane           there is no place for a checkpoint
├── EngineClosed     it was shut down, or is being shut down
└── InferenceFailed  a run has no answer
"""


class InferenceError(Exception):
    """Something about an inference engine failed."""


class UnknownAgent(InferenceError):
    """No agent of that id is registered."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"no agent {agent_id!r} is registered; register_agent does that")
        self.agent_id = agent_id


class AgentExists(InferenceError):
    """An agent of that id is registered already."""

    def __init__(self, agent_id: str) -> None:
        super().__init__(f"an agent {agent_id!r} is registered already")
        self.agent_id = agent_id


class NoLane(InferenceError):
    """There is no place for a checkpoint; the text says why."""


class EngineClosed(InferenceError):
    """It was shut down, or is being shut down."""


class InferenceFailed(InferenceError):
    """A run has no answer; ``reason`` is a failure reason of the specification."""

    def __init__(self, agent_id: str, reason: str, detail: str) -> None:
        super().__init__(f"agent {agent_id!r}: {reason}: {detail}")
        self.reason = reason
