"""Connections between the guardians of one span, which live and end together.

The guardian of the first member listens, those of the others connect to it. Each proves that it knows the key of the
generation, and then tells twice a second how its member does, one JSON object a line. A connection that ends, or the
word of a member that has ended, ends all other members at once. Silence alone ends none: a machine may stand still.
A guardian ends its own member if a peer is silent and the lease of its own node is over as well, since other nodes may
then have taken its place.

Only the standard library: a guardian imports it, as a file.
"""

import contextlib
import hashlib
import hmac
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

BEAT_S = 0.5  # between two reports of a member
FIRST_BEAT_S = 0.1  # the same while its engine is young: its processes have just come
YOUNG_S = 5.0
SILENCE_S = 5.0  # a peer without a report for this long is silent
GRACE_S = 0.3  # for an engine to end by itself after one of its processes has died
HELLO_LIMIT_S = 5.0  # for a connection to prove that it knows the key
CONNECT_S = 2.0  # for one try to connect, in which nothing else is looked at
STRANGERS = 16  # connections at once that have not proved it
NONCE_BYTES = 16
HELLO_BYTES = 1 + NONCE_BYTES + 32
LINE_BYTES = 4096
OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)  # signals that no engine sends to itself
TITLE = "::"  # in the names of the processes without which vLLM cannot go on: MODEL::EngineCore, MODEL::Worker_TP1

Report = Callable[..., None]


class Ended(Exception):
    """The span is over: ``text`` says why, ``rank`` names the member, ``is_outside`` whether no engine caused it."""

    def __init__(self, rank: int, text: str, *, is_outside: bool) -> None:
        super().__init__(text)
        self.rank, self.text, self.is_outside = rank, text, is_outside


