"""Parallelism degrees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Parallelism degrees. ``ep`` borrows ranks from dp_shard, cp and tp, so it adds none."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        """As people write it: ``FSDP 2 x TP 2``, ``HSDP 2x2``, ``DDP 2``."""
        parts = []
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"HSDP {self.dp_replicate}x{self.dp_shard}")
        elif self.dp_replicate > 1:
            parts.append(f"DDP {self.dp_replicate}")
        elif self.dp_shard > 1:
            parts.append(f"FSDP {self.dp_shard}")
        parts += [
            f"{label} {degree}"
            for label, degree in (
                ("TP", self.tp),
                ("CP", self.cp),
                ("PP", self.pp),
                ("EP", self.ep),
            )
            if degree > 1
        ]
        return " x ".join(parts) or "one rank"
