"""The project's language: its words and its sentences.

Words consist of syllables, with an ending for their category and gender. Determiners,
adjectives and nouns agree in gender, and a verb agrees with its subject even when a relative
clause stands between them; a sentence that opens with the question word ends in a question mark.
So there is something to learn at every scale: letters, words, neighbours, sentences, topics.
"""

from __future__ import annotations

from decimal import Decimal
from random import Random

from converge_harness.corpus.language import Arc, Category, Distribution, Language, log_normal, zipf

TOPICS = 8
TOPIC_BOOST = 10
"""How many times more likely a content word is in its own topic than in others."""
MEDIAN_SENTENCES = Decimal(5)
SENTENCES_SIGMA = Decimal("1.25")
LARGEST_DOCUMENT = 400
"""Sentences; the 99.98th percentile of the log-normal above is near it."""

_ONSETS = ("p", "t", "k", "b", "d", "g", "m", "n", "s", "l", "r", "v", "f", "z", "")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("", "", "", "n", "s", "l", "r")
_GENDERS = (0, 1)
_MOODS = ("statement", "question")
_ENDINGS = {"noun": ("a", "o"), "adjective": ("al", "ol"), "verb": ("it", "ut")}


def language(seed: int, vocab_size: int) -> Language:
    """The language of a seed; a larger vocabulary gets proportionally more words."""
    return Language(
        start="start",
        arcs=_arcs(),
        categories=_lexicon(Random(seed), vocab_size),
        topics=Distribution.of([1] * TOPICS),
        lengths=Distribution.of(log_normal(MEDIAN_SENTENCES, SENTENCES_SIGMA, LARGEST_DOCUMENT)),
    )


# --------------------------------------------------------------------- words