class EngineTree:
    """The processes of one engine: its session, read from /proc."""

    def __init__(self, leader_pid: int) -> None:
        self._leader = leader_pid
        self._titled: dict[int, tuple[int, str]] = {}  # by pidfd: processes without which the engine cannot go on

    def measure(self) -> dict[str, object]:
        """Return the CPU seconds of all processes together, and the names of stopped ones."""
        ticks, stopped = 0, []
        for entry in os.listdir("/proc"):  # noqa: PTH208 - twice a second
            if not entry.isdecimal():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
                    name, fields = file.read().rpartition(")")[::2]
                words = fields.split()
                if int(words[3]) != self._leader:
                    continue
                ticks += int(words[11]) + int(words[12])
                if words[0] in "Tt":
                    stopped.append(f"{name.partition('(')[2]} ({entry})")
                self._note(int(entry))
        return {"cpu_s": ticks / os.sysconf("SC_CLK_TCK"), "stopped": stopped[:8]}

    def _note(self, pid: int) -> None:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            title = file.read(256).partition(b"\0")[0].decode("utf-8", "replace").strip()
        if pid != self._leader and TITLE in title and " " not in title:
            known = next((descriptor for descriptor, (titled, _) in self._titled.items() if titled == pid), None)
            self._titled[os.pidfd_open(pid) if known is None else known] = pid, title  # a title may become longer

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a process dies without which the engine cannot go on."""
        return list(self._titled)

    def take_dead(self, descriptor: int) -> str:
        """Return the name of a process that has died."""
        pid, title = self._titled.pop(descriptor)
        os.close(descriptor)
        return f"{title} ({pid})"


class Peer:
    """One established connection."""

    def __init__(self, link: socket.socket, rank: int) -> None:
        link.setblocking(False)
        self.link, self.rank, self.heard_at = link, rank, time.monotonic()
        self._read, self._unsent = b"", b""

    def send(self, message: dict[str, object]) -> None:
        """Send a message, or drop it while an earlier one is unsent: the peer does not read."""
        if not self._unsent:
            self._unsent = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self.link.send(self._unsent) :]

    def take(self) -> Iterator[dict[str, object]]:
        """Yield what has come.

        Raises:
            OSError: the connection has ended, or carries something else.
        """
        try:
            data = self.link.recv(LINE_BYTES)
        except BlockingIOError:
            return
        *lines, self._read = (self._read + data).split(b"\n")
        if not data or len(self._read) > LINE_BYTES:
            raise ConnectionResetError
        self.heard_at = time.monotonic()
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                raise ConnectionResetError from None
            if not isinstance(message, dict):
                raise ConnectionResetError
            yield message


class Lifelines:
    """The connections of one member; ``end_fd`` becomes readable when its engine has to end.

    ``plan`` has ``rank``, ``size``, ``address``, ``port``, ``key`` (hexadecimal), ``join_s`` in which all members must
    have connected, and ``lease_s``, for which one renewal of the node's lease counts.

    Raises:
        OSError: the first member cannot listen there.
    """

    def __init__(self, plan: dict[str, object], report: Report) -> None:
        self._rank, self._size = int(str(plan["rank"])), int(str(plan["size"]))
        self._at = str(plan["address"]), int(str(plan["port"]))
        self._key = bytes.fromhex(str(plan["key"]))
        self._lease_s = float(str(plan["lease_s"]))
        self._join_until = time.monotonic() + float(str(plan["join_s"]))
        self._report = report
        self._peers: dict[int, Peer] = {}
        self._strangers: dict[int, tuple[socket.socket, bytes, float]] = {}
        self._dead: tuple[float, str] | None = None  # a process without which the engine cannot go on
        self._renewed_at = self._alive_at = time.monotonic()
        self._facts: dict[str, object] = {}  # as they were sent last
        self._farewell: dict[str, object] | None = None
        self.over: Ended | None = None
        self.end_fd, self._end_fd = os.pipe()
        self._wake_fd, self._woken_fd = os.pipe()
        family = socket.AF_INET6 if ":" in self._at[0] else socket.AF_INET
        is_first = self._rank == 0
        self._listening = socket.create_server(self._at, family=family, backlog=STRANGERS) if is_first else None
        if self._listening is not None:
            self._listening.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, engine_pid: int) -> None:
        """Begin; the engine runs."""
        self._tree, self._alive_since = EngineTree(engine_pid), time.monotonic()
        self._thread.start()

    def renew(self, *, has_lease: bool) -> None:
        """Restart the time that the node's service may be silent, and with ``has_lease`` its lease."""
        before, self._alive_at = self._alive_at, time.monotonic()
        if has_lease and self._alive_at - before < SILENCE_S:  # after a pause the word may be old
            self._renewed_at = self._alive_at

    def part(self, status: int | None, *, is_stopped: bool) -> dict[str, object]:
        """Let the other members end; return which one ended first, and why, if it was another.

        ``status`` is the engine's, negative for a signal; None if it still runs.
        """
        over, is_outside = self.over, is_stopped or status is None or -status in OUTSIDE
        text = "its node has stopped it" if is_stopped else "its service is gone"
        if status is not None and not is_stopped:
            text = f"its engine ended with {'signal' if status < 0 else 'status'} {abs(status)}"
            text = text if self._dead is None else f"{self._dead[1]} died, and {text}"
        if over is None:
            self._farewell = _end(self._rank, text, is_outside=is_outside)
        os.write(self._woken_fd, b"x")
        self._thread.join(BEAT_S)
        over = self.over  # a peer may have ended at the same moment
        return {} if over is None else {"member": over.rank, "because": over.text, "outside": over.is_outside}

    # In its thread

    def _run(self) -> None:
        try:
            self._serve()
        except Ended as over:
            self.over = over
        except Exception as error:  # noqa: BLE001 - a span without lifelines must not run
            self.over = Ended(self._rank, f"its lifelines failed: {error!r}", is_outside=True)
        if self.over is not None:
            self._say(_end(self.over.rank, self.over.text, is_outside=self.over.is_outside))
        os.close(self._end_fd)  # now the guardian ends its tree
        for peer in self._peers.values():
            peer.link.close()

    def _serve(self) -> None:
        beat_at = 0.0
        while self._farewell is None:
            now = time.monotonic()
            self._judge(now)
            if now >= beat_at:
                beat_at = now + (BEAT_S if now - self._alive_since > YOUNG_S else FIRST_BEAT_S)
                self._beat(now)
            look_at = beat_at if self._dead is None else min(beat_at, self._dead[0] + GRACE_S)
            poller = select.poll()
            descriptors = [self._wake_fd, *self._peers, *self._strangers, *self._tree.descriptors]
            for descriptor in descriptors + ([self._listening.fileno()] if self._listening is not None else []):
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll(max(0.0, look_at - time.monotonic()) * 1000):
                self._handle(descriptor)
        self._say(self._farewell)

    def _handle(self, descriptor: int) -> None:
        if self._listening is not None and descriptor == self._listening.fileno():
            self._greet()
        elif descriptor in self._strangers:
            self._admit(descriptor)
        elif descriptor in self._peers:
            self._hear(self._peers[descriptor])
        elif descriptor in self._tree.descriptors:
            self._dead = self._dead or (time.monotonic(), self._tree.take_dead(descriptor))
            facts = {**self._facts, "died": self._dead[1]}
            self._say(facts)  # before the others' engines notice it
            if _has_room(2):
                self._report("member", **facts, rank=self._rank)

    def _beat(self, now: float) -> None:
        if self._rank != 0 and not self._peers:
            self._connect()
        silent = [peer for peer in self._peers.values() if now - peer.heard_at > SILENCE_S]
        if silent and now - self._renewed_at > self._lease_s:
            text = f"member {silent[0].rank} is silent, and this node's lease is over"
            raise Ended(silent[0].rank, text, is_outside=True)
        self._facts = {**self._tree.measure(), "service_s": round(now - self._alive_at, 1)}
        self._say(self._facts if self._dead is None else {**self._facts, "died": self._dead[1]})

    def _judge(self, now: float) -> None:
        if self._dead is not None and now - self._dead[0] >= GRACE_S:
            raise Ended(self._rank, f"{self._dead[1]} died", is_outside=False)
        wanted = self._size - 1 if self._rank == 0 else 1
        if len(self._peers) < wanted and now > self._join_until:
            there = {peer.rank for peer in self._peers.values()}
            missing = next(rank for rank in range(self._size) if rank != self._rank and rank not in there)
            raise Ended(missing, f"member {missing} has not connected", is_outside=True)
        for descriptor, (link, _, until) in list(self._strangers.items()):
            if now > until:
                del self._strangers[descriptor]
                link.close()

    def _say(self, message: dict[str, object]) -> None:
        for peer in list(self._peers.values()):
            try:
                peer.send(message)
            except OSError:
                self._lose(peer)

    def _hear(self, peer: Peer) -> None:
        try:
            messages = list(peer.take())
        except OSError:
            self._lose(peer)
            return
        for message in messages:
            if "end" in message:
                is_outside = bool(message.get("outside"))
                raise Ended(_rank_of(message, peer.rank), str(message["end"])[:512], is_outside=is_outside)
            if _has_room(2):  # the service may not read
                self._report("member", **{**message, "rank": peer.rank})

    def _lose(self, peer: Peer) -> None:
        if self._farewell is None and self.over is None:
            raise Ended(peer.rank, "its guardian is gone", is_outside=True)

    # Connections

    def _proof(self, role: bytes, *parts: bytes) -> bytes:
        return hmac.digest(self._key, role + b"".join(parts), hashlib.sha256)

    def _greet(self) -> None:
        assert self._listening is not None  # noqa: S101 - it has just become readable
        with contextlib.suppress(OSError):
            link, _ = self._listening.accept()
            if len(self._strangers) >= STRANGERS:  # the oldest has had its time
                self._strangers.pop(next(iter(self._strangers)))[0].close()
            link.setblocking(False)
            nonce = os.urandom(NONCE_BYTES)
            link.send(nonce)
            self._strangers[link.fileno()] = link, nonce, time.monotonic() + HELLO_LIMIT_S

    def _admit(self, descriptor: int) -> None:
        """Take a connection whose other end knows the key and is a member that is not there yet."""
        link, nonce, _ = self._strangers.pop(descriptor)
        try:
            hello = link.recv(HELLO_BYTES)
            rank, theirs, proof = hello[:1], hello[1 : 1 + NONCE_BYTES], hello[1 + NONCE_BYTES :]
            there = {peer.rank for peer in self._peers.values()}
            is_due = bool(rank) and 0 < rank[0] < self._size and rank[0] not in there
            if not (is_due and hmac.compare_digest(proof, self._proof(b"F", nonce, theirs, rank))):
                link.close()
                return
            link.send(self._proof(b"L", theirs, nonce))
        except OSError:
            link.close()
            return
        self._peers[descriptor] = Peer(link, rank[0])

    def _connect(self) -> None:
        """Connect to the first member, which may not listen yet."""
        link, until = None, time.monotonic() + CONNECT_S
        try:
            link = socket.create_connection(self._at, timeout=CONNECT_S)
            nonce, ours, rank = _read(link, NONCE_BYTES, until), os.urandom(NONCE_BYTES), bytes([self._rank])
            link.sendall(rank + ours + self._proof(b"F", nonce, ours, rank))
            is_known = hmac.compare_digest(_read(link, 32, until), self._proof(b"L", ours, nonce))
        except OSError:
            is_known = False
        if link is not None and is_known:
            self._peers[link.fileno()] = Peer(link, 0)
        elif link is not None:
            link.close()


def _end(rank: int, text: str, *, is_outside: bool) -> dict[str, object]:
    return {"end": text, "rank": rank, "outside": is_outside}


def _read(link: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        link.settimeout(max(0.01, until - time.monotonic()))
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def _rank_of(message: dict[str, object], default: int) -> int:
    rank = message.get("rank")
    return rank if isinstance(rank, int) else default


def _has_room(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(0))
