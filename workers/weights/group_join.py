"""Brings engines into a trainer's group."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio

from transport.control import EngineControl
from transport.errors import EngineError
from workers.errors import NoWorkerReady
from workers.outcome import FailureReason
from workers.policy.weights import Backend
from workers.spec import WorkerId
from workers.supervised import SupervisedWorker
from workers.weights.group import Group, GroupState, Member, place_members
from workers.weights.receiver import ReceiverFiles, ask

TELL_LIMIT_S: Final = 60.0  # an engine in the middle of a long step answers after it
JOIN_POLL_S: Final = 0.05


async def join_engines(
    group: Group, workers: Sequence[SupervisedWorker], files: ReceiverFiles, start_soon: Callable[..., None]
) -> Mapping[WorkerId, Member]:
    """Send engines their ranks; return when all have them. Whether they have joined shows later.

    Raises:
        NoWorkerReady: no worker's engine is ready.
        EngineError: one cannot be reached.
    """
    if not workers:
        raise NoWorkerReady("no engine answers that could join")
    sizes: dict[WorkerId, tuple[int, int]] = {}
    with anyio.fail_after(TELL_LIMIT_S):
        for worker in workers:
            sizes[worker.spec.id] = (worker.now.incarnation, await EngineControl(worker.endpoint).world_size())
    group.members = place_members(sizes)
    if group.request.backend is Backend.NCCL:
        await _join_natively(group, workers, start_soon)
        return group.members
    try:
        with anyio.fail_after(TELL_LIMIT_S):
            async with anyio.create_task_group() as tasks:
                for worker in workers:
                    tasks.start_soon(_tell, group, worker, files.clear(worker.spec.id))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return group.members


async def _tell(group: Group, worker: SupervisedWorker, file: str) -> None:
    request, member = group.request, group.members[worker.spec.id]
    place = {
        "address": request.address,
        "port": request.port,
        "world_size": group.world_size,
        "timeout_s": request.timeout_s,
        "key": group.key,
    }
    control = EngineControl(worker.endpoint)
    await ask(control, "join", {"place": place, "first_rank": member.first_rank, "file": file})


async def _join_natively(group: Group, workers: Sequence[SupervisedWorker], start_soon: Callable[..., None]) -> None:
    """Let each engine's call wait for the trainer; return when all calls have been sent."""
    sent = {worker.spec.id: anyio.Event() for worker in workers}
    left = set(sent)

    async def call(worker: SupervisedWorker) -> None:
        request, member = group.request, group.members[worker.spec.id]
        info = {
            "master_address": request.address,
            "master_port": request.port,
            "rank_offset": member.first_rank,
            "world_size": group.world_size,
        }
        try:
            with anyio.fail_after(request.timeout_s):
                control = EngineControl(worker.endpoint)
                await control.post("/init_weight_transfer_engine", {"init_info": info}, sent[worker.spec.id].set)
        except (TimeoutError, EngineError) as error:
            group.fail(f"{worker.spec.id} has not joined: {str(error) or f'not within {request.timeout_s:g} s'}")
            if (
                isinstance(error, TimeoutError)
                and worker.now.incarnation == member.incarnation
                and worker.now.is_serving
            ):
                # Its worker processes may wait in the collective without end.
                because = "it waits for a trainer that has not come"
                worker.break_engine(FailureReason.ENGINE_UNREACHABLE, because, {})
        finally:
            sent[worker.spec.id].set()
        left.discard(worker.spec.id)
        if not left and group.state is GroupState.JOINING:
            group.state = GroupState.READY

    for worker in workers:
        start_soon(call, worker)
    for event in sent.values():
        await event.wait()


async def watch_joining(group: Group, files: ReceiverFiles) -> None:
    """Wait until all engines have joined, or fail the group with those that have not."""
    if group.request.backend is Backend.NCCL:
        return
    missing: dict[WorkerId, str] = {}
    with anyio.move_on_after(group.request.timeout_s):
        while group.state is GroupState.JOINING:
            stands = {name: _how_joined(group, files, name, member.size) for name, member in group.members.items()}
            missing = {name: standing for name, standing in stands.items() if standing != "ready"}
            if not missing:
                group.state = GroupState.READY
                return
            for name, standing in missing.items():
                if standing != "joining":
                    group.fail(f"{name} has not joined: {standing}")
            await anyio.sleep(JOIN_POLL_S)
    group.fail(f"not joined within {group.request.timeout_s:g} s: {', '.join(missing)}, or the trainer")


def _how_joined(group: Group, files: ReceiverFiles, worker: WorkerId, size: int) -> str:
    """Return the state of an engine's processes: the worst of them."""
    try:
        states = files.read(worker, size)
    except EngineError as error:
        return str(error)
    standings = [state.error or state.group if state.key == group.key else "joining" for state in states]
    return next((each for each in standings if each != "ready"), "ready")
