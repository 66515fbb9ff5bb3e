"""The probe's error when it cannot give evidence."""

from __future__ import annotations


class ProbeError(Exception):
    """The program's use of the probe, or its job, gives no evidence that could be trusted."""
