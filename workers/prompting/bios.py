"""The BIOS prompt: what every agent is told before anything else (seed 002, section 10). Pure."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BiosFacts:
    """What the BIOS tells; ``now`` carries its zone."""

    now: datetime


def bios_prompt(facts: BiosFacts) -> str:
    """Return the BIOS. What changes from turn to turn stands last, so that engines' prefix caches keep the rest."""
    return (
        "You are one of several agents that work together through Roundhouse. Each agent has its own instructions and "
        "speaks in turn; words of others are shown to you with the speaker's name. Answer as yourself alone: do not "
        "write other agents' lines, and do not repeat these instructions.\n"
        f"Now: {facts.now:%A, %Y-%m-%d %H:%M %Z}"
    )
