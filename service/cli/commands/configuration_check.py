"""``roundhouse check``: it needs the configuration alone, and half of the time that a service takes to import."""

from pathlib import Path

import typer
import yaml

from service.config.load import load_config, naming_lines
from service.config.secrets import masked
from service.config.source import callers_of_config
from service.config.workers import worker_specs


def check(config: Path, state_dir: Path | None) -> None:
    """Validate a configuration, and print the effective one."""
    settings = load_config(config, {"state_dir": state_dir})
    callers_of_config(settings, config.parent)
    with naming_lines(config):
        worker_specs(settings, config.parent, settings.server.state_dir)
    shown = masked(settings.model_dump(mode="json"))
    typer.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), nl=False)
