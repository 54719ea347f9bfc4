"""Environment variables that look like Roundhouse's own but that nothing reads."""

import re
from collections.abc import Collection, Iterator
from typing import Final

from service.formats.faults import unknown

PREFIX: Final = "ROUNDHOUSE_"
OF_COMMANDS: Final = (
    "ROUNDHOUSE_CONFIG",
    "ROUNDHOUSE_HOST",
    "ROUNDHOUSE_PORT",
    "ROUNDHOUSE_STATE_DIR",
    "ROUNDHOUSE_ADDRESS",
    "ROUNDHOUSE_PORT_OFFSET",
    "ROUNDHOUSE_STORE_URL",
    "ROUNDHOUSE_API_KEYS",
    "ROUNDHOUSE_OUTPUT",
    "ROUNDHOUSE_DEMO_PORT",
    "ROUNDHOUSE_DEMO_HTTP_PORT",
    "ROUNDHOUSE_URL",
    "ROUNDHOUSE_API_KEY",
    "ROUNDHOUSE_PROBE_KEY",
    "ROUNDHOUSE_DEBUG",
)
# Set by a service for its children or by ``launch`` for an agent, or read by ``cluster``.
OF_PROGRAMS: Final = frozenset(
    f"{PREFIX}{name}" for name in ("HANDOVER", "PARENT", "RUN", "RUN_BELOW", "WORKER", "SESSION", "PROGRAM", "CLUSTER")
)
# Kubernetes gives these to every pod beside a service named roundhouse.
OF_KUBERNETES: Final = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def unknown_variables(environment: Collection[str], named: Collection[str]) -> Iterator[str]:
    """Yield a warning for each variable that nothing reads; ``named`` are those that the configuration reads."""
    for name in sorted(environment):
        is_known = name in OF_COMMANDS or name in OF_PROGRAMS or name in named
        if name.startswith(PREFIX) and not is_known and not OF_KUBERNETES.fullmatch(name):
            yield f"nothing reads {name}: {unknown('variable', name, OF_COMMANDS)}"
