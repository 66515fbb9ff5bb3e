"""What the user sees while a toolchain is built: its step and the time, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from converge_harness.cli.console import say
from converge_harness.model import Toolchain, TrainerSpec
from converge_harness.toolchains.build import Doing, build
from converge_harness.toolchains.find import toolchain_root
from converge_harness.toolchains.recipes import has_recipe
from converge_harness.trainers import find_toolchain

if TYPE_CHECKING:
    from converge_harness.matrix.load import Finder


def build_shown(
    console: Console,
    name: str,
    *,
    extra: Sequence[str] = (),
    fresh: bool = False,
    quiet: bool = False,
) -> None:
    """Bring a toolchain up to date and show its steps; ``quiet``: only if there are any."""
    begun = time.monotonic()
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )
    task = progress.add_task(escape(name), total=None)

    def show(doing: Doing) -> None:
        number = f"{doing.step}/{doing.steps}: " if doing.steps else ""
        text = f"{name} {number}{doing.says}"
        if console.is_terminal:
            progress.update(task, description=escape(text))
        else:
            say(console, text)

    if console.is_terminal:
        with progress:
            built = build(name, extra=extra, fresh=fresh, observer=show)
            progress.remove_task(task)
    else:
        built = build(name, extra=extra, fresh=fresh, observer=show)
    took = f"built in {time.monotonic() - begun:.0f} s" if built else "is up to date"
    if built or not quiet:
        say(console, f"{name} {took}: {toolchain_root() / name}", "green")


def building(console: Console, *, quiet: bool = False) -> Finder:
    """A finder that builds what is missing or out of date, where converge has a recipe for it.

    ``quiet``: nothing is said of a toolchain that is up to date.
    """

    def find(name: str, *, trainer: TrainerSpec | None = None) -> Toolchain:
        if has_recipe(name):
            build_shown(console, name, quiet=quiet)
        return find_toolchain(name, trainer=trainer)

    return find
