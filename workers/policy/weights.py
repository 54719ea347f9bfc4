"""The phases of an update of weights, and their time limits. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from workers.policy.limits import Configured, Seconds


class Backend(StrEnum):
    """The transport of a trainer's tensors."""

    GLOO = "gloo"  # to an extension of ours in the engine: on a CPU, or through memory to any device
    NCCL = "nccl"  # vLLM's own endpoints: from GPU to GPU


class UpdateMode(StrEnum):
    """The treatment of requests in flight when an update begins."""

    KEEP = "keep"  # frozen, then continued with the new weights
    WAIT = "wait"  # the update waits for their ends
    ABORT = "abort"  # ended with their answers so far; a turn of a job is asked again


class UpdatePhase(StrEnum):
    """The steps of an update, in order; each ends for all workers before the next begins."""

    PAUSE = "pause"
    START = "start"
    RECEIVE = "receive"
    FINISH = "finish"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPolicy(Configured):
    """The rules by which a model's workers take new weights; all limits in seconds.

    ``backend`` is how a trainer may broadcast. With ``keep`` the received weights are also written to disk, beside the
    work that goes on, so that a worker which starts later can catch up.
    """

    backend: Backend = Backend.GLOO
    keep: bool = True
    init_s: Seconds = 300.0
    pause_s: Seconds = 60.0
    wait_s: Seconds = 600.0  # for requests in flight to end, if the update waits for them
    start_s: Seconds = 60.0
    receive_s: Seconds = 600.0
    finish_s: Seconds = 300.0
    resume_s: Seconds = 60.0
    keep_s: Seconds = 600.0

    def limit_s(self, phase: UpdatePhase, mode: UpdateMode) -> float:
        """Return the time limit of a phase."""
        if phase is UpdatePhase.PAUSE and mode is UpdateMode.WAIT:
            return self.wait_s + self.pause_s
        limit_s: float = getattr(self, f"{phase}_s")
        return limit_s
