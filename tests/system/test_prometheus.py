"""The board, the alerts and the scrape example, in a real Prometheus that scrapes a real service."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.documents.pages import ROOT
from tests.harness.service import Service, debate, serving
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the Debian package prometheus")
DEPLOY = ROOT / "deploy"
KEY = "key-of-this-test-alone"
SCRAPE_S = 1
# A service on one embedded model lacks these: each panel that may be empty shows one of them.
ABSENT = re.compile(r"_kv_|_lane_|_tool_calls_|_webhook_|_restarts_|_incidents_")
Sample = dict[str, Any]


def checked(*argv: object, text: str | None = None) -> str:
    """Run promtool, which must succeed."""
    done = subprocess.run(
        ["/usr/bin/env", "promtool", *map(str, argv)],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10)

    def get(self, path: str, **params: str) -> Any:  # noqa: ANN401 - JSON of the server
        answer = self.http.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, (params, answer.text)
        return answer.json()["data"]

    def query(self, expression: str) -> list[Sample]:
        samples: list[Sample] = self.get("query", query=expression)["result"]
        return samples

    def is_up(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def total(self, expression: str) -> float:
        return sum(float(sample["value"][1]) for sample in self.query(f"sum({expression})"))


def configuration(folder: Path, target: str) -> Path:
    """Return the example with another target, with the alerts and a key, as an operator has it."""
    example = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    example["global"]["scrape_interval"] = example["global"]["evaluation_interval"] = f"{SCRAPE_S}s"
    (scrape,) = example["scrape_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    (folder / "roundhouse.key").write_text(KEY)
    shutil.copy(DEPLOY / "alerts.yaml", folder)
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(example))
    return file


@pytest.fixture(scope="module")
def service(free_ports: Callable[[int], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with keys, on the embedded engine."""
    port = free_ports(2)
    model = {
        "engine": "embedded",
        "model": "roundhouse:tiny",
        "port": port + 1,
        "slots": 2,
        "params": {"max_tokens": 8},
    }
    with serving(tmp_path_factory.mktemp("service"), port, {"m": model}, {"api_keys": [KEY]}) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(
    service: Service, free_ports: Callable[[int], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A server that scrapes each second, before and after jobs and a client's request."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_ports(1)
    file = configuration(folder, service.url.removeprefix("http://"))
    checked("check", "config", file)
    argv = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    server = Prometheus(port)
    try:
        wait_for(server.is_up, "Prometheus is ready")
        turns = 0
        for _ in range(2):  # the second time adds to series that are there: rates are above 0
            service.wait_ended(service.post_job(debate(conversations=2, rounds=2)))
            chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert service.http.post("/v1/chat/completions", json=chat).status_code == 200
            turns += 13
            wait_for(lambda: server.total("roundhouse_turns_total") == turns, f"{turns} turns are scraped")  # noqa: B023
        wait_for(lambda: server.total("roundhouse_jobs") == 2, "what is looked at beside scrapes is scraped", 30)
        yield server
    finally:
        server.http.close()
        process.terminate()
        assert process.wait(20) == 0


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]


def filled(expression: str) -> str:
    """Return an expression of the board as Grafana sends it."""
    return expression.replace("$__rate_interval", "30s").replace("$instance", ".*").replace("$model", ".*")


@pytest.mark.usefixtures("prometheus")
def test_the_metrics_of_a_service_are_clean(service: Service) -> None:
    """``promtool check metrics`` has no complaint, once jobs and requests have run."""
    assert checked("check", "metrics", text=service.http.get("/metrics").text) == ""


def test_a_scrape_needs_the_key(prometheus: Prometheus, service: Service) -> None:
    """The credentials in the example are accepted."""
    (target,) = prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert httpx.get(f"{service.url}/metrics", trust_env=False).status_code == 401


@pytest.mark.parametrize("expression", expressions(), ids=range(len(expressions())))
def test_every_query_of_the_board_finds_data(prometheus: Prometheus, expression: str) -> None:
    """A misspelt or removed name would find none, unnoticed."""
    if not ABSENT.search(expression):
        assert prometheus.query(filled(expression)), expression
        return
    prometheus.query(filled(expression))  # it must at least be one
    told = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE))
    assert set(re.findall(r"roundhouse_\w+", expression)) <= told


def test_the_boards_figures_are_the_jobs_figures(prometheus: Prometheus) -> None:
    """26 turns have ended, two of them clients' requests, and every one had a token."""
    assert prometheus.total('roundhouse_turns_total{source="request",outcome="completed"}') == 2
    assert prometheus.total('roundhouse_turns_total{source="job",outcome="completed"}') == 24
    assert prometheus.total("roundhouse_queue_wait_seconds_count") == 26
    assert prometheus.total("roundhouse_time_to_first_token_seconds_count") >= 24
    assert prometheus.total('roundhouse_tokens_total{kind="answer"}') >= 26
    assert prometheus.total("roundhouse_conversations_total") == 4
    assert prometheus.total("roundhouse_engine_memory_bytes") > 1e6


