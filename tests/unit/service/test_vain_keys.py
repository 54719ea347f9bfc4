"""Keys of a configuration or a job that would have no effect are refused where they stand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.environment import unknown_variables
from service.config.load import build_config, load_config
from service.config.schema import Config, rules_of
from service.conversations.document.job_faults import JobRules
from service.conversations.document.job_parser import parse_job, parse_stored
from service.conversations.document.limits import Limits
from service.conversations.job.job import Job, JobId
from service.errors import ConfigError, InvalidJob
from workers.engine.launch import command_for
from workers.errors import InvalidSpec, InvalidTool
from workers.spec import EngineKind, WorkerSpec
from workers.tools.definition import ToolDefinition

SERVER = {"engine": "attached", "url": "http://127.0.0.1:9/v1"}
VLLM = {"engine": "vllm", "model": "org/name"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
CALLER = {"id": "g", "by": "caller"}


def config_of(**model: object) -> Config:
    return build_config({"models": {"m": {"engine": "embedded", **model}}}, {}, "here", {})


def job_of(rules: JobRules | None = None, **fields: object) -> Job:
    document = {"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "Go."}], **fields}
    return parse_job(document, JobId("j"), rules or JobRules(models=["m"], limits=Limits()))


def faults_of(rules: JobRules | None = None, **fields: object) -> dict[str, str]:
    with pytest.raises(InvalidJob) as refused:
        job_of(rules, **fields)
    return {fault.path: fault.message for fault in refused.value.faults}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"bios": {"template": "BASE", "context": "Hi."}}, "bios: context: the template has no $context"),
        ({"bios": {"template": "BASE", "context": "", "clock": "start"}}, None),
        ({"bios": {"enabled": False, "context": "Hi."}}, None),
        ({"bios": {"template": "$context", "clock": "now"}}, "bios: clock: the template has no $now"),
        ({"bios": {"template": "$context", "clock_step_s": 5}}, "bios: clock_step_s: the template has no $now"),
        ({"bios": {"template": "$contxt $now"}}, "bios.template: $contxt is not one of $budget, $context, $now"),
        ({"bios": {"template": "5 $"}}, "bios.template: a $ that is no name"),
        ({"bios": {"quote": "$who said something."}}, "bios: quote: has no $words"),
        ({"params": {"n": 3}, "url": None}, None),
        (SERVER | {"timeouts": {"start_s": 5}}, "timeouts.start_s: not for an attached engine"),
        (SERVER | {"timeouts": {"stop_grace_s": 5}}, "timeouts.stop_grace_s: not for an attached engine"),
        (SERVER | {"restart": {"failures": 2}}, "restart.failures: not for an attached engine"),
        (SERVER | {"restart": {"retry_s": 2}}, "restart.retry_s: not for an attached engine"),
        (SERVER | {"restart": {"initial_s": 2, "max_s": 9}, "timeouts": {"decode_stall_s": 5}}, None),
        (VLLM | {"port": 9300}, "port: vllm listens on a UNIX socket"),
        (VLLM | {"host": "127.0.0.2"}, "host: vllm listens on a UNIX socket"),
        (VLLM | {"port": 9300, "socket_dir": "there"}, "port: vllm listens on a UNIX socket"),
        (VLLM | {"port": 9300, "socket_dir": False}, None),
        ({"devices": [0, 1, 0]}, "devices: 0 is given twice"),
        ({"devices": ["GPU-1", "GPU-1"]}, "devices: GPU-1 is given twice"),
        ({"tools": {"mcp": {"s": {"command": ["x"], "headers": {"a": "b"}}}}}, "mcp.s: headers: only for"),
        ({"tools": {"mcp": {"s": {"url": "http://x", "env": {"a": "b"}}}}}, "mcp.s: env: only for"),
    ],
)
def test_a_key_that_its_engine_ignores_is_refused(model: dict[str, Any], told: str | None) -> None:
    """Keys that count beside it are accepted, and so is the effective configuration, which has every key."""
    if told is None:
        taken = config_of(**model)
        assert build_config(taken.model_dump(mode="json"), {}, "here", {}) == taken
        return
    with pytest.raises(ConfigError) as refused:
        config_of(**model)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("model", "place"),
    [
        *[
            ({key: True}, f"models.m.{key}")
            for key in ("slots", "port", "context", "max_answer", "replicas", "kv_tokens")
        ],
        ({"devices": [True]}, "models.m.devices"),
        ({"timeouts": {"decode_stall_s": True}}, "models.m.timeouts: decode_stall_s"),
        ({"restart": {"failures": True}}, "models.m.restart: failures"),
        ({"repetition": {"lines": False}}, "models.m.repetition: lines"),
        ({"weights": {"start_s": True}, "engine": "vllm"}, "models.m.weights: start_s"),
        ({"tools": {"stuck": False}}, "models.m.tools.stuck"),
        ({"bios": {"clock_step_s": False}}, "models.m.bios.clock_step_s"),
    ],
)
def test_a_boolean_is_no_number(model: dict[str, Any], place: str) -> None:
    """It would be read as 1 or 0. Where both are allowed each keeps its type."""
    with pytest.raises(ConfigError, match=rf"{place}: must be an? (integer|number), not (true|false)"):
        config_of(**model)
    taken = config_of(args={"a": True, "b": [True, 1]}, params={"c": True}, placement="lanes", pin=True).models["m"]
    assert (taken.args, taken.params, taken.pin) == ({"a": True, "b": [True, 1]}, {"c": True}, True)


@pytest.mark.parametrize(
    "section", [{"gpus": {"max_gpus": True}}, {"server": {"drain_s": True}}, {"limits": {"rounds": True}}]
)
def test_nor_is_a_boolean_a_number_in_other_sections(section: dict[str, Any]) -> None:
    """One rule holds for all sections."""
    with pytest.raises(ConfigError, match="not true"):
        build_config({"models": {"m": {"engine": "embedded"}}, **section}, {}, "here", {})
    assert faults_of(agents=[{"id": "a", "model": "m"}, CALLER | {"wait_s": True}]) == {
        "agents[1].wait_s": "must be a number, not true"
    }


@pytest.mark.parametrize(
    ("engine", "flags", "told"),
    [
        ("llama-server", {"top_k": 5, "top-k": 6}, "args.top-k: args.top_k decides the same"),
        ("llama-server", {"ngl": 5, "n_gpu_layers": 6}, "args.n_gpu_layers: args.ngl decides the same"),
        ("llama-server", {"--mmap": True, "no-mmap": True}, "args.no-mmap: args.--mmap decides the same"),
        ("vllm", {"dtype": "half", "--dtype": "float"}, "args.--dtype: args.dtype decides the same"),
        ("vllm", {"enable-log-requests": True, "no_enable_log_requests": True}, "args.no_enable_log_requests: args."),
        ("llama-server", {"mmap": None, "no-mmap": True, "lora": ["a", "b"], "top_k": 5}, None),
    ],
)
def test_a_flag_that_stands_twice_is_refused(engine: str, flags: dict[str, Any], told: str | None) -> None:
    """The engine would use one of the two, and only the engine knows which."""
    spec = WorkerSpec(engine=EngineKind(engine), model="m.gguf", args=flags)
    if told is None:
        assert "--no-mmap" in command_for(spec, {}).argv
        return
    with pytest.raises(InvalidSpec, match=re.escape(told)):
        command_for(spec, {})


@pytest.mark.parametrize("context", [8192, 8192.0, "8192"])
def test_a_context_means_the_same_in_every_notation(context: object) -> None:
    """A whole number with a point once gave a cache with as many tokens as there are slots."""
    assert config_of(capacity="tokens", context=context).models["m"].kv_tokens == 4 * 8192


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ({**TOOL, "unverifed": "retry"}, "unverifed: unknown key; did you mean 'unverified'?"),
        ({**TOOL, "cost": 5}, "cost: unknown key; known: type, function, mcp, unverified"),
        (
            {"function": {"name": "look", "paramters": {}}},
            "function.paramters: unknown key; did you mean 'parameters'?",
        ),
        ({"function": {"name": "look", "unverified": "retry"}}, "function.unverified: unknown key; known: name"),
    ],
)
def test_a_key_that_no_definition_has_is_refused(tool: dict[str, Any], told: str) -> None:
    """A misspelt key would leave the tool without parameters, or let its calls be repeated."""
    with pytest.raises(InvalidTool, match=re.escape(told)):
        ToolDefinition.parse(tool)
    for key in ("tools", "exit_tools"):
        agents: list[dict[str, Any]] = [{"id": "a", "model": "m", key: [tool]}]
        assert faults_of(agents=agents)[f"agents[0].{key}[0]"].startswith(told)


def test_a_tool_without_a_type_is_a_function() -> None:
    """Engines refuse a tool without type."""
    assert ToolDefinition.parse({"function": {"name": "look", "strict": True}}).document == {
        "type": "function",
        "function": {"name": "look", "strict": True},
    }


@pytest.mark.parametrize(
    ("fields", "path", "told"),
    [
        ({"prompts": {"quote": "$who speaks."}}, "prompts.quote", "has no $words"),
        ({"prompts": {"quote": ""}}, "prompts.quote", "has no $words"),
        ({"prompts": {"context": "Be brief."}}, "prompts.context", "no $context"),
        (
            {"agents": [{"id": "a", "model": "m", "exit_tools": [{**TOOL, "unverified": "retry"}]}]},
            "agents[0].exit_tools[0].unverified",
            "never run",
        ),
        (
            {"agents": [{"id": "a", "model": "m", "exit_tools": [{**TOOL, "mcp": {"server": "s", "tool": "t"}}]}]},
            "agents[0].exit_tools[0].mcp",
            "never run",
        ),
        (
            {"agents": [{"id": "a", "model": "m", "tools": [{**TOOL, "mcp": {"server": "tiem", "tool": "t"}}]}]},
            "agents[0].tools[0].mcp.server",
            "did you mean 'time'?",
        ),
        (
            {"agents": [{"id": "self", "model": "m"}], "memory": {"keep": "auto", "summary": {"by": "self"}}},
            "memory.summary.by",
            "an agent has that id",
        ),
        *[
            (
                {"agents": [{"id": "a", "model": "m"}, CALLER | {"validation": {"choices": ["yes"], **more}}]},
                f"agents[1].validation.{key}",
                "by: caller",
            )
            for more in ({"retries": 1}, {"constrain": "off"})
            for key in more
        ],
        *[
            (
                {"agents": [{"id": "a", "model": "m"}, CALLER | {"on_failure": "skip"} | more]},
                "agents[1].on_failure",
                "do not fail",
            )
            for more in ({}, {"wait_s": 5, "otherwise": "pass"})
        ],
    ],
)
def test_a_key_without_effect_in_a_job_is_refused(fields: dict[str, Any], path: str, told: str) -> None:
    """The fault has its place; a job that was accepted under another configuration still runs."""
    rules = JobRules(models=["m"], limits=Limits(), servers={"m": ["time"]}, untold=["m"])
    faults = faults_of(rules, **fields)
    assert (list(faults), told in faults[path]) == ([path], True)
    stored = {"agents": [{"id": "a", "model": "m"}], "conversations": [{"id": "c", "prompt": "Go."}], **fields}
    assert parse_stored(json.dumps(stored), JobId("j"), {}).agents


@pytest.mark.parametrize(
    "fields",
    [
        {"prompts": {"quote": "<$words>", "cue": "Now.", "context": ""}},
        {"agents": [{"id": "a", "model": "m", "tools": [{**TOOL, "mcp": {"server": "time", "tool": "t"}}]}]},
        {"agents": [{"id": "a", "model": "m"}, CALLER | {"on_failure": "skip", "wait_s": 5}]},
        {"agents": [{"id": "a", "model": "m"}, CALLER | {"on_failure": "end", "validation": {"choices": ["yes"]}}]},
        {"agents": [{"id": "self", "model": "m"}], "memory": {"keep": "auto", "summary": {}}},
        {"agents": [{"id": "a", "model": "elsewhere"}], "prompts": {"context": "Be brief."}},
        {"agents": [{"id": "a", "model": "elsewhere", "tools": [{**TOOL, "mcp": {"server": "x", "tool": "t"}}]}]},
    ],
)
def test_a_key_with_an_effect_is_accepted(fields: dict[str, Any]) -> None:
    """This includes keys for models of other nodes, which are unknown here."""
    rules = JobRules(models=["m", "elsewhere"], limits=Limits(), servers={"m": ["time"]}, untold=["m"])
    assert job_of(rules, **fields).agents


def test_a_cast_that_changes_the_model_is_judged_by_that_model() -> None:
    """Its tools are the job's, while its servers may differ."""
    tools = [{**TOOL, "mcp": {"server": "time", "tool": "t"}}]
    rules = JobRules(models=["m", "n"], limits=Limits(), servers={"m": ["time"], "n": []}, untold=["n"])
    cast = [{"prompt": "Go.", "agents": {"a": {"model": "n"}}}]
    agents = [{"id": "a", "model": "m", "tools": tools}]
    faults = faults_of(rules, agents=agents, conversations=cast, prompts={"context": "Be brief."})
    assert set(faults) == {"prompts.context", "conversations[0].agents.a.tools[0].mcp.server"}


