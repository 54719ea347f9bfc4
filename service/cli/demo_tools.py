"""The tool of the demo's clerk."""

from typing import Final

INHABITANTS: Final = {"Zurich": 436_330}  # end of 2023


def look_up(town: str) -> dict[str, object]:
    """Return the number of people in a town of the demo's job."""
    return {"town": town, "inhabitants": INHABITANTS[town]}
