"""A Slurm of one machine with two nodes: its daemons, with a configuration, keys and ports of their own.

Nothing of the machine's own Slurm is used or changed. Plugins that need cgroups are off, so this says nothing about
limits that a cluster sets. Jobs are real: sbatch, srun, scancel and scontrol are Slurm's.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["MISSING", "Slurm", "wait_for"]

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
"""Commands that are not installed: apt-get install slurmctld slurmd slurm-client munge."""

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
MinJobAge=600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 Port={node1} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000000 State=UNKNOWN
NodeName=n2 Port={node2} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def wait_for(what: str, true: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Wait by checking repeatedly; each check is a process, and takes its time."""
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline, f"after {deadline_s:.0f} s still not: {what}"
        time.sleep(0.2)


class Slurm:
    """The daemons, and the commands against them."""

    def __init__(self, folder: Path, cpus: int = 16) -> None:
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        self.host = socket.gethostname().partition(".")[0]
        settings = {
            "folder": folder,
            "host": self.host,
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "cpus": cpus,
            "control": _free_port(),
            "node1": _free_port(),
            "node2": _free_port(),
        }
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start_daemons()
        except BaseException:
            self._end_daemons()
            raise

    def _start_daemons(self) -> None:
        folder = self.folder
        munge = ("munged", "--foreground", "--force", "--num-threads=2", f"--socket={folder}/munge.socket")
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start(*munge, *files)
        wait_for("munged listens", (folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        wait_for("the nodes are idle", lambda: self.run("sinfo", "--noheader", "--format=%D%T", check=False) == "2idle")

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("wb") as out:
            daemon = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, start_new_session=True)
        self._daemons.append(daemon)

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        both = {**self.environment, **environment}
        done = subprocess.run(command, env=both, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **environment: str) -> str:
        """sbatch; the job's number."""
        return self.run("sbatch", "--parsable", *arguments, check=True, **environment)

    def facts(self, job: str) -> dict[str, str]:
        """Return what scontrol reports of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, state: str, deadline_s: float = 60.0) -> dict[str, str]:
        """Wait until a job is in this state."""
        wait_for(f"job {job} is {state}", lambda: self.facts(job)["JobState"] == state, deadline_s)
        return self.facts(job)

    def close(self) -> None:
        """End the jobs, and then the daemons."""
        self.run("scancel", "--user", str(os.geteuid()), check=False)
        try:
            wait_for("the queue is empty", lambda: not self.run("squeue", "--noheader", check=False), 45.0)
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
