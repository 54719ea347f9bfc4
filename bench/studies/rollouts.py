"""Recorded tokens in the store: bytes for each token, and the time to read a chain.

Chains of ten turns and 2,000 tokens, half of them written by the model, are stored as their service would. Ids follow
Zipf's law over a vocabulary of 151,936, as those of texts do; logprobs are as those of a sampled answer. The bound is 6
bytes a token, over what the same turns take without a record.

    python -m bench.studies.rollouts [--chains 1000] [--turns 10] [--tokens 2000]
"""

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import anyio
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, Job, JobId, TurnKey
from service.conversations.job.states import ConversationState
from service.conversations.record.rollout import RowPlace, chains_of, rows_of
from service.conversations.record.token_arrays import ChainEnd, TurnTokens, add_to_chain, pack
from service.store import rollout_rows
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from service.store.records import ConversationMoved, TurnEnded
from service.store.store import Store, open_store
from tests.harness.stored import NOW, append, new, turn
from workers.requests.tokens import RecordedTokens

VOCABULARY = 151_936
MOST_BYTES = 6.0
MOST_READ_S = 0.001
J = JobId("j")
AT_ONCE = 20  # conversations of one job's write


def turns_of(made: random.Random, name: str, turns: int, tokens: int, *, is_recorded: bool) -> Iterator[TurnEnded]:
    """Yield the facts of a conversation's turns."""
    end: ChainEnd | None = None
    so_far: list[int] = []
    each = tokens // turns // 2

    def ids(count: int) -> list[int]:
        return [min(VOCABULARY - 1, int(made.paretovariate(0.6))) for _ in range(count)]

    for number in range(turns):
        prompt, written = [*so_far, *ids(each)], ids(each)
        recorded = RecordedTokens(
            prompt=prompt,
            ids=written,
            logprobs=[-made.expovariate(1.5) for _ in written],
            versions=[(number, 0, each)],
            stop_reason="stop",
            params={"temperature": 0.7, "max_tokens": 512, "seed": number},
        )
        so_far = [*prompt, *written]
        messages, end = add_to_chain(end, [recorded], "raw")
        spoken = replace(turn("a", text="said", number=number), key=TurnKey(J, name, "a", number))
        if is_recorded:
            spoken = replace(spoken, recorded=TurnTokens(tokens=each, chain=end))
        yield TurnEnded(turn=spoken, at=NOW, tokens=pack(messages) if is_recorded else None)


async def fill(store: Store, chains: int, turns: int, tokens: int, *, is_recorded: bool) -> None:
    """Store the conversations of one job."""
    agent = Agent(id="a", role="participant", model="m", system="")
    talks = tuple(Conversation(id=f"c{number}", prompt="", rounds=turns) for number in range(chains))
    await store.post(new(Job(id=J, name="j", agents=(agent,), conversations=talks)), claims=True)
    made = random.Random(1)
    for begin in range(0, chains, AT_ONCE):
        for talk in talks[begin : begin + AT_ONCE]:
            ended = ConversationMoved(
                job_id=J, conversation_id=talk.id, state=ConversationState.COMPLETED, reason=None, at=NOW
            )
            await append(store, *turns_of(made, talk.id, turns, tokens, is_recorded=is_recorded), ended)


async def read(store: Store, chains: int) -> list[float]:
    """Read every chain as a row; return the seconds of each."""
    times = []
    for number in range(chains):
        began_s = time.perf_counter()
        spoken = await store.read(rollout_rows.spoken, J, f"c{number}")
        place = RowPlace(job=J, conversation=f"c{number}", state="completed", first=0)
        rows = list(rows_of(place, chains_of(each for _, each in spoken if each is not None), {}))
        times.append(time.perf_counter() - began_s)
        assert len(rows) == 1, "a chain has broken"
    return times


def stored_bytes(folder: Path) -> int:
    """Return the size of the database and its log."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.startswith(FILE_NAME))


async def measure(chains: int, turns: int, tokens: int) -> None:
    """Print the figures."""
    sizes = []
    times, grown_kib = list[float](), 0
    for is_recorded in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            database = SqliteDatabase(folder / FILE_NAME)
            database.prepare()
            with open_store(database) as store:
                await fill(store, chains, turns, tokens, is_recorded=is_recorded)
                before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                times = await read(store, chains) if is_recorded else []
                grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
            sizes.append(stored_bytes(folder))
    plain, recorded = sizes
    each = (recorded - plain) / (chains * tokens)
    print(f"{chains} chains of {turns} turns and {tokens} tokens")
    print(f"  stored: {each:.2f} bytes a token (bound {MOST_BYTES:g}), {plain / 2**20:.0f} MiB without a record")
    print(f"  read: {median(times) * 1000:.2f} ms a chain in the median (bound {MOST_READ_S * 1000:g})")
    print(f"  peak memory grown by reading: {grown_kib / 1024:.0f} MiB")


def main() -> None:
    """Run the study with the given arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    anyio.run(measure, options.chains, options.turns, options.tokens)


if __name__ == "__main__":
    main()
