"""A model file that only embeds texts, made on the spot: BERT, with one token per letter."""

import string
from pathlib import Path
from typing import Final

import gguf
import numpy as np

WIDTH: Final = 32
FEED_FORWARD: Final = 64
HEADS: Final = 2
CONTEXT: Final = 512
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SEED: Final = 20260102


def write_embedding_model(file: Path) -> Path:
    """Make the model; return its file. llama.cpp answers requests for its tokens with 500."""
    writer = gguf.GGUFWriter(str(file), "bert")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(value=False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    _add_words(writer)
    _add_weights(writer, len(SPECIAL) + 2 * len(string.ascii_lowercase))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_words(writer: gguf.GGUFWriter) -> None:
    letters = string.ascii_lowercase
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*SPECIAL, *("\u2581" + letter for letter in letters), *letters])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL] * len(SPECIAL) + [kinds.NORMAL] * 2 * len(letters))
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)


def _add_weights(writer: gguf.GGUFWriter, words: int) -> None:
    rng = np.random.default_rng(SEED)

    def add(name: str, outputs: int, inputs: int | None = None) -> None:
        writer.add_tensor(name, rng.normal(0.0, 0.1, outputs if inputs is None else (outputs, inputs)).astype("f4"))

    add("token_embd.weight", words, WIDTH)
    add("token_types.weight", 2, WIDTH)
    add("position_embd.weight", CONTEXT, WIDTH)
    layers = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH, WIDTH),
        "attn_v": (WIDTH, WIDTH),
        "attn_output": (WIDTH, WIDTH),
    }
    layers |= {"ffn_up": (FEED_FORWARD, WIDTH), "ffn_down": (WIDTH, FEED_FORWARD)}
    for name, (outputs, inputs) in layers.items():
        add(f"blk.0.{name}.weight", outputs, inputs)
        add(f"blk.0.{name}.bias", outputs)
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        add(f"{name}.weight", WIDTH)
        add(f"{name}.bias", WIDTH)
