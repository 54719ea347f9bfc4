"""LoRA adapters for the tiny models, made on the spot: in PEFT's form for vLLM, in GGUF for llama.cpp."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from tests.engines.checkpoint import FEED_FORWARD, LAYERS, WIDTH, write_safetensors

RANK: Final = 4
ALPHA: Final = 8.0
PEFT: Final = {"self_attn.q_proj": WIDTH, "self_attn.v_proj": WIDTH, "mlp.down_proj": FEED_FORWARD}  # to its inputs
GGUF: Final = {"attn_q": WIDTH, "attn_v": WIDTH, "ffn_down": FEED_FORWARD}


def write_peft_adapter(
    folder: Path, seed: int, *, rank: int = RANK, width: int = WIDTH, modules: Iterable[str] = PEFT
) -> Path:
    """Make an adapter whose weights are those of ``seed``; return its folder. Others than the model's do not fit it."""
    folder.mkdir(parents=True)
    targets = sorted(name.rpartition(".")[2] for name in modules)
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name in modules:
            inputs = PEFT.get(name, WIDTH)
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = rng.normal(0.0, 0.3, (rank, inputs)).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = rng.normal(0.0, 0.3, (width, rank)).astype(np.float32)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def write_gguf_adapter(file: Path, seed: int, architecture: str = "llama") -> Path:
    """Make an adapter whose weights are those of ``seed``; return its file."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, ALPHA)
    for layer in range(LAYERS):
        for name, inputs in GGUF.items():
            at = f"blk.{layer}.{name}.weight"
            writer.add_tensor(f"{at}.lora_a", rng.normal(0.0, 0.3, (RANK, inputs)).astype(np.float32))
            writer.add_tensor(f"{at}.lora_b", rng.normal(0.0, 0.3, (WIDTH, RANK)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
