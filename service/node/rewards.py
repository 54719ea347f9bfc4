"""Rewards of conversations: from a tool's result, from what an agent says, or from a Python callable in a process."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import regex

from service.conversations.document.posted_rollouts import PostedReward
from service.conversations.record.rollout import Reward
from service.conversations.record.transcript import Turn
from workers.offload.pool import Purpose, judge, offload

DETAIL_CHARS: Final = 500
NAMED: Final = "reward"  # the field of an object that is the reward, where others are metrics


class Unfit(Exception):
    """A source has no reward; the text says why."""


async def find_reward(
    source: PostedReward, turns: Sequence[Turn], transcript: Mapping[str, Any], limit_s: float
) -> Reward:
    """Return a conversation's reward from its source; one with an error if that fails.

    ``turns`` are its completed turns in order; a callable gets its ``transcript``, and ``limit_s`` seconds.
    """
    try:
        if source.python is not None:
            return await offload(call_reward, source.python, transcript, limit_s=limit_s, purpose=Purpose.REWARDS)
        if source.tool is not None:
            value = _last_result(source.tool, turns)
        else:
            value = await _said(source, turns)
        return as_reward(value)
    except TimeoutError as error:
        return _failed(str(error) or f"it took longer than reward_s = {limit_s:g} s")
    except Unfit as error:
        return _failed(str(error))
    except Exception as error:  # noqa: BLE001 - whatever a callable of the user's raises
        return _failed(f"{type(error).__name__}: {error}")


def as_reward(value: object) -> Reward:
    """Return a number, or an object with a number ``reward`` and others, as a reward.

    Raises:
        Unfit: it is neither.
    """
    metrics: dict[str, float] = {}
    if isinstance(value, Mapping):
        metrics = {_text(str(name)): _number(each, str(name)) for name, each in value.items() if name != NAMED}
        value = value.get(NAMED)
    return Reward(reward=_number(value, NAMED), metrics=metrics)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Unfit(f"{name}: {str(value)[:DETAIL_CHARS]!r} is no finite number")
    return float(value) + 0.0  # a number of Python's own, whatever its class


def _failed(detail: str) -> Reward:
    return Reward(error=_text(detail[:DETAIL_CHARS]))


def _text(text: str) -> str:
    """Return a text that every store takes, as half a surrogate pair is none."""
    return text.encode("utf-8", "replace").decode()


def _last_result(tool: str, turns: Sequence[Turn]) -> object:
    """Return the newest result of a tool, or the newest arguments of a signal.

    Raises:
        Unfit: there is none.
    """
    for turn in reversed(turns):
        for call in reversed(turn.tool_calls):
            if call.name == tool and call.reason is None:
                return call.result
        for signal in reversed(turn.signals):
            if signal.name == tool:
                return signal.arguments
    raise Unfit(f"the tool {tool!r} has no result in this conversation")


async def _said(source: PostedReward, turns: Sequence[Turn]) -> object:
    said = next((turn.text for turn in reversed(turns) if turn.key.agent_id == source.agent), None)
    if said is None:
        raise Unfit(f"{source.agent!r} has said nothing in this conversation")
    found = await judge(number_in, source.pattern or "", said, size=len(said))
    if found is None:
        raise Unfit(f"the last words of {source.agent!r} do not match {source.pattern}")
    try:
        return float(found)
    except ValueError:
        raise Unfit(f"{found[:DETAIL_CHARS]!r}, which matches {source.pattern}, is no number") from None


def number_in(pattern: str, text: str, limit_s: float) -> str | None:
    """Return the text of a pattern's first group, or of all of it without a group; None without a match.

    Raises:
        TimeoutError: that takes too long to find out.
    """
    found = regex.search(pattern, text, timeout=limit_s)
    return None if found is None else str(found[1] if found.re.groups else found[0])


def call_reward(place: str, transcript: Mapping[str, Any]) -> Reward:
    """Call a user's callable, ``module:function``, with a transcript; runs in a process of its own.

    What it returns is read there, too: it may have methods that take long.
    """
    module, _, path = place.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        value = function(transcript)
        return as_reward(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except TimeoutError:
        raise
    except Unfit as error:
        return _failed(str(error))
    except BaseException as error:  # noqa: BLE001 - whatever a callable of the user's raises
        return _failed(f"{type(error).__name__}: {error}")


async def _awaited(value: Any) -> object:  # noqa: ANN401 - what a user's callable returns
    return await value
