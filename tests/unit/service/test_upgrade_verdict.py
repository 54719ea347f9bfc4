"""The new code's verdict on the state of the old one, and the names of what is refused."""

import os

import msgspec
import pytest
from msgspec.structs import replace
from msgspec.structs import replace as with_changed

from service.errors import ConfigError, StoreError
from service.store.databases.migrations import Migration, migrations_of, schema_fault
from service.store.databases.sqlite import MemoryDatabase
from service.upgrade.handover import VARIABLE, take_handover
from service.upgrade.verdict import Bounds, Facts, Plan, UpgradeVerdict, judge
from workers.policy.adoption import OTHER_LAUNCH, Launch

BOUNDS = Bounds(host="127.0.0.1", port=8080, store="sqlite", state_dir="/s")
LAUNCH = Launch(worker="m-0", model="m", digest="a", adapters={}, may_have_more=False)
FACTS = Facts(handover=1, roundhouse="1.0", bounds=BOUNDS, running=[LAUNCH])
PLAN = Plan(handover=1, roundhouse="1.1", bounds=BOUNDS, wanted=[LAUNCH])


def test_without_an_obstacle_the_verdict_is_yes() -> None:
    """It says what becomes of each engine."""
    assert judge(FACTS, PLAN) == UpgradeVerdict(roundhouse="1.1", refusals=[], kept=["m-0"])
    other = with_changed(PLAN, wanted=[replace(LAUNCH, digest="b"), replace(LAUNCH, worker="n-0", model="n")])
    assert judge(FACTS, other) == UpgradeVerdict(
        roundhouse="1.1", refusals=[], ended={"m-0": OTHER_LAUNCH}, started=["m-0", "n-0"]
    )
    assert msgspec.json.decode(msgspec.json.encode(judge(FACTS, other)), type=UpgradeVerdict) == judge(FACTS, other)


@pytest.mark.parametrize(
    ("facts", "plan", "words"),
    [
        (FACTS, with_changed(PLAN, handover=2), "does not read"),
        (with_changed(FACTS, version=2), PLAN, "does not read"),
        (FACTS, with_changed(PLAN, bounds=with_changed(BOUNDS, port=1)), "server.port is 1 now, and was 8080"),
        (FACTS, with_changed(PLAN, bounds=with_changed(BOUNDS, host="::1")), "server.host"),
        (FACTS, with_changed(PLAN, bounds=with_changed(BOUNDS, state_dir="/t")), "server.state_dir"),
        (FACTS, with_changed(PLAN, schema="the database has to be migrated"), "migrated"),
    ],
)
def test_what_an_upgrade_cannot_change_is_refused_by_name(facts: Facts, plan: Plan, words: str) -> None:
    """There is one reason, with the remedy."""
    (refusal,) = judge(facts, plan).refusals
    assert words in refusal


def test_a_password_is_in_no_refusal() -> None:
    """The URL of a store may hold one."""
    plan = with_changed(PLAN, bounds=with_changed(BOUNDS, store="postgresql://u:secret@h/d"))
    (refusal,) = judge(FACTS, plan).refusals
    assert "store.url" in refusal
    assert "secret" not in refusal


def test_a_store_in_memory_is_refused() -> None:
    """The upgrade would lose it."""
    bounds = with_changed(BOUNDS, store="memory")
    (refusal,) = judge(with_changed(FACTS, bounds=bounds), with_changed(PLAN, bounds=bounds)).refusals
    assert "every job would be lost" in refusal


def test_a_schema_is_examined_and_not_changed() -> None:
    """A missing step is named; a store with more steps was written by a newer Roundhouse."""
    steps = migrations_of("sqlite")
    database = MemoryDatabase()
    database.prepare()
    connection = database.connect_writer()
    assert schema_fault(connection, steps) is None
    later = Migration(number=len(steps) + 1, name="0002_later", sql="")
    fault = schema_fault(connection, [*steps, later])
    assert fault is not None
    assert later.name in fault
    with pytest.raises(StoreError, match="not that of this"):
        schema_fault(connection, [replace(steps[0], sql="other"), *steps[1:]])
    connection.execute("INSERT INTO migrations VALUES (?, ?, ?, 'now')", (later.number, later.name, later.checksum))
    with pytest.raises(StoreError, match="newer"):
        schema_fault(connection, steps)
    connection.close()
    database.close()


def test_an_invalid_handover_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exits with a reason, and no child inherits the variable."""
    assert take_handover() is None
    monkeypatch.setenv(VARIABLE, "99999")
    with pytest.raises(ConfigError, match=VARIABLE):
        take_handover()
    assert VARIABLE not in os.environ
