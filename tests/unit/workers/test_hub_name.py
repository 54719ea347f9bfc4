"""Names of a hub's models, and the files of a repository that they select."""

import pytest

from workers.errors import InvalidSpec, ModelUnavailable
from workers.models.hub_name import HubName, choose_files, parse_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
QUANTS = ["Some-4B-Q8_0.gguf", "Some-4B-Q4_K_M.gguf", "Some-4B-IQ4_K_M.gguf", "mmproj-F16.gguf", "README.md"]
SPLIT = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
ORNITH = [f"ornith-9b-kl-{quant}.gguf" for quant in ("Q4_K_M", "Q8_0")] + ["mtp-ornith-9b-kl-Q8_0.gguf"]
BAKED = [f"ornith-9b-mtp-kl-{quant}.gguf" for quant in ("Q4_K_M", "Q8_0")] + ["mtp-ornith-9b-mtp-kl-Q8_0.gguf"]
GEMMA = ["gemma-E2B-Q8_0.gguf", "gemma-E2B-Q4_K_M.gguf", "MTP/gemma-E2B-Q8_0-MTP.gguf", "MTP/gemma-E2B-Q4_K_M.gguf"]
FOLDERS = [
    "Q4_K_M/model.gguf",
    "Q8_0/model.gguf",
    "big-Q6_K/model-00001-of-00002.gguf",
    "big-Q6_K/model-00002-of-00002.gguf",
]
CHECKPOINT = ["config.json", "model.safetensors", "tokenizer.json", "merges.txt", "model.bin", "code.py", "x.pt"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:org/Repo", HubName(owner="org", repository="Repo")),
        ("hf:org/Repo:Q4_K_M", HubName(owner="org", repository="Repo", file="Q4_K_M")),
        (f"hf:org/Repo:a.gguf@{COMMIT}", HubName(owner="org", repository="Repo", file="a.gguf", revision=COMMIT)),
        ("hf:org/Repo:Q4/a.gguf", HubName(owner="org", repository="Repo", file="Q4/a.gguf")),
        (f"hf:org/Repo:Q4_K_M@{COMMIT}", HubName(owner="org", repository="Repo", file="Q4_K_M", revision=COMMIT)),
        (f"hf:org/Repo@{COMMIT}", HubName(owner="org", repository="Repo", revision=COMMIT)),
        ("hf:org/Repo@v1.0", HubName(owner="org", repository="Repo", revision="v1.0")),
    ],
)
def test_a_name_is_read_and_written(text: str, name: HubName) -> None:
    """It is written as people write it, so that a pinned name can be stored in a file."""
    assert parse_hub_name(text) == name
    assert str(name) == text
    assert name.is_pinned == (f".gguf@{COMMIT}" in text)
    assert name.is_of_commit == (COMMIT in text)