def test_the_boards_variables_have_values(prometheus: Prometheus) -> None:
    """Each selects from existing labels."""
    asked = [each["query"]["query"] for each in board()["templating"]["list"] if each["type"] == "query"]
    for query in asked:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert prometheus.query(f"group by ({label}) ({metric})"), query


def test_every_alert_is_evaluated_and_silent(prometheus: Prometheus) -> None:
    """A healthy service has none."""
    (group,) = prometheus.get("rules", type="alert")["groups"]
    names = [rule["alert"] for rule in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]]
    assert [rule["name"] for rule in group["rules"]] == names
    wait_for(
        lambda: all(rule["health"] == "ok" for rule in prometheus.get("rules")["groups"][0]["rules"]),
        "every alert was evaluated",
    )
    assert prometheus.get("alerts")["alerts"] == []


AT = 'instance="n:1"'
MODEL = f'{AT},model="m"'
# Series that raise each alert, as promtool writes them at every minute, and when it must fire.
RAISED: dict[str, tuple[dict[str, str], str]] = {
    "RoundhouseDown": ({f'up{{job="roundhouse",{AT}}}': "0x30"}, "3m"),
    "RoundhouseModelWithoutWorker": (
        {f'roundhouse_worker_ready{{{MODEL},worker="m-0"}}': "0x30", f"roundhouse_slots_wanted{{{MODEL}}}": "2x30"},
        "7m",
    ),
    "RoundhouseTurnsWait": ({f"roundhouse_oldest_ready_turn_seconds{{{AT}}}": "840+60x30"}, "12m"),
    "RoundhouseEnginesRestart": (
        {f'roundhouse_worker_restarts_total{{{MODEL},worker="m-0",reason="engine_died"}}': "0+1x30"},
        "16m",
    ),
    "RoundhouseTurnsFail": (
        {
            f'roundhouse_turns_total{{{MODEL},source="job",outcome="failed",reason="deadline"}}': "0+1x30",
            f'roundhouse_turns_total{{{MODEL},source="job",outcome="completed",reason=""}}': "0+9x30",
        },
        "15m",
    ),
    "RoundhouseStoreDown": ({f"roundhouse_store_up{{{AT}}}": "1 1 0x30"}, "5m"),
    "RoundhouseLeaseOld": ({f"roundhouse_lease_renewed_timestamp_seconds{{{AT}}}": "30x30"}, "5m"),
    "RoundhouseWebhooksGivenUp": (
        {f'roundhouse_webhook_deliveries_total{{{AT},outcome="given_up"}}': "0 0 1x30"},
        "5m",
    ),
}
QUIET = {
    f'up{{job="roundhouse",{AT}}}': "1x30",
    f'roundhouse_worker_ready{{{MODEL},worker="m-0"}}': "0x30",  # no turn wants it
    f"roundhouse_slots_wanted{{{MODEL}}}": "0x30",
    f"roundhouse_oldest_ready_turn_seconds{{{AT}}}": "5x30",
    f'roundhouse_worker_restarts_total{{{MODEL},worker="m-0",reason="asked"}}': "0+1x30",
    f'roundhouse_turns_total{{{MODEL},source="job",outcome="failed",reason="deadline"}}': "0+1x30",
    f'roundhouse_turns_total{{{MODEL},source="job",outcome="completed",reason=""}}': "0+99x30",
    f"roundhouse_store_up{{{AT}}}": "1x30",
    f"roundhouse_lease_renewed_timestamp_seconds{{{AT}}}": "0x30",  # a node alone has none
    f'roundhouse_webhook_deliveries_total{{{AT},outcome="waiting"}}': "0+1x30",
}


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """``promtool test rules``: series that raise it, and silence for healthy ones."""
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == list(RAISED)
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)

    def case(series: dict[str, str], expected: dict[str, int], at: str) -> dict[str, Any]:
        counted = [
            {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)', "eval_time": at,
             "exp_samples": [{"labels": "{}", "value": count}]}
            for name, count in expected.items()
        ]  # fmt: skip
        given = [{"series": name, "values": values} for name, values in series.items()]
        return {"interval": "1m", "input_series": given, "promql_expr_test": counted}

    cases = [case(series, {name: 1}, at) for name, (series, at) in RAISED.items()]
    cases += [case(QUIET, dict.fromkeys(RAISED, 0), f"{minute}m") for minute in (5, 12, 20)]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": cases}))
    checked("check", "rules", tmp_path / "alerts.yaml")
    assert "SUCCESS" in checked("test", "rules", file)
