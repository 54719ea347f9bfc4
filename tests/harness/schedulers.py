"""Real schedulers on this machine, each for a block: Slurm of three nodes, an sshd, and Ray of two."""

import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.harness.waiting import wait_for
from tests.system import deploy_tools

ROOT = Path(__file__).parents[2]
START_S = 60.0
PLAIN = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "LANG": "C.UTF-8"}
NODES = 3
SLURM = """ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=5,batch_sched_delay=0
JobRequeue=0
NodeName=node[1-3] NodeHostName={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=main Nodes=node[1-3] Default=YES MaxTime=INFINITE State=UP
"""
SSHD = """Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/hostkey
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
"""
SSH = """Host m1
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
"""


class Schedulers:
    """Starts schedulers in a folder; nothing of them is left after their blocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def slurm(self, port: int) -> Iterator[tuple[str, str]]:
        """Run Slurm's daemons, at ports from ``port`` on; yield the folder of its state, and its configuration."""
        folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # munge wants a short name, and one that all enter
        folder.chmod(0o755)
        settings = folder / "slurm.conf"
        names = {"host": socket.gethostname(), "folder": folder, "port": port, "first": port + 1, "last": port + NODES}
        settings.write_text(SLURM.format(**names))
        nodes = [f"node{number + 1}" for number in range(NODES)]
        for name in ("state", *(f"spool-{node}" for node in nodes)):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        environment = {**PLAIN, "SLURM_CONF": str(settings)}
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            for command in (munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)):
                stack.enter_context(_running(command, environment, folder / f"{command[0]}-{command[-1][-5:]}.log"))

            def is_idle() -> bool:
                listed = _output(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], environment)
                return len(set(listed.split())) == NODES

            wait_for(is_idle, "Slurm has three idle nodes", START_S)
            yield str(folder / "state"), str(settings)

    @contextmanager
    def sshd(self, port: int) -> Iterator[str]:
        """Run an sshd that lets its own key in; yield the client's configuration, whose one host is ``m1``."""
        folder = self._folder / "ssh"
        folder.mkdir()
        for name in ("hostkey", "id"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, timeout=START_S)
        for name, text in (("sshd_config", SSHD), ("config", SSH)):
            (folder / name).write_text(text.format(folder=folder, port=port))
        Path("/run/sshd").mkdir(exist_ok=True)
        server = [str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")]
        client = ["ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes", "m1", "true"]
        with _running(server, PLAIN, folder / "log"):
            wait_for(lambda: subprocess.run(client, check=False).returncode == 0, "sshd lets us in", START_S)
            yield str(folder / "config")

    @contextmanager
    def ray(self, port: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Run two of Ray's nodes, at ports from ``port`` on; yield its address, and a Roundhouse that has Ray."""
        python = Path(deploy_tools.ray_python())
        packages = ":".join((str(ROOT), str(ROOT / "client"), sysconfig.get_paths()["purelib"]))
        program = self._folder / "roundhouse"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {python} -m service.cli.main "$@"\n')
        program.chmod(0o755)
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets' names must be short
        environment = {**PLAIN, "RAY_USAGE_STATS_ENABLED": "0"}
        address = f"127.0.0.1:{port}"
        every = ["--num-cpus=1", "--object-store-memory=100000000", "--block", "--node-ip-address=127.0.0.1"]

        def start(number: int, *words: str) -> list[str]:
            first = port + 10 * number
            names = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "metrics-export")
            ports = [f"--{name}-port={first + each}" for each, name in enumerate(names, 1)]
            ports += [f"--dashboard-agent-listen-port={first + 6}"]
            ports += [f"--min-worker-port={first + 20}", f"--max-worker-port={first + 28}"]
            return [str(python.parent / "ray"), "start", *words, *every, *ports]

        head = start(0, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        asking = [str(python.parent / "ray"), "status", "--address", address]
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_running(head, environment, self._folder / "head.log"))
            wait_for(lambda: _answers(port), "Ray's head answers", START_S)
            stack.enter_context(_running(start(1, f"--address={address}"), environment, self._folder / "node.log"))
            wait_for(lambda: _output(asking, environment).count(" 1 node_") == 2, "Ray has two nodes", START_S)
            yield address, (str(program),)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _output(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
    return done.stdout


@contextmanager
def _running(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(START_S / 3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(START_S)
