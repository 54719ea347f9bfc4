"""Which workers leave and which come: by the model, one after the other, and never where another still listens."""

import pytest

from workers.policy.roll import REPLACED_S, Join, Leave, LeaveReason, Replacements, ReplicaView, WantedModel, decide

FIRST = ("127.0.0.1", 9100)


def wanted(count: int, model: str = "m", port: int = 9100) -> WantedModel:
    return WantedModel(model=model, count=count, first=("127.0.0.1", port))


def worker(number: int, model: str = "m", *, port: int | None = None, **state: bool | int) -> ReplicaView:
    address = ("127.0.0.1", 9100 + number if port is None else port)
    return ReplicaView(model=model, number=number, address=address, **state)  # type: ignore[arg-type]


def old(number: int, model: str = "m", **state: int) -> ReplicaView:
    return worker(number, model, is_current=False, **state)


def leave(number: int, because: LeaveReason, model: str = "m") -> Leave:
    return Leave(model=model, number=number, because=because)


def join(number: int, model: str = "m") -> Join:
    return Join(model=model, number=number)


FEWER, CHANGED, REMOVED = LeaveReason.FEWER, LeaveReason.CHANGED, LeaveReason.REMOVED


def test_what_is_as_wanted_stays() -> None:
    """Whether it is ready or not: that is the concern of its supervisor."""
    assert decide([worker(0), worker(1, is_ready=False)], [wanted(2)]) == []


def test_a_model_that_comes_starts_all_its_workers() -> None:
    """At the same time."""
    assert decide([worker(0)], [wanted(1), wanted(2, "n", 9200)]) == [join(0, "n"), join(1, "n")]


def test_a_model_that_was_removed_leaves_with_all_its_workers() -> None:
    """There is nothing to keep one for."""
    assert decide([worker(0), worker(1, is_leaving=True), worker(2)], []) == [leave(0, REMOVED), leave(2, REMOVED)]


@pytest.mark.parametrize(
    ("workers", "left"),
    [
        ([worker(0, in_use=2), worker(1, in_use=1), worker(2, in_use=2)], 1),
        ([worker(0), worker(1), worker(2)], 2),  # of those that are alike the newest
        ([worker(0), worker(1, in_use=1, is_ready=False), worker(2)], 1),  # nobody misses it
        ([old(0, in_use=2), worker(1), worker(2)], 0),  # it would have to leave anyhow
    ],
)
def test_the_emptiest_leaves_where_there_are_too_many(workers: list[ReplicaView], left: int) -> None:
    """Before it those that would be missed least."""
    assert decide(workers, [wanted(2)]) == [leave(left, FEWER)]


def test_numbers_that_are_free_are_used_again() -> None:
    """Which are those that the configuration gives ports."""
    assert decide([worker(2)], [wanted(3)]) == [join(0), join(1)]


def test_a_worker_whose_number_is_beyond_the_count_stays() -> None:
    """Its number says nothing but where it listens."""
    assert decide([worker(1), worker(2)], [wanted(2)]) == []


def test_it_gives_way_to_another_model_that_is_to_listen_there() -> None:
    """And nobody starts there before it has left."""
    now = [worker(1), worker(2)]
    other = wanted(1, "n", 9102)
    assert decide(now, [wanted(2), other]) == [leave(2, CHANGED)]
    leaving = [worker(1), worker(2, is_leaving=True)]
    assert decide(leaving, [wanted(2), other]) == []
    assert decide([worker(1)], [wanted(2), other]) == [join(0), join(0, "n")]


def test_settings_are_changed_one_worker_after_the_other() -> None:
    """The emptiest first; the next when the first is ready again."""
    assert decide([old(0, in_use=2), old(1, in_use=1)], [wanted(2)]) == [leave(1, CHANGED)]
    assert decide([old(0), old(1, is_leaving=True)], [wanted(2)]) == []
    assert decide([old(0)], [wanted(2)]) == [join(1)]
    assert decide([old(0), worker(1, is_ready=False)], [wanted(2)]) == []
    assert decide([old(0), worker(1)], [wanted(2)]) == [leave(0, CHANGED)]


def test_settings_that_no_engine_starts_with_cost_one_worker() -> None:
    """The others wait for it to be ready, and go on with the old ones."""
    failed = worker(1, is_ready=False)
    assert decide([old(0), failed, old(2)], [wanted(3)]) == []


def test_a_worker_that_serves_nothing_is_changed_at_once() -> None:
    """The one that serves waits for them."""
    states = [old(0, is_ready=False), old(1), old(2, is_ready=False)]
    assert decide(states, [wanted(3)]) == [leave(0, CHANGED), leave(2, CHANGED)]


