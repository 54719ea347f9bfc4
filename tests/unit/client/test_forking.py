"""The document of a fork, changed by paths in it."""

from typing import Any

import pytest

from roundhouse_client.errors import NothingToFork
from roundhouse_client.flows.forking import forked_document, put_value


def document(**fields: object) -> dict[str, Any]:
    agents = [{"id": "a"}, {"id": "a.b", "model": "m"}]
    return {"agents": agents, "rounds": 2, "conversations": [{"prompt": "Go."}, {"id": "x", "rounds": 5}], **fields}


@pytest.mark.parametrize(
    ("path", "place"),
    [("agents.a.b.model", 1), ("agents.a.b.params.temperature", 1), ("agents.a.model", 0), ("agents.a.c.model", 0)],
)
def test_an_agent_is_named_by_its_id(path: str, place: int) -> None:
    """One with a dot too: the longest id that is there."""
    changed = document()
    put_value(changed, path, "new")
    assert "new" in str(changed["agents"][place])
    assert "new" not in str(changed["agents"][1 - place])


@pytest.mark.parametrize("path", ["agents.eve.model", "name.x", "", "agents."])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    """Nothing is changed at a place that nobody reads."""
    with pytest.raises(NothingToFork):
        put_value(document(name="n"), path, 1)


def test_each_conversation_goes_on_with_its_own_rounds() -> None:
    """Those of the job where it has none, and so many more."""
    forked = forked_document(document(), "j", None, {}, 3, 1)["conversations"]
    assert [(each["id"], each["rounds"]) for each in forked] == [("c0", 5), ("x", 8)]
    with pytest.raises(NothingToFork):
        forked_document(document(), "j", "y", {}, 3, 1)
    with pytest.raises(NothingToFork):
        forked_document(document(), "j", None, {}, 3, 0)
