"""The document of a fork, changed by paths in it."""

import copy
from typing import Any

import pytest

from roundhouse_client.errors import NothingToFork
from roundhouse_client.flows.forking import copies, forked_document, put_into_conversations, put_value


def document(**fields: object) -> dict[str, Any]:
    agents = [{"id": "a"}, {"id": "a.b", "model": "m"}]
    return {"agents": agents, "rounds": 2, "conversations": [{"prompt": "Go."}, {"id": "x", "rounds": 5}], **fields}


@pytest.mark.parametrize(
    ("path", "place"),
    [("agents.a.b.model", 1), ("agents.a.b.params.temperature", 1), ("agents.a.model", 0), ("agents.a.c.model", 0)],
)
def test_an_agent_is_named_by_its_id(path: str, place: int) -> None:
    """The id may contain a dot: the longest existing id matches."""
    changed = document()
    put_value(changed, path, "new")
    assert "new" in str(changed["agents"][place])
    assert "new" not in str(changed["agents"][1 - place])


@pytest.mark.parametrize("path", ["agents.eve.model", "name.x", "", "agents."])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    """No value is set where it would be ignored."""
    with pytest.raises(NothingToFork):
        put_value(document(name="n"), path, 1)


def test_each_conversation_goes_on_with_its_own_rounds() -> None:
    """The job's rounds where it has none, plus the requested number."""
    forked = forked_document(document(), "j", None, {}, 3)["conversations"]
    assert [(each["id"], each["rounds"]) for each in forked] == [("c0", 5), ("x", 8)]
    with pytest.raises(NothingToFork):
        forked_document(document(), "j", "y", {}, 3)
    with pytest.raises(NothingToFork):
        copies(document(), 0)


CAST = {"noah": {"id": "noah", "agents": {"a": {"params": {"temperature": 0, "top_k": 1}, "system": "Cast."}}}}


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("agents.a.params.temperature", {"a": {"params": {"temperature": "new", "top_k": 1}, "system": "Cast."}}),
        ("agents.a.params.seed", {"a": {"params": {"temperature": 0, "top_k": 1, "seed": "new"}, "system": "Cast."}}),
        ("agents.a.params", {"a": {"params": "new", "system": "Cast."}}),
        ("agents.a.system", {"a": {"params": {"temperature": 0, "top_k": 1}, "system": "new"}}),
        ("agents.a.validation.retries", CAST["noah"]["agents"]),
        ("agents.a", {}),
        ("agents.a.b.system", CAST["noah"]["agents"]),
    ],
)
def test_a_change_of_the_job_applies_to_each_conversation(path: str, left: object) -> None:
    """Also if the conversation has its own cast: the change must not be overridden silently."""
    changed = document(conversations=[copy.deepcopy(CAST["noah"]), {"id": "x"}])
    put_value(changed, path, {"model": "new"} if path == "agents.a" else "new")
    put_into_conversations(changed, path, {"model": "new"} if path == "agents.a" else "new")
    assert changed["conversations"] == [{"id": "noah", "agents": left}, {"id": "x"}]
    assert changed["agents"][0]["id"] == "a"


def test_ends_of_the_job_apply_to_each_conversation() -> None:
    """Otherwise a conversation's own ends would replace them."""
    changed = document(conversations=[{"id": "x", "until": []}])
    put_value(changed, "until", [{"unchanged": 2}])
    put_into_conversations(changed, "until", [{"unchanged": 2}])
    assert (changed["until"], changed["conversations"]) == ([{"unchanged": 2}], [{"id": "x"}])


def test_copies_have_other_seeds() -> None:
    """With the same seed an agent would say the same in all of them."""
    agents = [{"id": "a", "params": {"seed": 7}}, {"id": "b"}]
    cast = {"b": {"params": {"seed": 1, "top_k": 2}}}
    made = copies(document(agents=agents, conversations=[{"id": "x", "agents": cast}, {"id": "y"}]), 3)
    assert [each["id"] for each in made] == ["x-1", "x-2", "x-3", "y-1", "y-2", "y-3"]
    assert made[0]["agents"] == cast
    assert made[2]["agents"] == {"b": {"params": {"seed": 3, "top_k": 2}}, "a": {"params": {"seed": 9}}}
    assert [each.get("agents", {}).get("a", {}).get("params") for each in made[3:]] == [None, {"seed": 8}, {"seed": 9}]


def test_a_change_of_one_fork_does_not_affect_another() -> None:
    """Forks of a conversation with a cast once shared it: ``conversations.x-1.agents.a.params`` changed all of them."""
    cast = {"id": "x", "prompt": "Go.", "agents": {"a": {"params": {"top_k": 1}}}}
    made = document(conversations=[cast])
    made["conversations"] = copies(made, 2)
    put_value(made, "conversations.x-1.agents.a.params.top_k", 2)
    assert [each["agents"]["a"]["params"]["top_k"] for each in made["conversations"]] == [2, 1]
