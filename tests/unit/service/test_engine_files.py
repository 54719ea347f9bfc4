"""Files and flags of an engine in its configuration: paths are relative to its folder, and flags are known ones."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.load import load_config
from service.config.workers import worker_specs
from service.errors import ConfigError
from workers.engine.launch import command_for
from workers.engine.launch.engine_key import operators_key
from workers.engine.log_ring import LogRing
from workers.errors import InvalidSpec
from workers.spec import EngineKind, WorkerSpec


def specs_of(folder: Path, model: dict[str, Any], **gpus: object) -> list[WorkerSpec]:
    path = folder / "roundhouse.yaml"
    path.write_text(yaml.safe_dump({"gpus": gpus, "models": {"m": model}}))
    return worker_specs(load_config(path), path.parent, folder / "state")


@pytest.mark.parametrize("placement", ["fixed", "lanes"])
@pytest.mark.parametrize("engine", ["llama-server", "vllm"])
def test_relative_paths_in_flags_begin_at_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, placement: str
) -> None:
    """They resolve like the model's path, wherever the service and the engine's program were started."""
    folder = tmp_path / "conf"
    for each in (tmp_path / "bin", folder / "m"):
        each.mkdir(parents=True)
    program = tmp_path / "bin" / "engine"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (folder / "m.gguf").write_bytes(b"GGUF")
    model = {
        "engine": engine,
        "model": "m" if engine == "vllm" else "m.gguf",
        "command": ["./bin/engine"],
        "args": {"mmproj": "mmproj.gguf", "chat-template-file": "./t.jinja"},
        "placement": placement,
    }
    path = folder / "roundhouse.yaml"
    path.write_text(yaml.safe_dump({"models": {"m": model}}, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    relative = Path("conf/roundhouse.yaml")
    for spec in worker_specs(load_config(relative), relative.parent, Path("state")):
        command = command_for(spec, {})
        assert command.folder == str(folder)
        assert command.argv[0] == str(program)
        assert command.argv[-4:] == ("--mmproj", "mmproj.gguf", "--chat-template-file", "./t.jinja")


def test_a_program_on_the_search_path_is_found(tmp_path: Path) -> None:
    """A path that leads nowhere is shown whole."""
    (spec,) = specs_of(tmp_path, {"engine": "llama-server", "command": ["true", "x/y"]})
    assert command_for(spec, {}).argv[:2] == ("true", "x/y")
    with pytest.raises(ConfigError, match=r"no such program: '.*/bin/nothing'"):
        specs_of(tmp_path, {"engine": "llama-server", "command": ["bin/nothing"]})


def test_a_key_in_a_file_is_read_as_the_engine_reads_it(tmp_path: Path) -> None:
    """The service needs the key too."""
    (tmp_path / "keys.txt").write_text("first\nsecond\n")
    model = {"engine": "llama-server", "command": ["true"], "args": {"api-key-file": "keys.txt"}}
    (spec,) = specs_of(tmp_path, model)
    assert operators_key(spec) == "first"
    with pytest.raises(InvalidSpec, match="cannot be read"):
        operators_key(WorkerSpec(engine=EngineKind.LLAMA_SERVER, args={"api-key-file": "keys.txt"}))


@pytest.mark.parametrize(
    ("args", "because"),
    [
        ({"ngl": 0}, "args.ngl: the embedded engine has no flag --ngl; it is written '-ngl' or '--gpu-layers' or"),
        (
            {"flash-attn": True},
            "args.flash-attn: the embedded engine has no flag --flash-attn; engine: llama-server has",
        ),
        ({"flash_attn": "on"}, "args.flash_attn: the embedded engine has no flag --flash-attn"),
        ({"mmproj": "x.gguf"}, "args.mmproj: the embedded engine has no flag --mmproj"),
        ({"-fa": True}, "args.-fa: the embedded engine has no flag -fa"),
        ({"help": True}, "args.help: the embedded engine has no flag --help"),
        ({"threads": "many"}, "args.threads: argument -t/--threads: invalid int value: 'many'"),
        ({"threads": True}, "args.threads: argument -t/--threads: expected one argument"),
        ({"jinja": "yes"}, "args.jinja: unrecognized arguments: yes"),
    ],
)
def test_flags_that_the_embedded_engine_lacks_are_reported_before_a_start(
    tmp_path: Path, args: dict[str, Any], because: str
) -> None:
    """``check``, workers and inference engines report them alike; the engine would exit over them again and again."""
    with pytest.raises(ConfigError) as refused:
        specs_of(tmp_path, {"engine": "embedded", "args": args})
    assert f"models.m.{because}" in str(refused.value)
    with pytest.raises(InvalidSpec):
        command_for(WorkerSpec(engine=EngineKind.EMBEDDED, model="/m.gguf", args=args), {})


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"gpu-layers": 0, "n_predict": 5, "-t": 2, "jinja": True, "no-warmup": True, "temp": 0.5, "slots": False},
        {"seed": None, "pooling": "mean"},
    ],
)
def test_flags_of_the_embedded_engine_are_accepted(tmp_path: Path, args: dict[str, Any]) -> None:
    """They may be written in any form. A program of the author's own has its own flags."""
    assert specs_of(tmp_path, {"engine": "embedded", "args": args})
    assert specs_of(tmp_path, {"engine": "embedded", "command": ["true"], "args": {"flash-attn": True}})


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (
            [(1, "loading"), (2, "usage: x [-h]"), (2, "x: error: unrecognized arguments: --ngl")],
            "line: x: error: unrec",
        ),
        (
            [(2, "error: invalid argument: --foo"), (2, "to show complete usage, run with -h")],
            "error: error: invalid argu",
        ),
        ([(2, "RuntimeError: no GPU"), (2, "  warnings.warn("), (1, "bye")], "error: RuntimeError: no GPU"),
        (
            [(2, "llama_model_load: error loading model: bad magic"), (2, "main: exiting due to model loading error")],
            "error: llama_model_load: error loading model: bad magic",
        ),
        ([(2, "exiting due to model loading error")], "line: exiting due to model loading error"),
        ([(1, "ERROR: on the other stream"), (2, "usage")], "error: ERROR: on the other stream"),
        ([(1, "first"), (2, "second"), (2, " ")], "line: second"),
        ([], None),
    ],
)
def test_a_failed_engines_own_words_are_its_last_error(printed: list[tuple[int, str]], words: str | None) -> None:
    """The page of usage before or after them is left out."""
    log = LogRing()
    log.begin_incarnation(1)
    log.add_output(2, b"an error of the one before\n")
    log.begin_incarnation(2)
    for stream, line in printed:
        log.add_output(stream, f"{line}\n".encode())
    log.add_note("an error of ours")
    told = log.words_of_failure(2)
    assert told == words if words is None else (told or "").startswith(f"its last {words}")
