"""The errors of a worker, as its users see them.

    WorkerError
    ├── SpawnFailed       the engine's program cannot be started at all
    ├── StartFailed       the engine was started and did not get ready
    ├── ModelUnavailable  a model that Roundhouse fetches itself cannot be fetched
    ├── NoSlot            every slot is in use, or the worker is not ready
    ├── InvalidSpec       the specification cannot be launched (a flag of ours given twice, a missing file)
    ├── StopTimedOut      the engine's tree did not die
    ├── DevicesUnreadable a driver or a program that reports GPUs fails
    ├── DeviceSick        a device is sick: nothing is started there
    ├── InvalidInventory  no machine can have these devices
    ├── InvalidLayout     the devices cannot be divided into these lanes
    ├── OffloadCrowded    too much work already waits for other processes
    ├── InvalidTensors    a file of tensors is unreadable or incomplete
    ├── AdapterError      an adapter cannot be loaded or unloaded; nothing has changed
    │   ├── InvalidAdapter    the files are no adapter, or not one for this model
    │   ├── AdapterTaken      its name already means something else
    │   ├── AdapterUnknown    no adapter of that name was loaded
    │   ├── AdaptersFull      the model's engines have no room for another
    │   ├── AdapterRefused    an engine refused it
    │   └── NoEngineReady     no engine of the model is ready to prove it
    ├── WeightsUpdateError      an update of weights cannot begin
    │   ├── UpdateRunning     another update is running
    │   ├── VersionNotNewer   versions only rise
    │   ├── GroupMissing      no group with the trainer, or not with all workers: it must be made again
    │   ├── NoWorkerReady     no engine of the model answers
    │   └── InvalidUpdate     no such checkpoint, or not this model's
    └── ToolError         a failure of tools
        ├── InvalidTool     a definition is unusable, or two tools have one name
        ├── UnknownTool     no tool runner knows a tool of that name
        ├── JournalClosed    a call must not be made: another node has its request by now
        ├── ToolRunFailed   a tool's endpoint or server failed to run a call
        └── ToolsUnreachable  a tool server could not be started or reached at all
    IllegalTransition     (a RuntimeError) a move that is not in the table of states: a defect of ours

The end of a request is a value, not an error: see ``workers.outcome``.
"""


class WorkerError(Exception):
    """A worker failed."""


class OffloadCrowded(WorkerError):
    """Too much work already waits for other processes."""


class SpawnFailed(WorkerError):
    """The engine's program cannot be started at all."""


class StartFailed(WorkerError):
    """The engine was started and did not get ready; ``log_tail`` holds its last lines."""

    def __init__(self, worker_id: str, because: str, log_tail: tuple[str, ...]) -> None:
        lines = "".join(f"\n  | {line}" for line in log_tail)
        super().__init__(f"worker {worker_id}: {because}{lines}")
        self.worker_id = worker_id
        self.because = because
        self.log_tail = log_tail


class ModelUnavailable(WorkerError):
    """A model that Roundhouse fetches itself cannot be fetched."""


class NoSlot(WorkerError):
    """Every slot is in use, or the worker is not ready."""


class InvalidSpec(WorkerError):
    """The specification cannot be launched."""


class DevicesUnreadable(WorkerError):
    """A driver or a program that reports GPUs fails."""


class DeviceSick(WorkerError):
    """A device is sick, so nothing is started there; the text says why."""

    def __init__(self, uuid: str, because: str) -> None:
        super().__init__(f"device {uuid} is left alone: {because}")


class InvalidInventory(WorkerError):
    """No machine can have these devices."""


class InvalidLayout(WorkerError):
    """The devices cannot be divided into these lanes."""


class StopTimedOut(WorkerError):
    """The engine's tree did not die in time."""


class InvalidTensors(WorkerError):
    """A file of tensors is unreadable or incomplete."""


class AdapterError(WorkerError):
    """An adapter cannot be loaded or unloaded; nothing has changed."""


class InvalidAdapter(AdapterError):
    """The files are no adapter, or not one for this model."""


class AdapterTaken(AdapterError):
    """The name already means something else: each version needs its own."""


class AdapterUnknown(AdapterError):
    """No adapter of that name was loaded while the service ran."""


class AdaptersFull(AdapterError):
    """The model's engines were started without room for another."""


class AdapterRefused(AdapterError):
    """An engine refused the adapter."""


class NoEngineReady(AdapterError):
    """No engine of the model is ready to prove the adapter."""


class WeightsUpdateError(WorkerError):
    """An update of weights cannot begin; nothing has changed."""


class UpdateRunning(WeightsUpdateError):
    """Another update is running: one at a time."""


class VersionNotNewer(WeightsUpdateError):
    """The version is not above the present one."""


class GroupMissing(WeightsUpdateError):
    """No group joins the trainer and every worker; it must be made again."""


class NoWorkerReady(WeightsUpdateError):
    """No engine of the model answers."""


class InvalidUpdate(WeightsUpdateError):
    """There is no such checkpoint, or it is not this model's."""


class ToolError(WorkerError):
    """A failure of tools."""


class InvalidTool(ToolError):
    """A definition of a tool is unusable, or two tools have one name."""


class UnknownTool(ToolError):
    """No tool runner knows a tool of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no tool runner knows {name!r}")
        self.name = name


class JournalClosed(ToolError):
    """A call must not be made: another node has its request by now."""


class ToolRunFailed(ToolError):
    """A tool's endpoint or server failed to run a call."""


class ToolsUnreachable(ToolError):
    """A tool server could not be started, or reached, at all."""


class IllegalTransition(RuntimeError):
    """A move that is not in the table of states."""
