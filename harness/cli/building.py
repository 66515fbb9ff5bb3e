"""What a person sees while a toolchain is built: its step and the time, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from converge_harness.cli.console import say
from converge_harness.errors import ToolchainError
from converge_harness.model import Toolchain, TrainerSpec
from converge_harness.toolchains.build import Doing, build
from converge_harness.toolchains.find import toolchain_root
from converge_harness.toolchains.recipes import has_recipe
from converge_harness.trainers import find_toolchain

if TYPE_CHECKING:
    from converge_harness.matrix.load import Finder


def build_shown(
    console: Console, names: Sequence[str], *, extra: Sequence[str] = (), fresh: bool = False
) -> None:
    """Bring toolchains up to date, all at once, and say what is done meanwhile.

    Each spends most of its time waiting for an index or a disk.

    Raises ToolchainError, when all have ended, with the reason of each that could not be built.
    """
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )

    def build_one(name: str) -> None:
        begun = time.monotonic()
        task = progress.add_task(escape(name), total=None)

        def show(doing: Doing) -> None:
            number = f"{doing.step}/{doing.steps}: " if doing.steps else ""
            text = f"{name} {number}{doing.says}"
            if console.is_terminal:
                progress.update(task, description=escape(text))
            else:
                say(console, text)

        try:
            built = build(name, extra=extra, fresh=fresh, observer=show)
        finally:
            progress.remove_task(task)
        took = f"built in {time.monotonic() - begun:.0f} s" if built else "is up to date"
        say(console, f"{name} {took}: {toolchain_root() / name}", "green")

    shown = progress if console.is_terminal else nullcontext()
    with shown, ThreadPoolExecutor(max_workers=max(len(names), 1)) as builders:
        builds = [builders.submit(build_one, name) for name in names]
    ended = [each.exception() for each in builds]
    if other := [each for each in ended if each and not isinstance(each, ToolchainError)]:
        raise other[0]
    if any(ended):
        raise ToolchainError("\n".join(str(each) for each in ended if each))


def building(console: Console) -> Finder:
    """A finder that builds what is missing or out of date, where converge has a recipe for it."""

    def find(name: str, *, trainer: TrainerSpec | None = None) -> Toolchain:
        if has_recipe(name):
            build_shown(console, [name])
        return find_toolchain(name, trainer=trainer)

    return find
