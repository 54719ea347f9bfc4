"""A service's configuration, changed in place and reloaded."""

import signal
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import yaml

from tests.harness.service import Document, Service
from tests.harness.waiting import wait_for


def rewrite(service: Service, change: Callable[[Document], object]) -> None:
    """Change the file without a reload."""
    document = yaml.safe_load(service.config.read_text())
    change(document)
    service.config.write_text(yaml.safe_dump(document))


def post_reload(service: Service, change: Callable[[Document], object] | None = None) -> httpx.Response:
    """Change the file, and reload it over HTTP."""
    if change is not None:
        rewrite(service, change)
    return service.http.post("/v1/config/reload")


def reload(service: Service, change: Callable[[Document], object] | None = None) -> Document:
    """Return the changes of a reload, which must succeed."""
    answer = post_reload(service, change)
    assert answer.status_code == 200, answer.text
    document: Document = answer.json()
    return {key: value for key, value in document.items() if value}


def hang_up(service: Service) -> None:
    """Reload the file by a signal."""
    assert service.process is not None
    service.process.send_signal(signal.SIGHUP)


def wait_settled(service: Service) -> None:
    """Return when all workers are as the configuration wants them."""
    wait_for(lambda: not service.get("/v1/status")["configuration"]["under_way"], "the workers are as wanted")


def engines(service: Service) -> dict[str, tuple[int, float]]:
    """Return the processes of all workers' engines: the first descendant of each, with its start time."""
    found: dict[str, tuple[int, float]] = {}
    for worker in service.get("/v1/workers")["workers"]:
        if worker["pid"] is not None:
            found[worker["id"]] = worker["pid"], psutil.Process(worker["pid"]).create_time()
    return found


def models_of(document: Document) -> dict[str, Any]:
    """Return the models of a configuration, to be changed."""
    models: dict[str, Any] = document["models"]
    return models
