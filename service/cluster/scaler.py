"""Keeps a cluster under Ray as large as its work needs: reads the nodes' metrics, and adds or drains nodes."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import httpx

from service.cluster.order import ClusterOrder
from service.cluster.ray_place import RayPlace
from service.cluster.scaling import Scale, samples_of
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
    key = load_config(Path(order.config), {"host": order.host}).server.api_keys[0]
    place, scale = RayPlace(folder, order), Scale(order.most - order.nodes)
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=ASK_S, trust_env=False) as client:
        while True:
            urls = _urls(order)
            answers = [text for url in urls if (text := _metrics(client, url)) is not None]
            if answers:
                _step(place, scale, order, answers)
            time.sleep(POLL_S)


def _step(place: RayPlace, scale: Scale, order: ClusterOrder, answers: Sequence[str]) -> None:
    samples = [samples_of(text) for text in answers]
    oldest_s = max((value for each in samples for value in each.get(OLDEST, ())), default=0.0)
    wanted = sum(value for each in samples for value in each.get(WANTED, ()))
    added = place.added()
    is_pending = len(answers) < order.nodes + len(added)
    change = scale.step(time.monotonic(), len(added), oldest_s, wanted, is_pending=is_pending)
    if change > 0:
        logger.warning("node %s is added: a turn has waited for %.0f s", place.add(), oldest_s)
    elif change < 0:
        logger.warning("node %s is not needed: %s", added[-1], place.drain(added[-1]))


def _urls(order: ClusterOrder) -> list[str]:
    try:
        return [f"http://{seat.address}:{seat.port}" for seat in anyio.run(read_seats, order.store_url)]
    except StoreUnavailable as error:
        logger.warning("%s", error)
        return []


def _metrics(client: httpx.Client, url: str) -> str | None:
    try:
        answer = client.get(f"{url}/metrics")
    except httpx.TransportError:
        return None
    return answer.text if answer.is_success else None
