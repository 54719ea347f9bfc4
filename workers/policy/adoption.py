"""Which running engines the next program of the same process keeps, and why not the others. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

OTHER_LAUNCH: Final = "it would be started differently"
NOT_WANTED: Final = "the configuration has no such worker any more"
OTHER_ADAPTERS: Final = "its adapters have changed"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and the launch of its engine; ``adapters`` are in the engine's order, with their paths.

    ``may_have_more``: an engine with further adapters fits as well.
    """

    worker: str
    model: str
    digest: str
    adapters: Mapping[str, str]
    may_have_more: bool


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of workers, by id: engines that are kept, and those that are ended with the reason.

    ``started`` are the workers that need a new engine.
    """

    kept: tuple[str, ...]
    ended: Mapping[str, str]
    started: tuple[str, ...]


def plan_adoption(running: Sequence[Launch], wanted: Sequence[Launch]) -> Adoption:
    """Plan which running engines to keep and which to end; one unlike ``wanted`` is replaced.

    Several of ``wanted`` may be for one worker: a lane has one per model.
    """
    faults = {each.worker: _fault(each, wanted) for each in running}
    kept = tuple(worker for worker, fault in faults.items() if fault is None)
    ids = dict.fromkeys(each.worker for each in wanted)
    return Adoption(
        kept=kept,
        ended={worker: fault for worker, fault in faults.items() if fault is not None},
        started=tuple(worker for worker in ids if worker not in kept),
    )


def _fault(running: Launch, wanted: Sequence[Launch]) -> str | None:
    same = [each for each in wanted if (each.worker, each.model) == (running.worker, running.model)]
    if not same:
        return NOT_WANTED
    if same[0].digest != running.digest:
        return OTHER_LAUNCH
    return None if _has_adapters(running, same[0]) else OTHER_ADAPTERS


def _has_adapters(running: Launch, wanted: Launch) -> bool:
    if wanted.may_have_more:
        return all(running.adapters.get(name) == path for name, path in wanted.adapters.items())
    return list(running.adapters.items()) == list(wanted.adapters.items())
