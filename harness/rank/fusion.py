"""How many fused operators Inductor's async tensor-parallel pass really makes."""

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
