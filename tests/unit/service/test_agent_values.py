"""Values that are filled into an agent's row stay values, whatever characters they contain."""

import json
import shlex
import tomllib
from importlib import resources
from pathlib import PurePath

import msgspec
import pytest
import yaml

from service.cli.commands.agent_table import AgentStart, LaunchFacts, prepare, read_table

BUILT_IN = read_table((resources.files("service.cli") / "agents.yaml").read_text(), "agents.yaml")
FACTS = LaunchFacts(
    url="http://127.0.0.1:8080", key="rh-key", model="m", context=32_768, session="s-1", folder=PurePath("/f")
)
ODD_FOLDER = PurePath('/users/o\'brien: #1/{x}/"q"')
ODD_URL = 'http://127.0.0.1:8080/it\'s "mine"#x\\y'
ODD_NAMES = {
    "json": 'x", "hooks": {"SessionStart": [{"hooks": [{"type": "command", "command": "touch pwned"}]}]}, "y": "',
    "toml": 'x"\nnotify=["sh","-c","touch pwned"]#',
    "yaml": "x\n  notifications-command: touch pwned\n",
    "blank": "a b: #c",
    "letters": "größe\U0001f600\x7f",
}


def start(name: str, **facts: object) -> AgentStart:
    return prepare(BUILT_IN, name, msgspec.structs.replace(FACTS, **facts), {}, ())


def settings_of_codex(begun: AgentStart) -> dict[str, object]:
    """Return what Codex reads from its ``-c KEY=VALUE`` arguments: each is a line of TOML."""
    given = [begun.argv[place + 1] for place, word in enumerate(begun.argv) if word == "-c"]
    read: dict[str, object] = {}
    for each in given:
        read |= tomllib.loads(each)
    return read


@pytest.mark.parametrize("model", ODD_NAMES.values(), ids=ODD_NAMES)
def test_a_models_name_stays_one_value_in_claudes_settings(model: str) -> None:
    """Claude's hooks are commands, and a service must not set any."""
    settings = json.loads(start("claude", model=model).files["settings.json"])
    assert set(settings) == {"model", "env", "permissions"}
    assert (settings["model"], settings["env"]["ANTHROPIC_MODEL"]) == (model, model)


@pytest.mark.parametrize("model", ODD_NAMES.values(), ids=ODD_NAMES)
def test_a_models_name_stays_one_value_in_codexs_settings(model: str) -> None:
    """Its ``notify`` is a command."""
    settings = settings_of_codex(start("codex", model=model))
    assert set(settings) == {"model", "model_provider", "model_context_window", "model_providers"}
    assert (settings["model"], settings["model_context_window"]) == (model, 32_768)


@pytest.mark.parametrize("model", ODD_NAMES.values(), ids=ODD_NAMES)
def test_a_models_name_stays_one_value_in_opencodes_settings(model: str) -> None:
    """Its ``mcp`` and ``lsp`` are commands."""
    settings = json.loads(start("opencode", model=model).environment["OPENCODE_CONFIG_CONTENT"])
    assert set(settings) == {"model", "small_model", "enabled_providers", "autoupdate", "share", "provider"}
    assert settings["model"] == f"roundhouse/{model}"
    limit = {"context": 32_768, "output": 4096}
    assert settings["provider"]["roundhouse"]["models"] == {model: {"name": model, "tool_call": True, "limit": limit}}


@pytest.mark.parametrize("model", ODD_NAMES.values(), ids=ODD_NAMES)
def test_a_models_name_stays_one_value_in_aiders_settings(model: str) -> None:
    """Its ``lint-cmd`` and ``test-cmd`` are commands."""
    begun = start("aider", model=model)
    (settings,) = yaml.safe_load(begun.files["model-settings.yml"])
    assert settings == {
        "name": f"openai/{model}",
        "edit_format": "diff",
        "weak_model_name": f"openai/{model}",
        "editor_model_name": f"openai/{model}",
        "use_repo_map": True,
        "streaming": True,
        "extra_params": {"max_tokens": 4096, "extra_headers": {"X-Session-Id": "s-1"}},
    }
    assert list(json.loads(begun.files["model-metadata.json"])) == [f"openai/{model}"]


@pytest.mark.parametrize("model", ODD_NAMES.values(), ids=ODD_NAMES)
def test_a_models_name_stays_one_value_in_pis_settings(model: str) -> None:
    """The settings hold the one provider only, and its key is a variable."""
    provider = json.loads(start("pi", model=model).files["models.json"])["providers"]["roundhouse"]
    assert set(provider) == {"baseUrl", "api", "apiKey", "headers", "models"}
    assert provider["apiKey"] == "$ROUNDHOUSE_API_KEY"
    assert [(each["id"], each["contextWindow"]) for each in provider["models"]] == [(model, 32_768)]


@pytest.mark.parametrize("session", ["7", "1e3", "a:", "yes", "0x1f", "~"])
def test_a_text_that_yaml_reads_as_another_type_stays_a_text(session: str) -> None:
    """Headers are strings: a number or null makes aider exit."""
    (settings,) = yaml.safe_load(start("aider", session=session).files["model-settings.yml"])
    assert settings["extra_params"]["extra_headers"] == {"X-Session-Id": session}


def test_a_folder_with_special_characters_stays_one_value() -> None:
    """Home directories contain blanks, quotes and number signs."""
    begun = start("aider", folder=ODD_FOLDER)
    told = yaml.safe_load(begun.files["aider.conf.yml"])
    assert told["model-settings-file"] == f"{ODD_FOLDER}/model-settings.yml"
    assert told["model-metadata-file"] == f"{ODD_FOLDER}/model-metadata.json"
    assert told["check-update"] is False
    assert begun.argv[:3] == ("aider", "--config", f"{ODD_FOLDER}/aider.conf.yml")  # an argument needs no quotes


def test_a_key_with_special_characters_stays_one_value() -> None:
    """In a file of variables a number sign after a blank would begin a comment."""
    key = "a\"b\\c #d: e'f{g}"
    text = start("aider", key=key).files["environment"]
    assert shlex.split(text) == ["OPENAI_API_BASE=http://127.0.0.1:8080/v1", f"OPENAI_API_KEY={key}"]
    assert start("pi", key=key).environment["ROUNDHOUSE_API_KEY"] == key


def test_an_address_with_special_characters_stays_one_value() -> None:
    """In JSON and in TOML each agent gets the address unchanged."""
    assert json.loads(start("claude", url=ODD_URL).files["settings.json"])["env"]["ANTHROPIC_BASE_URL"] == ODD_URL
    pi = json.loads(start("pi", url=ODD_URL).files["models.json"])["providers"]["roundhouse"]
    assert pi["baseUrl"] == f"{ODD_URL}/v1"
    opencode = json.loads(start("opencode", url=ODD_URL).environment["OPENCODE_CONFIG_CONTENT"])
    assert opencode["provider"]["roundhouse"]["options"]["baseURL"] == f"{ODD_URL}/v1"
    codex = settings_of_codex(start("codex", url=ODD_URL))["model_providers"]
    assert isinstance(codex, dict)
    assert (codex["roundhouse"]["base_url"], codex["roundhouse"]["requires_openai_auth"]) == (f"{ODD_URL}/v1", False)
