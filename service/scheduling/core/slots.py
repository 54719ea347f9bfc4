"""Slots: each has a number, a state, a turn and a content, and belongs to one worker. Pure.

A worker is *reserved* for trials or for a turn on several slots. A turn *lends* its slot while its tools run. A slot is
*held* for a program between two of its requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

from service.conversations.job.job import TurnKey
from service.scheduling.core.kv_budgets import KvBudgets, KvNeed


class SlotState(StrEnum):
    """The state of one slot."""

    FREE = "free"  # any turn may take it
    TAKEN = "taken"  # a turn runs on it
    TRIAL = "trial"  # a suspect runs on it, alone on its worker
    LENT = "lent"  # the tools of its turn run: another turn may take it
    HELD = "held"  # reserved for the next request of a program


class SlotMove(StrEnum):
    """A change of a slot's state."""

    TAKE = "take"
    TRY = "try"
    LEND = "lend"
    HOLD = "hold"
    LEAVE = "leave"


MOVES: Final[Mapping[tuple[SlotState, SlotMove], SlotState]] = {
    (SlotState.FREE, SlotMove.TAKE): SlotState.TAKEN,
    (SlotState.FREE, SlotMove.TRY): SlotState.TRIAL,
    (SlotState.FREE, SlotMove.HOLD): SlotState.HELD,
    (SlotState.TAKEN, SlotMove.LEND): SlotState.LENT,
    (SlotState.TAKEN, SlotMove.LEAVE): SlotState.FREE,
    (SlotState.TRIAL, SlotMove.LEAVE): SlotState.FREE,
    (SlotState.LENT, SlotMove.TAKE): SlotState.TAKEN,
    (SlotState.LENT, SlotMove.TRY): SlotState.TRIAL,
    (SlotState.LENT, SlotMove.HOLD): SlotState.HELD,
    (SlotState.LENT, SlotMove.LEAVE): SlotState.FREE,
    (SlotState.HELD, SlotMove.TAKE): SlotState.TAKEN,  # a turn that had lent its slot goes before all others
    (SlotState.HELD, SlotMove.TRY): SlotState.TRIAL,
    (SlotState.HELD, SlotMove.LEAVE): SlotState.FREE,
}
IN_USE: Final = frozenset({SlotState.TAKEN, SlotState.TRIAL, SlotState.HELD})


class Slot:
    """One slot of a worker; ``content`` is the turn whose tokens its cache has, the newest on it."""

    __slots__ = ("content", "number", "state", "turn")

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = SlotState.FREE
        self.turn: TurnKey | None = None
        self.content: TurnKey | None = None

    def __repr__(self) -> str:
        return f"<Slot {self.number} {self.state} {self.turn}>"

    def move(self, move: SlotMove, turn: TurnKey | None = None) -> None:
        """Change the state; KeyError if the table has no such move."""
        self.state = MOVES[self.state, move]
        if move is not SlotMove.LEND:
            self.turn = turn
        if move in (SlotMove.TAKE, SlotMove.TRY):
            self.content = turn


class Reservation(StrEnum):
    """The purpose that a worker is reserved for; other turns do not start there."""

    TRIALS = "trials"  # it tries suspects, one at a time
    WIDE = "wide"  # it is emptied for a turn on several slots or with a large need


