"""converge: a loss-convergence verification harness for distributed training.

Importing this package imports nothing else, because every rank pays for it: ``load`` and
``compare``, the interface for notebooks (docs/notebook.md), are imported when they are asked for.
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
