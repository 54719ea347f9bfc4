"""Upgrades in place: engines stay, no turn is lost or doubled, no client is refused, and no engine is orphaned."""

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from service.store.databases.migrations import BEFORE_RELEASE, WRITTEN_BEFORE_RELEASE
from tests.harness.service import (
    Service,
    asked_for,
    check_debate,
    debate,
    recorded,
    run_command,
    scripted_model,
    serving,
)
from tests.harness.upgrades import (
    UPGRADE_LIMIT_S,
    Engine,
    engines_of,
    probing_health,
    upgrade,
    upgrades_of,
    wait_upgraded,
)
from tests.harness.waiting import is_alive, wait_for

KILL_WITHIN_S = 2.0
Ports = Callable[[int], int]


def still(engines: list[Engine]) -> set[tuple[int, float]]:
    return {(each.pid, psutil.Process(each.pid).create_time()) for each in engines if is_alive(each.pid)}


def has_started(service: Service, job: str) -> bool:
    return bool(service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"])


@pytest.mark.system
def test_engines_stay_and_every_turn_is_there_once(tmp_path: Path, free_ports: Ports) -> None:
    """Under load and with turns of all lengths; engines' processes, numbers and logs continue."""
    port, record = free_ports(4), tmp_path / "asked"
    model = scripted_model(port + 1, replicas=2, tokens=20, interval=0.02, record=str(record))
    with serving(tmp_path / "a", port, {"m": model}, {"drain_s": 0.3}) as service, probing_health(port) as probed:
        before, logged = engines_of(service), service.get("/v1/workers/m-0/logs")["lines"]
        assert service.process is not None
        pid = service.process.pid
        jobs = [service.post_job(debate(conversations=4, rounds=3)) for _ in range(2)]
        for number in (1, 2):
            wait_for(lambda: has_started(service, jobs[0]), "turns run")
            now = upgrade(service)
            assert (now["pid"], now["upgrades"], now["last"]["kept"]) == (pid, number, ["m-0", "m-1"])
            jobs.append(service.post_job(debate(conversations=2)))
        for job in jobs:
            assert service.wait_ended(job)["state"] == "completed"
        assert engines_of(service) == before
        lines = service.get("/v1/workers/m-0/logs?tail=2000")["lines"]
        assert [line["text"] for line in lines][: len(logged)] == [line["text"] for line in logged]
        assert len({line["number"] for line in lines}) == len(lines)
        for job, rounds in zip(jobs, (3, 3, 1, 1), strict=True):
            for transcript in service.get(f"/v1/jobs/{job}/result")["conversations"]:
                check_debate(transcript, rounds)
                for turn in transcript["turns"]:  # interrupted attempts are recorded, and charged to no turn
                    assert [each["outcome"] for each in turn["attempts"]][-1] == "completed"
                    assert Counter(each["outcome"] for each in turn["attempts"])["completed"] == 1
    assert probed.faults == []
    assert len(recorded(record)) >= 2 * 36 + 2 * 6
    assert {asked_for(each)[2] for each in recorded(record)} == set("abm")


@pytest.mark.system
def test_embedded_engines_stay_and_answer(tmp_path: Path, free_ports: Ports) -> None:
    """The real engine keeps its key, its slots and its learned figures; SIGUSR2 requests an upgrade as well."""
    port = free_ports(2)
    model = {"engine": "embedded", "port": port + 1, "slots": 2, "context": 4096, "args": {"threads": 1}}
    with serving(tmp_path / "a", port, {"m": {**model, "params": {"max_tokens": 16}}}) as service:
        before = engines_of(service)
        job = service.post_job(debate())
        assert service.wait_ended(job)["state"] == "completed"
        pace = service.get("/v1/workers/m-0")["pace"]
        assert service.process is not None
        service.process.send_signal(signal.SIGUSR2)
        wait_upgraded(service, 0)
        assert engines_of(service) == before
        assert service.get("/v1/workers/m-0")["pace"]["decode_ms"] == pace["decode_ms"]
        assert service.wait_ended(service.post_job(debate()))["state"] == "completed"
        os.kill(before[0].pid, signal.SIGKILL)  # it is supervised as one of its own
        wait_for(lambda: service.get("/v1/workers/m-0")["incarnation"] == 2, "it is replaced")
        wait_for(lambda: service.get("/v1/workers/m-0")["state"] == "ready", "the next one is ready")


@pytest.mark.system
def test_an_idle_connection_is_answered_by_the_next_program(tmp_path: Path, free_ports: Ports) -> None:
    """The client's open connection stays; a request sent meanwhile waits in its socket."""
    port = free_ports(2)
    with (
        serving(tmp_path / "a", port, {"m": scripted_model(port + 1)}) as service,
        httpx.Client(base_url=service.url, trust_env=False, limits=httpx.Limits(keepalive_expiry=None)) as kept,
    ):
        stream = kept.get("/healthz").extensions["network_stream"]
        at = stream.get_extra_info("client_addr")
        upgrade(service)
        again = kept.get("/healthz")
        assert again.status_code == 200
        assert again.extensions["network_stream"].get_extra_info("client_addr") == at


@pytest.mark.system
def test_changed_models_are_started_again_and_the_rest_stays(tmp_path: Path, free_ports: Ports) -> None:
    """A removed model is ended, a new one is started, and one with other settings is restarted."""
    port = free_ports(5)
    models = {name: scripted_model(port + 1 + at) for at, name in enumerate(("same", "other", "gone"))}
    with serving(tmp_path / "a", port, models) as service:
        before = {each.worker: each for each in engines_of(service)}
        models["other"] = {**models["other"], "args": {"tokens": 5}}
        models["new"] = {**models.pop("gone"), "port": port + 4}
        settings = yaml.safe_load(service.config.read_text())
        service.config.write_text(yaml.safe_dump({**settings, "models": models}))
        now = upgrade(service)
        after = {each.worker: each for each in engines_of(service)}
        assert set(after) == {"same-0", "other-0", "new-0"}
        assert after["same-0"] == before["same-0"]
        assert after["other-0"].pid != before["other-0"].pid
        assert set(now["last"]["ended"]) == {"other-0", "gone-0"}
        assert not is_alive(before["gone-0"].pid)
        assert not is_alive(before["other-0"].pid)


def _other_port(service: Service) -> None:
    settings = yaml.safe_load(service.config.read_text())
    settings["server"]["port"] += 2
    service.config.write_text(yaml.safe_dump(settings))


def _broken_file(service: Service) -> None:
    service.config.write_text("models: [")


def _needs_migration(service: Service) -> None:
    with closing(sqlite3.connect(service.folder / "state" / "roundhouse.db")) as database, database:
        database.execute("DELETE FROM migrations WHERE number = (SELECT max(number) FROM migrations)")


def _from_before_the_release(service: Service) -> None:
    with closing(sqlite3.connect(service.folder / "state" / "roundhouse.db")) as database, database:
        database.execute("UPDATE migrations SET name = ? WHERE number = 1", (BEFORE_RELEASE,))


REFUSALS: dict[str, tuple[Callable[[Service], None], str]] = {
    "another port": (_other_port, "server.port"),
    "a broken configuration": (_broken_file, "cannot start"),
    "a migration": (_needs_migration, "migrated"),
    "a store from before 1.0.0": (_from_before_the_release, WRITTEN_BEFORE_RELEASE),
}


@pytest.mark.system
@pytest.mark.parametrize("fault", REFUSALS)
def test_a_refused_upgrade_leaves_everything_unchanged(tmp_path: Path, free_ports: Ports, fault: str) -> None:
    """HTTP and the command get the reason; the running turns go on, and engines notice nothing."""
    change, because = REFUSALS[fault]
    port = free_ports(3)
    with serving(tmp_path / "a", port, {"m": scripted_model(port + 1, tokens=100, interval=0.02)}) as service:
        before = engines_of(service)
        job = service.post_job(debate())
        change(service)
        told = service.http.post("/v1/upgrade", timeout=60)
        assert (told.status_code, told.json()["code"]) == (409, "upgrade_refused")
        assert because in told.json()["detail"]
        said = run_command("upgrade", "--url", service.url)
        assert said.returncode == 3
        assert because in said.stderr
        now = upgrades_of(service)
        assert (now["upgrades"], now["phase"]) == (0, "idle")
        assert because in now["last"]["detail"]
        assert service.wait_ended(job)["state"] == "completed"
        (transcript,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
        assert all(len(turn["attempts"]) == 1 for turn in transcript["turns"])
        assert engines_of(service) == before


@pytest.mark.system
def test_an_upgrade_of_a_store_in_memory_is_refused(tmp_path: Path, free_ports: Ports) -> None:
    """Every job would be lost with it."""
    port = free_ports(2)
    with serving(tmp_path / "a", port, {"m": scripted_model(port + 1)}, store={"url": "memory"}) as service:
        told = service.http.post("/v1/upgrade", timeout=60)
        assert told.status_code == 409
        assert "store.url is memory" in told.json()["detail"]


@pytest.mark.system
def test_the_command_reports_the_outcome(tmp_path: Path, free_ports: Ports) -> None:
    """It waits until the next program serves."""
    port = free_ports(2)
    with serving(tmp_path / "a", port, {"m": scripted_model(port + 1)}) as service:
        said = run_command("upgrade", "--url", service.url)
        assert (said.returncode, said.stderr) == (0, "")
        assert "engines that stay: m-0" in said.stdout
        assert f"process {upgrades_of(service)['pid']}" in said.stdout
    assert run_command("upgrade", "--url", service.url).returncode == 3


@pytest.mark.system
def test_a_file_that_breaks_during_the_drain_is_found_before_the_exec(tmp_path: Path, free_ports: Ports) -> None:
    """After the check, and before the point of no return: the service goes on, with its engines and its turns."""
    port = free_ports(2)
    model = scripted_model(port + 1, tokens=100_000, interval=0.05)
    with serving(tmp_path / "a", port, {"m": model}, {"drain_s": 1.5}) as service:
        before = engines_of(service)
        service.post_job(debate())
        assert service.http.post("/v1/upgrade", timeout=60).status_code == 202
        service.config.write_text("models: [")
        wait_for(lambda: upgrades_of(service)["last"] is not None, "it is refused", UPGRADE_LIMIT_S)
        now = upgrades_of(service)
        assert (now["upgrades"], now["phase"]) == (0, "idle")
        assert "changed" in now["last"]["detail"] or "cannot start" in now["last"]["detail"]
        assert engines_of(service) == before
        wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] > 0, "turns run again")


