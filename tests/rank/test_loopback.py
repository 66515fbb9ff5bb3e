"""Stores of ranks that meet on loopback listen there only; others as torch has it."""

import ast
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from converge_harness.rank.start import loopback

PROGRAM = """
import os, sys
import torch.distributed as dist
from converge_harness.rank.start.loopback import listen_on_loopback

def listening():
    own = {os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")}
    sockets = {path.rpartition("/")[2] for path in own}
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                yield local.partition(":")[0]

if sys.argv[2] == "ours":
    listen_on_loopback()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": sys.argv[1], "MASTER_PORT": "0"}
from torch.distributed.elastic.utils.distributed import get_free_port
os.environ["MASTER_PORT"] = str(get_free_port())
for _ in range(2):  # the second time its own server has the port
    dist.init_process_group("gloo")
    dist.barrier()
    print(*sorted(set(listening())))
    store = dist.distributed_c10d._get_default_store()  # keeps the server
    dist.destroy_process_group()
"""
LOOPBACK = "0100007F"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def listening(host, how):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, host, how],
        capture_output=True,
        text=True,
        timeout=100,
        env={"GLOO_SOCKET_IFNAME": "lo", "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_rank_that_makes_the_store_listens_on_loopback(host):
    assert listening(host, "ours") == [LOOPBACK] * 2


@pytest.mark.parametrize("own", ["print('own')", "raise ValueError('own')", None])
def test_every_python_of_a_program_keeps_to_loopback_and_its_own_sitecustomize(tmp_path, own):
    program = PROGRAM.replace(
        "from converge_harness.rank.start.loopback import listen_on_loopback", ""
    )
    early = f"import sys\nassert 'torch' not in sys.modules\n{program}"
    ours = Path(loopback.__file__).parent / "on_loopback"
    if own is not None:
        (tmp_path / "sitecustomize.py").write_text(own)
    done = subprocess.run(
        [sys.executable, "-c", early, "127.0.0.1", "torch"],
        capture_output=True,
        text=True,
        timeout=100,
        env={"GLOO_SOCKET_IFNAME": "lo", "PATH": "", "PYTHONPATH": f"{ours}:{tmp_path}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = ["own"] if own == "print('own')" else []
    assert done.stdout.splitlines() == [*said, *[LOOPBACK] * 2]
    assert ("Error in sitecustomize" in done.stderr) == (own == "raise ValueError('own')")


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("", False)],
)
def test_hosts_of_this_machine_are_known(host, here):
    """192.0.2.1 is nobody's (RFC 5737)."""
    assert loopback.is_of_this_machine(host) is here


def test_a_host_of_this_machine_is_so_by_its_name_too(monkeypatch):
    name = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: name)
    assert loopback.is_of_this_machine("node-7.cluster")


PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")) or [Path(sys.executable)]


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: python.parts[-3])
def test_pythons_of_every_release_start_with_it(tmp_path, python):
    """A program's launchers may be others than the Python that trains."""
    (tmp_path / "sitecustomize.py").write_text("print('own')")
    ours = Path(loopback.__file__).parent / "on_loopback"
    done = subprocess.run(
        [python, "-c", "print('began')"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ours}:{tmp_path}"},
        check=True,
    )
    assert (done.stdout, done.stderr) == ("own\nbegan\n", "")


@pytest.mark.parametrize(
    ("file", "release"), [("on_loopback/sitecustomize.py", (3, 6)), ("loopback.py", (3, 7))]
)
def test_its_syntax_is_that_of_old_pythons(file, release):
    source = (Path(loopback.__file__).parent / file).read_text()
    ast.parse(source, feature_version=release)


def test_torch_itself_listens_everywhere():
    assert all(set(seen.split()) - {LOOPBACK} for seen in listening("127.0.0.1", "torch"))
