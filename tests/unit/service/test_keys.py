"""Keys as operators write them: which are refused, and that no secret is ever shown."""

import hashlib
import re
from pathlib import Path

import pytest
import yaml

from service.api.door.access import TokenBucket
from service.api.door.gate import KeyRing
from service.config.keys import callers_of
from service.config.load import build_config
from service.config.schema import Config
from service.config.secrets import masked
from service.conversations.callers import ANYBODY, KeyScope
from service.errors import ConfigError
from tests.harness.service import run_command


def config(**server: object) -> Config:
    return build_config({"server": server, "models": {"m": {"engine": "embedded"}}}, {}, "test", {})


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ([{"name": "a", "key": "k"}, {"name": "a", "key": "l"}], "the name a appears twice"),
        ([{"name": "a", "key": "k"}, {"name": "b", "sha256": digest("k")}], "b is the same key as a"),
        ([{"name": "a", "key": "plain"}], "a is the same key as api_keys"),
        ([{"name": "api_keys", "key": "k"}], "the name api_keys is reserved"),
        ([{"name": "a"}], "either key: TEXT or sha256: HEX"),
        ([{"name": "a", "key": "k", "sha256": digest("k")}], "either key: TEXT or sha256: HEX"),
        ([{"name": "a", "sha256": "K" * 64}], "keys[0].sha256"),
        ([{"name": "a b", "key": "k"}], "keys[0].name"),
        ([{"name": "a", "key": "k k"}], "without spaces"),
        ([{"name": "a", "key": "k", "scopes": []}], "keys[0].scopes"),
        ([{"name": "a", "key": "k", "scopes": ["write"]}], "keys[0].scopes[0]"),
        ([{"name": "a", "key": "k", "share": 0}], "keys[0].share"),
        ([{"name": "a", "key": "k", "shares": 2}], "did you mean 'share'"),
    ],
)
def test_invalid_keys_are_refused_without_showing_them(keys: list[dict[str, object]], told: str) -> None:
    """A name or a key that occurs twice, a key with no form or two, and impossible bounds."""
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        config(keys=keys, api_keys=["plain"])
    assert "plain" not in str(refused.value)


def test_a_host_reachable_from_outside_accepts_any_form_of_keys() -> None:
    """Named keys and a file of hashes count as ``api_keys`` does."""
    with pytest.raises(ConfigError, match="needs api_keys"):
        config(host="0.0.0.0")
    for server in ({"keys": [{"name": "a", "key": "k"}]}, {"keys_file": "keys.yaml"}, {"api_keys": ["k"]}):
        assert config(host="0.0.0.0", **server).server.port == 8080


def test_no_key_and_no_hash_is_shown() -> None:
    """``check`` prints their names and bounds only."""
    keys = [{"name": "a", "key": "k-secret", "queued": 5}, {"name": "b", "sha256": digest("other")}]
    shown = str(masked(config(keys=keys).model_dump(mode="json")))
    assert not {"k-secret", digest("other"), digest("k-secret")} & set(re.findall(r"[\w-]+", shown))
    assert "'name': 'a'" in shown
    assert "'queued': 5" in shown


