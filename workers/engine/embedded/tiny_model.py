"""A model file generated on the spot: a real architecture, small enough for every test. Its text is noise."""

import os
import tempfile
from pathlib import Path
from typing import Final

import gguf
import numpy as np

WIDTH: Final = 64
LAYERS: Final = 2
HEADS: Final = 4
FEED_FORWARD: Final = 128
CONTEXT: Final = 131072
SEED: Final = 20260101
FIRST_CHARACTER: Final = 3 + 256  # after <unk>, <s>, </s> and the bytes
# ChatML-like, in plain characters: the tokenizer has one token per character and no special ones for it.
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ '[' + m['role'] + ']\\n' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)


def ensure_tiny_model(path: Path) -> Path:
    """Return ``path``, made if missing; two processes may do so at once, and no half-made file is ever seen."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            _write(Path(name))
            Path(name).chmod(0o644)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def _vocabulary() -> tuple[list[bytes], list[float], list[int]]:
    kinds = gguf.TokenType
    tokens: list[tuple[bytes, float, int]] = [
        (b"<unk>", 0.0, kinds.UNKNOWN),
        (b"<s>", 0.0, kinds.CONTROL),
        (b"</s>", 0.0, kinds.CONTROL),
    ]
    tokens += [(f"<0x{byte:02X}>".encode(), 0.0, kinds.BYTE) for byte in range(256)]
    characters = ["\u2581", *(chr(code) for code in range(0x21, 0x7F))]
    tokens += [(character.encode(), -float(rank), kinds.NORMAL) for rank, character in enumerate(characters)]
    texts, scores, types = zip(*tokens, strict=True)
    return list(texts), list(scores), [int(kind) for kind in types]


def _write(path: Path) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("roundhouse-tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    texts, scores, types = _vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_weights(writer, len(texts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    rng = np.random.default_rng(SEED)

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        weights = np.ones(shape) if len(shape) == 1 else rng.normal(0.0, scale, shape)
        if name == "output.weight":
            weights[:FIRST_CHARACTER] = 0.0  # so that the noise is printable, and does not end by chance
        writer.add_tensor(name, weights.astype(np.float32))

    add("token_embd.weight", vocabulary, WIDTH)
    add("output_norm.weight", WIDTH)
    add("output.weight", vocabulary, WIDTH, scale=0.5)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, FEED_FORWARD)
