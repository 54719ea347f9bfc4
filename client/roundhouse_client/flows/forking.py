"""A job that goes on with what another has recorded: its document with conversations that begin there."""

import json
from collections.abc import Mapping
from typing import Any

from roundhouse_client.calls.job_calls import get_document, post_job
from roundhouse_client.errors import NothingToFork
from roundhouse_client.flows.asking import PATIENCE_S, ask
from roundhouse_client.flows.steps import Flow
from roundhouse_client.values.jobs import Job

OF_THE_SOURCE = ("prompt", "variables")  # what a conversation takes over from the one that it is from


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
    """Post a job that goes on with a conversation of another one, or with all of its conversations.

    Its conversations begin with all that is recorded, with the first ``rounds``, or with what was said ``before`` the
    turn of an agent in a round. They have the rounds of the source and ``more``. ``changes`` are values by their path
    in the job's document, where an agent is named by its id: ``agents.pro.model``, ``agents.pro.params.temperature``.
    Each conversation is forked ``times`` times.

    Raises:
        NothingToFork: the job has no such conversation, or a path leads nowhere.
        InvalidRequest: a round is not recorded yet, or nothing is left to say: ask for ``more``.
        NotFound: there is no such job.
    """
    text = yield from ask(get_document(job_id), patience_s)
    cut: dict[str, object] = {} if rounds is None else {"rounds": rounds}
    if before is not None:
        cut["before"] = {"agent": before[0], "round": before[1]}
    changes = dict(changes or {})
    source = json.loads(text)
    if "rounds" in changes:  # before each conversation is given its own
        source["rounds"] = changes.pop("rounds")
    document = forked_document(source, job_id, conversation_id, cut, more, times)
    for path, value in changes.items():
        put_value(document, path, value)
    return (yield from ask(post_job(document, idempotency_key=idempotency_key), patience_s))


def forked_document(
    document: dict[str, Any], job_id: str, conversation_id: str | None, cut: Mapping[str, object], more: int, times: int
) -> dict[str, Any]:
    """Return a job's document with conversations that begin with its own.

    Raises:
        NothingToFork: it has no such conversation, or there is to be no fork of it.
    """
    if times < 1:
        raise NothingToFork(f"{times} forks of a conversation are none")
    heirs: list[dict[str, Any]] = []
    for place, given in enumerate(document["conversations"]):
        name = given.get("id") or f"c{place}"
        if conversation_id not in {None, name}:
            continue
        kept = {key: value for key, value in given.items() if key not in OF_THE_SOURCE}
        kept["from"] = {"job": job_id, "conversation": name, **cut}
        kept["rounds"] = (given.get("rounds") or document.get("rounds", 1)) + more
        heirs += [{**kept, "id": name if times == 1 else f"{name}-{number + 1}"} for number in range(times)]
    if not heirs:
        raise NothingToFork(f"job {job_id} has no conversation {conversation_id}")
    return {**document, "conversations": heirs}


def put_value(document: dict[str, Any], path: str, value: object) -> None:
    """Set a value of a job's document, in which an agent is named by its id.

    Raises:
        NothingToFork: the path leads nowhere.
    """
    names = path.split(".")
    at: Any = document
    while len(names) > 1 and isinstance(at, dict | list):
        at, names = _step(at, names)
    (last,) = names if len(names) == 1 else ("",)
    if not isinstance(at, dict) or not last:
        raise NothingToFork(f"{path} leads nowhere in the job; an agent is named by its id, as agents.pro.model")
    at[last] = value


def _step(at: Any, names: list[str]) -> tuple[Any, list[str]]:  # noqa: ANN401 - any value of a document
    """Go to a value by the first of the names; an id may have dots, and be several of them."""
    if isinstance(at, dict):
        return at.setdefault(names[0], {}), names[1:]
    for count in range(len(names) - 1, 0, -1):
        name = ".".join(names[:count])
        found = next((each for each in at if isinstance(each, dict) and each.get("id") == name), None)
        if found is not None:
            return found, names[count:]
    return None, names
