"""Awaited turns of callers cost nothing while nothing happens, counted in statements of the database.

Counted on the virtual loop: ten minutes pass at once, and each run makes the same calls.
"""

from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import anyio

from service.config.source import LoadedConfig
from service.node.node import Node
from service.store.databases.database import Cursor
from service.store.databases.sqlite import SqliteConnection
from tests.harness.quiet_node import on_node
from tests.harness.virtual import pass_time

IDLE_S = 600
SELDOM_S = 15  # an occasional sign of life is no look each second
OF_WAITS = ("awaited_turns", "waits", "conversations", "nodes")


def statements_of_idleness(wait_s: float | None) -> Counter[str]:
    """Return the statements about waits that a node runs in ten minutes, while one caller's turn is awaited."""
    told: Counter[str] = Counter()
    execute = SqliteConnection.execute

    def counted(connection: SqliteConnection, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        told[sql] += 1
        return execute(connection, sql, parameters)

    async def scenario(node: Node, _loaded: LoadedConfig) -> int:
        guest = {"id": "guest", "by": "caller"} | ({} if wait_s is None else {"wait_s": wait_s})
        ann = {"id": "ann", "model": "m0", "system": "You are agent=ann.", "speak_after_within_round": ["guest"]}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.callers.run)
            stored, _ = await node.door.post({"agents": [guest, ann], "conversations": [{"prompt": "topic=c"}]})
            while not (await node.jobs.get(stored.id)).tally.awaited:
                await pass_time(0.2)
            await pass_time(30)
            with patch.object(SqliteConnection, "execute", counted):
                for _ in range(IDLE_S):
                    await pass_time(1)
            tasks.cancel_scope.cancel()
        return 0

    on_node(scenario)
    return Counter({sql: count for sql, count in told.items() if any(table in sql for table in OF_WAITS)})


def test_a_wait_that_ends_in_a_day_is_not_looked_at_each_second() -> None:
    """Neither the loop that ends waits, nor each claim, nor a write to the disk looks at it."""
    told = statements_of_idleness(86_400.0)
    assert max(told.values(), default=0) <= IDLE_S / SELDOM_S, told.most_common(12)


def test_a_wait_without_an_end_is_not_looked_at() -> None:
    """No statement at all: only a caller can end it, and the request with its words reports them."""
    assert statements_of_idleness(None) == {}
