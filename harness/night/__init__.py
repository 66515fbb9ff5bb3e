"""What a person is told of a night: on the first bad one, and not again on the next."""

from harness.night.body import body, nothing_judged
from harness.night.news import BadSet, Night, night
from harness.night.reported import reported

__all__ = ["BadSet", "Night", "body", "night", "nothing_judged", "reported"]
