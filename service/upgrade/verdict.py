"""The new program's verdict on whether it can continue where this one stops. Pure.

The present program states its facts, a child with the new code reads them, and its verdict says which engines would
stay, end or start, or why the upgrade is refused.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct, field

from workers.policy.adoption import Launch, plan_adoption

VERSION: Final = 1  # version of these documents' format
BOUND: Final = {
    "host": "server.host",
    "port": "server.port",
    "store": "store.url",
    "state_dir": "server.state_dir",
}
SECRET: Final = frozenset({"store"})  # may hold a password


class Bounds(Struct, frozen=True, kw_only=True):
    """The settings that the next program cannot change; paths are absolute."""

    host: str
    port: int
    store: str
    state_dir: str


class Facts(Struct, frozen=True, kw_only=True):
    """The present program's side: its bounds, its engines, and the workers that an operator has unloaded."""

    version: int = VERSION
    handover: int  # version of the handover document that it would write
    roundhouse: str
    bounds: Bounds
    running: list[Launch]
    unloaded: list[str] = field(default_factory=list)


class Plan(Struct, frozen=True, kw_only=True):
    """The new code's side: its bounds, its engines, and in ``schema`` the fault of the store's schema, if any."""

    handover: int
    roundhouse: str
    bounds: Bounds
    wanted: list[Launch]
    schema: str | None = None


class UpgradeVerdict(Struct, frozen=True, kw_only=True):
    """A yes without ``refusals``; ``ended`` has workers with the reason, ``started`` workers that get a new engine."""

    version: int = VERSION
    roundhouse: str
    refusals: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)


def judge(facts: Facts, plan: Plan) -> UpgradeVerdict:
    """Return the verdict of the new code."""
    refusals = [*_of_form(facts, plan), *_of_bounds(facts.bounds, plan.bounds)]
    if facts.bounds.store == "memory":
        refusals.append("store.url is memory: every job would be lost")
    if plan.schema is not None:
        refusals.append(plan.schema)
    wanted = [launch for launch in plan.wanted if launch.worker not in facts.unloaded]
    adoption = plan_adoption(facts.running, wanted)
    return UpgradeVerdict(
        roundhouse=plan.roundhouse,
        refusals=refusals,
        kept=list(adoption.kept),
        ended=dict(adoption.ended),
        started=list(adoption.started),
    )


def _of_form(facts: Facts, plan: Plan) -> Sequence[str]:
    if facts.version == VERSION and facts.handover == plan.handover:
        return ()
    return (f"Roundhouse {plan.roundhouse} does not read what {facts.roundhouse} would leave it: restart",)


def _of_bounds(was: Bounds, now: Bounds) -> Sequence[str]:
    changed = [name for name in BOUND if getattr(was, name) != getattr(now, name)]
    return [
        f"{BOUND[name]} is another now, which only a restart can change"
        if name in SECRET
        else f"{BOUND[name]} is {getattr(now, name)} now, and was {getattr(was, name)}: only a restart changes it"
        for name in changed
    ]
