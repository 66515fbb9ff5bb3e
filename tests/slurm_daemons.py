"""A real Slurm for tests: munged, slurmctld and slurmd of several nodes, all on loopback.

::

    with slurm_daemons(settings={"MinJobAge": 2}) as cluster:
        cluster.ask("squeue")                     # cluster.environment has SLURM_CONF
        cluster.kill("node2"); cluster.start("node2")

No systemd, no cgroups and no fixed ports; as root or not. GPUs are pseudo-terminals. The daemons
and all that they start are children of a keeper (this file as a program), which kills every one
of them and removes the folder when its standard input ends: also when the test process was killed.
"""

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
_NODE = "CONVERGE_TEST_NODE"
"""Marks the processes of a node."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def missing_programs():
    """Those of Slurm's that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class SlurmDaemons:
    """A running cluster."""

    def __init__(self, folder, nodes):
        self.folder = folder
        self.nodes = nodes
        self.conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _PATH}
        self._keeper = None

    def ask(self, *command):
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def kill(self, node):
        """Have a node die: its slurmd, and all that runs on it, by SIGKILL."""
        self._tell(f"kill {node}")

    def start(self, node):
        """Have a dead node come back, and wait until jobs may run on it."""
        self._tell(f"start {node}")
        self.wait_until_idle(node)

    def down(self, node):
        """Have the controller give up a node that lives: its jobs fail with NODE_FAIL.

        The node comes back by itself, soon.
        """
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def wait_until_idle(self, *nodes, timeout_s=60):
        """Until these nodes, by default all, could run a job."""
        names = ",".join(nodes or self.nodes)
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(AssertionError):
                states = self.ask("sinfo", "--noheader", "-N", f"--nodes={names}", "-o", "%T")
                if set(states.split()) == {"idle"}:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{names} did not become idle:\n{self.log_tails()}")
            time.sleep(0.1)

    def wait_for_reason(self, reason, timeout_s=60):
        """Until the queue has one job, which pends for this reason."""
        deadline = time.monotonic() + timeout_s
        while (found := self.ask("squeue", "--noheader", "-o", "%r").split()) != [reason]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the queue says {found}, not {reason}:\n{self.log_tails()}")
            time.sleep(0.1)

    def log_tails(self):
        """The ends of all daemons' logs."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"
            for log in sorted((self.folder / "log").glob("*.log"))
        )

    def _tell(self, line):
        self._keeper.stdin.write(f"{line}\n")
        self._keeper.stdin.flush()
        answer = self._keeper.stdout.readline()
        assert answer == f"{line}\n", f"{answer!r} instead of {line!r}:\n{self.log_tails()}"

    def _bring_up(self):
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self._tell("start munged")
        self._tell("start slurmctld")
        for node in self.nodes:
            self._tell(f"start {node}")
        self.wait_until_idle(timeout_s=30)

    def _take_down(self):
        self._keeper.stdin.close()
        self._keeper.wait(timeout=60)
        self._keeper.stdout.close()


@contextmanager
def slurm_daemons(*, nodes=2, cpus=16, gpus=8, partitions=None, settings=None):
    """A cluster while the context lasts.

    ``settings`` are keys of slurm.conf that replace ours; ``partitions`` its partition lines, by
    default one named main with all nodes. Raises TimeoutError when it does not come up.
    """
    names = tuple(f"node{number}" for number in range(1, nodes + 1))
    terminals = [os.openpty() for _ in range(gpus)]
    try:
        devices = [os.ttyname(terminal) for _, terminal in terminals]
        settings = settings or {}
        try:
            cluster = _up(names, cpus, devices, partitions, settings)
        except TimeoutError:  # another process may have taken a port meanwhile
            cluster = _up(names, cpus, devices, partitions, settings)
        try:
            yield cluster
        finally:
            cluster._take_down()
    finally:
        for pair in terminals:
            for descriptor in pair:
                os.close(descriptor)


def _up(names, cpus, devices, partitions, settings):
    # Not pytest's tmp_path: munge wants folders that everybody may enter.
    folder = Path(tempfile.mkdtemp(prefix="converge-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = SlurmDaemons(folder, names)
    _configure(cluster, cpus, devices, partitions, settings)
    try:
        cluster._bring_up()
    except BaseException:
        cluster._take_down()
        raise
    return cluster


def _configure(cluster, cpus, devices, partitions, settings):
    folder, user = cluster.folder, pwd.getpwuid(os.geteuid()).pw_name
    for name in ("log", "run", "state"):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    control_port, *ports = _free_ports(1 + len(cluster.nodes))
    values = {
        "ClusterName": "test",
        "SlurmctldHost": f"{_host()}(127.0.0.1)",
        "SlurmctldPort": control_port,
        # Jobs of two such clusters meet on this host at ports by their ids: keep those apart.
        "FirstJobId": 10_000 + control_port * 97 % 90_000,
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        # Requeued jobs start once their old credentials have expired.
        "AuthInfo": f"socket={folder}/run/munge.sock,cred_expire=5",
        "CredType": "cred/munge",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool.%n",
        "SlurmctldPidFile": folder / "run" / "slurmctld.pid",
        "SlurmdPidFile": folder / "run" / "slurmd.%n.pid",
        "SlurmctldLogFile": folder / "log" / "slurmctld.log",
        "SlurmdLogFile": folder / "log" / "slurmd.%n.log",
        "SlurmdParameters": "config_overrides",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SchedulerParameters": "bf_interval=1,sched_interval=1,sched_min_interval=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "EnforcePartLimits": "ALL",
        "ReturnToService": 2,
        "KillWait": 5,
        "MinJobAge": 86400,
        "SlurmctldTimeout": 10,
        "SlurmdTimeout": 10,
        "GresTypes": "gpu",
        **settings,
    }
    lines = [f"{key}={value}" for key, value in values.items()]
    for node, port in zip(cluster.nodes, ports, strict=True):
        lines.append(
            f"NodeName={node} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
            f"Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=10000 "
            f"Gres=gpu:{len(devices)}"
        )
    nodes = ",".join(cluster.nodes)
    lines += partitions or [
        f"PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE DefaultTime=10 State=UP"
    ]
    cluster.conf.write_text("\n".join(lines) + "\n")
    gres = [f"NodeName={node} Name=gpu File={','.join(devices)}" for node in cluster.nodes]
    (folder / "gres.conf").write_text("\n".join(gres) + "\n")


def _host():
    return socket.gethostname().partition(".")[0]


def _free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


# ---------------------------------------------------------------- the keeper


def keep(folder):
    """Start and kill daemons as standard input says; when it ends, leave no process behind."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever daemons leave behind comes to us
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests, which then close
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        for line in sys.stdin:
            what, name = line.split()
            if what == "start":
                _start(libc, folder, name)
            else:
                _kill(_of_node(name))
            sys.stdout.write(line)
            sys.stdout.flush()
    finally:
        while processes := _descendants(os.getpid()):
            _kill(processes)
        shutil.rmtree(folder, ignore_errors=True)


def _start(libc, folder, name):
    munge = [
        *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
        *(f"--socket={folder}/run/munge.sock", f"--pid-file={folder}/run/munged.pid"),
        *(f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/munge.seed"),
    ]
    command = {"munged": munge, "slurmctld": ["slurmctld", "-D", "-i"]}.get(
        name, ["slurmd", "-D", "-N", name]
    )
    with Path(folder, "log", f"{name}.out.log").open("ab") as log:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, _NODE: name},
            cwd=folder,  # a slurmstepd that could not begin leaves its core there
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - has no threads
        )


def _of_node(node):
    """A node's slurmd and step daemons, and all processes under them."""
    marked = [
        pid
        for pid in _descendants(os.getpid())
        if f"{_NODE}={node}".encode() in _environment_of(pid)
    ]
    return sorted({pid for root in marked for pid in (root, *_descendants(root))})


def _environment_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _descendants(root):
    children = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            # "pid (name) state ppid …"; a name may have anything in it
            after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(pid)
    found, roots = [], [root]
    while roots:
        new = children.get(roots.pop(), [])
        found += new
        roots += new
    return found


def _kill(processes):
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not any(Path(f"/proc/{pid}").exists() for pid in processes):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
