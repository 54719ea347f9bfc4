import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli.app import app
from service.config.load import load_config
from service.config.schema import Config
from service.config.workers import worker_specs
from service.errors import ConfigError
from service.formats.documents import parse_document
from workers.spec import Capacity

SPAN = "models: {m: {engine: vllm, model: org/made, command: ['true', serve]"
SHARED = "store: {url: 'postgresql://h/d'}\nserver: {address: here}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: {m: {engine: embeded}}", "roundhouse.yaml:1: models.m.engine"),
        ("model:\n  m: {engine: embedded}", "roundhouse.yaml:1: model: unknown key 'model'; did you mean 'models'?"),
        (
            "models:\n  m:\n    engine: embedded\n    slot: 2",
            "roundhouse.yaml:4: models.m.slot: unknown key 'slot'; did you mean 'slots'?",
        ),
        ("models: {}", "models: dictionary should have at least 1 item, not 0"),
        ("", "a configuration must be a mapping"),
        ("models: [", "not YAML"),
        ("models: {m: {engine: llama-server, model: gone.gguf}}", "models.m.model: there is no file"),
        ("models: {m: {engine: embedded, model: 'roundhouse:big'}}", "roundhouse:small, roundhouse:tiny"),
        (
            "models: {m: {engine: embedded, slots: 4096, context: 999999}}",
            "models.m.context: llama.cpp has no KV cache",
        ),
        ("models: {m: {engine: llama-server}}", "models.m.model: is required for engine llama-server"),
        ("models: {m: {engine: embedded, port: 65535, replicas: 2}}", "exceed 65535"),
        ("models: {m: {engine: embedded}, n: {engine: embedded}}", "port 9100 of replica 0 is already models.m's"),
        ("models: {m: {engine: embedded, args: {port: 1}}}", "models.m.args.port: is decided by the key 'port'"),
        ("models: {m: {engine: llama-server, command: [no-such-program]}}", "no such program: 'no-such-program'"),
        (
            "models: {m: {engine: embedded, tools: {mcp: {files: {command: [not-there, /data]}}}}}",
            "models.m.tools.mcp.files.command: no such program: 'not-there'",
        ),
        ("models: {m: {engine: embedded}}\nserver: {host: 0.0.0.0}", "needs api_keys"),
        ("models: {m: {engine: embedded, env: {A: '${NOT_SET_ANYWHERE}'}}}", "NOT_SET_ANYWHERE is not set"),
        ('models: {m: {engine: embedded}}\nserver: {state_dir: "a\\0b"}', "server.state_dir"),
        ('models: {m: {engine: embedded}}\nserver: {roots: ["a\\0b"]}', "server.roots"),
        ('models: {m: {engine: embedded, adapters: {x: "a\\0b"}}}', "models.m.adapters"),
        ("models: {m: {engine: embedded, slots: 0}}", "models.m.slots: must be at least 1, not 0"),
        ("models: {m: {engine: embedded, spares: 300}}", "models.m.spares: must be auto, or a number from 0 to 256"),
        ("models: {m: {engine: embedded, span: {nodes: 2}}}", "span: only vllm can span several nodes"),
        (f"{SPAN}, span: {{nodes: 2}}, placement: lanes}}}}", "span: not for a model on lanes"),
        (f"{SPAN}, span: {{nodes: 2}}, spares: 1}}}}", "spares: not for a model that spans nodes"),
        (
            "models: {m: {engine: vllm, model: org/made, command: ['true'], span: {nodes: 2}}}",
            "needs one that ends with serve",
        ),
        (f"{SPAN}, span: {{nodes: 2}}}}}}", "span.nodes: 2 nodes cannot share 1 parts"),
        (f"{SPAN}, span: {{nodes: 2}}, args: {{tp: 3}}}}}}", "span.nodes: 2 nodes cannot share 3 parts"),
        (f"{SPAN}, span: {{nodes: 2}}, args: {{tp: 2}}}}}}", "models.m.span: its nodes need one store"),
        (
            f"{SPAN}, span: {{nodes: 2}}, args: {{tp: 2}}}}}}\nstore: {{url: 'postgresql://h/d'}}",
            "models.m.span: the other nodes need this one's address",
        ),
        (f"{SPAN}, span: {{nodes: 0}}}}}}", "models.m.span.nodes: must be at least 1, not 0"),
        (
            f"{SPAN}, span: {{nodes: 2}}, args: {{tp: 2, nnodes: 2}}}}}}\n{SHARED}",
            "args.nnodes: is decided by the key 'span' of the model",
        ),
        ("models: {m: {engine: embedded, slots: yes}}", "models.m.slots: must be an integer, not 'yes'"),
        ("models: {m: {engine: embedded, pin: null}}", "models.m.pin: must be true or false, not null"),
        ("models: {m: {engine: embedded, timeouts: {start_s: 0}}}", "timeouts.start_s: must be more than 0, not 0"),
        ("models: {m: {engine: embeded}}", "'vllm' or 'attached', not 'embeded'"),
        ("models: {m: {engine: embedded, repetition: maybe}}", "models.m.repetition: must be a mapping"),
        ("models: {m: {engine: embedded, socket_dir: 3}}", "models.m.socket_dir: must be a path, false or null"),
        (
            "models: {m: {engine: embedded, args: {a: [1, {b: 2}]}}}",
            "models.m.args.a: must be text, a number, true, false, null or a list of those",
        ),
        ("models: {m: {engine: embedded, context: " + "[" * 5000, "nested too deeply"),
        ("models: {1: {engine: embedded}}", "a key must be text"),
        ("a: &a {slots: 2}\nmodels: {m: {<<: *a}}", "roundhouse.yaml:2: mappings are not merged"),
        (
            "scheduling: {policy: best}\nmodels: {m: {engine: embedded}}",
            "unknown policy 'best'; known: critical_path, fifo, progress",
        ),
    ],
)
def test_an_unusable_configuration_is_reported_with_place_and_remedy(tmp_path: Path, text: str, told: str) -> None:
    """Specification, "Configuration files": errors name the key and the nearest known one."""
    path = tmp_path / "roundhouse.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        worker_specs(load_config(path), tmp_path, tmp_path / "state")


