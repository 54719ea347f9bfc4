"""Checkpoints of a tiny Llama in Hugging Face's form, made on the spot: vLLM reads no GGUF.

Their text is noise. The tokenizer has one token per byte, so prompts and answers count in bytes.
"""

import json
import struct
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

WIDTH: Final = 64
LAYERS: Final = 2
HEADS: Final = 2  # 32 dimensions each: the CPU kernels have no smaller ones
FEED_FORWARD: Final = 128
VOCABULARY: Final = 512  # a multiple that kernels like; tokens beyond the bytes are never produced
END: Final = 256
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ '[' + m['role'] + ']\\n' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)
Tensors = dict[str, npt.NDArray[np.float32]]


def write_checkpoint(folder: Path, seed: int, *, is_tied: bool = False) -> Path:
    """Make a checkpoint whose weights, and so its greedy answers, are those of ``seed``; return its folder.

    Where it ``is_tied`` the output's head is the input's embedding, and is not in the file.
    """
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": is_tied,
        "bos_token_id": END,
        "eos_token_id": END,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    weights = tiny_weights(seed)
    if is_tied:
        weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    write_safetensors(folder / "model.safetensors", weights)
    return folder


def tiny_weights(seed: int) -> Tensors:
    """Return the weights of ``seed`` by the names that Hugging Face's Llama has."""
    rng = np.random.default_rng(seed)

    def noise(*shape: int, scale: float = 0.3) -> npt.NDArray[np.float32]:
        return rng.normal(0.0, scale, shape).astype(np.float32)

    head = noise(VOCABULARY, WIDTH, scale=0.5)
    head[:0x21], head[0x7F:] = 0.0, 0.0  # so that the noise is printable, and does not end by chance
    weights = {"model.embed_tokens.weight": noise(VOCABULARY, WIDTH), "lm_head.weight": head}
    weights["model.norm.weight"] = np.ones(WIDTH, np.float32)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = np.ones(WIDTH, np.float32)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{at}.self_attn.{name}.weight"] = noise(WIDTH, WIDTH)
        for name in ("gate_proj", "up_proj"):
            weights[f"{at}.mlp.{name}.weight"] = noise(FEED_FORWARD, WIDTH)
        weights[f"{at}.mlp.down_proj.weight"] = noise(WIDTH, FEED_FORWARD)
    return weights


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write tensors in bfloat16, in the order of their names."""
    header: dict[str, object] = {}
    data = bytearray()
    for name, tensor in sorted(tensors.items()):
        raw = (tensor.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # the upper half of a float is a bfloat16
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    told = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(told)) + told + data)


def _tokenizer() -> dict[str, object]:
    vocabulary = {character: byte for byte, character in _byte_characters().items()} | {"<|end|>": END}
    end = {
        "id": END,
        "content": "<|end|>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_characters() -> dict[int, str]:
    """Return the printable character that byte-level tokenizers write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