def _lexicon(random: Random, vocab_size: int) -> dict[str, Category]:
    taken: set[str] = set()

    def stems(count: int, syllables: int, endings: tuple[str, ...] = ("",)) -> list[str]:
        """Draw new stems, each free with all of the endings; frequent words are short."""
        found: list[str] = []
        for rank in range(count):
            stem = "".join(_syllable(random) for _ in range(1 + rank * syllables // count))
            while any(stem + ending in taken for ending in endings):
                stem += _syllable(random)
            taken.update(stem + ending for ending in endings)
            found.append(stem)
        return found

    categories: dict[str, Category] = {}
    for name, count in (("preposition", 8), ("conjunction", 4), ("question word", 1), ("that", 1)):
        categories[name] = _function_words(stems(count, 1))
    for gender in _GENDERS:
        categories[f"determiner {gender}"] = _function_words(stems(4, 1))
        categories[f"pronoun {gender}"] = _function_words(stems(2, 1))
        nouns = stems(max(8, vocab_size // 4), 3, _ENDINGS["noun"])
        categories[f"noun {gender}"] = _content_words(nouns, _ENDINGS["noun"][gender])
    categories["adverb"] = _content_words(stems(max(8, vocab_size // 16), 3), "")
    for name, share in (("adjective", 8), ("verb", 4)):
        # One stem for both genders, equally frequent in both.
        inflected = stems(max(8, vocab_size // share), 3, _ENDINGS[name])
        for gender in _GENDERS:
            categories[f"{name} {gender}"] = _content_words(inflected, _ENDINGS[name][gender])
    for name, marks, weights in (
        ("comma", (",",), (1,)),
        ("stop", (".", "!"), (9, 1)),
        ("question mark", ("?",), (1,)),
    ):
        categories[name] = Category(marks, (Distribution.of(weights),) * TOPICS)
    return categories


def _function_words(words: list[str]) -> Category:
    return Category(tuple(words), (Distribution.of(zipf(len(words))),) * TOPICS)


def _content_words(stems: list[str], ending: str) -> Category:
    """Zipf-like frequencies; each word belongs to one topic."""
    weights = zipf(len(stems))
    by_topic = [
        Distribution.of(
            [
                weight * (TOPIC_BOOST if rank % TOPICS == topic else 1)
                for rank, weight in enumerate(weights)
            ]
        )
        for topic in range(TOPICS)
    ]
    return Category(tuple(stem + ending for stem in stems), tuple(by_topic))


def _syllable(random: Random) -> str:
    parts = (_ONSETS, _VOWELS, _CODAS)
    return "".join(part[int(random.random() * len(part))] for part in parts)


# ----------------------------------------------------------------- sentences


def _arcs() -> dict[str, tuple[Arc, ...]]:
    arcs: dict[str, tuple[Arc, ...]] = {
        "start": (*_subject(20, "statement"), Arc(6, "question word", "clause question")),
    }
    for mood in _MOODS:
        arcs |= _clause(mood)
    return arcs


def _subject(weight: int, mood: str) -> tuple[Arc, ...]:
    """How a clause begins: with a determiner or a pronoun of either gender."""
    return tuple(
        arc
        for gender in _GENDERS
        for arc in (
            Arc(3 * weight, f"determiner {gender}", f"subject {gender} {mood}"),
            Arc(weight, f"pronoun {gender}", f"predicate {gender} {mood}"),
        )
    )


def _clause(mood: str) -> dict[str, tuple[Arc, ...]]:
    """All states of a clause; the subject's gender is remembered until its verb is said."""
    stop = "question mark" if mood == "question" else "stop"
    object_of_verb = tuple(
        Arc(5, f"determiner {gender}", f"object {gender} {mood}") for gender in _GENDERS
    )
    place = (Arc(4, "preposition", f"place {mood}"), Arc(3, "adverb", f"tail {mood}"))
    arcs: dict[str, tuple[Arc, ...]] = {
        f"clause {mood}": _subject(1, mood),
        f"verb phrase {mood}": (*object_of_verb, *place, Arc(4, stop, None)),
        f"after object {mood}": (
            *place,
            Arc(2, "comma", f"joined {mood}"),
            Arc(8, stop, None),
        ),
        f"place {mood}": tuple(
            Arc(1, f"determiner {gender}", f"place {gender} {mood}") for gender in _GENDERS
        ),
        f"tail {mood}": (Arc(1, "comma", f"joined {mood}"), Arc(5, stop, None)),
        f"joined {mood}": (Arc(1, "conjunction", f"clause {mood}"),),
    }
    for gender in _GENDERS:
        noun, adjective, verb = f"noun {gender}", f"adjective {gender}", f"verb {gender}"
        head = f"head {gender} {mood}"
        predicate = Arc(8, verb, f"verb phrase {mood}")
        arcs |= _noun_phrase(f"subject {gender} {mood}", noun, adjective, head)
        arcs |= _noun_phrase(f"object {gender} {mood}", noun, adjective, f"after object {mood}")
        arcs |= {
            f"place {gender} {mood}": (Arc(1, noun, f"tail {mood}"),),
            head: (predicate, Arc(2, "that", f"relative {gender} {mood}")),
            f"predicate {gender} {mood}": (predicate,),
            f"relative {gender} {mood}": (Arc(1, verb, f"relative object {gender} {mood}"),),
            f"relative object {gender} {mood}": tuple(
                Arc(1, f"determiner {other}", f"relative noun {other} {gender} {mood}")
                for other in _GENDERS
            ),
        }
        for other in _GENDERS:
            arcs[f"relative noun {other} {gender} {mood}"] = (
                Arc(1, f"noun {other}", f"predicate {gender} {mood}"),
            )
    return arcs


def _noun_phrase(state: str, noun: str, adjective: str, then: str) -> dict[str, tuple[Arc, ...]]:
    """A noun with at most one adjective before it."""
    bare = f"{state} bare"
    return {state: (Arc(7, noun, then), Arc(3, adjective, bare)), bare: (Arc(1, noun, then),)}