def test_a_possible_secret_in_the_wrong_place_is_not_shown(tmp_path: Path) -> None:
    """A key is given where a list of keys is expected. One fault reports it."""
    path = tmp_path / "roundhouse.yaml"
    path.write_text("models: {m: {engine: embedded}}\nserver: {api_keys: sk-very-secret}")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert str(refused.value) == f"{path}:2: server.api_keys: must be a list"


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", '{"a": 1, "a": 2}', "m: {x: 1, x: 2}"])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    """A copied block that was not renamed must not vanish silently."""
    with pytest.raises(ConfigError, match=r"already|twice"):
        parse_document(text, "file.json" if text[0] == "{" else "file.yaml")


@pytest.mark.parametrize(
    "text", ["v: .nan", "v: -.inf", "v: !!binary aGk=", "v: !!set {a, b}", '{"v": NaN}', "v: !x 1"]
)
def test_values_that_json_cannot_express_are_refused(text: str) -> None:
    """They could not be sent to any service, and no service could store them."""
    with pytest.raises(ConfigError, match=r"JSON"):
        parse_document(text, "file.json" if text[0] == "{" else "file.yaml")


def test_variables_take_values_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unquoted values are read as YAML, quoted ones as text. Keys come from the environment too."""
    monkeypatch.setenv("SLOTS", "3")
    monkeypatch.setenv("FILE", str(Path(__file__)))
    monkeypatch.setenv("ROUNDHOUSE_API_KEYS", "one, two")
    path = tmp_path / "roundhouse.yaml"
    path.write_text(
        "server:\n  port: ${PORT:-8123}\n"
        "models:\n  m:\n    engine: llama-server\n    command: ['true']\n    model: ${FILE}\n"
        "    slots: ${SLOTS}\n    replicas: 2\n    params:\n      a: ${SLOTS}\n      b: '${SLOTS}'\n"
    )
    config = load_config(path, {"port": 9000, "host": None})
    assert (config.server.port, config.server.api_keys) == (9000, ["one", "two"])
    assert config.models["m"].params == {"a": 3, "b": "3"}
    specs = worker_specs(config, tmp_path, tmp_path)
    assert [(spec.id, spec.port, spec.slots, spec.model) for spec in specs] == [
        ("m-0", 9100, 3, __file__),
        ("m-1", 9101, 3, __file__),
    ]


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("choices: [yes, no, on, off]", {"choices": ["yes", "no", "on", "off"]}),
        ("a: true\nb: False\nc: ~\nd: 1\ne: 0.5", {"a": True, "b": False, "c": None, "d": 1, "e": 0.5}),
        ("day: 2024-01-01\nodd: 2024-13-45", {"day": "2024-01-01", "odd": "2024-13-45"}),
        ('{"face": "\\ud83d\\ude00",\n\t"tab": "\x7f"}', {"face": "\U0001f600", "tab": "\x7f"}),
        ("prompt: home ${HOME}", {"prompt": "home ${HOME}"}),
        ("{a: 1}", {"a": 1}),
        ("", None),
    ],
)
def test_a_document_keeps_its_values(text: str, document: object) -> None:
    """YAML follows version 1.2, and JSON its own rules; in a job file nothing is replaced."""
    assert parse_document(text, "file")[0] == document


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("serve", "ROUNDHOUSE_CONFIG"),
        ("run", "ROUNDHOUSE_OUTPUT"),
        ("demo", "ROUNDHOUSE_DEMO_PORT"),
        ("check", "ROUNDHOUSE_CONFIG"),
        *((name, "ROUNDHOUSE_URL") for name in ("submit", "status", "result", "watch", "cancel", "workers", "logs")),
    ],
)
def test_help_names_the_environment_variables(command: str, variable: str) -> None:
    """Specification, "Environment variables": --help on each command shows its environment variables."""
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert variable in done.stdout


