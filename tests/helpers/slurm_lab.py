"""A real Slurm on one machine, for the tests: munge, one controller and two nodes, with their own ports and folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
# Debian installs the daemons outside of an ordinary user's PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])

# Nodes claim more CPUs than there are, so that no job waits for another. A requeued job waits until the credentials of its last
# start have expired: here 5 s instead of 120 s. KillWait has Slurm's default.
_CONF = """\
ClusterName=finch
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/{proctrack}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
KillWait=30
MinJobAge=3600
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=1000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=1000
PartitionName=main Nodes={nodes[0]},{nodes[1]} Default=YES OverSubscribe=FORCE:8 MaxTime=INFINITE State=UP
"""


class NoSlurm(RuntimeError):
    """Slurm is not installed or does not start; the message has the reason."""


class Lab:
    """Starts on construction, ends with ``close``.

    Args:
        proctrack: how Slurm tracks a job's processes. With ``cgroup``, as on clusters, a signal reaches only the first
            process of a task; needs root. With ``linuxproc`` it reaches all of them.

    Raises:
        NoSlurm: a program is missing, a daemon does not start, or a job does not run.
    """

    def __init__(self, proctrack: str = "cgroup") -> None:
        missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
        if missing:
            raise NoSlurm(f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)")
        self._folder = Path(tempfile.mkdtemp(prefix="slurm"))  # a socket's path has at most 107 characters
        self._folder.chmod(0o755)
        self._daemons: list[subprocess.Popen] = []
        ports = _free_ports(3)
        # Unique names: control groups are named after the node and the job.
        self.nodes = [f"n{port}" for port in ports[1:]]
        conf = self._folder / "slurm.conf"
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(conf),
            "PATH": _PATH,
        }
        try:
            for name in ("state", *(f"spool/{node}" for node in self.nodes)):
                (self._folder / name).mkdir(parents=True)
            values = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "folder": self._folder}
            conf.write_text(_CONF.format(**values, ports=ports, nodes=self.nodes, proctrack=proctrack))
            (self._folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
            self._start_munge()
            self._start("slurmctld", "-D", "-f", str(conf))
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node, "-f", str(conf))
            self._wait_until_idle()
            self._try_a_job()
        except BaseException as error:
            reason = self._logs()
            self.close()
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoSlurm(f"{error.cmd[0]} does not answer here: {reason}") from error
            raise

    def run(self, *command: str, check: bool = True, timeout: float = 180) -> str:
        """Runs one of Slurm's commands and returns its stdout."""
        options = {"env": self.environment, "cwd": self._folder, "timeout": timeout}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self, number: str) -> list[dict[str, str]]:
        """Slurm's fields of a job, or of each task of an array."""
        lines = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line]

    def close(self) -> None:
        """Ends all jobs and daemons, also after a failure."""
        if len(self._daemons) > 1:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the controller may not answer
                self.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), check=False, timeout=20)
                self.run("scancel", "--user", getpass.getuser(), check=False, timeout=20)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        of_lab = set(processes_with(f"SLURM_CONF={self._folder / 'slurm.conf'}"))
        # Processes of jobs and slurmstepd may outlive the nodes' daemons.
        for pid in of_lab & {
            *processes_with("SLURM_JOB_ID="),
            *_processes("comm", lambda name: name.startswith(b"slurmstepd")),
        }:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for group in [each for node in self.nodes for each in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}")]:
            for folder in [*sorted(group.rglob("*/"), reverse=True), group]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_munge(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        names["seed-file"] = "munge.seed"
        options = [f"--{option}={self._folder / name}" for option, name in names.items()]
        self._start("munged", "--foreground", "--force", *options)

    def _start(self, *command: str) -> None:
        output = (self._folder / f"{Path(command[0]).name}{len(self._daemons)}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(command, env=self.environment, stdout=output, stderr=output, start_new_session=True)
        )

    def _wait_until_idle(self) -> None:
        end = time.monotonic() + 180
        while self.run("sinfo", "--noheader", "--states=idle", "--format=%D", check=False).strip() != "2":
            ended = [daemon for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                raise NoSlurm(f"Slurm does not start here: {self._logs()}")
            time.sleep(0.2)

    def _try_a_job(self) -> None:
        command = ("srun", "--immediate=120", "--nodes=2", "--ntasks-per-node=1", "--quiet", "echo", "ok")
        if self.run(*command, check=False).split() != ["ok"] * 2:
            raise NoSlurm(f"Slurm runs no job here: {self._logs()}")

    def _logs(self) -> str:
        return "".join(
            f"\n{log.name}: {line}"
            for log in sorted([*self._folder.glob("*.log"), *self._folder.glob("*.out")])
            for line in log.read_text(errors="replace").splitlines()[-3:]
        )


def processes_with(variable: str) -> list[int]:
    """Ids of the processes that started with ``NAME=value`` in their environment; ``NAME=`` matches any value."""
    pattern = f"\0{variable}" if variable.endswith("=") else f"\0{variable}\0"
    return _processes("environ", lambda content: pattern.encode() in b"\0" + content)


def _processes(name: str, matches: Callable[[bytes], bool]) -> list[int]:
    """Ids of the processes whose file of a name in /proc has some content."""
    pids = []
    for file in Path("/proc").glob(f"[0-9]*/{name}"):
        with contextlib.suppress(OSError):
            if matches(file.read_bytes()):
                pids.append(int(file.parent.name))
    return pids


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
