"""Counts what torch really does of async tensor parallelism and of context parallelism.

Fused operators, as Inductor's pass makes them; and rotations, by which context parallelism brings
every rank's keys and values together.
"""

from __future__ import annotations

import collections
import unittest.mock
from typing import Any

from torch import distributed as dist


class FusionCount:
    """Counts the fused operators that Inductor's real pass puts into the graphs of this rank.

    On a CPU the pass must also believe that torch was built with NCCL, which it checks although
    the rewrite itself has no use for it.
    """

    def __init__(self, device: str) -> None:
        self.fused: collections.Counter[str] = collections.Counter()
        from torch._inductor.fx_passes import post_grad

        rewrite = post_grad.micro_pipeline_tp_pass

        def rewrite_and_count(graph: Any) -> None:
            if device == "cpu":
                with unittest.mock.patch.object(dist, "is_nccl_available", return_value=True):
                    rewrite(graph)
            else:
                rewrite(graph)
            self.fused.update(_fused_operators(graph))

        post_grad.micro_pipeline_tp_pass = rewrite_and_count


def _fused_operators(graph: Any) -> list[str]:
    """Names of the ``symm_mem`` operators in a graph, as ``fused_all_gather_matmul``."""
    return [
        node.target._schema.name.removeprefix("symm_mem::")
        for node in graph.nodes
        if getattr(node.target, "namespace", None) == "symm_mem"
    ]


class RotationCount:
    """Counts the rotations that attention really uses, by the names of torch's rotate methods.

    torch has two ways. Ring attention (scaled dot product attention) creates a rotater of the
    method in torch's own options; its backward also rotates gradients, always all-to-all and by
    explicit request, which is not the configured rotation and is not counted. FlexAttention has
    no such option: one operator gathers all keys and values, and is counted where it runs, below
    anything that compiles.
    """

    def __init__(self, device: str) -> None:
        self.used: collections.Counter[str] = collections.Counter()
        self._watch_ring()
        self._watch_flex(device)

    def _watch_ring(self) -> None:
        import torch.distributed.tensor.experimental._context_parallel._attention as ring

        create = ring._create_rotater
        names = {ring._AllGatherRotater: "allgather", ring._AllToAllRotater: "alltoall"}

        def create_and_count(group: Any, seq_dim: int, method: Any = None) -> Any:
            rotater = create(group, seq_dim, method)
            if method is None:
                self.used[names[type(rotater)]] += 1
            return rotater

        ring._create_rotater = create_and_count

    def _watch_flex(self, device: str) -> None:
        import torch.distributed.tensor.experimental._context_parallel._attention as ring

        operator = ring.flex_cp_allgather
        gather = operator._init_fn

        def gather_and_count(*args: Any) -> Any:
            self.used["allgather"] += 1
            return gather(*args)

        operator.register_kernel(device, gather_and_count)