def test_slots_that_share_a_cache_are_many_by_default(tmp_path: Path) -> None:
    """llama.cpp's cache then has the memory of four slots.

    The effective configuration means the same as the written one.
    """
    path = tmp_path / "roundhouse.yaml"
    for engine, given, made in (
        ("vllm", "", (256, None)),
        ("vllm", "slots: 8", (8, None)),
        ("embedded", "", (16, 16_384)),
        ("embedded", "context: '8192'", (16, 32_768)),
        ("llama-server", "slots: 8", (8, None)),
        ("llama-server", "kv_tokens: 5000", (16, 5000)),
        ("llama-server", "kv_tokens: 4096", (16, 4096)),
    ):
        path.write_text(f"models:\n  m:\n    engine: {engine}\n    model: x\n    capacity: tokens\n    {given}\n")
        config = load_config(path)
        assert (config.models["m"].slots, config.models["m"].kv_tokens) == made
        assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("engine: vllm", (Capacity.TOKENS, 256)),
        ("{engine: vllm, slots: 8}", (Capacity.TOKENS, 8)),
        ("{engine: vllm, capacity: slots}", (Capacity.SLOTS, 4)),
        ("{engine: vllm, capacity: slots, slots: 8}", (Capacity.SLOTS, 8)),
        ("engine: llama-server", (Capacity.SLOTS, 4)),
        ("engine: embedded", (Capacity.SLOTS, 4)),
    ],
)
def test_vllm_admits_turns_by_tokens_by_default(tmp_path: Path, given: str, made: tuple[Capacity, int]) -> None:
    """One line switches it off. llama.cpp counts slots, since counting tokens makes a CPU slower."""
    path = tmp_path / "roundhouse.yaml"
    fields = given.strip("{}")
    path.write_text(f"models: {{m: {{model: x, {fields}}}}}\n")
    config = load_config(path)
    assert (config.models["m"].capacity, config.models["m"].slots) == made
    assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{engine: attached, model: x, url: 'http://127.0.0.1:9', capacity: tokens}", "capacity: not for an"),
        ("{engine: vllm, model: x, capacity: tokens, kv_tokens: 9999}", "kv_tokens: only for llama.cpp"),
        ("{engine: embedded, kv_tokens: 9999}", "kv_tokens: only for llama.cpp"),
        ("{engine: embedded, capacity: tokens, kv_tokens: 4095}", r"kv_tokens: must be at least context .4096 tokens."),
    ],
)
def test_a_cache_is_shared_only_where_the_engine_can_share_it(given: str, told: str, tmp_path: Path) -> None:
    """The largest request must fit into it."""
    path = tmp_path / "roundhouse.yaml"
    path.write_text(f"models:\n  m: {given}\n")
    with pytest.raises(ConfigError, match=told):
        load_config(path)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("timeouts: {prefil_stall_s: 3}", r"m\.timeouts\.prefil_stall_s: .*did you mean 'prefill_stall_s'"),
        ("timeouts: {start_s: 0}", r"m\.timeouts\.start_s: "),
        ("timeouts: {busy_stall_s: -1}", r"m\.timeouts\.busy_stall_s: "),
        ("restart: {failures: 0}", r"m\.restart\.failures: "),
        ("restart: {failures: null}", r"m\.restart: failures: a number from 1"),
        ("repetition: {lines: 1}", r"m\.repetition\.lines: "),
        ("weights: {keep_s: 0}", r"m\.weights\.keep_s: "),
        ("capacity: token", r"m\.capacity: .*'slots' or 'tokens'"),
        ("weights: {backend: mpi}", r"m\.weights\.backend: .*'gloo' or 'nccl'"),
    ],
)
def test_sections_defined_in_workers_are_checked_as_strictly(tmp_path: Path, section: str, told: str) -> None:
    """Their bounds and keys stand in the dataclasses. A fault names the key and the remedy, as everywhere."""
    path = tmp_path / "roundhouse.yaml"
    path.write_text(f"models:\n  m:\n    engine: vllm\n    model: x\n    {section}\n")
    with pytest.raises(ConfigError, match=told):
        load_config(path)


