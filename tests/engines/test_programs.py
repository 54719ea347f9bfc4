"""Programs of clients on the real llama.cpp, whose slots forget (specification, "Programs of clients")."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.harness.service import Document, serving

PROGRAMS, REQUESTS = 3, 8
RULES = "Each of these words is a rule that counts for much. " * 60


def run_program(url: str, number: int) -> int:
    """Ask, and ask again with all earlier words; return how many tokens of its prompts the engine read."""
    read = 0
    messages: list[Document] = [{"role": "system", "content": f"Program {number}. {RULES}"}]
    with httpx.Client(base_url=url, timeout=60, headers={"X-Session-Id": f"program-{number}"}) as client:
        for request in range(REQUESTS):
            messages.append({"role": "user", "content": f"Go on, please, with number {request}."})
            body = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
            told = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            usage = told["usage"]
            read += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
    return read


@pytest.mark.system
def test_a_slot_held_for_its_program_spares_the_engine_its_prompt(
    tmp_path: Path, free_ports: Callable[[int], int], tiny_model: Path
) -> None:
    """Three programs on one slot, with no cache beside it: each would lose its cache to the next."""
    read: dict[bool, int] = {}
    for holds in (False, True):
        model = {"engine": "embedded", "model": str(tiny_model), "slots": 1, "context": 4096, "port": free_ports(1)}
        model["args"] = {"threads": 1, "cache-ram": 0}
        folder = tmp_path / str(holds)
        folder.mkdir()
        scheduling = {"hold_slots": holds}
        with (
            serving(folder, free_ports(1), {"m": model}, scheduling=scheduling) as service,
            ThreadPoolExecutor(PROGRAMS) as pool,
        ):
            read[holds] = sum(pool.map(run_program, [service.url] * PROGRAMS, range(PROGRAMS)))
    assert read[True] < 0.7 * read[False]
