"""Recorded sessions of coding agents, scaled down: lengths, shared prefixes and pauses, without words.

The format is that of callanjfox/kv-cache-tester (Apache-2.0): each request has its tokens in and out, and the hashes of
its blocks of 64 tokens; equal first hashes mean that prompts began with the same words. A block becomes a number with
as many tokens as fit a smaller context.
"""

import json
from pathlib import Path
from typing import Final, NamedTuple

SCALE: Final = 0.1  # factor for output tokens and pauses
DIGITS: Final = 6  # digits of a block's number: the small model has a token for each, and one for the space
TOKENS_A_BLOCK: Final = DIGITS + 1
FRAME_TOKENS: Final = 64  # tokens of the template around a prompt
LEAST_ANSWER, MOST_ANSWER = 8, 96
MOST_PAUSE_S: Final = 3.0
# llama.cpp keeps up to 8 GiB of prompts beside its slots. The sessions keep 7 of 64 tokens, and a token takes 22.5 KiB
# with the small model, but 96 with a coding model of 30 billion parameters (48 layers, 4 heads of 128).
CACHE_RAM_MIB: Final = round(8192 * TOKENS_A_BLOCK / 64 * 22.5 / 96)


class RecordedRequest(NamedTuple):
    """A request to be made ``pause_s`` after the answer before it; lengths are in tokens."""

    prompt: str
    answer: int
    pause_s: float


def read_sessions(folder: Path, count: int, requests: int, context: int) -> list[list[RecordedRequest]]:
    """Return the first requests of ``count`` sessions whose beginnings fit a context."""
    sessions: list[list[RecordedRequest]] = []
    for file in sorted(folder.glob("*.json")):
        recorded = json.loads(file.read_text())["requests"]
        session = [_request(each, len(sessions) + 1) for each in recorded[:requests]]
        if len(session) == requests and all(_tokens(each) <= context for each in session):
            sessions.append(session)
        if len(sessions) == count:
            return sessions
    raise SystemExit(f"{folder} has {len(sessions)} sessions of {requests} requests that fit {context} tokens")


def _request(recorded: dict[str, object], session: int) -> RecordedRequest:
    hashes = recorded["hash_ids"]
    blocks = hashes if isinstance(hashes, list) else []
    think_s = recorded.get("think_time", 0.0)
    return RecordedRequest(
        prompt=" ".join(f"{session * 10 ** (DIGITS - 1) + block:0{DIGITS}}" for block in blocks),
        answer=max(LEAST_ANSWER, min(MOST_ANSWER, round(int(str(recorded["out"])) * SCALE))),
        pause_s=min(MOST_PAUSE_S, float(str(think_s)) * SCALE),
    )


def _tokens(request: RecordedRequest) -> int:
    return (request.prompt.count(" ") + 1) * TOKENS_A_BLOCK + request.answer + FRAME_TOKENS
