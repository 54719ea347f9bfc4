"""The output of ``check``: secrets are masked wherever they stand, and everything else is shown."""

import json

import pytest

from service.config.secrets import MASK, mask_text, masked

SECRET = "S3cr3t"  # noqa: S105 - a stand-in


@pytest.mark.parametrize(
    "document",
    [
        {"args": {"api-key": [SECRET, SECRET]}},
        {"args": {"hf-token": SECRET, "ssl-key-file": SECRET}},
        {"command": [f"--header=X-Api-Key: {SECRET}"]},
        {"command": ["curl", "-H", f"Whatever: {SECRET}"]},
        {"command": [f"-HX-Api-Key: {SECRET}"]},
        {"command": ["--extra-header", f"X-Api-Key: {SECRET}"]},
        {"command": ["--api-key", SECRET, "--model", "m"]},
        {"command": ["sh", "-c", f"export API_KEY={SECRET}; exec engine --api-key {SECRET}"]},
        {"env": {"VLLM_PWD": SECRET, "LLAMA_ARG_X": f"--api-key {SECRET}", "FOO": SECRET}},
        {"url": f"http://{SECRET}@host/path"},
        {"url": f"postgresql://u:p@{SECRET}@host/db"},
        {"url": f"https://host/path?access_token={SECRET}&x=1"},
        {"url": f"https://host/path?sig={SECRET}"},
        {"headers": {"X": SECRET}},
        {"params": {"password": SECRET}},
    ],
)
def test_no_secret_is_shown(document: dict[str, object]) -> None:
    """Secrets stand in lists, beside flags, and inside commands and addresses."""
    shown = json.dumps(masked(document))
    assert SECRET not in shown
    assert MASK in shown


def test_a_number_may_be_a_secret() -> None:
    """A boolean is none."""
    assert masked({"hf-token": 123456789, "auth": True}) == {"hf-token": MASK, "auth": True}


@pytest.mark.parametrize(
    "document",
    [
        {"command": ["vllm", "--tokenizer", "foo/bar", "--tokenizer-mode", "auto"]},
        {"args": {"tokenizer": "a", "max-tokens": 5, "author": "b", "keyboard": "c", "compasses": "d"}},
        {"env": {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4", "PATH": "/bin"}},
        {"url": "http://127.0.0.1:8080/v1"},
        {"bios": {"template": "You are {id}. Speak in turn: briefly."}},
    ],
)
def test_harmless_values_are_shown(document: dict[str, object]) -> None:
    """People look for them."""
    assert masked(document) == document


def test_the_user_of_an_address_is_shown() -> None:
    """Only the password of an address is masked, if it has both."""
    assert mask_text("postgresql://u:p@host/db") == f"postgresql://u:{MASK}@host/db"
