"""Keeps a cluster under Ray as large as its work needs: reads the nodes' metrics, and adds or drains nodes."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

import anyio
import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from service.cluster.order import ClusterOrder
from service.cluster.ray_place import RayPlace
from service.cluster.scaling import ClusterLoad, Scale
from service.config.load import load_config
from service.errors import StoreUnavailable
from service.store.seats import read_seats

POLL_S: Final = 5.0
ASK_S: Final = 5.0
OLDEST: Final = "roundhouse_oldest_ready_turn_seconds"
WANTED: Final = "roundhouse_slots_wanted"
logger = logging.getLogger(__name__)


def keep_scaling(folder: Path, order: ClusterOrder) -> None:
    """Scale until the process ends. A node that does not answer is not counted; without any, nothing is changed."""
    os.environ.update(order.environment)
    config = load_config(Path(order.config), {"host": order.host, "store_url": order.store_url})
    key, models = config.server.api_keys[0], config.models.keys()
    place, scale = RayPlace(folder, order), Scale(order.most - order.nodes)
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=ASK_S, trust_env=False) as client:
        while True:
            added = place.added()
            load = _load(client, order.nodes + len(added), _urls(order), models)
            change = 0 if load is None else scale.step(time.monotonic(), len(added), load)
            if change > 0:
                logger.warning("node %s is added: turns wait for slots", place.add())
            elif change < 0:
                logger.warning("node %s is not needed: %s", added[-1], place.drain(added[-1]))
            time.sleep(POLL_S)


def _load(client: httpx.Client, nodes: int, urls: Sequence[str], models: AbstractSet[str]) -> ClusterLoad | None:
    """Return the load that the nodes report; None while none of them answers."""
    answers = {url: answer for url in urls if (answer := _ask(client, f"{url}/metrics")) is not None}
    status = next((answer for url in answers if (answer := _ask(client, f"{url}/v1/status")) is not None), None)
    if status is None:
        return None
    samples = [sample for answer in answers.values() for sample in _samples(answer.text)]
    return ClusterLoad(
        oldest_s=max((sample.value for sample in samples if sample.name == OLDEST), default=0.0),
        wanted=sum(sample.value for sample in samples if sample.name == WANTED),
        is_queued=not models.isdisjoint(status.json()["unclaimed"]),
        is_pending=len(answers) < nodes,
    )


def _samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def _urls(order: ClusterOrder) -> list[str]:
    try:
        seats = anyio.run(read_seats, order.store_url)
        return [seat.url for seat in seats if seat.id.startswith(f"{order.mark}-")]
    except StoreUnavailable as error:
        logger.warning("%s", error)
        return []


def _ask(client: httpx.Client, url: str) -> httpx.Response | None:
    try:
        answer = client.get(url)
    except httpx.TransportError:
        return None
    return answer if answer.is_success else None
