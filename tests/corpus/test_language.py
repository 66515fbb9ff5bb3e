"""The likelihood is checked against enumeration and against counting, never against itself."""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest

from converge_harness.corpus.grammar import language
from converge_harness.corpus.language import (
    Arc,
    Category,
    Distribution,
    Language,
    log_sum_exp,
    render,
)


def category(*words, weights=None, by_topic=None):
    topics = by_topic or [weights or [1] * len(words)] * 2
    return Category(words, tuple(Distribution.of(topic) for topic in topics))


TINY = Language(
    start="start",
    arcs={
        "start": (Arc(3, "noun", "verb"), Arc(1, "who", "verb")),
        "verb": (Arc(1, "verb", "end"), Arc(1, "comma", "start twice")),
        "start twice": (Arc(1, "noun", "end"),),
        "end": (Arc(1, "stop", None),),
    },
    categories={
        "noun": category("pa", "ta", by_topic=[[9, 1], [1, 4]]),
        "who": category("ku"),
        "verb": category("mi", "ni", by_topic=[[1, 1], [3, 1]]),
        "comma": category(","),
        "stop": category(".", "!", weights=[2, 1]),
    },
    topics=Distribution.of([2, 1]),
    lengths=Distribution.of([5, 2, 1]),
)


def share(weights, index):
    return weights[index] / sum(weights)


def sentences_of_tiny(topic):
    """Every sentence of TINY with its probability in a topic, written out by hand."""
    noun = {"pa": share([[9, 1], [1, 4]][topic], 0), "ta": share([[9, 1], [1, 4]][topic], 1)}
    verb = {"mi": share([[1, 1], [3, 1]][topic], 0), "ni": share([[1, 1], [3, 1]][topic], 1)}
    first = {word: p * 3 / 4 for word, p in noun.items()} | {"ku": 1 / 4}
    rest = {f" {word}": p / 2 for word, p in verb.items()}
    rest |= {f", {word}": p / 2 for word, p in noun.items()}
    stop = {".": 2 / 3, "!": 1 / 3}
    return {
        a + b + c: first[a] * rest[b] * stop[c] for a, b, c in itertools.product(first, rest, stop)
    }


def all_documents_of_tiny():
    probability = defaultdict(float)
    for topic, count in itertools.product((0, 1), (1, 2, 3)):
        given = share([2, 1], topic) * share([5, 2, 1], count - 1)
        sentences = sentences_of_tiny(topic).items()
        for chosen in itertools.product(sentences, repeat=count):
            text = " ".join(sentence for sentence, _ in chosen)
            probability[text] += given * math.prod(p for _, p in chosen)
    return probability


def test_likelihood_equals_exact_enumeration_of_every_document():
    documents = all_documents_of_tiny()
    assert len(documents) == 24 + 24**2 + 24**3
    for text, probability in documents.items():
        # Weights are rounded to multiples of 2**-32.
        assert TINY.log_probability(text) == pytest.approx(math.log(probability), abs=1e-6)
    assert math.fsum(math.exp(TINY.log_probability(text)) for text in documents) == pytest.approx(
        1, abs=1e-9
    )


def test_documents_come_as_often_as_the_likelihood_says():
    spoken = Counter(itertools.islice(TINY.documents(Random(3)), 20_000))
    for text, probability in all_documents_of_tiny().items():
        if probability > 0.01:
            deviation = math.sqrt(20_000 * probability)
            assert spoken[text] == pytest.approx(20_000 * probability, abs=5 * deviation)


def test_mean_code_length_is_the_entropy():
    entropy = -math.fsum(p * math.log(p) for p in all_documents_of_tiny().values())
    spoken = list(itertools.islice(TINY.documents(Random(4)), 20_000))
    measured = -math.fsum(map(TINY.log_probability, spoken)) / len(spoken)
    assert measured == pytest.approx(entropy, rel=0.02)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pa",
        "pa mi",
        "pa mi.pa mi.",
        "pa  mi.",
        "pa mi .",
        "pa mi. ",
        "pa xa.",
        "pa PA mi.",
        "mi pa.",
        "pa mi. pa mi. pa mi. pa mi.",
    ],
)
def test_what_cannot_be_said_has_probability_zero(text):
    assert TINY.log_probability(text) == -math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arcs": {"start": (Arc(1, "noun", None), Arc(2, "noun", "start"))}}, "two arcs"),
        ({"categories": {"a": category("pa"), "b": category("pa")}}, "two categories"),
        ({"categories": {"a": category("p a")}}, "no words"),
        ({"topics": Distribution.of([1, 1, 1])}, "every topic"),
    ],
)
def test_an_ambiguous_language_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_render_sets_marks_close_to_words():
    assert render(["pa", ",", "ta", "mi", "?"]) == "pa, ta mi?"


def test_log_sum_exp_survives_small_probabilities():
    assert log_sum_exp([-10_000.0, -10_000.0]) == pytest.approx(-10_000 + math.log(2))


# ------------------------------------------------- the project's own language


def test_the_language_of_a_seed_is_always_the_same():
    first, second = (language(7, 512) for _ in range(2))
    assert first == second
    assert language(8, 512).categories != first.categories


def test_it_can_say_all_that_it_says():
    source = language(1, 512)
    for text in itertools.islice(source.documents(Random(1)), 200):
        assert -math.inf < source.log_probability(text) < 0


def test_it_keeps_gender_and_mood_over_a_distance():
    source = language(1, 512)
    said = {name: words.words[0] for name, words in source.categories.items()}

    def sayable(*categories):
        return source.log_probability(render([said[name] for name in categories])) > -math.inf

    relative = ("that", "verb 0", "determiner 1", "noun 1")
    assert sayable("determiner 0", "noun 0", *relative, "verb 0", "stop")
    assert not sayable("determiner 0", "noun 0", *relative, "verb 1", "stop")
    assert not sayable("determiner 0", "noun 1", "verb 1", "stop")
    assert sayable("question word", "pronoun 1", "verb 1", "adverb", "question mark")
    assert not sayable("question word", "pronoun 1", "verb 1", "adverb", "stop")


def test_every_state_is_reached_and_leads_on():
    source = language(1, 64)
    reached, todo = set(), [source.start]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached.add(state)
            todo += [arc.to for arc in source.arcs[state] if arc.to]
    assert reached == set(source.arcs)
    used = {arc.category for arcs in source.arcs.values() for arc in arcs}
    assert used == set(source.categories)
