"""Computes a checkpoint's text with another program than vLLM: transformers, in vLLM's environment, for the tests.

Standard input has JSON: {"checkpoint": FOLDER, "prompts": [messages, ...], "tokens": N}. The answer is a list for each
prompt of [token's text, by how much its logit leads]: greedy, computed in float32.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]


def main() -> None:
    told = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(told["checkpoint"])
    model = AutoModelForCausalLM.from_pretrained(told["checkpoint"], dtype=torch.float32)
    answers = []
    for prompt in told["prompts"]:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        answer = []
        for _ in range(told["tokens"]):
            with torch.no_grad():
                logits = model(ids).logits[0, -1]
            best = torch.topk(logits, 2)
            answer.append([tokenizer.decode([int(best.indices[0])]), float(best.values[0] - best.values[1])])
            ids = torch.cat([ids, best.indices[:1].view(1, 1)], dim=1)
        answers.append(answer)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
