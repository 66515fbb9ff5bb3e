"""The upstream bugs that this dialect repairs, each by a name that a job may leave out.

Importable without torch, so that the harness can check names before anything is launched.
``without_fixes`` of a test set takes these names: the repair is then not made and the bug shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ACT_GRAD = "act-grad"
RS_SCATTER = "rs-scatter"
SYMM_MEM = "symm-mem"
FLOAT8_TP = "float8-tp"
CP_ROTATION = "cp-rotation"
INITIAL_LOAD = "initial-load"

FIXES: Mapping[str, str] = MappingProxyType(
    {
        ACT_GRAD: (
            "TP with torch.compile: AOTAutograd waits on the asynchronous input of a compiled block"
            " and loses its requires_grad, so tok_embeddings gets no gradient"
            " (pytorch#179849, repaired by pytorch PR #191113; torch 2.13)."
        ),
        RS_SCATTER: (
            "Float8 with async TP: the fused scaled matmul and reduce-scatter scatters rows of the"
            " batch instead of the sequence once the local batch holds more than one sample"
            " (torch 2.13, torch.distributed._symmetric_memory; no public report known)."
        ),
        SYMM_MEM: (
            "async TP never fuses: symmetric memory is not enabled for the TP group, which"
            " Inductor's pass asks for (pytorch#193027, torchtitan#4045; torchtitan 0.2.2 on torch"
            " 2.13)."
        ),
        FLOAT8_TP: (
            "Float8 all-gathers of TP are out of reach: llama3 looks for a converter named float8,"
            " and the only registered name is quantize.linear.float8 (torchtitan 0.2.2,"
            " models/llama3/infra/parallelize.py)."
        ),
        CP_ROTATION: (
            "parallelism.context_parallel_rotate_method is read by nothing: context parallel always"
            " rotates by all-gather (torchtitan 0.2.2, distributed/context_parallel.py)."
        ),
        INITIAL_LOAD: (
            "A restart whose checkpoint folder holds no whole checkpoint loads nothing, not even"
            " checkpoint.initial_load_path, says nothing, and trains on from random weights"
            " (torchtitan 0.2.2, components/checkpoint.py, load; 0.3.0 falls back)."
        ),
    }
)
"""Name of a fix to one sentence: what goes wrong without it, where, and the upstream reference."""
