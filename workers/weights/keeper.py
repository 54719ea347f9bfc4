"""Has one engine write the weights that all have received, while all go on with their work."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio

from transport.control import EngineControl
from transport.errors import EngineError
from workers.log_context import line_about, of_worker
from workers.supervised import SupervisedWorker
from workers.weights.receiver import ReceiverFiles, ask

KEEP_POLL_S: Final = 0.2
DROP_LIMIT_S: Final = 30.0
logger = logging.getLogger(__name__)


async def keep_weights(
    engines: Sequence[tuple[SupervisedWorker, int]],
    files: ReceiverFiles,
    update: int,
    folder: Path | None,
    limit_s: float,
) -> bool:
    """Return whether one of the engines has written them to ``folder``; then all forget what they had received.

    ``update`` is the number of the one that brought them: what a later one has brought is not touched.

    Engines are given with the incarnation that has them. One that dies meanwhile is followed by the next.
    """
    is_kept = False
    for worker, incarnation in engines if folder is not None else ():
        if worker.incarnation == incarnation and not is_kept:
            try:
                with anyio.fail_after(limit_s):
                    await _write(worker, files, update, str(folder))
                is_kept = True
            except (TimeoutError, EngineError) as error:
                line, said = line_about(of_worker(worker.spec.id, incarnation)), str(error) or "not in time"
                logger.warning("worker %s: weights could not be kept: %s", worker.spec.id, said, extra=line)
    for worker, incarnation in engines:
        if worker.incarnation == incarnation and worker.is_serving:
            try:
                with anyio.fail_after(DROP_LIMIT_S):
                    await ask(EngineControl(worker.endpoint), "forget", {"update": update})
            except (TimeoutError, EngineError) as error:
                line, said = line_about(of_worker(worker.spec.id, incarnation)), str(error) or "no answer"
                logger.warning("worker %s: weights are still in its memory: %s", worker.spec.id, said, extra=line)
    return is_kept


async def _write(worker: SupervisedWorker, files: ReceiverFiles, update: int, folder: str) -> None:
    state, *_ = await ask(EngineControl(worker.endpoint), "keep", {"folder": folder, "update": update})
    while state.stage != "kept":
        if (state.stage, state.update) != ("keeping", update) or not worker.is_serving:
            raise EngineError(state.error or state.stage)
        await anyio.sleep(KEEP_POLL_S)
        (state,) = files.read(worker.spec.id, 1)
