"""SIGKILL at swept and random moments of an upgrade: no process is left, no acknowledged work is lost or doubled."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.faults.test_kills import embedded
from tests.harness.service import Document, scripted_model
from tests.harness.upgrade_kills import Kill, KilledService, KillRun

Ports = Callable[[int], int]
KILLS = (1, 3, 4, 5)  # in a test run: in the check, right before the exec, in the imports, in the adoption
AUDIT_EVERY = 25
SIDE_BY_SIDE = {"scripted": 2, "embedded": 2}
SHARE = {"scripted": 0.9, "embedded": 0.1}  # share of a soak's kills


def model_of(kind: str, port: int) -> Document:
    if kind == "embedded":
        return embedded(port)
    return scripted_model(port, replicas=2, tokens=20, interval=0.02)


@pytest.mark.system
@pytest.mark.parametrize("kind", SHARE)
def test_a_sigkill_at_any_moment_of_an_upgrade_leaves_and_loses_nothing(
    tmp_path: Path, free_ports: Ports, kind: str, request: pytest.FixtureRequest
) -> None:
    """Guardians see their parent die, whatever it runs; the next start continues where the killed one was."""
    is_soak, record = request.config.getoption("--soak"), request.config.getoption("--soak-record")
    numbers = range(int(request.config.getoption("--soak-kills") * SHARE[kind])) if is_soak else KILLS
    file = (record or tmp_path) / f"{kind}.jsonl"
    done = [msgspec.json.decode(line, type=Kill) for line in file.read_bytes().splitlines()] if file.exists() else []
    began_at = time.monotonic()

    def note(kill: Kill) -> None:
        done.append(kill)
        with file.open("ab") as lines:
            lines.write(msgspec.json.encode(kill) + b"\n")
        print(f"{kind} {len(done)}/{len(numbers)} {time.monotonic() - began_at:.0f} s: {kill}", flush=True)

    ports = [free_ports(3) for _ in range(SIDE_BY_SIDE[kind])]
    services = [
        KilledService(tmp_path / f"{kind}-{at}", port, {"m": model_of(kind, port + 1)}, at)
        for at, port in enumerate(ports)
    ]
    known = {kill.number for kill in done}
    run = KillRun((number for number in numbers if number not in known), note, AUDIT_EVERY)
    run.perform(services)
    met, slowest = Counter(str(kill.met) for kill in done), max(kill.gone_s for kill in done)
    print(
        f"{len(done)} kills ({dict(met)}), audited now: {dict(run.counts)}; the slowest was gone after {slowest:.2f} s"
    )
    assert len(done) == len(numbers)
    assert set(met) & {"import", "adopt", "serve"}, "no kill met the next program"
    assert set(met) & {"asked", "check", "drain", "exec"}, "no kill met the old one"
