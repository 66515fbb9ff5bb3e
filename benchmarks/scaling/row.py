"""A measurement with its goal."""

from __future__ import annotations

from dataclasses import dataclass

HEADER = f"{'scale':<62}{'measured':>14}   goal"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    measured: float
    unit: str
    goal: float | None = None
    """Largest allowed value; None: no goal."""

    @property
    def missed(self) -> bool:
        # Not `measured > goal`: NaN must not meet a goal.
        return self.goal is not None and not self.measured <= self.goal

    def __str__(self) -> str:
        value = f"{self.measured:.0f}" if self.unit == "queries" else f"{self.measured:.2f}"
        goal = ""
        if self.goal is not None:
            goal = f"   at most {self.goal:g} {self.unit}: {'MISSED' if self.missed else 'met'}"
        return f"{self.what:<62}{value:>8} {self.unit:<7}{goal}".rstrip()
