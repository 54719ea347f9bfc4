"""A simulated hub over real sockets: the files fetched, the receivers of the token, and failures."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from service.cli.commands.first_steps import config_path
from service.config.load import build_config
from service.config.source import usable_specs
from service.errors import ConfigError
from tests.harness.file_server import Handler, Server, serving
from tests.harness.service import run_command
from workers.errors import ModelUnavailable
from workers.models import download, hub
from workers.models.hub import HubUnreachable, ensure_hub_model, find_model
from workers.models.hub_cache import HubSettings, find_kept, hub_settings
from workers.models.hub_name import parse_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"  # noqa: S105
WEIGHTS = Random(8).randbytes(2 * download.PIECE_BYTES + 5)  # noqa: S311
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
GGUF = {"m-Q4_K_M.gguf": WEIGHTS, "README.md": b"words"}
CHECKPOINT = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "run.py": b"print()", "w.bin": b"pickle"}


class Hub:
    """A hub with one repository, ``o/r``, whose files are on another server, as with the real one."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.commit = COMMIT
        self.page: Callable[[Handler], None] = self.list_files
        self.send: Callable[[Handler, bytes], None] = Handler.send_rest
        self.elsewhere: Server | None = None
        self.edit: Callable[[list[dict[str, object]]], object] = list

    def answer(self, handler: Handler) -> None:
        if handler.path.startswith("/api/models/o/r/revision/"):
            self.page(handler)
        elif handler.path.startswith(f"/o/r/resolve/{self.commit}/") and self.elsewhere is not None:
            handler.send(302, location=f"{self.elsewhere.url}/{handler.path.partition(self.commit)[2][1:]}")
        else:
            handler.send(404)

    def store(self, handler: Handler) -> None:
        self.send(handler, self.files[handler.path[1:]])

    def list_files(self, handler: Handler) -> None:
        files = [self._entry(name, content) for name, content in self.files.items()]
        handler.send(200, json.dumps({"sha": self.commit, "siblings": self.edit(files)}).encode())

    def _entry(self, name: str, content: bytes) -> dict[str, object]:
        blob = hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()  # noqa: S324 - git's
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
        if not name.endswith(".json"):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry


class Place:
    """A simulated hub that runs, and settings for it."""

    def __init__(self, hub: Hub, server: Server, store: Server, cache: Path) -> None:
        self.hub = hub
        self.server = server
        self.store = store
        self.settings = HubSettings(endpoint=server.url, cache=cache, token=TOKEN)

    def bring(self, name: str, settings: HubSettings | None = None) -> Path:
        return ensure_hub_model(parse_hub_name(name), settings or self.settings)

    @property
    def asked(self) -> int:
        return len(self.server.seen) + len(self.store.seen)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    hub = Hub(dict(GGUF))
    with serving(hub.answer) as server, serving(hub.store) as store:
        hub.elsewhere = store
        yield Place(hub, server, store, tmp_path / "hub")


def test_a_gguf_file_goes_into_the_cache_of_the_hubs_own_programs(place: Place) -> None:
    """They find it there as their own: a blob by its digest, and a link to it in the snapshot of a commit."""
    path = place.bring("hf:o/r")
    folder = place.settings.cache / "models--o--r"
    assert path == folder / "snapshots" / COMMIT / "m-Q4_K_M.gguf"
    assert path.read_bytes() == WEIGHTS
    assert path.readlink() == Path("../../blobs") / hashlib.sha256(WEIGHTS).hexdigest()
    assert (folder / "refs" / "main").read_text() == COMMIT
    assert [path for path, _ in place.store.seen] == ["/m-Q4_K_M.gguf"]


def test_a_checkpoint_comes_without_executable_files(place: Place) -> None:
    """Neither Python's code nor pickled weights, whatever the repository has."""
    place.hub.files = dict(CHECKPOINT)
    folder = place.bring("hf:o/r")
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {
        "config.json": CONFIG,
        "model.safetensors": WEIGHTS,
    }
    assert find_kept(parse_hub_name("hf:o/r"), place.settings.cache) == folder


def test_a_pinned_commit_is_not_requested_and_a_branch_is_followed(place: Place) -> None:
    """A pinned model starts without a network; one that is not pinned is the branch's current one."""
    pinned = f"hf:o/r:m-Q4_K_M.gguf@{COMMIT}"
    place.bring(pinned)
    asked = place.asked
    path = place.bring(pinned)
    assert place.asked == asked
    place.hub.commit = "f" * 40
    newer = place.bring("hf:o/r")
    assert newer.parent.name == "f" * 40
    assert newer.readlink() == path.readlink()  # the same bytes are not fetched again
    assert find_kept(parse_hub_name("hf:o/r"), place.settings.cache) == newer
    assert len(place.store.seen) == 1


