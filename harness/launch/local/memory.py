"""How much memory runs may still take on this machine, and how many ranks that wait fit into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

GIB = 1 << 30
"""Memory of a rank in bytes, until one is known to need more: a small model's needs about half."""
WAITING_RANKS_PER_SLOT = 4
"""How many ranks may be in memory in runs that wait for each other, for each that trains: enough
for a control of two ranks with four repeats and a set, on two cores.
"""


def ranks_that_fit(available: int, training: int, rank_bytes: int) -> int:
    """How many ranks may wait in memory, beside those that train.

    Args:
        available: bytes that all ranks may have, before any has started.
        training: ranks that may train at once.
        rank_bytes: what one of them needs, if it is known to be more than a GiB.
    """
    fit = available // max(rank_bytes, GIB) - training
    return max(min(WAITING_RANKS_PER_SLOT * training, fit), 0)


def available_bytes(
    processes: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int:
    """What processes may still take, in bytes: of the machine, and by each limit of their cgroup.

    Limits of Linux control groups, versions 1 and 2, are those of the group and of all above it.
    Cached files that the kernel would drop first do not count as taken.
    """
    left = [psutil.virtual_memory().available, *_left_in_groups(processes, mounted)]
    return max(min(left), 0)


def _left_in_groups(processes: Path, mounted: Path) -> Iterator[int]:
    """For each limit that is there, what is left of it."""
    try:
        lines = processes.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used = mounted, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = mounted / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for each in (group, *group.parents):
            if each == root or root in each.parents:
                # Without a limit the file says "max"; in a container groups above may be hidden.
                with suppress(OSError, ValueError):
                    taken = int((each / used).read_text()) - _dropped_first(each)
                    yield int((each / limit).read_text()) - taken


def _dropped_first(group: Path) -> int:
    """Bytes of cached files that have not been used lately, in a group and those below it."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)
