"""A trainer for the tests: broadcasts checkpoints with ``roundhouse_client``, on commands from its standard input.

A line is JSON: {"checkpoint": FOLDER, "version": N}, with "bucket_bytes" or without; the answer is a line as well. With
``"mute": true`` it sends nothing, reports that, and waits to be killed. With ``"breaks": true`` its first broadcast
reports its start, sends nothing, and breaks with the next line. With ``"served": true`` it declares that the engines
have its checkpoint already.
"""

import json
import sys
import threading
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from roundhouse_client import TrainerClient, WeightsError
from roundhouse_client.trainer import tensors as wire

BUCKET_BYTES = wire.BUCKET_BYTES


def main() -> None:
    weights = TrainerClient(sys.argv[1], sys.argv[2], timeout_s=120)
    weights.init(timeout_s=60)
    print(json.dumps({"state": "here"}), flush=True)
    while line := sys.stdin.readline():
        told = json.loads(line)
        wire.BUCKET_BYTES = told.get("bucket_bytes", BUCKET_BYTES)  # type: ignore[misc]
        tensors = load_file(str(Path(told["checkpoint"]) / "model.safetensors"))
        if told.get("mute"):
            weights._group.broadcast = _send_nothing  # type: ignore[method-assign, assignment]
        if told.get("breaks"):
            weights._group.broadcast = partial(_break, weights)  # type: ignore[method-assign]
        try:
            if told.get("served"):
                weights.take_for_served(tensors, version=told["version"])
            answer = weights.update(tensors, version=told["version"]) or {"state": "skipped"}
        except WeightsError as error:
            answer = {"state": "failed", "error": str(error), "code": error.code}
        print(json.dumps(answer), flush=True)


def _send_nothing(sent: list[object], _in_flight: int, _timeout_s: float) -> None:
    print(json.dumps({"state": "mute", "tensors": len(sent)}), flush=True)
    threading.Event().wait(600)


def _break(weights: TrainerClient, _sent: list[object], _in_flight: int, _timeout_s: float) -> None:
    del weights._group.broadcast  # the next one is real
    print(json.dumps({"state": "begun"}), flush=True)
    sys.stdin.readline()
    raise RuntimeError("a member of the group has gone")


if __name__ == "__main__":
    main()