def test_the_token_goes_to_the_hub_alone(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Files come from other hosts; neither they nor the log see the token."""
    with caplog.at_level(logging.DEBUG):
        place.bring("hf:o/r")
    assert {headers.get("Authorization") for _, headers in place.server.seen} == {f"Bearer {TOKEN}"}
    assert [headers.get("Authorization") for _, headers in place.store.seen] == [None]
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(place.settings)


def test_a_broken_transfer_asks_the_hub_again(place: Place) -> None:
    """Addresses of files are valid for minutes, so each try asks the hub."""

    def broken(handler: Handler, content: bytes) -> None:
        handler.send_rest(content, len(place.store.seen) * download.PIECE_BYTES)

    place.hub.send = broken
    assert place.bring("hf:o/r").read_bytes() == WEIGHTS
    assert [headers.get("Range") for _, headers in place.store.seen] == [
        None,
        f"bytes={download.PIECE_BYTES}-",
        f"bytes={2 * download.PIECE_BYTES}-",
    ]


@pytest.mark.parametrize("files", [GGUF, CHECKPOINT])
def test_a_file_that_differs_from_the_hubs_digest_is_discarded(place: Place, files: dict[str, bytes]) -> None:
    """It has the same length; its SHA-256 differs, or git's digest for a small file."""
    place.hub.files = dict(files)
    place.hub.send = lambda handler, content: handler.send_rest(content[:-1] + b"?")
    with pytest.raises(ModelUnavailable, match="another file arrived than expected"):
        place.bring("hf:o/r")
    assert find_kept(parse_hub_name("hf:o/r"), place.settings.cache) is None
    assert not [each for each in place.settings.cache.rglob("*") if each.is_file() and each.stat().st_size]


def test_files_that_do_not_fit_the_disk_are_reported_before_any_is_fetched(place: Place) -> None:
    """All missing files together."""

    def grown(files: list[dict[str, object]]) -> list[dict[str, object]]:
        return [{**each, "lfs": {"sha256": "a" * 64, "size": 2 * 10**15}} for each in files]

    place.hub.edit = grown
    with pytest.raises(ModelUnavailable, match=r"2,000,000\.0 GB are missing, and [0-9,.]+ GB are free"):
        place.bring("hf:o/r")
    assert place.store.seen == []


@pytest.mark.parametrize(
    ("page", "because"),
    [
        (lambda handler: handler.send(404), "has no such repository or revision"),
        (lambda handler: handler.send(401), "its terms are not accepted, or the token may not read it"),
        (lambda handler: handler.send(200, b"<html>"), "lists no files of it"),
        (lambda handler: handler.send(200, b'{"sha": "../..", "siblings": []}'), "lists no files of it"),
        (lambda handler: handler.send(200, b"[" * 100_000), "lists no files of it"),
        (lambda handler: handler.send(200, b" " * 2000), "about it is too large"),
        (lambda handler: handler.send(503), "does not answer: .*503"),
        (lambda handler: handler.send(302, location="/api/models/o/r/revision/main"), "does not answer: .*redirects"),
        (lambda handler: handler.send(302, location="ftp://127.0.0.1/"), "does not answer: .*ftp"),
    ],
)
def test_an_unusable_hub_is_reported(
    place: Place, page: Callable[[Handler], None], because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, whatever it sends."""
    if "too large" in because:
        monkeypatch.setattr(hub, "MOST_PAGE_BYTES", 1000)
    place.hub.page = page
    with pytest.raises(ModelUnavailable, match=because):
        place.bring("hf:o/r")


def test_files_without_a_digest_are_not_fetched(place: Place) -> None:
    """Their content could not be verified."""
    place.hub.edit = lambda files: [{"rfilename": each["rfilename"]} for each in files]
    with pytest.raises(ModelUnavailable, match=r"gives no digest of m-Q4_K_M\.gguf"):
        place.bring("hf:o/r")


def test_while_the_hub_is_away_fetched_files_are_used(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """For a branch too, and the log says so; without any the fault is reported."""
    path = place.bring("hf:o/r")
    place.hub.page = lambda handler: handler.send(502)
    assert place.bring("hf:o/r") == path
    assert "what was fetched before is used" in caplog.text
    with pytest.raises(HubUnreachable):
        place.bring("hf:o/r@other")


def test_offline_the_hub_is_not_asked(place: Place) -> None:
    """``HF_HUB_OFFLINE`` is read as the hub's own programs read it."""
    path = place.bring("hf:o/r")
    asked = place.asked
    offline = HubSettings(endpoint=place.server.url, cache=place.settings.cache, is_offline=True)
    assert place.bring("hf:o/r", offline) == path
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE forbids a fetch"):
        place.bring("hf:o/r:Q8_0", offline)
    assert place.asked == asked


def test_a_model_is_pinned_to_its_current_file_and_commit(place: Place) -> None:
    """The file and the commit."""
    found = find_model(parse_hub_name("hf:o/r:q4_k_m"), place.settings)
    assert str(found.name) == f"hf:o/r:m-Q4_K_M.gguf@{COMMIT}"
    assert (found.is_gguf, found.weights_bytes) == (True, len(WEIGHTS))
    assert place.store.seen == []


def test_a_pinned_name_means_the_same_with_any_cache(place: Place) -> None:
    """Other programs may have fetched other files.

    The hub is asked once, or not at all if only another file is there.
    """
    place.hub.files = {"m-Q4_K_M.gguf": WEIGHTS, "m-Q8_0.gguf": b"eight"}
    place.bring(f"hf:o/r:m-Q8_0.gguf@{COMMIT}")
    offline = HubSettings(endpoint=place.server.url, cache=place.settings.cache, is_offline=True)
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE"):
        place.bring(f"hf:o/r@{COMMIT}", offline)
    assert place.bring(f"hf:o/r@{COMMIT}").name == "m-Q4_K_M.gguf"
    assert find_kept(parse_hub_name(f"hf:o/r@{COMMIT}", is_gguf=True), place.settings.cache) == place.bring(
        f"hf:o/r@{COMMIT}", offline
    )
    asked = place.asked
    place.bring(f"hf:o/r@{COMMIT}")  # its meaning is recorded
    assert place.asked == asked


def test_a_quant_at_a_commit_means_what_the_repository_has(place: Place) -> None:
    """It does not mean the only one of several files that is in the cache.

    Once resolved, the hub is not asked again.
    """
    place.hub.files = {"a-Q8_0.gguf": WEIGHTS, "b-Q8_0.gguf": b"b", "c-Q6_K.gguf": b"c", "mtp-c-Q6_K.gguf": b"d"}
    place.bring(f"hf:o/r:a-Q8_0.gguf@{COMMIT}")
    with pytest.raises(ModelUnavailable, match=r"several files fit: a-Q8_0\.gguf, b-Q8_0\.gguf"):
        place.bring(f"hf:o/r:Q8_0@{COMMIT}")
    place.bring(f"hf:o/r:mtp-c-Q6_K.gguf@{COMMIT}")
    path = place.bring(f"hf:o/r:Q6_K@{COMMIT}")
    assert path.name == "c-Q6_K.gguf"
    place.hub.page = lambda handler: handler.send(502)
    assert place.bring(f"hf:o/r:Q6_K@{COMMIT}") == path


def test_a_file_in_a_folder_is_fetched_and_pinned_by_its_path(place: Place) -> None:
    """Two files may share a name; such a name alone is refused until it is unambiguous."""
    place.hub.files = {"Q4_K_M/m.gguf": WEIGHTS, "Q8_0/m.gguf": b"eight"}
    found = find_model(parse_hub_name("hf:o/r"), place.settings)
    assert str(found.name) == f"hf:o/r:Q4_K_M/m.gguf@{COMMIT}"
    path = place.bring(str(found.name))
    assert path.read_bytes() == WEIGHTS
    asked = place.asked
    assert place.bring(str(found.name)) == path
    assert place.asked == asked
    with pytest.raises(ModelUnavailable, match="several files fit"):
        place.bring(f"hf:o/r:m.gguf@{COMMIT}")
    assert place.bring(f"hf:o/r:Q8_0@{COMMIT}").read_bytes() == b"eight"


def test_a_remembered_meaning_of_a_name_is_verified(place: Place) -> None:
    """A record that others have changed leads nowhere else; a cache that cannot be written needs none."""
    path = place.bring("hf:o/r")
    record = place.settings.cache / "models--o--r" / ".roundhouse" / COMMIT / "any"
    assert record.read_text() == "m-Q4_K_M.gguf"
    for text in ("../../../x.gguf", "config.json", "gone.gguf", "", "x" * 10_000):
        record.write_text(text)
        assert place.bring("hf:o/r") == path
    record.unlink()
    record.mkdir()
    assert place.bring("hf:o/r") == path
    assert find_kept(parse_hub_name("hf:o/r"), place.settings.cache) == path


def test_part_of_a_checkpoint_is_no_model(place: Place) -> None:
    """A fetch ended before its last part, or another program has fetched one file of many."""
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    place.hub.files = {
        "config.json": CONFIG,
        "model.safetensors.index.json": index,
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": b"more",
    }
    folder = place.bring("hf:o/r")
    name = parse_hub_name("hf:o/r")
    assert find_kept(name, place.settings.cache) == folder
    (folder / "model-2.safetensors").unlink()
    assert find_kept(name, place.settings.cache) is None
    assert place.bring("hf:o/r") == folder
    assert find_kept(name, place.settings.cache) == folder
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").write_bytes(b"[")
    assert find_kept(name, place.settings.cache) is None


def test_settings_are_those_of_the_hubs_own_programs(tmp_path: Path) -> None:
    """Their variables, and the token that their login stored."""
    home = tmp_path / "home"
    kept = home / ".cache" / "huggingface" / "token"
    kept.parent.mkdir(parents=True)
    kept.write_text("hf_kept\n")
    plain = hub_settings({}, home)
    assert (plain.endpoint, plain.cache, plain.token) == (
        "https://huggingface.co",
        home / ".cache" / "huggingface" / "hub",
        "hf_kept",
    )
    said = {"HF_ENDPOINT": "http://h/", "HF_HOME": "/hf", "HF_TOKEN": "hf_said", "HF_HUB_OFFLINE": "1"}
    assert hub_settings(said, home) == HubSettings(
        endpoint="http://h", cache=Path("/hf/hub"), token=said["HF_TOKEN"], is_offline=True
    )
    assert hub_settings({"HF_HUB_CACHE": "/c", "HF_HOME": "/hf"}, home) == HubSettings(cache=Path("/c"))
    with pytest.raises(ModelUnavailable, match="characters that no token has"):
        find_model(parse_hub_name("hf:o/r"), HubSettings(cache=tmp_path, token="a\nb"))  # noqa: S106


@pytest.fixture
def environment(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user who has only an account at the hub."""
    said = {
        "HF_ENDPOINT": place.server.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "XDG_STATE_HOME": str(tmp_path / "users"),
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return said


@pytest.mark.system
@pytest.mark.usefixtures("environment")
def test_init_pins_a_model_of_the_hub_and_run_fetches_it(place: Place, tiny_model: Path, tmp_path: Path) -> None:
    """The real engine runs it, with no file written by the user; a second run fetches nothing."""
    place.hub.files = {"m-Q4_K_M.gguf": tiny_model.read_bytes()}
    assert run_command("init", "--model", "hf:o/r:Q4_K_M", folder=tmp_path).returncode == 0
    written = (tmp_path / "roundhouse.yaml").read_text()
    assert f"model: hf:o/r:m-Q4_K_M.gguf@{COMMIT}" in written
    assert place.store.seen == []
    checked = run_command("check", folder=tmp_path)
    assert (f"model: hf:o/r:m-Q4_K_M.gguf@{COMMIT}" in checked.stdout, TOKEN in checked.stdout) == (True, False)
    agent = {"id": "a", "model": "r", "params": {"max_tokens": 5}}
    job = {"name": "short", "rounds": 1, "agents": [agent], "conversations": [{"id": "c", "prompt": "Hello"}]}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    for output in ("first", "second"):
        done = run_command("run", "job.yaml", "--output", output, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "completed" in done.stdout
        assert TOKEN not in done.stdout + done.stderr
    assert len(place.store.seen) == 1


@pytest.mark.usefixtures("environment")
def test_a_model_for_one_command_is_pinned_too_and_needs_no_hub_once_it_is_fetched(place: Place) -> None:
    """Without the hub and without a file, the command says so."""
    made = config_path(None, "hf:o/r")
    assert f"model: hf:o/r:m-Q4_K_M.gguf@{COMMIT}" in made.read_text()
    ensure_hub_model(parse_hub_name("hf:o/r"), hub_settings(os.environ, Path.home()))
    place.hub.page = lambda handler: handler.send(502)
    assert "model: hf:o/r " in config_path(None, "hf:o/r").read_text()
    with pytest.raises(HubUnreachable, match="502"):
        config_path(None, "hf:o/r@other")


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("model", "because"),
    [
        ({"engine": "embedded", "model": "hf:o/../r"}, "is written hf:ORG/REPO"),
        ({"engine": "vllm", "model": "hf:o/r:Q8_0"}, "vllm loads a checkpoint"),
        ({"engine": "vllm", "model": "hf:o/r", "args": {"trust_remote_code": True}}, "would run code from the hub"),
    ],
)
def test_forbidden_files_are_refused_before_the_hub_is_asked(
    model: dict[str, object], because: str, tmp_path: Path, place: Place
) -> None:
    """No code of the hub runs, whatever the engine's flags say."""
    config = build_config({"models": {"m": model}}, {}, "here", {})
    with pytest.raises(ConfigError, match=because):
        usable_specs(config, tmp_path, tmp_path)
    assert place.asked == 0


@pytest.mark.usefixtures("environment")
def test_a_model_in_another_engines_format_is_reported(place: Place, tmp_path: Path) -> None:
    """A checkpoint for llama.cpp, or the other way round."""
    config = build_config({"models": {"m": {"engine": "vllm", "model": "hf:o/r", "command": ["true"]}}}, {}, "here", {})
    with pytest.raises(ModelUnavailable, match="no checkpoint of safetensors"):
        usable_specs(config, tmp_path, tmp_path)
    assert place.store.seen == []
