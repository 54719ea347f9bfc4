"""The slots of turns whose tools run: kept, lent and taken back as the core decides."""

import time
from collections.abc import Callable, Sequence
from typing import Self

import anyio

from service.conversations.job.job import TurnKey
from service.scheduling.attempt import RunningAttempt
from service.scheduling.core import events
from workers.fleet import Fleet
from workers.outcome import Cancelled, CancelReason
from workers.requests.slots import Lease

Post = Callable[[events.SlotEvent], None]


class TurnSlot:
    """One turn's slot, held for a block except while it is lent (``workers.requests.request.SlotHolder``)."""

    def __init__(self, key: TurnKey, model: str, attempt: RunningAttempt, lease: Lease, post: Post) -> None:
        self.key = key
        self._model = model
        self._attempt = attempt
        self._lease: Lease | None = lease
        self._post = post
        self._is_settled = anyio.Event()
        self._is_lost = False
        self._tools: Sequence[str] = ()
        self._began_at = self._lent_at = 0.0

    def __repr__(self) -> str:
        return f"<TurnSlot {self.key} lent={self._lease is None}>"

    def __enter__(self) -> Self:
        """Keep the slot for a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the slot back, unless it is lent."""
        if self._lease is not None:
            self._lease.release()

    def begin_tools(self, tools: Sequence[str], context_tokens: int) -> None:
        """Begin a run of tools; the turn asks nothing of its engine until they end."""
        self._tools, self._began_at = tools, time.monotonic()
        self._post(events.ToolsBegan(key=self.key, model=self._model, tools=tools, context_tokens=context_tokens))

    async def end_tools(self) -> Cancelled | None:
        """Return when the engine may be asked again; with an outcome if the engine is gone."""
        seconds = time.monotonic() - self._began_at
        self._post(events.ToolsEnded(key=self.key, tools=self._tools, seconds=seconds))
        if self._lease is None:
            await self._is_settled.wait()
        return Cancelled(reason=CancelReason.SLOT_LOST) if self._is_lost else None

    def lend(self) -> None:
        """Let other turns use the slot."""
        if self._lease is not None:
            self._lease.release()
            self._lease, self._lent_at, self._is_settled = None, time.monotonic(), anyio.Event()

    def leave_for_good(self) -> None:
        """Let other turns use the slot for good: the answer is complete."""
        self._post(events.AnswerWhole(key=self.key))

    def take_back(self, lease: Lease) -> None:
        """Go on with another slot of the same worker."""
        self._lease = lease
        self._attempt.lent_s += time.monotonic() - self._lent_at
        self._is_settled.set()

    def lose(self) -> None:
        """End the turn's attempt: its slot is lost."""
        self._is_lost = True
        self._is_settled.set()


class LentSlots:
    """The slots of jobs' turns in flight; owned by ``JobTurns``. ``post`` reports to the core."""

    def __init__(self, fleet: Fleet, post: Post) -> None:
        self._fleet = fleet
        self._post = post
        self._slots: dict[TurnKey, TurnSlot] = {}

    def __repr__(self) -> str:
        return f"<LentSlots of {len(self._slots)} turns>"

    def hold(self, key: TurnKey, model: str, attempt: RunningAttempt, lease: Lease) -> TurnSlot:
        """Return the slot of a turn that begins."""
        slot = self._slots[key] = TurnSlot(key, model, attempt, lease, self._post)
        return slot

    def forget(self, key: TurnKey) -> None:
        """Forget the slot of a turn that has ended."""
        self._slots.pop(key, None)

    def act(self, action: events.OfSlot, start_soon: Callable[..., None]) -> None:
        """Carry out one action; ignore a turn that has just ended."""
        slot = self._slots.get(action.key)
        match action:
            case _ if slot is None:
                pass
            case events.LendSlotLater():
                start_soon(self._end_keep, action)
            case events.LendSlot():
                slot.lend()
            case events.TakeBackSlot():
                worker = self._fleet.get(action.worker)
                if worker is None:
                    raise RuntimeError(f"{action} cannot be carried out")
                slot.take_back(worker.lease_nowait(1))
            case events.LoseSlot():
                slot.lose()

    async def _end_keep(self, hold: events.LendSlotLater) -> None:
        await anyio.sleep(hold.seconds)
        self._post(events.LendingDue(key=hold.key, number=hold.number))
