"""Faults of the core's tables between two events: each turn is in one place, and each count matches its turns. Pure."""

from collections import Counter
from collections.abc import Iterator

from service.conversations.job.job import TurnKey
from service.scheduling.core.flow import ConversationFlow
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.live import LiveConversation
from service.scheduling.core.ready_pool import ReadyPool


def pool_faults(flow: ConversationFlow, ready: ReadyPool, in_flight: InFlightPool) -> Iterator[str | None]:
    """Yield a fault of the pools, slots, reservations and charges, or None, for each entry."""
    waiting: set[TurnKey] = set()
    for key in ready:
        waiting.add(key)
        yield f"{key} is ready and in flight" if key in in_flight else None
    begun = 0
    for live in flow.jobs.values():
        for conversation in live.conversations.values():
            begun += len(conversation.open)
            lost = [key for key in conversation.open if key not in waiting and key not in in_flight]
            yield f"{lost} are of a conversation, and in no pool" if lost else None
            yield _order_fault(conversation, flow)
    if begun != len(waiting) + len(in_flight):
        yield f"{len(waiting)} turns are ready, {len(in_flight)} in flight, {begun} of conversations"
    if ready.fair is not None and (charged := ready.fair.charged - set(in_flight.keys())):
        yield f"{sorted(charged)} are charged for, and not in flight"
    yield from ready.check(lambda key: flow.jobs[key.job_id].job.owner)
    yield from in_flight.check()


def _order_fault(conversation: LiveConversation, flow: ConversationFlow) -> str | None:
    """Return a fault unless each turn whose order has come is in exactly one place: ready, in flight or at a gate."""
    if conversation.ending is not None or conversation.order.is_over or conversation.live.is_cancelled:
        return None  # its other turns are dropped over several events
    there = Counter([*conversation.open, *flow.gates.waiting_in(conversation)])
    due = Counter(map(conversation.key, conversation.order.due_turns()))
    return None if there == due else f"{[*(due - there)]} are nowhere, {[*(there - due)]} are not due"
