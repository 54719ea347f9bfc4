"""Which workers leave and which join: by model, one after the other, and never on a port that is still in use."""

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


def test_a_worker_as_wanted_stays() -> None:
    """Ready or not: its supervisor cares for that."""
    assert decide([worker(0), worker(1, is_ready=False)], [wanted(2)]) == []


def test_a_model_that_joins_starts_all_its_workers() -> None:
    """They start at the same time."""
    assert decide([worker(0)], [wanted(1), wanted(2, "n", 9200)]) == [join(0, "n"), join(1, "n")]


def test_a_removed_model_leaves_with_all_its_workers() -> None:
    """There is no reason to keep one."""
    assert decide([worker(0), worker(1, is_leaving=True), worker(2)], []) == [leave(0, REMOVED), leave(2, REMOVED)]


@pytest.mark.parametrize(
    ("workers", "left"),
    [
        ([worker(0, in_use=2), worker(1, in_use=1), worker(2, in_use=2)], 1),
        ([worker(0), worker(1), worker(2)], 2),  # the newest of those that are alike
        ([worker(0), worker(1, in_use=1, is_ready=False), worker(2)], 1),  # it is missed least
        ([old(0, in_use=2), worker(1), worker(2)], 0),  # it would have to leave anyhow
    ],
)
def test_with_too_many_workers_the_emptiest_leaves(workers: list[ReplicaView], left: int) -> None:
    """Ties go to the worker that is least useful."""
    assert decide(workers, [wanted(2)]) == [leave(left, FEWER)]


def test_free_numbers_are_used_again() -> None:
    """The configuration derives ports from them."""
    assert decide([worker(2)], [wanted(3)]) == [join(0), join(1)]


def test_a_worker_whose_number_is_beyond_the_count_stays() -> None:
    """The number only determines the port."""
    assert decide([worker(1), worker(2)], [wanted(2)]) == []


def test_a_worker_leaves_its_port_to_another_model_that_needs_it() -> None:
    """No worker starts there before it has left."""
    now = [worker(1), worker(2)]
    other = wanted(1, "n", 9102)
    assert decide(now, [wanted(2), other]) == [leave(2, CHANGED)]
    leaving = [worker(1), worker(2, is_leaving=True)]
    assert decide(leaving, [wanted(2), other]) == []
    assert decide([worker(1)], [wanted(2), other]) == [join(0), join(0, "n")]


def test_settings_change_one_worker_after_the_other() -> None:
    """The emptiest comes first; the next follows when the first is ready again."""
    assert decide([old(0, in_use=2), old(1, in_use=1)], [wanted(2)]) == [leave(1, CHANGED)]
    assert decide([old(0), old(1, is_leaving=True)], [wanted(2)]) == []
    assert decide([old(0)], [wanted(2)]) == [join(1)]
    assert decide([old(0), worker(1, is_ready=False)], [wanted(2)]) == []
    assert decide([old(0), worker(1)], [wanted(2)]) == [leave(0, CHANGED)]


def test_settings_with_which_no_engine_starts_cost_one_worker() -> None:
    """The others wait for it to be ready, and go on with the old settings."""
    failed = worker(1, is_ready=False)
    assert decide([old(0), failed, old(2)], [wanted(3)]) == []


def test_a_worker_that_serves_nothing_is_changed_at_once() -> None:
    """A worker that serves waits for it."""
    states = [old(0, is_ready=False), old(1), old(2, is_ready=False)]
    assert decide(states, [wanted(3)]) == [leave(0, CHANGED), leave(2, CHANGED)]


def test_the_only_worker_is_changed_too() -> None:
    """There is no other to wait for."""
    assert decide([old(0)], [wanted(1)]) == [leave(0, CHANGED)]


def test_models_change_at_the_same_time() -> None:
    """One worker of each."""
    models = [wanted(1), wanted(1, "n", 9200)]
    assert decide([old(0), old(0, "n", port=9200)], models) == [leave(0, CHANGED), leave(0, CHANGED, "n")]


def test_more_replicas_join_before_the_others_are_changed() -> None:
    """There is one more to take requests meanwhile."""
    assert decide([old(0)], [wanted(2)]) == [join(1)]


def test_no_worker_starts_on_a_port_in_use() -> None:
    """Its engine would not get the port."""
    leaving = worker(0, "n", is_leaving=True)
    assert decide([leaving], [wanted(1)]) == []


def run_to_the_end(workers: list[ReplicaView], models: list[WantedModel]) -> list[ReplicaView]:
    """Carry out every step at once until none is left."""
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
def test_models_that_swap_ports_do_not_block_each_other(workers: list[ReplicaView], models: list[WantedModel]) -> None:
    """Each waits for a port that the other holds, so one has to leave first."""
    end = run_to_the_end(workers, models)
    places = {(each.model, number): each.address(number) for each in models for number in range(each.count)}
    assert {(each.model, each.number): each.address for each in end} == places
    assert all(each.is_current for each in end)


def portless(model: str, *, is_current: bool = True) -> ReplicaView:
    return ReplicaView(model=model, number=0, is_current=is_current)


def test_models_without_ports_of_ours_claim_no_address() -> None:
    """Examples are vLLM on its UNIX socket and an attached server: neither blocks another."""
    models = [WantedModel(model=model, count=1) for model in ("m", "n")]
    assert decide([portless("m"), portless("n")], models) == []
    assert decide([portless("m")], models) == [join(0, "n")]
    assert decide([portless("m", is_current=False), portless("n")], models) == [leave(0, CHANGED)]


def test_a_worker_that_is_left_alone_stays() -> None:
    """Even if it should be replaced; its model's other workers are changed."""
    alone = worker(0, is_current=False, is_left_alone=True)
    assert decide([alone], [wanted(1)]) == []
    assert decide([alone, old(1)], [wanted(2)]) == [leave(1, CHANGED)]
    assert decide([alone], []) == [leave(0, REMOVED)]


def test_a_worker_is_left_alone_after_three_replacements_within_a_minute() -> None:
    """It stays until its settings change, or an operator asks."""
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


def test_rare_replacements_do_not_count() -> None:
    """Three in more than a minute."""
    noted = Replacements()
    for at in (0.0, REPLACED_S / 2, REPLACED_S + 1):
        noted.note("m-0", "settings", at)
    assert not noted.leaves_alone("m-0", "settings")
