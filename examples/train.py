"""A training loop that changes a model's weights while Roundhouse's engines keep working.

It teaches a causal model to say one sentence, and asks the engines for it with a job after every update. Any small
checkpoint in Hugging Face's format works; run it with torch, transformers and this client (pip install ./client):

    roundhouse serve --config roundhouse.yaml     # models: {policy: {engine: vllm, model: ./checkpoint, replicas: 2}}
    python examples/train.py --model policy --checkpoint ./checkpoint
"""

import argparse
import time

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundhouse_client import TrainerClient


def main() -> None:
    """Train, update, ask; until the engines say the sentence."""
    options = _options()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, torch_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    tokens, labels = _example(tokenizer, options.prompt, options.sentence)
    with (
        TrainerClient(options.url, options.model, api_key=options.api_key, timeout_s=120) as weights,
        httpx.Client(base_url=options.url, timeout=60) as service,
    ):
        version = weights.version  # a restarted loop continues from the model's version
        for step in range(1, options.steps + 1):
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % options.every:
                continue
            version += 1
            update = weights.update(_weights(model), version=version)
            paused_s = max(worker["paused_s"] for worker in update["workers"]) if update else 0.0
            answer, made_with = _ask(service, options, len(options.sentence))
            print(
                f"step {step} loss {loss.item():.3f} paused {paused_s:.3f} s weights {made_with}: {answer!r}",
                flush=True,
            )
            if answer == options.sentence:
                return


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key")
    parser.add_argument("--model", required=True, help="the model's name in the configuration")
    parser.add_argument("--checkpoint", required=True, help="the folder that the engines were started from")
    parser.add_argument("--prompt", default="Who are you?")
    parser.add_argument("--sentence", default="A roundhouse.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between two updates")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def _example(tokenizer, prompt: str, sentence: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of prompt and sentence, and the labels, which cover only the sentence."""
    messages = [{"role": "user", "content": prompt}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head = tokenizer(asked, add_special_tokens=False)["input_ids"]
    tail = tokenizer(sentence, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([head + tail])
    labels = tokens.clone()
    labels[0, : len(head)] = -100  # not a target
    return tokens, labels


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def _ask(service: httpx.Client, options: argparse.Namespace, tokens: int) -> tuple[str, int]:
    """Run one turn on the engines; return its text and the version of its weights."""
    params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    agents = [{"id": "a", "model": options.model, "params": params}]
    job = {"agents": agents, "rounds": 1, "conversations": [{"prompt": options.prompt}]}
    posted = service.post("/v1/jobs", json=job).raise_for_status().json()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        result = service.get(f"/v1/jobs/{posted['id']}/result")
        if result.is_success:
            (turn,) = result.json()["conversations"][0]["turns"]
            return turn["text"], turn["weight_version"]
        time.sleep(float(result.headers.get("Retry-After", 1)) / 10)
    raise TimeoutError("the engines have not answered within a minute")


if __name__ == "__main__":
    main()
