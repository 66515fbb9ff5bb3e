"""converge: a loss-convergence verification harness for distributed training.

Importing this package imports nothing else, because every rank pays for it.
"""

DISTRIBUTION = "converge"
"""The name of this package for pip."""
__version__ = "0.1.0"
