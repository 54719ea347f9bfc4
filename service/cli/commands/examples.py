"""The gallery of jobs: its list, and one of them written into this folder."""

from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import typer

from service.cli.conventions import FILE
from service.config.load import load_config
from service.errors import ConfigError
from workers.files.atomic import replace_file

GALLERY: Final = resources.files("service.web") / "gallery"
BESIDE: Final = {"tools": "town_server.py", "interviews": "personas.csv"}  # file that an example needs beside it
CONFIGURED: Final = frozenset({"tools"})  # examples that need a line in the configuration
MODEL: Final = "model: small\n"


def examples(
    name: Annotated[str | None, typer.Argument(help="The example; without it, list them.", metavar="[NAME]")] = None,
) -> None:
    """List the example jobs, or write one into this folder."""
    titles = {each.name.removesuffix(".yaml"): each.read_text() for each in GALLERY.iterdir() if _is_job(each.name)}
    if name is None:
        for known, text in sorted(titles.items()):
            typer.echo(f"{known:<12} {_title(text)}")
        return
    if name not in titles:
        raise ConfigError(f"{name}: no such example; there are {', '.join(sorted(titles))}")
    files = {f"{name}.yaml": titles[name].replace(MODEL, f"model: {_model()}\n")}
    if name in BESIDE:
        files[BESIDE[name]] = (GALLERY / BESIDE[name]).read_text()
    for file in files:
        if Path(file).exists():
            raise ConfigError(f"{file} already exists, and is not overwritten")
    for file, text in files.items():
        replace_file(Path(file), text.encode())
        typer.echo(f"written: {file}")
    for line in titles[name].splitlines()[1:]:
        if not line.startswith("#"):
            break
        typer.echo(line.removeprefix("#").removeprefix(" "))
    typer.echo(_next(name))


def _is_job(file: str) -> bool:
    return file.endswith(".yaml")


def _title(text: str) -> str:
    return text.splitlines()[0].removeprefix("# ").partition(":")[0]


def _model() -> str:
    """Return the first model of this folder's configuration, or the small one without a configuration."""
    return next(iter(load_config(Path(FILE)).models)) if Path(FILE).is_file() else "small"


def _next(name: str) -> str:
    if Path(FILE).is_file():
        return f"next: roundhouse run {name}.yaml"
    if name in CONFIGURED:
        return f"next: roundhouse init; add the line above to {FILE}; roundhouse run {name}.yaml"
    return f"next: roundhouse run {name}.yaml --model roundhouse:small"
