"""Twenty ways of breaking an engine: innocent turns end, killers are convicted, and starts stay within their bound."""

from collections.abc import Sequence
from random import Random

import pytest

from service.conversations.job.job import Job, TurnKey
from service.scheduling.core.deaths import MOST_DEATHS
from tests.harness.breaking import INNOCENTS, Break, Engine, Outcome, Way, World
from tests.harness.jobs import agent, job

SEEDS = 50
STARTS_A_KILLER = MOST_DEATHS + 3  # in company, on an engine that had served others, and alone


def every(number: int) -> Way:
    def way(engine: Engine, _key: TurnKey, _now: float, chance: Random) -> Break | None:
        return Break(dies_after=chance.uniform(0, 0.4)) if engine.begun % number == 0 else None

    return way


def under_load(number: int) -> Way:
    def way(engine: Engine, _key: TurnKey, _now: float, chance: Random) -> Break | None:
        return Break(dies_after=chance.uniform(0, 0.2)) if len(engine.on_it) >= number else None

    return way


def by_chance(share: float) -> Way:
    def way(_engine: Engine, _key: TurnKey, _now: float, chance: Random) -> Break | None:
        return Break(dies_after=chance.uniform(0, 0.4)) if chance.random() < share else None

    return way


def of_age(seconds: float) -> Way:
    def way(engine: Engine, _key: TurnKey, now: float, _chance: Random) -> Break | None:
        left = engine.started_at + seconds - now
        return Break(dies_after=max(0.0, left)) if left < 2.0 else None

    return way


def hangs_at(number: int) -> Way:
    def way(engine: Engine, _key: TurnKey, _now: float, _chance: Random) -> Break | None:
        return Break(hangs=True) if engine.begun % number == 0 else None

    return way


def refuses_between(*spans: tuple[float, float]) -> Way:
    def way(_engine: Engine, _key: TurnKey, now: float, _chance: Random) -> Break | None:
        return Break(refuses=True) if any(begin <= now < end for begin, end in spans) else None

    return way


def refuses_by_chance(share: float) -> Way:
    def way(_engine: Engine, _key: TurnKey, _now: float, chance: Random) -> Break | None:
        return Break(refuses=True) if chance.random() < share else None

    return way


def killed(then: Way = lambda *_: None) -> Way:
    """The named agents kill; all other turns get ``then``."""

    def way(engine: Engine, key: TurnKey, now: float, chance: Random) -> Break | None:
        if key.agent_id == "killer":
            return Break(dies_after=chance.uniform(0, 0.4), by_killer=True)
        return then(engine, key, now, chance)

    return way


def innocents(turns: int) -> Job:
    return job(agent("good"), conversations=turns, name=INNOCENTS)


def killers(number: int, name: str = "killers") -> Job:
    return job(agent("killer"), conversations=number, name=name)


MIXED = job(agent("killer"), agent("good"), conversations=3, rounds=2, name="mixed")
CHANCE = {"chance 0.2", "chance 0.05", "chance 0.01", "killers and chance", "refuses by chance"}
WAYS: dict[str, tuple[Way, Sequence[Job], int]] = {
    "load of 2": (under_load(2), [innocents(40)], 1),
    "load of 3": (under_load(3), [innocents(40)], 1),
    "load of 4": (under_load(4), [innocents(80)], 2),
    "count of 3": (every(3), [innocents(30)], 2),
    "count of 10": (every(10), [innocents(100)], 1),
    "count of 25": (every(25), [innocents(200)], 1),
    "chance 0.2": (by_chance(0.2), [innocents(60)], 2),
    "chance 0.05": (by_chance(0.05), [innocents(100)], 1),
    "chance 0.01": (by_chance(0.01), [innocents(100)], 2),
    "age of 20 s": (of_age(20), [innocents(60)], 1),
    "age of 60 s": (of_age(60), [innocents(100)], 2),
    "hangs at 6": (hangs_at(6), [innocents(40)], 1),
    "hangs at 20": (hangs_at(20), [innocents(80)], 2),
    "one killer": (killed(), [killers(1), innocents(60)], 1),
    "three killers, one worker": (killed(), [killers(3), innocents(80)], 1),
    "six killers": (killed(), [killers(6), innocents(150)], 2),
    "killers of several jobs": (killed(), [*(killers(1, f"k{n}") for n in range(5)), innocents(80)], 2),
    "killers in conversations": (killed(), [MIXED, innocents(60)], 2),
    "killers and load": (killed(under_load(4)), [killers(3), innocents(80)], 2),
    "killers and count": (killed(every(10)), [killers(3), innocents(80)], 2),
    "killers and chance": (killed(by_chance(0.02)), [killers(3), innocents(80)], 2),
    "refuses for half a minute": (refuses_between((1, 31), (60, 100)), [innocents(60)], 2),
    "refuses by chance": (refuses_by_chance(0.3), [innocents(60)], 2),
}


def runs(name: str, seeds: int = SEEDS, *, is_keyed: bool = False) -> list[Outcome]:
    way, jobs, workers = WAYS[name]
    return [World(jobs, way, seed=seed, workers=workers, is_keyed=is_keyed).run() for seed in range(seeds)]


@pytest.mark.parametrize("is_keyed", [False, True], ids=["without keys", "with keys"])
@pytest.mark.parametrize("name", WAYS)
def test_innocent_turns_end_and_killers_are_convicted(name: str, *, is_keyed: bool) -> None:
    """No innocent turn suffers for an engine, every killer is found, and each costs a bounded number of starts."""
    _, jobs, workers = WAYS[name]
    outcomes = runs(name, is_keyed=is_keyed)
    failed = [key for outcome in outcomes for key in outcome.failed if key.agent_id != "killer"]
    asked = sum(len(each.conversations) * (each is not MIXED) for each in jobs) * len(outcomes)
    assert len(failed) <= (asked / 1000 if name in CHANCE else 0), failed
    first_rounds = sum(len(each.conversations) for each in jobs if each.agents[0].id == "killer")
    for outcome in outcomes:
        convicted = [key for key, reason in outcome.failed.items() if key.agent_id == "killer" and reason == "poisoned"]
        assert len(convicted) == first_rounds
        assert outcome.killer_deaths <= first_rounds * STARTS_A_KILLER
        assert outcome.starts <= workers + outcome.own_deaths + outcome.killer_deaths


def test_innocents_go_on_beside_killers() -> None:
    """Two workers, six killers: one worker tries suspects, and the other serves all other turns."""
    with_killers = runs("six killers", 20)
    way, jobs, workers = WAYS["six killers"]
    for seed, outcome in enumerate(with_killers):
        quiet = World(jobs[1:], way, seed=seed, workers=workers).run()
        last = max(at for key, at in outcome.completed.items() if key.agent_id == "good")
        assert quiet.ended_at / last >= 0.4


def test_kills_from_outside_charge_no_turn() -> None:
    """Foreign signals are no turn's fault, however many arrive, as long as turns have time to end at all."""
    for seed in range(SEEDS):
        world = World([innocents(60)], lambda *_: None, seed=seed, workers=1)
        for at in range(20):
            world.after(5.0 * at, world.kill_from_outside)
        assert world.run().failed == {}
