"""``roundhouse check``: it imports the configuration only, in half the time that a service's imports take."""

import os
from collections.abc import Mapping
from pathlib import Path

import typer
import yaml

from service.config.environment import unknown_variables
from service.config.lane_plan import with_mig
from service.config.load import load_config, named_variables, naming_lines
from service.config.secrets import masked
from service.config.source import callers_of_config
from service.config.workers import worker_specs


def check(config: Path, overrides: Mapping[str, object], *, enable_mig: bool) -> None:
    """Validate a configuration with a service's overrides, and print the effective one."""
    settings = with_mig(load_config(config, overrides), enable_mig=enable_mig)
    for warning in unknown_variables(os.environ, named_variables(config)):
        typer.echo(warning, err=True)
    callers_of_config(settings, config.parent)
    with naming_lines(config):
        worker_specs(settings, config.parent, settings.server.state_dir)
    shown = masked(settings.model_dump(mode="json"))
    typer.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), nl=False)
