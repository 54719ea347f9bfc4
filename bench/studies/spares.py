"""What an engine's death costs the reader of a stream, with a spare and without; and the memory of a spare.

A stream of the small model is read, and its engine gets a SIGKILL in the middle: the seconds until the next words,
beside the seconds that an idle engine needs for the first token of a prompt of that length. The texts, at temperature
0, are compared with undisturbed ones: where they part, the log-probabilities of the two best tokens are printed. Then
the memory of the spare, by the kernel, beside the buffers that its log names.

    python -m bench.studies.spares [--kills 10] [--engine embedded|llama-server|vllm] [--command PROGRAM ...]
        [--model FILE] [--words 200] [--tokens 400]
"""

import argparse
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

import psutil

from bench.parts.services import VLLM, serving
from tests.harness.ports import find_ports
from tests.harness.service import Service
from tests.harness.waiting import wait_for
from workers.models.small_model import small_model_path
from workers.spare_engines import engine_memory

KILL_AT: Final = 100  # deltas
READY_S: Final = 300.0
BUFFERS: Final = re.compile(r"(KV|compute|output)\s+buffer size =\s+([\d.]+) MiB")
Document = dict[str, Any]


def main() -> None:
    """Print a line for each number of spares, and one for the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--engine", default="embedded")
    parser.add_argument("--command", nargs="+", default=[])
    parser.add_argument("--model", default=str(small_model_path()))
    parser.add_argument("--words", type=int, default=200, help="words of the prompt")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of the answer")
    options = parser.parse_args()
    for spares in (0, 1):
        with serving(find_ports(1), {"m": _model(options, spares)}) as service:
            _wait_spares(service, spares)
            prompt = "Tell a long story about " + "the sea and " * (options.words // 3)
            reads = [_first_token_s(service, f"{number}. {prompt}") for number in range(3)]
            gaps, ties, equal = [], list[float](), 0
            for number in range(options.kills):
                gap_s, text = _broken_stream(service, f"{number}. {prompt}", options.tokens)
                gaps.append(gap_s)
                _wait_spares(service, spares)
                tie = _distance_of_best(service, f"{number}. {prompt}", text, options.tokens)
                ties += [] if tie is None else [tie]
                equal += tie is None
            print(f"{options.engine}, spares: {spares}: from SIGKILL to the next words {median(gaps):.2f} s"
                  f" ({min(gaps):.2f} to {max(gaps):.2f}, {len(gaps)} kills); first token of such a prompt"
                  f" {median(reads):.2f} s; {equal} texts as undisturbed, the others part between tokens that are"
                  f" {', '.join(f'{tie:.3f}' for tie in ties) or 'never'} nats apart", flush=True)  # fmt: skip
            if spares:
                _print_memory(service)


def _model(options: argparse.Namespace, spares: int) -> Document:
    is_vllm = options.engine == "vllm"
    model: Document = {
        "engine": options.engine,
        "model": options.model,
        "slots": 2,
        "context": 2048,
        "spares": spares,
        "repetition": None,
        "restart": {"initial_s": 1, "failures": 1000},
        **({"command": options.command} if options.command else {}),
        **({"args": {"verbosity": 4}} if options.engine == "llama-server" else {}),  # its log names the buffers
        **(VLLM if is_vllm else {}),
    }
    return model if is_vllm else {**model, "port": find_ports(2)}


def _workers(service: Service) -> dict[str, Document]:
    return {each["id"]: each for each in service.get("/v1/workers")["workers"]}


def _wait_spares(service: Service, spares: int) -> None:
    def is_settled() -> bool:
        found = _workers(service).values()
        return [each["state"] for each in sorted(found, key=lambda each: str(each["state"]))] == [
            *["draining"] * spares,
            "ready",
        ]

    wait_for(is_settled, "the workers are ready", READY_S)


def _body(prompt: str, tokens: int) -> Document:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "m", "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "messages": messages}


def _deltas(service: Service, prompt: str, tokens: int) -> Iterator[str]:
    body = {**_body(prompt, tokens), "stream": True}
    with service.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    raise RuntimeError(frame["error"])
                words = frame["choices"][0]["delta"].get("content") if frame["choices"] else None
                if words:
                    yield words


def _first_token_s(service: Service, prompt: str) -> float:
    """Return the seconds until the first words after a prompt as long as ``prompt`` and half an answer."""
    began_at = time.monotonic()
    next(_deltas(service, prompt + " word" * KILL_AT, 2))
    return time.monotonic() - began_at


def _broken_stream(service: Service, prompt: str, tokens: int) -> tuple[float, str]:
    """Kill the engine under a stream; return the seconds without words, and the whole text."""
    killed_at, gap_s, said = None, None, list[str]()
    for number, words in enumerate(_deltas(service, prompt, tokens)):
        now = time.monotonic()
        said.append(words)
        if number == KILL_AT:
            (serving_now,) = (each for each in _workers(service).values() if each["state"] == "ready")
            os.kill(serving_now["pid"], signal.SIGKILL)
            killed_at = time.monotonic()
        elif killed_at is not None and gap_s is None and now - killed_at > 0.02:  # later ones had been written before
            gap_s = now - killed_at
    assert gap_s is not None
    return gap_s, "".join(said)


def _distance_of_best(service: Service, prompt: str, text: str, tokens: int) -> float | None:
    """Return how far apart the two best tokens are, in nats, where a text parts from the undisturbed one; or None."""
    body = {**_body(prompt, tokens), "logprobs": True, "top_logprobs": 2}
    answer = service.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    said = b""
    for token in answer["logprobs"]["content"]:
        said += bytes(token.get("bytes") or token["token"].encode())
        if not text.encode().startswith(said):
            best, second = sorted((each["logprob"] for each in token["top_logprobs"]), reverse=True)
            return float(best - second)
    return None


def _print_memory(service: Service) -> None:
    (spare,) = (each for each in _workers(service).values() if each["state"] == "draining")
    lines = [line["text"] for line in service.get(f"/v1/workers/{spare['id']}/logs?tail=2000")["lines"]]
    named = {match[1]: float(match[2]) for line in lines if (match := BUFFERS.search(line))}
    memory = engine_memory(psutil.Process(spare["pid"]).ppid())
    print(f"a spare: {memory.own_mib} MiB of its own, {memory.mapped_mib} of {memory.weights_mib} MiB of weights"
          f" shared; its log names {named}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
