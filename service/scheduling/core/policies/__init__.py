"""The orders of ready turns: one policy per file, named after it.

To add a policy, add a file with one ``ReadyQueue``.
"""

from collections.abc import Mapping
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules
from typing import Final

from service.scheduling.core.queue.ready_queue import PolicyFactory, ReadyQueue


def _policy_of(name: str) -> PolicyFactory:
    """Return the one queue class that a module defines."""
    module = import_module(f"{__name__}.{name}")
    (policy,) = (
        found
        for found in vars(module).values()
        if isclass(found) and issubclass(found, ReadyQueue) and found.__module__ == module.__name__
    )
    return policy


POLICIES: Final[Mapping[str, PolicyFactory]] = {
    module.name: _policy_of(module.name) for module in iter_modules(__path__)
}
