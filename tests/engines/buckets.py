"""Packs random tensors as a trainer does, and unpacks them as an engine does; for the tests, in vLLM's environment."""

import random
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "client"), str(ROOT / "workers" / "weights" / "extension")]

import roundhouse_weights  # type: ignore[import-not-found]  # noqa: E402

from roundhouse_client.trainer import tensors as wire  # noqa: E402

TRIALS = 2000


def main() -> None:
    chance = random.Random(1)  # noqa: S311
    for _ in range(TRIALS):
        wire.BUCKET_BYTES = chance.choice([1, 64, 100, 1000, 5000])  # type: ignore[misc]
        edges = [0, 1, 2, 63, 64, 65, 128, chance.randrange(3000)]
        sizes = [chance.choice(edges) for _ in range(chance.randrange(12))]
        tensors = {str(place): torch.full([size], place, dtype=torch.uint8) for place, size in enumerate(sizes)}
        buckets = list(wire.buckets(wire.sent_tensors(tensors)))
        plan = roundhouse_weights.plan(sizes, wire.BUCKET_BYTES)
        assert [len(bucket) for bucket in buckets] == [size for size, _ in plan], sizes
        for bucket, (_, places) in zip(buckets, plan, strict=True):
            for place, at in places:
                assert at % roundhouse_weights.ALIGNMENT == 0
                assert torch.equal(bucket[at : at + sizes[place]], tensors[str(place)]), sizes
        assert sorted(place for _, places in plan for place, _ in places) == list(range(len(sizes)))
    print(TRIALS)


if __name__ == "__main__":
    main()
