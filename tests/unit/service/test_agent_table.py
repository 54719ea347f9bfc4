"""The table of agents: the environment of a started agent, and rows that a user adds."""

import json
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import PurePath

import msgspec
import pytest
import yaml

from service.cli.commands.agent_table import AgentStart, AgentTable, LaunchFacts, prepare, read_table, shown, too_small
from service.errors import ConfigError

BUILT_IN = read_table((resources.files("service.cli") / "agents.yaml").read_text(), "agents.yaml")
FACTS = LaunchFacts(
    url="http://127.0.0.1:8080", key="rh-key", model="m", context=32_768, session="s-1", folder=PurePath("/f")
)
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL", "GEMINI_API_KEY", "HF_TOKEN")
NAMES = ("claude", "codex", "opencode", "aider", "pi")


def start(name: str, table: AgentTable = BUILT_IN, facts: LaunchFacts = FACTS, **environment: str) -> AgentStart:
    return prepare(table, name, facts, environment, ("--more",))


def everything(begun: AgentStart) -> str:
    return "\n".join([*begun.argv, *begun.environment.values(), *begun.files.values(), *begun.once.values()])


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_gets_the_service_and_loses_providers_keys(name: str) -> None:
    """The agent gets the service's address, model and session, and no credentials of other providers."""
    begun = prepare(BUILT_IN, name, FACTS, {**dict.fromkeys(KEYS, "paid"), "EDITOR": "vi"}, ("--more",))
    assert begun.unset == tuple(sorted(KEYS))
    text = everything(begun)
    assert all(each in text for each in ("http://127.0.0.1:8080", "rh-key", "s-1", "32768"))
    assert begun.argv[-1] == "--more"
    assert "$" not in text.replace("$ROUNDHOUSE", "")


@pytest.mark.parametrize("name", NAMES)
def test_no_row_switches_off_permission_prompts(name: str) -> None:
    """Permission prompts stay as the agent has them, or stricter."""
    text = everything(start(name)).lower()
    for word in ("bypass", "dangerously", "yolo", "--yes", "full-auto", "never", "skip-permissions", '"allow"'):
        assert word not in text


@pytest.mark.parametrize("name", NAMES)
def test_files_have_the_format_that_their_names_promise(name: str) -> None:
    """JSON, TOML and YAML stay valid, whatever values are filled in."""
    begun = start(name)
    readers: Mapping[str, Callable[[str], object]] = {"json": json.loads, "toml": tomllib.loads, "yml": yaml.safe_load}
    for file, text in {**begun.files, **begun.once}.items():
        readers.get(file.rpartition(".")[2], str)(text)
    for text in (value for value in begun.environment.values() if value.startswith("{")):
        json.loads(text)


def test_a_start_is_shown_whole_with_its_key_masked() -> None:
    """The key is masked wherever it occurs."""
    text = shown(start("aider", OPENAI_API_KEY="paid"), FACTS.key)
    assert "rh-key" not in text
    assert 'OPENAI_API_KEY="***"' in text
    assert "unset OPENAI_API_KEY" in text
    assert text.splitlines()[-1].startswith("aider --config /f/aider.conf.yml")


