"""GET /v1/status as callers see it."""

from service.api.schemas import Body, LaneOut, ToolServerOut, WorkerOut
from service.node.status import ConversationsSoFar, Head, Pools, PrefixTokens


class HeadsOut(Body):
    """The turns that wait at the heads of the pools."""

    pending: list[Head]
    ready: list[Head]


class StoreOut(Body):
    """The store as this node sees it; ``trouble`` is what ails it."""

    node: str
    trouble: str | None


class ReloadFailureOut(Body):
    """The last reload, where it changed nothing."""

    at: str
    detail: str


class ConfigurationOut(Body):
    """The configuration in force; ``under_way`` says what workers have yet to do until they are as it wants them."""

    loaded_at: str
    failure: ReloadFailureOut | None
    under_way: list[str]


class StatusOut(Body):
    """A moment of this node; ``jobs`` are those that have not ended.

    ``unclaimed`` says of each model what the conversations wait for that need it next and that no node runs.
    """

    jobs: int
    conversations: ConversationsSoFar
    ended_turns: int  # of jobs, since the start
    pools: Pools
    prefix_tokens: PrefixTokens
    heads: HeadsOut
    unclaimed: dict[str, str]
    store: StoreOut
    configuration: ConfigurationOut
    tool_servers: list[ToolServerOut]
    lanes: list[LaneOut]
    workers: list[WorkerOut]
