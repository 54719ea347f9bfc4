"""Calls of sessions: base URLs whose requests are recorded as rollouts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from roundhouse_client.decoding import decode, parse
from roundhouse_client.request import Call, Request, as_nothing, get, into, place, post
from roundhouse_client.values.rollout_rows import OpenSession, RolloutRow, StoredReward

T = TypeVar("T")
SESSIONS: Final = "/v1/sessions"


def open_session(
    *,
    model: str | None = None,
    logprobs: bool = True,
    max_staleness: int | None = None,
    ttl_s: float | None = None,
) -> Call[OpenSession]:
    """Open a session; give its ``url`` to an agent as the base URL of its model.

    With ``model`` that model answers all its requests, whichever they name.

    Raises:
        InvalidRequest: there is no such model, or its tokens cannot be recorded.
    """
    about = {"model": model, "max_staleness": max_staleness, "ttl_s": ttl_s}
    document: dict[str, object] = {"record": {"tokens": True, "logprobs": logprobs}}
    document |= {name: value for name, value in about.items() if value is not None}
    return post(SESSIONS, into(OpenSession), document)


def get_session(session_id: str) -> Call[OpenSession]:
    """Return a session and the number of its exchanges.

    Raises:
        NotFound: there is no such session.
    """
    return get(f"{SESSIONS}{place(session_id)}", into(OpenSession))


def get_session_rows(session_id: str, *, partial: bool = False) -> Call[tuple[RolloutRow, ...]]:
    """Return the rows of a session so far; those whose record is not whole are left out, unless ``partial`` is true.

    Raises:
        NotFound: there is no such session.
    """
    return _rollouts(session_id, "rows", partial, lambda line: decode(RolloutRow, line))


def get_session_episodes(session_id: str, *, partial: bool = False) -> Call[tuple[dict[str, Any], ...]]:
    """Return a session so far in the form of verifiers: one episode, or none without rows.

    Raises:
        NotFound: there is no such session.
    """
    return _rollouts(session_id, "episode", partial, dict)


def post_session_reward(
    session_id: str, reward: float, *, metrics: Mapping[str, float] | None = None
) -> Call[StoredReward]:
    """Give a session its reward; it is durable when this returns. The same again is no error.

    Raises:
        StateConflict: there is another reward (``reward_conflict``).
        NotFound: there is no such session.
    """
    document = {"reward": reward, **({} if metrics is None else {"metrics": metrics})}
    return replace(post(f"{SESSIONS}{place(session_id)}/reward", into(StoredReward), document), is_repeatable=True)


def delete_session(session_id: str) -> Call[None]:
    """Delete a session with all that it has recorded.

    Raises:
        NotFound: there is no such session.
    """
    return Call(request=Request(method="DELETE", path=f"{SESSIONS}{place(session_id)}"), read=as_nothing)


def _rollouts(session_id: str, form: str, partial: bool, read: Callable[[Any], T]) -> Call[tuple[T, ...]]:
    def read_lines(body: bytes) -> tuple[T, ...]:
        return tuple(read(parse(line)) for line in body.splitlines())

    return get(f"{SESSIONS}{place(session_id)}/rollouts", read_lines, form=form, partial=partial)
