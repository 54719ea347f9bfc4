"""Computes the logprobs of rollouts' tokens with another program than the engine: transformers, in vLLM's environment.

Standard input has JSON: {"checkpoint": FOLDER, "gguf": FILE or null, "rows": [row, ...]}. The answer is a list for each
row: the logprob of each of its completion's tokens, computed in float32.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]


def main() -> None:
    asked = json.load(sys.stdin)
    where = {} if asked["gguf"] is None else {"gguf_file": asked["gguf"]}
    model = AutoModelForCausalLM.from_pretrained(asked["checkpoint"], dtype=torch.float32, **where)
    answers = []
    for row in asked["rows"]:
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        logprobs = torch.log_softmax(logits, dim=-1)
        begin = len(row["prompt_ids"])
        answers.append([float(logprobs[place - 1, ids[place]]) for place in range(begin, len(ids))])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
