"""What a change did to every set: its runs beside those of an earlier revision of the same code."""

from __future__ import annotations

from dataclasses import dataclass

from converge_harness.model import Judgement, Sameness
from converge_harness.wording import counted

_SAME = (Sameness.BITWISE, Sameness.ROUNDING)


@dataclass(frozen=True, slots=True)
class ChangedSet:
    """One control or test set, before and after the change."""

    name: str
    sameness: Sameness
    sentence: str = ""
    """What differs, or why nothing was compared."""
    before: Judgement | None = None
    """The verdict at the base; None for a control that nothing challenges, and for a new set."""
    after: Judgement | None = None

    @property
    def is_worse(self) -> bool:
        """Whether the change made the verdict worse."""
        order = list(Judgement)
        return (
            self.before is not None
            and self.after is not None
            and order.index(self.after) > order.index(self.before)
        )

    @property
    def verdicts(self) -> str:
        """``PASS``, or ``PASS → FAIL``; empty for a set that is not judged."""
        words = [each.value for each in (self.before, self.after) if each is not None]
        return " → ".join(dict.fromkeys(words))


@dataclass(frozen=True, slots=True)
class Against:
    """A matrix beside the same matrix at another revision."""

    revision: str
    """As the user wrote it."""
    commit: str
    """Which commit that is, shortened."""
    fork: str
    """The git checkout under test."""
    tree: str
    """What of it ran, as git calls it."""
    sets: tuple[ChangedSet, ...]
    head: str = ""
    """The commit of its tree, shortened; empty if changes were under test that no commit has."""

    @property
    def is_same(self) -> bool:
        """Whether nothing differs by more than rounding, and no verdict got worse."""
        return bool(self.sets) and all(
            each.sameness in _SAME and not each.is_worse for each in self.sets
        )

    @property
    def headline(self) -> str:
        """One sentence that answers what the change did."""
        base = f"{self.revision} ({self.commit})"
        number = {each: [one.sameness for one in self.sets].count(each) for each in Sameness}
        total = len(self.sets)
        if number[Sameness.BITWISE] == total:
            which = "set is" if total == 1 else "sets are"
            return f"Bitwise identical: {total} {which} the same as at {base}, in every number."
        parts = [f"{amount} {each.value}" for each, amount in number.items() if amount]
        return f"Of {counted(total, 'set')} against {base}: {', '.join(parts)}."

    @property
    def tested(self) -> str:
        """What was compared with what, in a sentence."""
        return f"{self.fork} at {self.tree}, against {self.revision} ({self.commit})."
