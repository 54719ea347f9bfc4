"""Forks: jobs whose conversations begin with another job's recorded turns."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from roundhouse_client.calls.job_calls import get_document, post_job
from roundhouse_client.errors import NothingToFork
from roundhouse_client.flows.asking import PATIENCE_S, ask
from roundhouse_client.flows.steps import Flow
from roundhouse_client.values.jobs import Job

OF_THE_SOURCE = ("prompt", "variables")  # fields that a fork takes from its source


def fork(  # noqa: PLR0913 - one for each option
    job_id: str,
    conversation_id: str | None = None,
    *,
    rounds: int | None = None,
    before: tuple[str, int] | None = None,
    more: int = 0,
    changes: Mapping[str, object] | None = None,
    times: int = 1,
    idempotency_key: str | None = None,
    patience_s: float = PATIENCE_S,
) -> Flow[Job]:
    """Post a job that continues a conversation of another job, or all of its conversations.

    Its conversations begin with all recorded turns, with the first ``rounds``, or with the turns ``before`` that of an
    agent in a round. They have the source's rounds plus ``more``. ``changes`` are values by their path in the job's
    document, with agents named by id: ``agents.pro.model``, ``agents.pro.params.temperature``. Each conversation is
    forked ``times`` times.

    Raises:
        NothingToFork: the job has no such conversation, or a path cannot be set.
        InvalidRequest: a round is not recorded yet, or nothing is left to say: ask for ``more``.
        NotFound: there is no such job.
    """
    text = yield from ask(get_document(job_id), patience_s)
    cut: dict[str, object] = {} if rounds is None else {"rounds": rounds}
    if before is not None:
        cut["before"] = {"agent": before[0], "round": before[1]}
    changes = dict(changes or {})
    source = json.loads(text)
    if "rounds" in changes:  # before each conversation gets its own
        source = _with_rounds(source, changes.pop("rounds"))
    document = forked_document(source, job_id, conversation_id, cut, more)
    # Changes of the job come first: those of a conversation override them, and those of a copy both.
    of_copies: dict[str, object] = {}
    for path, value in sorted(changes.items(), key=lambda change: change[0].startswith("conversations.")):
        if times > 1 and _is_of_a_copy(document, path):
            of_copies[path] = value
            continue
        put_value(document, path, value)
        put_into_conversations(document, path, value)
    document["conversations"] = copies(document, times)
    for path, value in of_copies.items():
        put_value(document, path, value)
    return (yield from ask(post_job(document, idempotency_key=idempotency_key), patience_s))


def forked_document(
    document: dict[str, Any], job_id: str, conversation_id: str | None, cut: Mapping[str, object], more: int
) -> dict[str, Any]:
    """Return a job's document with conversations that begin with the job's own.

    Raises:
        NothingToFork: it has no such conversation.
    """
    heirs: list[dict[str, Any]] = []
    for place, given in enumerate(document["conversations"]):
        name = given.get("id") or f"c{place}"
        if conversation_id not in {None, name}:
            continue
        kept = {key: value for key, value in given.items() if key not in OF_THE_SOURCE}
        kept["from"] = {"job": job_id, "conversation": name, **cut}
        kept["rounds"] = (given.get("rounds") or document.get("rounds", 1)) + more
        heirs.append({**kept, "id": name})
    if not heirs:
        raise NothingToFork(f"job {job_id} has no conversation {conversation_id}")
    return {**document, "conversations": heirs}


def _is_of_a_copy(document: dict[str, Any], path: str) -> bool:
    """Whether a path names a conversation that exists only after the copying."""
    names = (f"conversations.{each['id']}" for each in document["conversations"])
    return path.startswith("conversations.") and not any(path == name or path.startswith(f"{name}.") for name in names)


def copies(document: dict[str, Any], times: int) -> list[dict[str, Any]]:
    """Return ``times`` copies of each conversation, with another seed per copy for agents that have one.

    With the same seed all copies would sample the same answers.

    Raises:
        NothingToFork: ``times`` is below 1.
    """
    if times < 1:
        raise NothingToFork(f"{times} forks of a conversation are none")
    if times == 1:
        return list(document["conversations"])
    return [
        {**_with_seeds(document["agents"], deepcopy(given), number), "id": f"{given['id']}-{number + 1}"}
        for given in document["conversations"]
        for number in range(times)
    ]


def _with_seeds(agents: list[dict[str, Any]], given: dict[str, Any], number: int) -> dict[str, Any]:
    casts = {**(given.get("agents") or {})}
    for agent in agents:
        cast = casts.get(agent["id"]) or {}
        seed = {**(agent.get("params") or {}), **(cast.get("params") or {})}.get("seed")
        if number and isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0:
            casts[agent["id"]] = {**cast, "params": {**(cast.get("params") or {}), "seed": seed + number}}
    return {**given, "agents": casts} if casts else given


def put_into_conversations(document: dict[str, Any], path: str, value: object) -> None:
    """Apply a value of the job to conversations that override it.

    Casts override an agent's values, and a conversation may have its own ``until``.
    """
    for given in document["conversations"]:
        if path == "until":
            given.pop("until", None)
        casts = given.get("agents") if isinstance(given.get("agents"), dict) else {}
        for name, cast in list(casts.items()):
            if path == f"agents.{name}":
                del casts[name]
            elif path.startswith(f"agents.{name}.") and isinstance(cast, dict):
                casts[name] = _with(cast, path.removeprefix(f"agents.{name}.").split("."), value)


def _with(at: dict[str, Any], names: list[str], value: object) -> dict[str, Any]:
    """Return a cast with a value of its agent, if the cast overrides that value or a part around it."""
    if names[0] not in at:
        return at
    if len(names) == 1:
        return {**at, names[0]: value}
    inner = at[names[0]]
    return {**at, names[0]: _put(inner if isinstance(inner, dict) else {}, names[1:], value)}


def _put(at: dict[str, Any], names: list[str], value: object) -> dict[str, Any]:
    inner = at.get(names[0])
    deeper = value if len(names) == 1 else _put(inner if isinstance(inner, dict) else {}, names[1:], value)
    return {**at, names[0]: deeper}


def _with_rounds(document: dict[str, Any], rounds: object) -> dict[str, Any]:
    """Return a job with the rounds of all its conversations set.

    Raises:
        NothingToFork: it is not a number of rounds.
    """
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise NothingToFork(f"rounds: {rounds!r} is not a number from 1")
    conversations = [{**each, "rounds": rounds} for each in document["conversations"]]
    return {**document, "rounds": rounds, "conversations": conversations}


def put_value(document: dict[str, Any], path: str, value: object) -> None:
    """Set a value in a job's document by its path, with agents named by id.

    Raises:
        NothingToFork: the path cannot be set.
    """
    names = path.split(".")
    if names == ["conversations"]:
        raise NothingToFork("conversations: they are those of the job; change one as conversations.ID.prompt")
    at: Any = document
    while isinstance(at, list) or (len(names) > 1 and isinstance(at, dict)):
        if isinstance(at, list) and _replace(at, ".".join(names), value):
            return
        at, names = _step(at, names)
    (last,) = names if len(names) == 1 else ("",)
    if not isinstance(at, dict) or not last:
        raise NothingToFork(f"{path} leads nowhere in the job; an agent is named by its id, as agents.pro.model")
    at[last] = value


def _replace(entries: list[Any], name: str, value: object) -> bool:
    """Replace the agent or conversation of that id; return whether there is one."""
    for place, each in enumerate(entries):
        if isinstance(each, dict) and each.get("id") == name and isinstance(value, dict):
            entries[place] = {**value, "id": name}
            return True
    return False


def _step(at: Any, names: list[str]) -> tuple[Any, list[str]]:  # noqa: ANN401 - any value of a document
    """Return the value of the first name, and the other names; an id with dots takes several names."""
    if isinstance(at, dict):
        return at.setdefault(names[0], {}), names[1:]
    for count in range(len(names) - 1, 0, -1):
        name = ".".join(names[:count])
        found = next((each for each in at if isinstance(each, dict) and each.get("id") == name), None)
        if found is not None:
            return found, names[count:]
    return None, names
