"""What engines and tool servers inherit of the service's environment."""

import os
from collections.abc import Collection
from typing import Final

from service.config.secrets import HARMLESS

OURS: Final = ("ROUNDHOUSE_", "NOTIFY_SOCKET", "WATCHDOG_")


def child_environment(named: Collection[str]) -> dict[str, str]:
    """Return the environment of a child, without what is ours and what the configuration has read of it by ``named``.

    Those are mostly keys, passwords and addresses with one. A child that is to have one has it in its own ``env``.
    Places and settings of devices stay, whoever reads them.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OURS) and (name not in named or HARMLESS.fullmatch(name))
    }