@pytest.mark.parametrize(("context", "is_small"), [(32_768, False), (23_512, False), (8192, True), (None, False)])
def test_a_context_that_is_too_small_is_reported(context: int | None, is_small: bool) -> None:
    """The size of the agent's first request is what counts."""
    facts = msgspec.structs.replace(FACTS, context=context)
    warning = too_small("claude", BUILT_IN.agents["claude"], facts)
    assert (warning is not None) == is_small
    if warning is not None:
        assert "m has a context of 8192 tokens, and claude reads about 23000" in warning


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("url", "environment", "hosts"),
    [
        ("http://127.0.0.1:8080", {}, "127.0.0.1"),
        ("http://127.0.0.1:8080", {"NO_PROXY": "corp.example, .lan"}, "corp.example,.lan,127.0.0.1"),
        ("http://127.0.0.1:8080", {"no_proxy": "corp.example"}, "corp.example,127.0.0.1"),
        ("http://127.0.0.1:8080", {"NO_PROXY": "a", "no_proxy": "b,a"}, "a,b,127.0.0.1"),
        ("http://localhost:8080", {"NO_PROXY": "localhost"}, "localhost"),
        ("http://127.0.0.1:8080", {"NO_PROXY": "*"}, "*"),
        ("http://127.0.0.1:8080", {"NO_PROXY": ""}, "127.0.0.1"),
        ("http://[::1]:8080", {}, "::1,[::1]"),
        ("https://Big.Host/prefix", {}, "big.host"),
    ],
)
def test_an_agent_reaches_the_service_past_the_users_proxy(
    name: str, url: str, environment: dict[str, str], hosts: str
) -> None:
    """In either spelling. Existing exceptions of the user's proxy stay, and so does the proxy for all other hosts."""
    proxy = {"HTTP_PROXY": "http://proxy:3128", "http_proxy": "http://proxy:3128", "ALL_PROXY": "socks5://proxy"}
    begun = prepare(BUILT_IN, name, msgspec.structs.replace(FACTS, url=url), {**proxy, **environment}, ())
    assert (begun.environment["NO_PROXY"], begun.environment["no_proxy"]) == (hosts, hosts)
    assert not set(begun.unset) & proxy.keys()
    assert f"NO_PROXY={hosts}" in shown(begun, None).splitlines()


def test_a_row_may_bypass_the_proxy_for_other_hosts_too() -> None:
    """The row's exceptions are added, and variables that it removes stay removed."""
    row = "{program: x, unset: [no_proxy], environment: {NO_PROXY: other.example}}"
    table = BUILT_IN.with_rows(read_table(f"agents:\n  mine: {row}", "mine"))
    assert start("mine", table, no_proxy="gone.example").environment["no_proxy"] == "other.example,127.0.0.1"


def test_a_user_adds_a_row_or_changes_one() -> None:
    """A row of the same name replaces ours; the variables that are always removed are still removed."""
    more = read_table(
        "unset: [MY_KEY]\nagents:\n  mine: {program: mine, environment: {URL: $url/v1, COST: $$5}}\n"
        "  pi: {program: other}",
        "mine",
    )
    table = BUILT_IN.with_rows(more)
    begun = start("mine", table, MY_KEY="x", OPENAI_API_KEY="y")
    assert (begun.argv, begun.unset) == (("mine", "--more"), ("MY_KEY", "OPENAI_API_KEY"))
    assert begun.environment == {
        "URL": "http://127.0.0.1:8080/v1", "COST": "$5", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    assert start("pi", table).argv == ("other", "--more")
    keyless = start("claude", facts=msgspec.structs.replace(FACTS, key=None))
    assert keyless.environment["ANTHROPIC_AUTH_TOKEN"]  # it refuses to start without one


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("agents: {mine: {programme: x}}", "programme"),
        ("agents: {mine: {}}", "program"),
        ("agents: {mine: {program: x, files: {../x: y}}}", "pattern|match"),
        ("agents: {../x: {program: x}}", "pattern|match"),
        ("agents: [", "expected"),
        ("[1]", "object"),
        ("[" * 5000, ""),
    ],
)
def test_an_invalid_table_is_refused_with_its_place(text: str, because: str) -> None:
    """No part of it is ignored."""
    with pytest.raises(ConfigError, match=rf"(?s)mine\.yaml(:\d+)?: .*({because})"):
        read_table(text, "mine.yaml")


def test_a_row_that_cannot_be_filled_in_is_reported() -> None:
    """The row has an unknown placeholder, or a single dollar sign."""
    for text in ("$nothing", "5$"):
        table = AgentTable(agents=read_table(f"agents: {{mine: {{program: x, arguments: ['{text}']}}}}", "t").agents)
        with pytest.raises(ConfigError, match="cannot be filled in"):
            start("mine", table)
    with pytest.raises(ConfigError, match="no such agent; known are claude"):
        start("nobody")