class WorkerSlots:
    """The slots of one worker. A worker that is not ready offers none; its turns stay until they end."""

    def __init__(self, name: str, kv: KvBudgets) -> None:
        self.name = name
        self.model = ""
        self.total = 0  # slots that it offers when it is empty
        self.is_ready = False
        self.opening = 0  # number of times it has become ready
        self.is_offering = False  # a turn may start here if a slot is free
        self.reserved: Reservation | None = None
        self.owes = False  # a turn wants back the slot that it lent here, so nothing else starts
        self.trial: TurnKey | None = None  # the suspect that runs here
        self.taken = 0
        self._kv = kv
        self._slots: list[Slot] = []
        self._free: list[Slot] = []  # slots that are free or lent, so a turn may take them
        self._holds: dict[TurnKey, Slot | None] = {}  # by the last request of a program; None if a turn took that slot

    def __repr__(self) -> str:
        return f"<WorkerSlots {self.name} taken={self.taken}/{self.total} {self.reserved or ''}>"

    @property
    def free(self) -> int:
        """The slots that are neither taken nor held; negative if a turn took a held one."""
        return self.total - self.taken - len(self._holds)

    @property
    def held(self) -> int:
        """The number of slots held for the next requests of programs."""
        return len(self._holds)

    def reserve(self, purpose: Reservation | None) -> None:
        """Reserve the worker for a purpose; None lets it take any turn."""
        self.reserved = purpose
        self._note_offering()

    def owe(self, *, owes: bool) -> None:
        """Start nothing else here while a turn wants back the slot that it lent."""
        self.owes = owes
        self._note_offering()

    def _note_offering(self) -> None:
        # After a drain and a resume during a trial the worker is not reserved, and the suspect is still alone on it.
        self.is_offering = self.is_ready and self.reserved is None and self.trial is None and not self.owes

    @property
    def offer(self) -> int:
        """The number of slots that a turn may take now."""
        return len(self._free) if self.is_offering else 0

    def fits(self, slots: int, need: KvNeed) -> bool:
        """Whether enough slots are free, with room for ``need``; ``slots`` above the total means all of them."""
        wanted = 1 if slots == 1 else min(slots, self.total)
        return len(self._free) >= wanted and self._kv.fits(self.name, need)

    def open(self, model: str, total: int) -> None:
        """Offer ``total`` slots; slots in use above that number are dropped when their turns end."""
        self.opening += not self.is_ready
        self.model, self.total, self.is_ready = model, total, True
        self._note_offering()
        in_use = [slot for slot in self._slots if slot.state in IN_USE]
        rest = [slot for slot in self._slots if slot.state not in IN_USE][: max(0, total - len(in_use))]
        numbers = {slot.number for slot in (*in_use, *rest)}
        lacking = max(0, total - len(in_use) - len(rest))
        fresh = [number for number in range(len(numbers) + lacking) if number not in numbers][:lacking]
        free = [*rest, *map(Slot, fresh)]
        self._slots, self._free = [*in_use, *free], []
        for slot in free:
            self._reuse(slot)

    def close(self) -> None:
        """Offer no slots; the engine's caches are gone."""
        self.total, self.is_ready = 0, False
        self.reserve(None)
        for slot in self._holds.values():
            if slot is not None:
                slot.move(SlotMove.LEAVE)
        self._holds.clear()
        self._slots = [slot for slot in self._slots if slot.state in IN_USE]
        self._free = []

    def take(self, key: TurnKey, count: int, *, is_suspect: bool) -> list[Slot]:
        """Put a turn on slots."""
        slots = []
        for _ in range(count):
            slot = self._free.pop() if self._free else self._displace_hold()
            slot.move(SlotMove.TRY if is_suspect else SlotMove.TAKE, key)
            slots.append(slot)
        self.taken += count
        if is_suspect:
            self.trial = key
            self._note_offering()
        return slots

    def take_off(self, key: TurnKey, slots: Sequence[Slot]) -> None:
        """Take a turn off its slots."""
        if self.trial == key:
            self.trial = None
            self._note_offering()
        for slot in slots:
            self.taken -= 1
            slot.move(SlotMove.LEAVE)
            self._reuse(slot)

    def lend(self, slot: Slot) -> None:
        """Let another turn use the slot of one whose tools run."""
        slot.move(SlotMove.LEND)
        self.taken -= 1
        self._reuse(slot)

    @staticmethod
    def forget_lent(key: TurnKey, slot: Slot) -> None:
        """Forget a turn's loan; another turn may use the slot by now."""
        if slot.state is SlotState.LENT and slot.turn == key:
            slot.move(SlotMove.LEAVE)

    def take_back(self, key: TurnKey, own: Slot) -> Slot | None:
        """Give a turn that lent its slot one again: its own if it is free; None if all are taken."""
        if self.taken >= self.total:
            return None
        if self._free:
            slot = own if own in self._free else self._free[-1]
            self._free.remove(slot)
        else:
            slot = self._displace_hold()
        slot.move(SlotMove.TAKE, key)
        self.taken += 1
        return slot

    def hold(self, key: TurnKey) -> bool:
        """Hold a slot for the program whose request has just ended; return False if none is on offer."""
        if self.offer < 1:
            return False
        slot = self._free.pop()
        slot.move(SlotMove.HOLD, key)
        self._holds[key] = slot
        return True

    def end_hold(self, key: TurnKey) -> bool:
        """Release a slot that was held; return whether it was."""
        if key not in self._holds:
            return False
        slot = self._holds.pop(key)
        if slot is not None:
            slot.move(SlotMove.LEAVE)
            self._reuse(slot)
        return True

    def _displace_hold(self) -> Slot:
        """Take a slot that is held; its program gets the next free one."""
        key, slot = next((key, slot) for key, slot in self._holds.items() if slot is not None)
        self._holds[key] = None
        return slot

    def _reuse(self, slot: Slot) -> None:
        """Offer a slot again, hold it for a program whose slot was taken, or drop it if there are too many."""
        waiting = next((key for key, held in self._holds.items() if held is None), None) if self._holds else None
        if len(self._slots) > self.total:
            self._slots.remove(slot)
        elif waiting is not None:
            slot.move(SlotMove.HOLD, waiting)
            self._holds[waiting] = slot
        else:
            self._free.insert(0 if slot.state is SlotState.LENT else len(self._free), slot)

    def check(self, seated: Mapping[TurnKey, Sequence[Slot]]) -> Iterator[str]:
        """Report counts that do not match; ``seated`` holds the slots of each turn on the worker."""
        name, count = self.name, sum(map(len, seated.values()))
        in_use = sum(slot.state in (SlotState.TAKEN, SlotState.TRIAL) for slot in self._slots)
        most = max(self.total, sum(slot.state in IN_USE for slot in self._slots))
        reserved = self._kv.needs(name).keys()
        strays = [
            (key, slot)
            for key, slots in seated.items()
            for slot in slots
            if (slot.turn, slot.content) != (key, key) or slot not in self._slots
        ]
        faults = (
            (not self.taken == in_use == count, f"{name}: turns have {count} slots, {self.taken} are counted"),
            (bool(strays), f"{name}: {strays} are not of their turns"),
            (len(self._slots) != most, f"{name}: {len(self._slots)} slots are there, {self.total} are offered"),
            (any(slot.state in IN_USE for slot in self._free), f"{name}: {self._free} are free"),
            (
                len(self._free) != max(0, self.free),
                f"{name}: {len(self._free)} slots are free, {self.free} are counted",
            ),
            (set(seated) != reserved, f"{name}: {[*seated]} are on slots, {sorted(reserved)} have reserved"),
            (
                self.trial is not None and set(seated) != {self.trial},
                f"{name}: {self.trial} is tried beside {[*seated]}",
            ),
        )
        yield from (fault for is_fault, fault in faults if is_fault)