def test_the_rules_of_a_configuration_know_its_servers_and_templates() -> None:
    """They look them up by the models' names."""
    config = build_config(
        {
            "models": {
                "m": {"engine": "embedded", "tools": {"mcp": {"time": {"url": "http://x"}}}},
                "n": {"engine": "embedded", "port": 9200, "bios": {"template": "BASE"}},
                "o": {"engine": "embedded", "port": 9300, "bios": {"enabled": False}},
            }
        },
        {},
        "here",
        {},
    )
    rules = rules_of(config)
    assert (dict(rules.servers), rules.untold) == ({"m": ("time",), "n": (), "o": ()}, ("n",))


@pytest.mark.parametrize("given", ["", " ", ",", " , "])
def test_empty_keys_are_refused(given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret that has not arrived must not open the door."""
    path = tmp_path / "roundhouse.yaml"
    path.write_text(yaml.safe_dump({"server": {"api_keys": ["other"]}, "models": {"m": {"engine": "embedded"}}}))
    monkeypatch.setenv("ROUNDHOUSE_API_KEYS", given)
    with pytest.raises(ConfigError, match="ROUNDHOUSE_API_KEYS is set but holds no key"):
        load_config(path)


def test_a_variable_that_nothing_reads_is_reported() -> None:
    """Variables of commands, of programs we start, of a Kubernetes service and of the configuration are read."""
    known = ["ROUNDHOUSE_CONFIG", "ROUNDHOUSE_RUN", "ROUNDHOUSE_PARENT", "ROUNDHOUSE_MINE", "HOME"]
    linked = ["ROUNDHOUSE_SERVICE_HOST", "ROUNDHOUSE_SERVICE_PORT_HTTP", "ROUNDHOUSE_PORT_8080_TCP_ADDR"]
    told = list(unknown_variables([*known, *linked, "ROUNDHOUSE_STATEDIR", "ROUNDHOUSE_X"], {"ROUNDHOUSE_MINE"}))
    assert len(told) == 2
    assert told[0].endswith("unknown variable 'ROUNDHOUSE_STATEDIR'; did you mean 'ROUNDHOUSE_STATE_DIR'?")