FAILS = """
import os, sys
if os.path.exists({marker!r}) and "serve" in sys.orig_argv and "--upgrade-check" not in sys.orig_argv:
    os._exit(2)
"""


@pytest.mark.system
def test_a_program_that_fails_after_the_exec_takes_every_engine_with_it(tmp_path: Path, free_ports: Ports) -> None:
    """No check found the fault: nothing is left, as after any death."""
    port = free_ports(2)
    model = scripted_model(port + 1, tokens=100_000, interval=0.05)
    service = Service(tmp_path / "a", port, {"m": model}, {"drain_s": 1.5})
    marker, beside = tmp_path / "marker", tmp_path / "beside"
    beside.mkdir()
    (beside / "sitecustomize.py").write_text(FAILS.format(marker=str(marker)))
    service.environment["PYTHONPATH"] = str(beside)
    try:
        service.start()
        tree = service.tree()
        service.post_job(debate())
        marker.touch()
        assert service.http.post("/v1/upgrade", timeout=60).status_code == 202
        assert service.process is not None
        assert service.process.wait(UPGRADE_LIMIT_S) == 2
        wait_for(lambda: not any(map(is_alive, tree)), "nothing of it is left", KILL_WITHIN_S)
    finally:
        service.http.close()
        if service.process is not None:
            service.kill()
