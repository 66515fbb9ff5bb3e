"""``converge toolchain``: the Python environments that ranks train in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.toolchains.build import Condition

HELP = "list, build, check and remove toolchains, the environments that ranks train in"
DESCRIPTION = """\
A toolchain is a Python environment with torch, and with torchtitan or another framework. converge
itself needs neither. Toolchains are kept in $CONVERGE_TOOLCHAINS, else in .toolchains of the
current folder if it is there, else in your cache (~/.cache/converge/toolchains).

They are built by uv where it is installed and by pip where not, from the indexes that pip is
configured for. On a machine without a GPU, set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu first: it saves gigabytes of CUDA."""
EPILOG = """\
examples:
  converge toolchain list
  converge toolchain list experiments/smoke.toml
  converge toolchain build torchtitan-0.3.0
  converge toolchain build --for experiments/smoke.toml
  converge toolchain check torchtitan-0.3.0"""
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, says: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")

    listing = action("list", "show which toolchains there are, where, and whether they are current")
    listing.add_argument(
        "experiment",
        type=Path,
        nargs="?",
        metavar="EXPERIMENT",
        help="only those that this experiment needs",
    )
    listing.add_argument(
        "--names",
        action="store_true",
        help="only the names of those that it needs, or that can be built, one a line",
    )
    building = action("build", "build toolchains, or bring them up to date")
    building.add_argument("names", nargs="*", metavar="NAME", help="see `converge toolchain list`")
    building.add_argument(
        "--for",
        type=Path,
        dest="experiment",
        metavar="EXPERIMENT",
        help="those that this experiment needs",
    )
    building.add_argument(
        "--with",
        action="extend",
        nargs="+",
        default=[],
        dest="extra",
        metavar="PACKAGE",
        help="more packages to install, as pip names them; later builds keep them",
    )
    building.add_argument("--fresh", action="store_true", help="rebuild even if up to date")
    checking = action("check", "say which trainers can use a toolchain, and import what they need")
    checking.add_argument("name", metavar="NAME", help="or the path of a Python")
    installing = action(
        "install", "install this converge in a Python of your own, for programs that call the probe"
    )
    installing.add_argument("python", type=Path, metavar="PYTHON", help="such as env/bin/python")
    removing = action("remove", "remove toolchains that converge has built")
    removing.add_argument("names", nargs="+", metavar="NAME")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Do one of them; 0 when it is done."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console
    console = make_console()
    match arguments.action:
        case "list":
            _list(console, arguments.experiment, only_names=arguments.names)
        case "build":
            _build(console, arguments)
        case "check":
            _check(console, arguments.name)
        case "install":
            _install(console, arguments.python)
        case _:
            _remove(console, arguments.names)
    return ExitCode.PASS


def _needed(experiment: Path) -> tuple[str, ...]:
    with leaving_when_interrupted():
        from converge_harness.experiment import load_experiment
        from converge_harness.matrix.load import toolchain_names
    return toolchain_names(load_experiment(experiment))


def _list(console: Console, experiment: Path | None, *, only_names: bool) -> None:
    with leaving_when_interrupted():
        from converge_harness.cli.console import say
        from converge_harness.toolchains.build import condition, conditions
        from converge_harness.toolchains.find import toolchain_root
        from converge_harness.toolchains.recipes import RECIPES
    needed = () if experiment is None else _needed(experiment)
    if only_names:
        for name in needed or RECIPES:
            print(name)
        return
    found = [condition(name) for name in needed] if needed else conditions()
    say(console, f"toolchains in {toolchain_root()}")
    _show(console, found)


def _show(console: Console, found: Sequence[Condition]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from converge_harness.cli.console import say
    from converge_harness.toolchains.build import State, disk_use
    from converge_harness.toolchains.recipes import NameParts, has_recipe, recipe_of

    styles = {State.READY: "green", State.STALE: "yellow", State.HALF_BUILT: "red"}
    table = Table("name", "state", "size", "what", box=None, pad_edge=False)
    for each in found:
        what = recipe_of(each.name).recipe.what if has_recipe(each.name) else ""
        _, package, version, revision = NameParts.of(each.name)
        pin = f"{package}-{version}" if package else ""
        others = (pin, f"at {revision}" if revision else "")
        missing = each.state is State.MISSING
        size = "" if missing else f"{disk_use(each.folder) / 1e9:.1f} GB"
        style = styles.get(each.state, "")
        table.add_row(
            escape(each.name),
            f"[{style}]{each.state}[/]" if style else each.state.value,
            size,
            escape(", ".join(filter(None, (what, *others)))),
        )
    console.print(table)
    for each in found:
        if each.state is State.STALE:
            say(console, f"{each.name} is out of date: {each.why}", "yellow")
    behind = [each.name for each in found if each.state in (State.STALE, State.HALF_BUILT)]
    missing_names = [each.name for each in found if each.state is State.MISSING]
    if behind:
        say(console, f"bring up to date with: converge toolchain build {' '.join(behind)}")
    elif len(missing_names) == len(found):
        say(console, f"build one with: converge toolchain build {missing_names[0]}")


def _build(console: Console, arguments: argparse.Namespace) -> None:
    with leaving_when_interrupted():
        from converge_harness.cli.building import build_shown
        from converge_harness.toolchains.recipes import RECIPES, has_recipe, recipe_of
    names = list(arguments.names)
    if arguments.experiment is not None:
        names += [name for name in _needed(arguments.experiment) if has_recipe(name)]
    elif not names:
        raise ConfigError(
            Problem(
                "converge toolchain build",
                "names no toolchain",
                f"name some of {', '.join(RECIPES)}, or --for EXPERIMENT",
            )
        )
    for name in names:
        recipe_of(name)  # all of them, before an hour goes into the first
    for name in dict.fromkeys(names):
        build_shown(console, name, extra=arguments.extra, fresh=arguments.fresh)


def _check(console: Console, name: str) -> None:
    with leaving_when_interrupted():
        from converge_harness.cli.console import say
        from converge_harness.toolchains.build import State, condition, imported
        from converge_harness.toolchains.find import PACKAGES
        from converge_harness.trainers import trainer_of_kind, trainers_in
    name = str(Path(name).absolute()) if "/" in name else name
    found = condition(name)
    driven, not_driven = trainers_in(name)
    versions = next(iter(driven.values())).versions
    imports = imported(
        name, also=[each for kind in driven for each in trainer_of_kind(kind).imports]
    )
    say(console, f"{name} in {found.folder}")
    for says, values in (
        ("imports", imports),
        ("trainers", {kind: _as(kind, each.dialect) for kind, each in driven.items()}),
        ("installed", {key: each for key, each in versions.items() if key != PACKAGES}),
    ):
        listed = ", ".join(f"{key} {each}".strip() for key, each in values.items())
        say(console, f"  {says}: {listed}")
    for kind, why in not_driven.items():
        say(console, f"  not for {kind}: {why}")
    match found.state:
        case State.STALE:
            say(console, f"  out of date: {found.why}; converge toolchain build {name}", "yellow")
        case State.FOREIGN:
            say(console, "  not built by converge: whether it is up to date is unknown")
        case _:
            say(console, "  up to date", "green")


def _as(kind: str, dialect: str) -> str:
    return "" if dialect == kind else f"({dialect})"


def _install(console: Console, python: Path) -> None:
    with leaving_when_interrupted():
        from converge_harness.cli.console import say
        from converge_harness.toolchains.build import install_here
    install_here(python)
    say(console, f"installed this converge in {python}")


def _remove(console: Console, names: Sequence[str]) -> None:
    with leaving_when_interrupted():
        from converge_harness.cli.console import say
        from converge_harness.toolchains.build import remove
    for name in names:
        remove(name)
        say(console, f"removed {name}")
