"""The orders of ready turns: one file each, and its name is the policy's.

To add one, add a file with a class ``Policy``, a ``ReadyQueue``.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from service.scheduling.core.queue.ready_queue import ReadyQueue

PolicyFactory = Callable[[], ReadyQueue]  # called once for each model
POLICIES: Final[Mapping[str, PolicyFactory]] = {
    module.name: import_module(f"{__name__}.{module.name}").Policy for module in iter_modules(__path__)
}
