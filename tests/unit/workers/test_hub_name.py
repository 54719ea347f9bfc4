"""Names of a hub's models, and which files of a repository they mean."""

import pytest

from workers.errors import InvalidSpec, ModelUnavailable
from workers.models.hub_name import HubName, choose_files, parse_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
QUANTS = ["Some-4B-Q8_0.gguf", "Some-4B-Q4_K_M.gguf", "Some-4B-IQ4_K_M.gguf", "mmproj-F16.gguf", "README.md"]
CHECKPOINT = ["config.json", "model.safetensors", "tokenizer.json", "merges.txt", "model.bin", "code.py", "x.pt"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:org/Repo", HubName(owner="org", repository="Repo")),
        ("hf:org/Repo:Q4_K_M", HubName(owner="org", repository="Repo", file="Q4_K_M")),
        (f"hf:org/Repo:a.gguf@{COMMIT}", HubName(owner="org", repository="Repo", file="a.gguf", revision=COMMIT)),
        ("hf:org/Repo@v1.0", HubName(owner="org", repository="Repo", revision="v1.0")),
    ],
)
def test_a_name_is_read_and_written(text: str, name: HubName) -> None:
    """As a person writes it, so that a pinned one can be written into a file."""
    assert parse_hub_name(text) == name
    assert str(name) == text
    assert name.is_pinned == (COMMIT in text)


@pytest.mark.parametrize(
    "text",
    [
        "hf:repo",
        "hf:a/b/c",
        "hf:../b",
        "hf:a/..",
        "hf:a/b:../c.gguf",
        "hf:a/b:x/y.gguf",
        "hf:a/b@refs/pr/1",
        "hf:a/b@..",
        "hf:a/b@",
        "hf:a/b:",
        "hf:a b/c",
        "hf:a/b\n",
        f"hf:a/{'b' * 201}",
        "hf:ä/b",
    ],
)
def test_what_is_no_single_segment_is_no_name(text: str) -> None:
    """A name becomes a part of paths and addresses."""
    with pytest.raises(InvalidSpec, match="is written hf:ORG/REPO"):
        parse_hub_name(text)


@pytest.mark.parametrize(
    ("name", "paths", "chosen"),
    [
        ("hf:o/r", QUANTS, ["Some-4B-Q4_K_M.gguf"]),
        ("hf:o/r:q8_0", QUANTS, ["Some-4B-Q8_0.gguf"]),
        ("hf:o/r:Some-4B-IQ4_K_M.gguf", QUANTS, ["Some-4B-IQ4_K_M.gguf"]),
        ("hf:o/r", ["only-F16.gguf", "config.json"], ["only-F16.gguf"]),
        ("hf:o/r", ["b-Q8_0.gguf", "b-F16.gguf"], ["b-Q8_0.gguf"]),
        (
            "hf:o/r:Q6_K",
            ["Q6_K/m-Q6_K-00002-of-00002.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf", "m-Q8_0.gguf"],
            ["Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"],
        ),
        ("hf:o/r:Q8_0", ["Q8_0.gguf", "sub/Q8_0.gguf"], ["Q8_0.gguf"]),
        ("hf:o/r", CHECKPOINT, ["config.json", "merges.txt", "tokenizer.json", "model.safetensors"]),
        (
            "hf:o/r",
            ["config.json", "consolidated.safetensors", "model-1.safetensors", "onnx/model.safetensors"],
            ["config.json", "model-1.safetensors"],
        ),
    ],
)
def test_files_are_chosen_without_code(name: str, paths: list[str], chosen: list[str]) -> None:
    """One GGUF with all its parts, or a checkpoint with its weights last; what could be run is left there."""
    assert choose_files(parse_hub_name(name), paths) == chosen


def test_an_engine_takes_what_it_loads() -> None:
    """A repository may have both forms."""
    both = [*QUANTS, *CHECKPOINT]
    assert choose_files(parse_hub_name("hf:o/r", is_gguf=True), both) == ["Some-4B-Q4_K_M.gguf"]
    assert choose_files(parse_hub_name("hf:o/r", is_gguf=False), both)[-1] == "model.safetensors"
    with pytest.raises(InvalidSpec, match="vllm loads a checkpoint"):
        parse_hub_name("hf:o/r:Q8_0", is_gguf=False)


@pytest.mark.parametrize(
    ("name", "paths", "because"),
    [
        ("hf:o/r", ["a-Q2_K.gguf", "a-Q3_K.gguf"], "say which of its files; it has a-Q2_K.gguf, a-Q3_K.gguf"),
        ("hf:o/r:Q5_K", QUANTS, "there is no such GGUF file; it has Some"),
        ("hf:o/r", ["model.bin", "config.json"], "neither a GGUF file nor a checkpoint of safetensors"),
        ("hf:o/r", ["../../x.gguf", "/x.gguf", ".hidden.gguf"], "neither a GGUF file"),
        ("hf:o/r", ["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"], "parts are missing: m-00002-of-00003.gguf"),
        ("hf:o/r", ["m-00001-of-99999.gguf"], "parts are missing"),
        ("hf:o/r:Q1", [f"m-{n}.gguf" for n in range(40)], "and 28 more"),
    ],
)
def test_what_cannot_be_chosen_is_said_with_what_there_is(name: str, paths: list[str], because: str) -> None:
    """So that the next try can be right."""
    with pytest.raises(ModelUnavailable, match=because):
        choose_files(parse_hub_name(name), paths)


def test_a_repository_without_gguf_files_has_none_to_name() -> None:
    """For llama.cpp, where only a checkpoint is there."""
    with pytest.raises(ModelUnavailable, match="there is no such GGUF file; it has none"):
        choose_files(parse_hub_name("hf:o/r", is_gguf=True), CHECKPOINT)
