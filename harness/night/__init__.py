"""What a person is told of a night: on the first bad one, and not again on the next."""

from harness.night.body import body
from harness.night.news import BadSet, Night, night

__all__ = ["BadSet", "Night", "body", "night"]
