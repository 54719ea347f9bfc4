"""Plays one node's part of a vLLM over several nodes: its processes, their names, its rendezvous, its device.

The leader serves as ``vllm_engine`` does, once all others have connected; the others serve nothing. Each part holds a
lock on its device, and notes in ``--record`` when another part has it. Its worker is a process of its own, with vLLM's
name for it.
"""

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import vllm_engine  # type: ignore[import-not-found]

WORKER = (
    "import os, signal, sys, time\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(20000)); time.sleep(0.01)"
)


def take_device(folder: Path, record: Path) -> int:
    """Lock this node's device, or note that another part has it."""
    device = os.open(folder / "device", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with record.open("a") as file:
            file.write(f"{os.getpid()}: another part has the device of {folder}\n")
    os.set_inheritable(device, True)
    return device


def meet(options: argparse.Namespace) -> list[socket.socket]:
    """Connect all members, as a process group does; the connections stay open."""
    if options.node_rank:
        while True:
            try:
                return [socket.create_connection((options.master_addr, options.master_port))]
            except ConnectionRefusedError:
                time.sleep(0.02)
    with socket.create_server((options.master_addr, options.master_port)) as server:
        return [server.accept()[0] for _ in range(options.nnodes - 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--device-folder", type=Path, required=True)
    parser.add_argument("--record-doubles", type=Path, required=True)
    options, rest = parser.parse_known_args()
    device = take_device(options.device_folder, options.record_doubles)
    title = f"{os.environ.get('VLLM_PROCESS_NAME_PREFIX', 'm')}::Worker_TP{options.node_rank}"
    worker = subprocess.Popen(
        [title, "-I", "-S", "-c", WORKER, str(os.getpid())], executable=sys.executable, pass_fds=[device]
    )

    def fall() -> None:  # vLLM ends some time after its worker
        worker.wait()
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=fall, daemon=True).start()
    links = meet(options)
    if options.node_rank:
        signal.pause()
    _serve, model, *flags = rest
    sys.argv = [sys.argv[0], "--model", model, *flags]
    vllm_engine.main()
    del links


if __name__ == "__main__":
    main()
