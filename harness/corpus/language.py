"""A source of documents whose exact probabilities are known.

A document has a hidden topic and a number of sentences; a sentence is a walk through a
right-linear grammar; each arc of the walk emits a word of one category, drawn by the topic. Every
word belongs to one category and no state has two arcs of one category, so a sentence has exactly
one derivation and the probability of a text is

    p(number of sentences) * sum over topics of p(topic) * p(arcs) * p(words | topic).

Probabilities of a :class:`Distribution` are exact integers over 2**32. Nothing here touches libm: a
draw scales a 53-bit random number by a power of two and bisects integers, so the same seed draws
the same outcomes on every machine. Python guarantees that ``random.Random(seed).random()`` keeps
its sequence across releases; it guarantees it for no other method, so no other is used.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cached_property
from itertools import accumulate
from random import Random

TOTAL = 2**32
"""All probabilities are whole multiples of 1 / TOTAL."""

# Decimal's exp and ln are correctly rounded by specification, unlike those of libm.
_DECIMAL = Context(prec=28)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Outcomes 0 .. n-1; ``weights`` are positive integers that sum to ``TOTAL``."""

    weights: tuple[int, ...]
    cumulative: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[int]) -> Distribution:
        """Scale positive integer weights to ``TOTAL``; the largest gets the remainder."""
        whole = sum(weights)
        scaled = [max(1, weight * TOTAL // whole) for weight in weights]
        scaled[scaled.index(max(scaled))] += TOTAL - sum(scaled)
        return cls(tuple(scaled), tuple(accumulate(scaled)))

    def draw(self, random: Random) -> int:
        return bisect_right(self.cumulative, int(random.random() * TOTAL))

    def log_probability(self, outcome: int) -> float:
        """Natural logarithm of an outcome's probability."""
        return math.log(self.weights[outcome] / TOTAL)


def zipf(ranks: int) -> list[int]:
    """Integer weights proportional to 1 / (rank + 2), most frequent first."""
    return [TOTAL // (rank + 2) for rank in range(ranks)]


def log_normal(median: Decimal, sigma: Decimal, largest: int) -> list[int]:
    """Integer weights of 1 .. ``largest`` under a log-normal density with that median."""
    with localcontext(_DECIMAL):
        centre = median.ln()
        return [
            max(1, int(TOTAL * (-(((value.ln() - centre) / sigma) ** 2) / 2).exp() / value))
            for value in map(Decimal, range(1, largest + 1))
        ]


PUNCTUATION = ".,?!"
_WORD = re.compile(rf"[a-z]+|[{PUNCTUATION}]")


@dataclass(frozen=True, slots=True)
class Arc:
    """An arc of a state: its weight, the category of the word it emits, the next state."""

    weight: int
    category: str
    to: str | None
    """None ends the sentence."""


@dataclass(frozen=True, slots=True)
class Category:
    """The words of one category and, for each topic, their frequencies."""

    words: tuple[str, ...]
    by_topic: tuple[Distribution, ...]
    """One per topic of the language, over the indices of ``words``."""


@dataclass(frozen=True)
class Language:
    """A probabilistic source of documents (see the module's docstring for its model)."""

    start: str
    arcs: Mapping[str, tuple[Arc, ...]]
    categories: Mapping[str, Category]
    topics: Distribution
    lengths: Distribution
    """Over sentences in a document; outcome 0 is one sentence."""

    def __post_init__(self) -> None:
        """Refuse a language with more than one derivation of a text.

        Raises:
            ValueError: two arcs of a state emit the same category, a word is in two categories or
            is not a word, or a category lacks a topic.
        """
        for state, arcs in self.arcs.items():
            if len({arc.category for arc in arcs}) < len(arcs):
                raise ValueError(f"state {state!r} has two arcs of one category")
        words = [word for category in self.categories.values() for word in category.words]
        if len(set(words)) < len(words):
            raise ValueError("a word is in two categories, or twice in one")
        if bad := [word for word in words if not _WORD.fullmatch(word)]:
            raise ValueError(f"no words of the language: {bad[:3]}")
        for name, category in self.categories.items():
            if len(category.by_topic) != len(self.topics.weights):
                raise ValueError(f"category {name!r} does not cover every topic")

    # ------------------------------------------------------------ speaking

    def documents(self, random: Random) -> Iterator[str]:
        """Documents without end."""
        while True:
            topic = self.topics.draw(random)
            sentences = self.lengths.draw(random) + 1
            yield " ".join(self.sentence(topic, random) for _ in range(sentences))

    def sentence(self, topic: int, random: Random) -> str:
        state: str | None = self.start
        words = []
        while state is not None:
            arc = self.arcs[state][self._arc_chances[state].draw(random)]
            category = self.categories[arc.category]
            words.append(category.words[category.by_topic[topic].draw(random)])
            state = arc.to
        return render(words)

    # ------------------------------------------------------------- judging

    def log_probability(self, document: str) -> float:
        """Exact log p(document) in nats; minus infinity for a text that the source cannot emit."""
        words = _WORD.findall(document)
        by_topic = [self.topics.log_probability(t) for t in range(len(self.topics.weights))]
        known = self._log_words
        arcs = 0.0
        sentences = 0
        state: str | None = self.start
        for word in words:
            category, given_topic = known.get(word, ("", ()))
            step = self._log_arcs.get((state or self.start, category))
            if step is None:
                return -math.inf
            log_arc, state = step
            arcs += log_arc
            sentences += state is None
            for topic, value in enumerate(given_topic):
                by_topic[topic] += value
        whole = state is None and sentences <= len(self.lengths.weights)
        if not whole or render(words) != document:
            return -math.inf
        return self.lengths.log_probability(sentences - 1) + arcs + log_sum_exp(by_topic)

    @cached_property
    def _arc_chances(self) -> dict[str, Distribution]:
        return {s: Distribution.of([arc.weight for arc in arcs]) for s, arcs in self.arcs.items()}

    @cached_property
    def _log_arcs(self) -> dict[tuple[str, str], tuple[float, str | None]]:
        return {
            (state, arc.category): (self._arc_chances[state].log_probability(index), arc.to)
            for state, arcs in self.arcs.items()
            for index, arc in enumerate(arcs)
        }

    @cached_property
    def _log_words(self) -> dict[str, tuple[str, tuple[float, ...]]]:
        return {
            word: (name, tuple(chances.log_probability(index) for chances in category.by_topic))
            for name, category in self.categories.items()
            for index, word in enumerate(category.words)
        }


def render(words: Sequence[str]) -> str:
    """Words and punctuation marks as text: a space between words, none before a mark."""
    return "".join(
        word if word in PUNCTUATION or not index else f" {word}" for index, word in enumerate(words)
    )


def log_sum_exp(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))
