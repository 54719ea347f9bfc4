"""Who forms a span, when a member must end, and who is to blame.

Source: specification, "Spans".
"""

from typing import Any

import pytest

from workers.errors import SpawnFailed
from workers.span_board import SpanBoard
from workers.spans import MemberFacts, Offer, SpanGeneration, collide, fate, form, suspect
from workers.spec import EngineKind, WorkerSpec

NOW = 1000.0
LEASE_S = 15.0


def offer(seat: str, **fields: Any) -> Offer:  # noqa: ANN401 - fields of several types
    given = {"kind": "cpu", "address": f"{seat}.example", "devices": (), "port": 1, "lifeline_port": 2, **fields}
    return Offer(seat=seat, worker="m-0", **given)


def generation(nodes: int = 3) -> SpanGeneration:
    formed = form([offer(f"node-{each}") for each in range(nodes)], nodes, 7, "key", LEASE_S)
    assert formed is not None
    return formed


def heard(**fields: Any) -> MemberFacts:  # noqa: ANN401 - fields of several types
    return MemberFacts(
        **{
            "cpu_s": 1.0,
            "stopped": (),
            "died": None,
            "service_s": 0.5,
            "heard_at": NOW - 0.5,
            "moved_at": NOW - 0.5,
            **fields,
        }
    )


def test_ranks_follow_the_names_of_nodes() -> None:
    """Whoever offers first, so that a node that starts again finds its part in its page cache."""
    formed = form([offer("c"), offer("a"), offer("b", port=9)], 2, 1, "key", LEASE_S)
    assert formed is not None
    assert [member.seat for member in formed.members] == ["a", "b"]
    assert [formed.rank_of(seat) for seat in ("a", "b", "c")] == [0, 1, None]
    assert formed.port == 1


def test_members_have_devices_of_one_kind() -> None:
    """Two kinds with one node each form nothing; the kind with enough nodes forms."""
    mixed = [offer("a", kind="H100"), offer("b", kind="A30")]
    assert form(mixed, 2, 1, "key", LEASE_S) is None
    formed = form([*mixed, offer("c", kind="A30")], 2, 1, "key", LEASE_S)
    assert formed is not None
    assert [member.seat for member in formed.members] == ["b", "c"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((), (), False),
        (("0",), (), False),
        (("0",), ("1",), False),
        (("0", "1"), ("1", "2"), True),
        (("*",), ("3",), True),
        (("*",), (), False),
    ],
)
def test_devices_collide_where_any_is_the_same(one: tuple[str, ...], other: tuple[str, ...], *, expected: bool) -> None:
    """A star is all devices, and no device is the CPU, which all share."""
    assert collide(one, other) is expected
    assert collide(other, one) is expected


@pytest.mark.parametrize(
    ("known", "is_absent", "expected"),
    [
        (heard(), False, None),
        (heard(heard_at=NOW - 60), False, None),  # silent, but the store sees it
        (heard(), True, None),  # unseen, but its guardian speaks for it: the database was away
        (heard(heard_at=NOW - 60), True, "is frozen or cut off"),
        (heard(service_s=LEASE_S + 1), True, "the service of"),
        (heard(service_s=LEASE_S + 1), False, None),
        (None, True, "is frozen or cut off"),
        (None, False, None),
    ],
)
def test_a_node_is_gone_only_by_two_proofs(known: MemberFacts | None, expected: str | None, *, is_absent: bool) -> None:
    """The store has not seen it, and its guardian is silent or says that its service is."""
    span = generation()
    facts = {1: heard(), 2: heard()} if known is None else {1: known, 2: heard()}
    if known is None:
        del facts[1]
    absent = {span.members[1].seat: 20.0} if is_absent else {}
    because = fate(span, 0, facts, absent, NOW)
    assert because is expected if expected is None else because is not None and expected in because


def test_a_follower_judges_only_its_leader() -> None:
    """It has no lifeline to other followers, so their silence tells it nothing."""
    span = generation()
    absent = {member.seat: 20.0 for member in span.members[1:]}
    assert fate(span, 1, {0: heard()}, absent, NOW) is None


def test_no_node_judges_itself() -> None:
    """Its own absence is handled by its guardian."""
    span = generation()
    assert fate(span, 0, {1: heard(), 2: heard()}, {span.members[0].seat: 20.0}, NOW) is None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({1: heard(), 2: heard()}, None),
        ({1: heard(heard_at=NOW - 9), 2: heard(died="w (7)")}, "member 2 at node-2.example: w (7) died"),
        ({1: heard(), 2: heard(heard_at=NOW - 9)}, "member 2 at node-2.example has been silent for 9 s"),
        ({1: heard(moved_at=NOW - 8), 2: heard(stopped=("w (7)",))}, "member 2 at node-2.example: w (7) is stopped"),
        ({1: heard(), 2: heard(moved_at=NOW - 8)}, "member 2 at node-2.example has not computed for 8 s"),
    ],
)
def test_the_member_that_keeps_others_waiting_is_named(facts: dict[int, MemberFacts], expected: str | None) -> None:
    """A death first, then silence and stopped processes, then a member that does not compute."""
    assert suspect(generation(), facts, NOW) == expected


def test_a_generation_without_a_node_is_not_formed() -> None:
    """Too few offers form nothing."""
    assert form([offer("a")], 2, 1, "key", LEASE_S) is None


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "nowhere.invalid"])
async def test_an_address_of_another_machine_fails_the_worker(address: str) -> None:
    """As any start that fails does; an error of another kind would end the service."""
    board = SpanBoard("a", address, LEASE_S)
    with pytest.raises(SpawnFailed, match=r"server\.address"):
        await board.wait_generation(WorkerSpec(engine=EngineKind.VLLM, model="m", nodes=2), frozenset())
    assert not board.offers
