"""Makes the faults of a script that ranks cannot make themselves.

The ranks hold still after such a fault's step until it is over (``faults/<index>.over.json``), so
it strikes where the script says, however fast the machine is.
"""

from __future__ import annotations

import time

from harness.launch import processes
from harness.launch.run import Run
from harness.launch.start import Place, start_node
from harness.model import Fault, FaultKind
from harness.run_folder.faults import over_file, struck_file
from harness.store import write_json
from harness.trainers import most_nodes


def strike(place: Place, run: Run, index: int, fault: Fault) -> None:
    """Make a fault of the run's script.

    ``agent_loss`` of a node that is not there and ``join`` of one too many do not strike.
    Raises StoreError when its file cannot be written or a node not be started.
    """
    run.struck[index] = run.tail.number
    if not _can_strike(run, fault):
        _over(run, index)
        return
    write_json(
        struck_file(run.folder, index),
        {
            "index": index,
            "kind": fault.kind.value,
            "step": fault.step,
            "at": time.time(),
            "pass": run.tail.number,
            "torn": False,
            **({"node": fault.node} if fault.kind is FaultKind.AGENT_LOSS else {}),
        },
    )
    if fault.kind is FaultKind.PREEMPT:
        for agent in run.call.left:
            processes.ask_to_end(agent.process)
    elif fault.kind is FaultKind.AGENT_LOSS:
        lost = run.call.agents[fault.node]
        processes.end_all([(lost.process, lost.folder)], grace_s=None)
        lost.lost = True
        _over(run, index)
    else:
        start_node(place, run)


def settle(run: Run, *, call_is_over: bool) -> None:
    """Say that faults are over whose effect has come: another pass has begun, or the call ended.

    Raises StoreError when that cannot be written.
    """
    for index, number in run.struck.items():
        if call_is_over or run.tail.number > number:
            _over(run, index)


def _can_strike(run: Run, fault: Fault) -> bool:
    if fault.kind is FaultKind.AGENT_LOSS:
        agents = run.call.agents
        return fault.node < len(agents) and not agents[fault.node].lost
    return fault.kind is not FaultKind.JOIN or len(run.call.left) < most_nodes(run.job)


def _over(run: Run, index: int) -> None:
    path = over_file(run.folder, index)
    if not path.exists():
        write_json(path, {"index": index, "at": time.time()})