@pytest.mark.parametrize(
    "section", ["timeouts: {prefill_stall_s: null}", "restart: {retry_s: null}", "repetition: null", "weights: null"]
)
def test_keys_that_may_be_null_are_accepted(tmp_path: Path, section: str) -> None:
    """Null means for ever, or not at all."""
    path = tmp_path / "roundhouse.yaml"
    path.write_text(f"models:\n  m:\n    engine: vllm\n    model: x\n    {section}\n")
    assert list(load_config(path).models) == ["m"]


def test_a_file_may_have_a_name_like_those_of_our_models(tmp_path: Path) -> None:
    """Only a name that leads to no file is taken for a misspelling."""
    (tmp_path / "roundhouse:mine.gguf").write_bytes(b"GGUF")
    path = tmp_path / "roundhouse.yaml"
    path.write_text("models: {m: {engine: embedded, model: 'roundhouse:mine.gguf'}}")
    (spec,) = worker_specs(load_config(path), tmp_path, tmp_path / "state")
    assert spec.model == str(tmp_path / "roundhouse:mine.gguf")


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_a_file_that_no_engine_loads_is_reported_before_a_start(tmp_path: Path, engine: str) -> None:
    """The file may be a saved web page of a hub. A program of the user's own may accept it."""
    (tmp_path / "model.gguf").write_text("<!doctype html>")
    path = tmp_path / "roundhouse.yaml"
    path.write_text(f"models: {{m: {{engine: {engine}, model: model.gguf}}}}")
    with pytest.raises(ConfigError, match="is not a readable GGUF file"):
        worker_specs(load_config(path), tmp_path, tmp_path / "state")
    path.write_text("models: {m: {engine: llama-server, command: [sh], model: model.gguf}}")
    (spec,) = worker_specs(load_config(path), tmp_path, tmp_path / "state")
    assert spec.model == str(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [("", 600.0), ("timeouts: {decode_stall_s: 5}", 600.0), ("timeouts: {prefill_stall_s: 120}", 120.0),
     ("timeouts: {prefill_stall_s: null}", None)],
)  # fmt: skip
def test_an_attached_server_has_time_for_its_first_prompt(tmp_path: Path, given: str, limit_s: float | None) -> None:
    """It may load its model during the request, and its reading speed is unknown.

    An engine of ours has loaded already.
    """
    path = tmp_path / "roundhouse.yaml"
    path.write_text(f"models:\n  m:\n    engine: attached\n    url: 'http://127.0.0.1:9'\n    model: x\n    {given}\n")
    assert load_config(path).models["m"].timeouts.prefill_stall_s == limit_s
    path.write_text("models: {m: {engine: llama-server, model: x.gguf}}")
    assert load_config(path).models["m"].timeouts.prefill_stall_s == 120.0
