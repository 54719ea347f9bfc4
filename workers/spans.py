"""Spans: engines whose parts run on several nodes. Who forms one, when one is over, and who is to blame. Pure.

A generation is one life of a span. Nodes offer what they could give; an offer is made only while nothing of an earlier
generation runs there, and it is taken once. So no device ever has parts of two generations.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct

SILENCE_S: Final = 5.0  # a member that reports twice a second is silent after this long
IDLE_S: Final = 5.0  # a member that has used no CPU for this long while others have is suspect


class Offer(Struct, frozen=True, kw_only=True):
    """The devices of one node for one worker's next generation; ``*`` among them stands for all."""

    seat: str
    worker: str
    kind: str  # class of its devices; all members are of one
    address: str
    devices: tuple[str, ...]
    port: int  # for the engine's own rendezvous, if this node leads
    lifeline_port: int


class SpanMember(Struct, frozen=True, kw_only=True):
    """A node in a generation; its rank is its place there."""

    seat: str
    address: str
    devices: tuple[str, ...] = ()


class SpanGeneration(Struct, frozen=True, kw_only=True):
    """One life of a span; ``key`` proves to its members that they are of it."""

    worker: str
    number: int
    members: tuple[SpanMember, ...]
    port: int
    lifeline_port: int
    key: str
    lease_s: float  # how long a node keeps its place that the store has not seen

    def rank_of(self, seat: str) -> int | None:
        """Return the place of a node; None if it is no member."""
        return next((rank for rank, member in enumerate(self.members) if member.seat == seat), None)

    def name_of(self, rank: int) -> str:
        """Return a member's name for people."""
        return f"member {rank} at {self.members[rank].address}" if rank < len(self.members) else f"member {rank}"


class MemberFacts(Struct, frozen=True, kw_only=True):
    """The newest report of another member's guardian, with times in monotonic seconds of this node.

    ``died`` names a process without which its engine cannot go on. ``service_s`` is for how long its service was
    silent, ``moved_at`` when its engine last used CPU time.
    """

    cpu_s: float
    stopped: tuple[str, ...]
    died: str | None
    service_s: float
    heard_at: float
    moved_at: float


def collide(one: Collection[str], other: Collection[str]) -> bool:
    """Whether two parts on one node need the same device."""
    return bool(one and other) and ("*" in {*one, *other} or not set(one).isdisjoint(other))


def form(offers: Sequence[Offer], nodes: int, number: int, key: str, lease_s: float) -> SpanGeneration | None:
    """Return a generation of the first ``nodes`` offers of one kind, by their seats; None if there are too few.

    Seats keep their order, so that a node that starts again finds its part of the weights in its page cache.
    """
    kinds = sorted({offer.kind for offer in offers})
    by_kind = ([offer for offer in offers if offer.kind == kind] for kind in kinds)
    chosen = next((sorted(each, key=lambda offer: offer.seat)[:nodes] for each in by_kind if len(each) >= nodes), None)
    if chosen is None:
        return None
    return SpanGeneration(
        worker=chosen[0].worker,
        number=number,
        members=tuple(SpanMember(seat=each.seat, address=each.address, devices=each.devices) for each in chosen),
        port=chosen[0].port,
        lifeline_port=chosen[0].lifeline_port,
        key=key,
        lease_s=lease_s,
    )


def fate(
    generation: SpanGeneration,
    rank: int,
    facts: Mapping[int, MemberFacts],
    absent: Mapping[str, float],
    now: float,
) -> str | None:
    """Return why a member that runs must end, or None.

    ``absent`` has the nodes that the store has not seen for their lease, each with the seconds. Absence alone proves
    nothing, since an engine needs no store: a node is gone if its guardian is silent too, or says that its service is.
    """
    for other, member in enumerate(generation.members):
        if other == rank or (rank != 0 and other != 0) or member.seat not in absent:
            continue
        known = facts.get(other)
        if known is None or now - known.heard_at > SILENCE_S:
            return f"{generation.name_of(other)} is frozen or cut off"
        if known.service_s > generation.lease_s:
            return f"the service of {generation.name_of(other)} is frozen"
    return None


def suspect(generation: SpanGeneration, facts: Mapping[int, MemberFacts], now: float) -> str | None:
    """Name the member that keeps the others waiting, as far as its guardian's reports show it."""
    for rank, known in sorted(facts.items()):
        if known.died is not None:
            return f"{generation.name_of(rank)}: {known.died} died"
    for rank, known in sorted(facts.items()):
        if now - known.heard_at > SILENCE_S:
            return f"{generation.name_of(rank)} has been silent for {now - known.heard_at:.0f} s"
        if known.stopped:
            return f"{generation.name_of(rank)}: {known.stopped[0]} is stopped"
    for rank, known in sorted(facts.items()):
        if now - known.moved_at > IDLE_S:
            return f"{generation.name_of(rank)} has not computed for {now - known.moved_at:.0f} s"
    return None
