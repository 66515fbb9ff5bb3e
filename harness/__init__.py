"""converge: a loss-convergence verification harness for distributed training.

An experiment becomes a plan, runs, evidence, verdicts and a report (docs/architecture.md)::

    cli/ matrix/             the command line; the application behind it
    experiment/ plan/ guide/ experiment files; their jobs; which sets to run for a technique
    trainers/ launch/        how each trainer is called; runs jobs here, under Slurm, in Kubernetes
    rank/ probe/             code inside ranks: torchtitan's, and the library for other programs
    run_folder/ readers/     the files of a run; evidence from them and from other tools' curves
    judge/                   evidence to verdicts
    baselines.py calibrations.py   blessed controls; the limits learnt from repeats, in files
    report/ history/         reports; results over nights
    shrink/ bisect.py        searches: the smallest set-up that fails; the first revision that does
    model/                   the values that all of these exchange
    corpus/ toolchains/      the synthetic corpus; the Python environments of ranks
    store.py seal.py         converge's own files; digests of a run's evidence and sources
    checkout.py surroundings.py   git checkouts; what outside the experiment file changes numbers
    toml.py errors.py shipped.py  strict TOML tables; exceptions; files shipped beside the code
    wording.py                    numbers in sentences
    notebook.py export.py    results as pandas frames; curves for TensorBoard and W&B
    night.py pytest_plugin.py     the message about a night; ``pytest --converge``
    __main__.py              ``python -m converge_harness``

Importing this package imports nothing else, because every rank pays for it: ``load`` and
``compare``, the interface for notebooks (docs/notebook.md), are imported on first use.
"""

TYPE_CHECKING = False  # as typing's, which would be an import
if TYPE_CHECKING:
    from converge_harness.notebook import compare, load

DISTRIBUTION = "converge-harness"
"""The name of this package for pip."""
__version__ = "0.1.0"
__all__ = ["DISTRIBUTION", "__version__", "compare", "load"]

if not TYPE_CHECKING:  # mypy takes any name to be there where a module has this function

    def __getattr__(name: str) -> object:
        """The interface for notebooks (PEP 562)."""
        if name in ("compare", "load"):
            from converge_harness import notebook  # noqa: PLC0415

            return getattr(notebook, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
