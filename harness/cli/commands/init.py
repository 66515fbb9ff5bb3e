"""``converge init``: write an experiment file for the techniques to be tested."""

from __future__ import annotations

import argparse
from pathlib import Path

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import add_technique, positive
from converge_harness.errors import ConfigError, Problem

HELP = "write an experiment file: what the converging guide recommends, or an example"
DESCRIPTION = """\
Write the experiment file that torchtitan's converging guide recommends for some techniques: a 1D
FSDP control, the smallest test set of each (a parallelism on dp x p ranks; any other technique on
top of what it needs, as async_tp on FSDP + TP + compile), and one set of all of them together.
Every entry says which rule of the guide it serves. Where the base config's batch has too few
microbatches for a pipeline, a `set` raises it, with the same token budget in every set. The
toolchain is the one that the base config is written for.

With --example, write one of converge's own experiments and the files that it names instead."""
EPILOG = """\
examples:
  the guide's own example, printed:
    converge init --technique tp=2,pp=2,float8,async_tp --dp 8 --base train_configs/llama3_8b.toml
  written to a file, and its plan shown:
    converge init --technique cp=2,pp=2:Interleaved1F1B --dp 2 \\
      --base train_configs/llama3_debug.toml --out experiments/long_context.toml
    converge plan experiments/long_context.toml
  a technique of your own (docs/own-technique.md):
    converge init --technique fused_norm=my_norm.py:use_fused_norm --dp 2 \\
      --base train_configs/llama3_debug.toml
  an additional larger degree of a parallelism (all techniques together use the first):
    converge init --technique tp=2,cp=2,cp=8 --dp 8 --base train_configs/llama3_8b.toml
  an example of converge's own, with the train config that it starts from:
    converge init --example smoke && converge run smoke.toml --build
  an example with a script, which one of your own may replace:
    converge init --example tutorial/probed && converge plan probed.toml"""
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_technique(parser, required=False)
    parser.add_argument(
        "--dp", type=positive, metavar="N", help="data-parallel degree of every set"
    )
    parser.add_argument(
        "--base",
        metavar="TRAIN_CONFIG",
        help="the train config that every set is based on",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write it here (default: print it; of an example NAME.toml)",
    )
    parser.add_argument("--name", help="of the experiment (default: the file's)")
    parser.add_argument(
        "--not-deterministic",
        action="store_true",
        help="train with production's kernels (deterministic = false), and with more reruns of the "
        "control, from which the noise of a run is learnt",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--example",
        metavar="NAME",
        help="write this example and the files that it names; `--example list` lists them",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Print the recommended experiment file, or write it.

    Raises ConfigError when the file exists already, and what ``recommended_file`` raises.
    """
    if arguments.example is not None:
        return _example(arguments)
    _require_all(arguments)
    with leaving_when_interrupted():
        from converge_harness.matrix.recommend import recommended_file
        from converge_harness.store import atomic_write
    out: Path | None = arguments.out
    if out is not None:
        _require_free(out, force=arguments.force)
    text = recommended_file(
        arguments.technique,
        arguments.dp,
        arguments.base,
        name=arguments.name,
        out=out,
        deterministic=not arguments.not_deterministic,
    )
    if out is None:
        print(text, end="")
        return ExitCode.PASS
    atomic_write(out, text.encode())
    print(f"wrote {out}; see what it runs with: converge plan {out}")
    return ExitCode.PASS


def _require_all(arguments: argparse.Namespace) -> None:
    missing = [
        f"--{name}" for name in ("technique", "dp", "base") if getattr(arguments, name) is None
    ]
    if missing:
        raise ConfigError(
            Problem(
                "converge init",
                f"needs {', '.join(missing)}",
                "or --example NAME for one of converge's own experiments",
            )
        )


def _example(arguments: argparse.Namespace) -> ExitCode:
    """Write an example, or list them."""
    with leaving_when_interrupted():
        from converge_harness.shipped import examples, write_example
    given = [
        f"--{name}" for name in ("technique", "dp", "base", "name") if getattr(arguments, name)
    ]
    if given:
        raise ConfigError(
            Problem(
                f"--example {arguments.example}",
                f"is written as it is, without {', '.join(given)}",
                "leave one of them out",
            )
        )
    if arguments.example == "list":
        for name, what in examples().items():
            print(f"{name}: {what}")
        return ExitCode.PASS
    out: Path = arguments.out or Path(f"{Path(arguments.example).name}.toml")
    written = write_example(arguments.example, out, force=arguments.force)
    print("wrote", *written, sep="\n  ")
    print(f"run it: converge run {out} --build")
    return ExitCode.PASS


def _require_free(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise ConfigError(Problem(f"--out {out}", "is a folder", f"as {out / 'experiment.toml'}"))
    if out.exists() and not force:
        raise ConfigError(
            Problem(f"--out {out}", "exists already", "give another name, or --force")
        )
