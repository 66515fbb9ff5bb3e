"""converge: a loss-convergence verification harness for distributed training.

Importing this package imports nothing else, because every rank pays for it.
"""

DISTRIBUTION = "converge"
"""What pip calls this package."""
__version__ = "0.1.0"