@pytest.mark.parametrize(
    "text",
    [
        "hf:repo",
        "hf:a/b/c",
        "hf:../b",
        "hf:a/..",
        "hf:a/b:../c.gguf",
        "hf:a/b:/y.gguf",
        "hf:a/b:x//y.gguf",
        "hf:a/b:x/../y.gguf",
        "hf:a/b:x/",
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
def test_a_name_that_leads_out_of_a_repository_is_refused(text: str) -> None:
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
        ("hf:o/r:Q8_0.gguf", ["Q8_0.gguf", "sub/Q8_0.gguf"], ["Q8_0.gguf"]),
        ("hf:o/r:sub/Q8_0", ["Q8_0.gguf", "sub/Q8_0.gguf"], ["sub/Q8_0.gguf"]),
        ("hf:o/r:m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], SPLIT),
        ("hf:o/r", ["imatrix.gguf", "mmproj-F16.gguf", "config.json", "model.safetensors"], CHECKPOINT[:2]),
        ("hf:o/r", CHECKPOINT, ["config.json", "merges.txt", "tokenizer.json", "model.safetensors"]),
        (
            "hf:o/r",
            ["config.json", "consolidated.safetensors", "model-1.safetensors", "onnx/model.safetensors"],
            ["config.json", "model-1.safetensors"],
        ),
    ],
)
def test_files_are_chosen_without_code(name: str, paths: list[str], chosen: list[str]) -> None:
    """One GGUF with all its parts, or a checkpoint with its weights last; files that could be executed are left out."""
    assert choose_files(parse_hub_name(name), paths) == chosen


def test_an_engine_takes_the_form_that_it_loads() -> None:
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
def test_an_ambiguous_choice_is_refused_with_the_candidates(name: str, paths: list[str], because: str) -> None:
    """The next attempt can then be right."""
    with pytest.raises(ModelUnavailable, match=because):
        choose_files(parse_hub_name(name), paths)


def test_a_repository_without_gguf_files_is_refused_for_llama_cpp() -> None:
    """It has a checkpoint only."""
    with pytest.raises(ModelUnavailable, match="there is no such GGUF file; it has none"):
        choose_files(parse_hub_name("hf:o/r", is_gguf=True), CHECKPOINT)


@pytest.mark.parametrize(
    ("name", "paths", "chosen"),
    [
        ("hf:o/r:Q8_0", ORNITH, "ornith-9b-kl-Q8_0.gguf"),
        ("hf:o/r", ORNITH, "ornith-9b-kl-Q4_K_M.gguf"),
        ("hf:o/ornith-MTP-GGUF:Q8_0", BAKED, "ornith-9b-mtp-kl-Q8_0.gguf"),
        ("hf:o/r:Q8_0", BAKED, "ornith-9b-mtp-kl-Q8_0.gguf"),
        ("hf:o/r:mtp-ornith-9b-kl-Q8_0.gguf", ORNITH, "mtp-ornith-9b-kl-Q8_0.gguf"),  # it is selected by name
        ("hf:o/r:Q8_0", GEMMA, "gemma-E2B-Q8_0.gguf"),
        ("hf:o/r", GEMMA, "gemma-E2B-Q4_K_M.gguf"),
        ("hf:o/r", ["m.gguf", "m-mtp.gguf"], "m.gguf"),
        ("hf:o/r", ["m.gguf", "m-draft-0.6b.gguf"], "m.gguf"),
        ("hf:o/r", ["m.gguf", "m_DFlash.gguf"], "m.gguf"),
        ("hf:o/r", ["m.gguf", "m.eagle3.gguf"], "m.gguf"),
        ("hf:o/r", ["m.gguf", "dspark/m-2.gguf"], "m.gguf"),
        ("hf:o/r", ["m.gguf", "imatrix.gguf"], "m.gguf"),
        ("hf:o/r", ["m.gguf", "m-imatrix.gguf", "imatrix_unsloth.gguf"], "m.gguf"),
        ("hf:o/r", ["m.gguf", "m-lora-f16.gguf", "adapters/x.gguf"], "m.gguf"),
        ("hf:o/r:F16", ["m-F16.gguf", "mmproj-F16.gguf", "m-vision-projector-F16.gguf"], "m-F16.gguf"),
        ("hf:o/r:Q4_K_M", ["m-imatrix-Q4_K_M.gguf", "m.imatrix.gguf"], "m-imatrix-Q4_K_M.gguf"),  # made with one
        ("hf:o/r:Q4_K_M", ["m-lora-merged-Q4_K_M.gguf"], "m-lora-merged-Q4_K_M.gguf"),
        ("hf:o/Qwen-0.6B-draft", ["qwen-0.6b-draft-Q8_0.gguf"], "qwen-0.6b-draft-Q8_0.gguf"),
        ("hf:o/r", ["draftsman-Q4_K_M.gguf"], "draftsman-Q4_K_M.gguf"),
        ("hf:o/r", ["solar-explorer-Q4_K_M.gguf"], "solar-explorer-Q4_K_M.gguf"),
        ("hf:o/r:Q4_K_M", FOLDERS, "Q4_K_M/model.gguf"),
        ("hf:o/r", FOLDERS, "Q4_K_M/model.gguf"),
        ("hf:o/r:q8_0", FOLDERS, "Q8_0/model.gguf"),
        ("hf:o/r:Q6_K", FOLDERS, "big-Q6_K/model-00001-of-00002.gguf"),
        ("hf:o/r:Q8_0/model.gguf", FOLDERS, "Q8_0/model.gguf"),
        ("hf:o/r:Q4_K_M", ["Q4_K_M/m-Q8_0.gguf", "Q8_0/m-Q4_K_M.gguf"], "Q8_0/m-Q4_K_M.gguf"),  # its own name counts
    ],
)
def test_companions_of_a_model_are_not_mistaken_for_it(name: str, paths: list[str], chosen: str) -> None:
    """Drafters, projectors, adapters and importance matrices are recognised by names or folders.

    A folder may name a quantisation.
    """
    assert choose_files(parse_hub_name(name), paths)[0] == chosen


@pytest.mark.parametrize(
    ("name", "paths", "because"),
    [
        (
            "hf:o/r:Q8_0",
            ["Q8_0.gguf", "sub/Q8_0.gguf"],
            "several files fit: Q8_0.gguf, sub/Q8_0.gguf; name one of them",
        ),
        ("hf:o/r:Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "as hf:o/r:a-Q8_0.gguf"),
        (
            "hf:o/r",
            ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "a-Q8_0.gguf"],
            "several files fit: a-Q4_K_M.gguf, b-Q4_K_M.gguf;",
        ),
        ("hf:o/r:Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00001-of-00003.gguf"], "several files fit"),
        (
            "hf:o/r:model.gguf",
            FOLDERS,
            "several files fit: Q4_K_M/model.gguf, Q8_0/model.gguf; name one of them, as hf:o/r:Q4",
        ),
        ("hf:o/r:Q4_K_XL", ["m-Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf"], "several files fit"),
        (
            "hf:o/r",
            ["mtp-m-Q8_0.gguf"],
            r"there is no such GGUF file; it has none, and beside it mtp-m-Q8_0.gguf \(a drafter\)",
        ),
        (
            "hf:o/r:Q8_0",
            ["m-Q4_K_M.gguf", "mtp-m-Q8_0.gguf"],
            "no such GGUF file; it has m-Q4_K_M.gguf, and beside it mtp",
        ),
        (
            "hf:o/r:mmproj-F16.gguf",
            ["m-F16.gguf", "mmproj-F16.gguf"],
            "mmproj-F16.gguf is a projector and no model; it has m-",
        ),
        ("hf:o/r:F16", ["mmproj-F16.gguf"], "beside it mmproj-F16.gguf"),
        ("hf:o/r:imatrix.gguf", ["m.gguf", "imatrix.gguf"], "is an importance matrix and no model"),
        ("hf:o/m-lora", ["m-lora-f16.gguf"], r"m-lora-f16.gguf \(an adapter\)"),
    ],
)
def test_files_that_fit_equally_are_listed(name: str, paths: list[str], because: str) -> None:
    """The user has to choose."""
    with pytest.raises(ModelUnavailable, match=because):
        choose_files(parse_hub_name(name), paths)


def test_an_adapter_of_peft_is_no_checkpoint() -> None:
    """Its repository may contain the base's configuration."""
    with pytest.raises(ModelUnavailable, match="there is no checkpoint"):
        choose_files(parse_hub_name("hf:o/r", is_gguf=False), ["config.json", "adapter_model.safetensors"])
