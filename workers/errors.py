"""The errors of a worker, as its users see them.

    WorkerError
    ├── SpawnFailed       the engine's program cannot be started at all
    ├── StartFailed       the engine was started and did not get ready
    ├── ModelUnavailable  a model that Roundhouse fetches itself cannot be had
    ├── NoSlot            every slot is in use, or the worker is not ready
    ├── InvalidSpec       the specification cannot be launched (a flag of ours given twice, a file that is not there)
    ├── StopTimedOut      the engine's tree did not die
    ├── DevicesUnreadable a driver or a program that tells of GPUs fails
    ├── DeviceSick        a device is left alone: nothing is started there
    ├── InvalidInventory  there cannot be a machine with these devices
    ├── InvalidLayout     devices cannot be divided into lanes so
    ├── OffloadCrowded    too much waits already to be looked at in other processes
    ├── InvalidTensors    a file of tensors is none, or not whole
    ├── AdapterError      an adapter cannot be loaded or unloaded; nothing has changed
    │   ├── InvalidAdapter    it is none, or not one for this model
    │   ├── AdapterTaken      its name means something else already
    │   ├── AdapterUnknown    no adapter of that name was loaded
    │   ├── AdaptersFull      the model's engines have room for no more
    │   ├── AdapterRefused    an engine would not take it
    │   └── NoEngineReady     no engine of the model answers that could prove it
    ├── WeightsUpdateError      an update of weights cannot begin
    │   ├── UpdateRunning     another one is under way
    │   ├── VersionNotNewer   versions only rise
    │   ├── GroupMissing      no group with the trainer, or not with all workers: it has to be made again
    │   ├── NoWorkerReady     no engine of the model answers
    │   └── InvalidUpdate     what was asked for cannot be: no such checkpoint, or not this model's
    └── ToolError         something about tools
        ├── InvalidTool     a definition is none, or two have one name
        ├── UnknownTool     no tool runner knows a tool of that name
        ├── JournalClosed    a call must not be made: another node has its request by now
        ├── ToolRunFailed   a tool's endpoint or server did not do what it was asked
        └── ToolsUnreachable  a tool server could not be started or reached at all
    IllegalTransition     (a RuntimeError) a move that the table of states does not have: a defect of ours

How a request ends is no error but a value: see ``workers.outcome``.
"""


class WorkerError(Exception):
    """Something about a worker failed."""


class OffloadCrowded(WorkerError):
    """Too much waits already to be looked at in other processes."""


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
    """A model that Roundhouse fetches itself cannot be had."""


class NoSlot(WorkerError):
    """Every slot is in use, or the worker is not ready."""


class InvalidSpec(WorkerError):
    """The specification cannot be launched."""


class DevicesUnreadable(WorkerError):
    """A driver, or a program, that tells of GPUs fails."""


class DeviceSick(WorkerError):
    """A device is left alone; the text says why."""

    def __init__(self, uuid: str, because: str) -> None:
        super().__init__(f"device {uuid} is left alone: {because}")


class InvalidInventory(WorkerError):
    """There cannot be a machine with these devices."""


class InvalidLayout(WorkerError):
    """Devices cannot be divided into lanes so."""


class StopTimedOut(WorkerError):
    """The engine's tree did not die in time."""


class InvalidTensors(WorkerError):
    """A file of tensors is unreadable, or not whole."""


class AdapterError(WorkerError):
    """An adapter cannot be loaded or unloaded; nothing has changed."""


class InvalidAdapter(AdapterError):
    """The named files are no adapter, or not one for this model."""


class AdapterTaken(AdapterError):
    """The name means something else already: one name a version."""


class AdapterUnknown(AdapterError):
    """No adapter of that name was loaded while the service ran."""


class AdaptersFull(AdapterError):
    """The model's engines were started with room for no more."""


class AdapterRefused(AdapterError):
    """An engine would not take it."""


class NoEngineReady(AdapterError):
    """No engine of the model answers that could prove it."""


class WeightsUpdateError(WorkerError):
    """An update of weights cannot begin; nothing has changed."""


class UpdateRunning(WeightsUpdateError):
    """Another update is under way: one at a time."""


class VersionNotNewer(WeightsUpdateError):
    """The version is not above the present one."""


class GroupMissing(WeightsUpdateError):
    """There is no group with the trainer, or not with every worker; it has to be made again."""


class NoWorkerReady(WeightsUpdateError):
    """No engine of the model answers."""


class InvalidUpdate(WeightsUpdateError):
    """The update cannot be."""


class ToolError(WorkerError):
    """Something about tools failed."""


class InvalidTool(ToolError):
    """A definition of a tool is not usable, or two tools have one name."""


class UnknownTool(ToolError):
    """No tool runner knows a tool of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no tool runner knows {name!r}")
        self.name = name


class JournalClosed(ToolError):
    """A call must not be made: another node has its request by now."""


class ToolRunFailed(ToolError):
    """A tool's endpoint or server did not do what it was asked."""


class ToolsUnreachable(ToolError):
    """A tool server could not be started, or reached, at all."""


class IllegalTransition(RuntimeError):
    """A move that the table of states does not have."""