def write(folder: Path, content: object, mode: int = 0o600) -> Path:
    file = folder / "keys.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    file.chmod(mode)
    return file


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"name": "a", "key": "k-secret"}], "[0].sha256"),
        ([{"name": "a", "sha256": "k-secret"}], "[0].sha256"),
        ([], "holds no key"),
        ({"name": "a"}, "the file: must be a list"),
        ([{"name": "a", "sha256": digest("plain")}], "a is the same key as api_keys"),
    ],
)
def test_a_file_of_keys_in_place_of_hashes_is_refused(tmp_path: Path, content: object, told: str) -> None:
    """Keys must not stand in it, and none of them is shown."""
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        callers_of(["plain"], [], write(tmp_path, content))
    assert "secret" not in str(refused.value)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others could add a key of their own. A file that others may read lets them guess, which is worth a warning."""
    content = [{"name": "a", "sha256": digest("k")}]
    for mode in (0o620, 0o602, 0o666):
        with pytest.raises(ConfigError, match="chmod 600"):
            callers_of([], [], write(tmp_path, content, mode))
    for mode, is_told in ((0o600, False), (0o640, False), (0o644, True)):
        caplog.clear()
        assert len(callers_of([], [], write(tmp_path, content, mode))) == 1
        assert ("may read it" in caplog.text) is is_told


def test_a_key_is_found_by_its_hash_alone() -> None:
    """Without keys every client counts as one anonymous key with all scopes."""
    assert KeyRing({}).find("") is ANYBODY
    named = config(keys=[{"name": "a", "key": "k", "share": 2, "requests_per_s": 3}]).server.keys
    ring = KeyRing(callers_of(["plain"], named, None))
    found = ring.find("Bearer k")
    assert found is not None
    assert (found.name, found.share, found.requests_per_s, found.max_priority) == ("a", 2, 3, 0)
    assert found.scopes == {KeyScope.READ, KeyScope.SUBMIT}
    of_all = ring.find("bearer plain")
    assert of_all is not None
    assert (of_all.name, of_all.scopes, of_all.max_priority) == ("api_keys", frozenset(KeyScope), None)
    for other in ("", "Bearer", "Bearer ", "Basic k", f"Bearer {digest('k')}", "Bearer K"):
        assert ring.find(other) is None


def test_faults_of_a_key_file_do_not_show_its_contents(tmp_path: Path) -> None:
    """A key may stand anywhere in it by mistake."""
    file = write(tmp_path, f"- {{name: a, sha256: {digest('k')}, share: rh-secret}}")
    with pytest.raises(ConfigError) as refused:
        callers_of([], [], file)
    assert str(refused.value) == f"{file}: [0].share: must be a number"


@pytest.mark.system
def test_a_new_key_is_printed_with_its_hash(tmp_path: Path) -> None:
    """The second line is the entry for the file of hashes, and the first is what the client sends."""
    key, entry = run_command("key", "alice").stdout.splitlines()
    ring = KeyRing(callers_of([], [], write(tmp_path, entry)))
    found = ring.find(f"Bearer {key}")
    assert found is not None
    assert found.name == "alice"
    assert found.scopes == {KeyScope.READ, KeyScope.SUBMIT}
    key, entry = run_command("key", "ops", "--scope", "admin", "--scope", "read").stdout.splitlines()
    found = KeyRing(callers_of([], [], write(tmp_path, entry))).find(f"Bearer {key}")
    assert found is not None
    assert found.scopes == {KeyScope.ADMIN, KeyScope.READ}
    assert run_command("key", "alice", "--scope", "all").returncode == 2
    wrong = run_command("key", "a b")
    assert wrong.returncode == 2
    assert "'a b'" in wrong.stderr


@pytest.mark.parametrize(("per_s", "burst"), [(0.5, 1), (1, 1), (4, 4), (2.5, 2)])
def test_a_bucket_holds_one_second_of_its_rate_and_at_least_one(per_s: float, burst: int) -> None:
    """A refused request succeeds after the time that was given, and costs nothing."""
    bucket = TokenBucket(per_s, now=100.0)
    assert [bucket.take_token(100.0) for _ in range(burst)] == [0.0] * burst
    wait_s = bucket.take_token(100.0)
    assert 0 < wait_s == bucket.take_token(100.0) <= 1 / per_s
    assert bucket.take_token(100.0 + wait_s * 0.9) > 0
    assert bucket.take_token(100.0 + wait_s + 1e-9) == 0.0
    taken = sum(bucket.take_token(101 + wait_s + number / 100) == 0 for number in range(10_000))
    assert taken == pytest.approx(100 * per_s + burst, abs=1)
