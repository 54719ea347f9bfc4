"""The costs of turns: the engine time they take, and the charges to their keys. Pure.

Source: specification, "Fair shares".
"""

from service.scheduling.core import events
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.live import LiveConversation
from service.scheduling.core.program_slots import ProgramSlots
from service.scheduling.core.queue.affinity import SpeedEstimates
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.trials import Trials


class Costs:
    """The speeds of models, the programs on their slots, and the charges of keys; written by the core alone."""

    def __init__(self, ready: ReadyPool, in_flight: InFlightPool, trials: Trials) -> None:
        self._ready = ready
        self._in_flight = in_flight
        self._trials = trials
        self.speeds = SpeedEstimates()
        self.programs = ProgramSlots(in_flight, self.speeds, ready.waiting)

    def __repr__(self) -> str:
        return f"<Costs {self.programs!r}>"

    def settle(self, spent: events.TurnSpent) -> None:
        """Correct the charge that a turn's key got at the start; record the time of a trial, which other turns waited.

        Slot time is charged if the engine did not report all tokens, or if the turn had several slots. Otherwise
        clients who leave before the end would use slots for free.
        """
        worker = self._in_flight.worker_of(spent.key)
        if worker is not None and worker.trial == spent.key:
            self._trials.note_trial(worker.model, spent.seconds)
        model = self._ready.fair.model_of(spent.key) if self._ready.fair is not None else None
        if self._ready.fair is None or model is None:
            return
        weight = self.speeds.weigh(model, spent.fresh_tokens, spent.answer_tokens)
        slots = self._in_flight.slots_of(spent.key)
        if spent.is_told and slots == 1:
            self.speeds.learn_rate(model, weight, spent.seconds)
        else:
            weight = max(weight, self.speeds.tokens_in(model, slots * spent.seconds))
        self._ready.fair.settle(spent.key, weight)

    def _charge_idle(self, owner: str | None, model: str, slot_s: float) -> None:
        """Charge a key for ``slot_s`` slot seconds that were idle for its turn or program."""
        if self._ready.fair is not None:
            weight = self.speeds.tokens_in(model, slot_s)
            self._ready.fair.times(model).charge(owner, weight)

    def charge_reserved(self, event: events.SlotsReserved) -> None:
        """Charge a key for the slots that were idle until its turn on several slots had all of them."""
        self._charge_idle(event.owner, event.model, event.slot_s)

    def meet_program(self, conversation: LiveConversation, back: events.ProgramReturn) -> None:
        """Handle the next request of a program, whose slot may be held for it."""
        job = conversation.live.job
        idle_s = self.programs.admit_request(job, back)
        if idle_s is not None:
            conversation.has_held_slot = True
            self._charge_idle(job.owner, job.agents[0].model, idle_s)

    def end_hold(self, event: events.HoldOver) -> None:
        """Release a slot that was held for a program in vain, and charge the program's key."""
        stay = self.programs.expire(event.key)
        if stay is not None:
            self._charge_idle(stay.owner, stay.model, event.seconds)

    def note_worker(self, worker: events.WorkerReady) -> None:
        """Record the caches of a ready worker's engine, and its reading speed."""
        self.programs.note_worker(worker)
        if worker.read_s is not None:
            self.speeds.note_pace(worker.model, worker.read_s)
