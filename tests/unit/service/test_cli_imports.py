"""Modules that a command imports before it does anything: a service that is still importing answers no request."""

import subprocess
import sys

import pytest

HEAVY = (
    "fastapi",
    "uvicorn",
    "service.serve",
    "roundhouse_client.client",
    "roundhouse_client.values",
    "service.cli.displays.top",
)


@pytest.mark.parametrize(
    ("module", "needless"),
    [
        ("service.cli.app", HEAVY),
        ("service.cli.commands.configuration_check", HEAVY),
        (
            "service.cli.commands.engine_commands",
            ("roundhouse_client.client", "service.cli.displays.top", "service.cli.displays.run_display", "numpy"),
        ),
    ],
)
def test_a_command_imports_only_what_it_needs(module: str, needless: tuple[str, ...]) -> None:
    """All commands in outline, ``check``, and ``serve``: an upgrade runs the last two twice."""
    code = f"import sys, service.cli.main, service.cli.app, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert module in done.stdout.split()
    assert not set(needless) & set(done.stdout.split())