def test_the_only_worker_is_changed_too() -> None:
    """There is no other that it could wait for."""
    assert decide([old(0)], [wanted(1)]) == [leave(0, CHANGED)]


def test_models_are_changed_at_the_same_time() -> None:
    """One of each."""
    models = [wanted(1), wanted(1, "n", 9200)]
    assert decide([old(0), old(0, "n", port=9200)], models) == [leave(0, CHANGED), leave(0, CHANGED, "n")]


def test_more_replicas_come_before_the_others_are_changed() -> None:
    """So that there is one more to take requests meanwhile."""
    assert decide([old(0)], [wanted(2)]) == [join(1)]


def test_nobody_starts_where_another_still_listens() -> None:
    """Its engine would not get the port."""
    leaving = worker(0, "n", is_leaving=True)
    assert decide([leaving], [wanted(1)]) == []


def run_to_the_end(workers: list[ReplicaView], models: list[WantedModel]) -> list[ReplicaView]:
    """Carry out every step at once until nothing is left to be done."""
    by_model = {each.model: each for each in models}
    for _ in range(50):
        steps = decide(workers, models)
        if not steps:
            return workers
        for step in steps:
            if isinstance(step, Leave):
                workers = [each for each in workers if (each.model, each.number) != (step.model, step.number)]
            else:
                address = by_model[step.model].address(step.number)
                assert address not in {each.address for each in workers}
                workers = [*workers, ReplicaView(model=step.model, number=step.number, address=address)]
    raise AssertionError("it never ends")


@pytest.mark.parametrize(
    ("workers", "models"),
    [
        ([old(0), old(1)], [wanted(2, port=9101)]),  # each new place but the last is an old one's
        ([old(0), old(1), old(2)], [wanted(3, port=9102)]),
        ([old(0), old(1), old(0, "n", port=9102), old(1, "n", port=9103)], [wanted(2, port=9102), wanted(2, "n")]),
        (
            [old(0), old(1), old(0, "n", port=9103), old(1, "n", port=9104)],
            [wanted(2, port=9104), wanted(2, "n", 9100)],
        ),
    ],
)
def test_places_that_models_swap_hold_up_nobody(workers: list[ReplicaView], models: list[WantedModel]) -> None:
    """Each waits for a port that another holds: somebody has to leave first."""
    end = run_to_the_end(workers, models)
    places = {(each.model, number): each.address(number) for each in models for number in range(each.count)}
    assert {(each.model, each.number): each.address for each in end} == places
    assert all(each.is_current for each in end)


def portless(model: str, *, is_current: bool = True) -> ReplicaView:
    return ReplicaView(model=model, number=0, is_current=is_current)


def test_models_that_listen_on_no_port_of_ours_claim_no_address() -> None:
    """As vLLM on its UNIX socket and a server of somebody else: none stands in another's way."""
    models = [WantedModel(model=model, count=1) for model in ("m", "n")]
    assert decide([portless("m"), portless("n")], models) == []
    assert decide([portless("m")], models) == [join(0, "n")]
    assert decide([portless("m", is_current=False), portless("n")], models) == [leave(0, CHANGED)]


def test_a_worker_that_is_left_alone_stays() -> None:
    """Whatever says that it should go; its model's others are changed as ever."""
    alone = worker(0, is_current=False, is_left_alone=True)
    assert decide([alone], [wanted(1)]) == []
    assert decide([alone, old(1)], [wanted(2)]) == [leave(1, CHANGED)]
    assert decide([alone], []) == [leave(0, REMOVED)]


def test_a_worker_is_left_alone_after_three_replacements_within_a_minute() -> None:
    """Until its settings change, or somebody asks."""
    noted = Replacements()
    for at in (0.0, 1.0):
        noted.note("m-0", "settings", at)
    assert not noted.leaves_alone("m-0", "settings")
    noted.note("m-0", "settings", 2.0)
    assert noted.leaves_alone("m-0", "settings")
    assert not noted.leaves_alone("m-0", "others")
    assert not noted.leaves_alone("m-1", "settings")
    noted.forgive("m-0")
    assert not noted.leaves_alone("m-0", "settings")


def test_replacements_that_are_rare_count_for_nothing() -> None:
    """Three in more than a minute."""
    noted = Replacements()
    for at in (0.0, REPLACED_S / 2, REPLACED_S + 1):
        noted.note("m-0", "settings", at)
    assert not noted.leaves_alone("m-0", "settings")
