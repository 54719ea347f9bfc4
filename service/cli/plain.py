"""Text of others as a terminal may show it: without controls, which could move the cursor or rename the window."""

import re
from typing import Final

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: object) -> str:
    """Return a text with each control but line feeds and tabs made visible."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text))
