import io
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image
from report_samples import HOSTILE, build_view, foreign_view, hostile_view, sample_view

from converge_harness.model import Evidence, Judgement, Verdict
from converge_harness.report.renderers.plots import draw


def pixels(png):
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("view", [sample_view(), hostile_view()])
def test_three_figures_with_something_in_them(view):
    drawn = draw(view)
    names = ("overview", "differences", "grad_norm_ratio")
    assert set(drawn) == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    for name in names:
        picture = pixels(drawn[f"{name}.png"])
        assert picture.shape == (840, 1650, 3)
        assert len(np.unique(picture.astype(np.int64) @ [65536, 256, 1])) > 50


def test_the_sets_have_their_colours():
    picture = pixels(draw(sample_view())["overview.png"])
    control, failing = (0xC3, 0xC9, 0xCF), (0xCC, 0x79, 0xA7)
    for colour in (control, failing):
        assert (picture == colour).all(axis=2).sum() > 300


def long_view(steps):
    """A set whose loss differs by noise that crosses zero, growing to 1%."""
    noise = 1e-2 * np.linspace(0, 1, steps) * np.random.default_rng(1).standard_normal(steps)
    numbers = tuple(range(1, steps + 1))
    return build_view(
        title="long",
        verdicts=[Verdict("a", "c", Judgement.FAIL, onset_step=1)],
        evidences=[
            Evidence("a", "a", numbers, {"loss": tuple(2 + 2 * noise)}),
            Evidence("c", "c", numbers, {"loss": (2.0,) * steps}),
        ],
    )


def inked(view):
    """Share of the picture of differences that is not white."""
    return float((pixels(draw(view)["differences.png"]) != 255).any(axis=2).mean())


def test_a_long_run_is_a_line_of_sizes_and_no_block():
    assert inked(long_view(3000)) < 0.1
    assert inked(long_view(400)) > 0.1  # signed, step by step


def test_a_long_run_without_any_difference_is_drawn():
    steps = tuple(range(1, 1001))
    same = [Evidence(name, name, steps, {"loss": (2.0,) * 1000}) for name in ("a", "c")]
    verdict = Verdict("a", "c", Judgement.PASS)
    assert inked(build_view(title="same", verdicts=[verdict], evidences=same)) > 0


def test_a_figure_without_curves_is_left_out():
    assert {name.split(".")[0] for name in draw(foreign_view())} == {"overview", "differences"}
    assert draw(build_view(title="t", verdicts=[Verdict("a", "c", Judgement.ERROR)])) == {}


@pytest.mark.parametrize("name", ["_hidden", "$x$", "日本語", "x" * 300, HOSTILE])
def test_any_name_can_be_drawn(name):
    loss = {"loss": (1.0, 0.9)}
    view = build_view(
        title=name,
        verdicts=[Verdict(name, "c", Judgement.PASS)],
        evidences=[Evidence(name, "a", (1, 2), loss), Evidence("c", "c", (1, 2), loss)],
    )
    assert pixels(draw(view)["overview.png"]).std() > 1


def test_an_svg_holds_curves_and_no_script_or_address():
    root = ET.fromstring(draw(hostile_view())["differences.svg"])  # noqa: S314 - our own file
    tags = {element.tag.split("}")[1] for element in root.iter()}
    assert "path" in tags
    assert not tags & {"script", "image", "a", "foreignObject"}
    links = [value for each in root.iter() for key, value in each.items() if key.endswith("href")]
    assert all(link.startswith("#") for link in links)


def test_the_same_view_gives_the_same_bytes():
    assert draw(foreign_view()) == draw(foreign_view())
