"""Pages that follow the code name existing files, names that are in them, and states that the code has."""

import re
from enum import StrEnum

import pytest

from service.conversations.job.states import ENDED_TURNS, TurnState
from tests.documents.pages import ROOT, own_rows
from workers.policy.lane_life import MOVES, LanePhase
from workers.policy.weight_update import STAGES, UpdateStage, UpdateState
from workers.states import ALLOWED, WorkerState

LIFECYCLE = ROOT / "docs" / "lifecycle.md"
STATES: dict[str, type[StrEnum]] = {
    "Turn": TurnState,
    "Worker": WorkerState,
    "Lane": LanePhase,
    "Weight update": UpdateState,
    "One worker in an update": UpdateStage,
}
PLACE = re.compile(r"`([\w./-]+/[\w.-]+)`((?:,?\s`[\w.]+`)*)")


def cells(heading: str, columns: int) -> list[list[str]]:
    return [[cell.strip("`") for cell in row] for row in own_rows(LIFECYCLE, heading) if len(row) == columns]


def places(text: str) -> list[tuple[str, list[str]]]:
    """Return every path of a text, each with the names after it."""
    return [(path, re.findall(r"[\w.]+", names)) for path, names in PLACE.findall(text)]


def fault(path: str, names: list[str]) -> str | None:
    if not (ROOT / path).exists():
        return f"{path} is not there"
    text = (ROOT / path).read_text(encoding="utf-8") if names else ""
    missing = [part for name in names for part in name.split(".") if not re.search(rf"\b{part}\b", text)]
    return f"{path} has no {missing}" if missing else None


@pytest.mark.parametrize("heading", STATES)
def test_every_state_is_on_the_page_of_lifecycles_and_no_other(heading: str) -> None:
    """Each has its meaning; moves lead from states to states, and out of each state that is no end."""
    states = [str(state) for state in STATES[heading]]
    assert [row[0] for row in cells(heading, 2)] == states
    moves = cells(heading, 4)
    assert {state for row in moves for state in row[:2]} == set(states)


@pytest.mark.parametrize(
    ("heading", "table"), [("Worker", ALLOWED), ("One worker in an update", STAGES), ("Lane", MOVES)]
)
def test_moves_are_those_of_the_code(heading: str, table: dict[StrEnum, frozenset[StrEnum]]) -> None:
    """The page has the same moves as each table of legal moves in the code."""
    assert {(row[0], row[1]) for row in cells(heading, 4)} == {
        (str(old), str(new)) for old, targets in table.items() for new in targets
    }


def test_no_move_leads_out_of_an_end() -> None:
    """An end that a caller has read never changes."""
    assert {row[0] for row in cells("Turn", 4)} == set(TurnState) - ENDED_TURNS
    assert {row[0] for row in cells("Weight update", 4)} == {UpdateState.RUNNING}


def test_the_table_of_the_core_gives_each_stored_state_one_pool() -> None:
    """Each stored state belongs to one pool, or to none."""
    states = cells("A turn inside the scheduling core", 5)
    pools = {TurnState(state): pool for _, state, pool, _, _ in states}
    assert pools == {
        TurnState.PENDING: "pending",
        TurnState.AWAITED: "none",
        TurnState.READY: "ready",
        TurnState.IN_FLIGHT: "in flight",
    }
    assert len({(state, pool) for _, state, pool, _, _ in states}) == len(pools)


@pytest.mark.parametrize("page", ["lifecycle.md", "walks.md"])
def test_every_place_exists(page: str) -> None:
    """Files move, and the pages have to follow."""
    found = places((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(found) > 40
    assert [told for path, names in found if (told := fault(path, names))] == []
