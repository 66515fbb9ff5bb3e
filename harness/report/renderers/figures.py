"""The interactive figures as data: series once, figures that refer to them. Pure.

``templates/report.js`` turns a figure into a plotly call and chooses the theme's colours.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from converge_harness.model import Judgement
from converge_harness.report.renderers.assets import typed_array
from converge_harness.report.renderers.downsample import corners, downsample
from converge_harness.report.renderers.marks import Mark, marks
from converge_harness.report.renderers.palette import style
from converge_harness.report.renderers.scales import SignedLog, ratio_needs_log, ratio_range
from converge_harness.report.text import digits
from converge_harness.report.view.curves import Comparison, Curve
from converge_harness.report.view.gradient_map import GradientMap
from converge_harness.report.view.report_view import (
    SIGNAL_TITLES,
    RepeatView,
    ReportView,
    RunView,
    TestView,
)
from converge_harness.wording import control_called

Figure = dict[str, Any]
"""What ``templates/report.js`` draws."""
_THIN, _THICK, _BAND = 1.2, 2.4, 8.0
_LABEL_CHARACTERS = 54
"""Characters of a label across the figure of one set, on a phone."""
_LOSS_TITLE = "loss, nats per token"
_DIFFERENCE_TITLE = "relative difference"
_INK = "ink"
"""A colour name that the page replaces by its theme's text colour; so are the two below."""
_QUIET = "quiet"
_SHADE = "shade"


class Figures:
    """Builds the payload of a page."""

    def __init__(self, view: ReportView) -> None:
        self.view = view
        self.series: dict[str, dict[str, Any]] = {}
        self.controls = {control.name: control for control in view.judged_against}
        self.styles = {test.run.anchor: style(index) for index, test in enumerate(view.tests)}

    def payload(self) -> dict[str, Any]:
        """``series`` by key, and ``figures`` by the id of the element that shows them."""
        figures = {
            "overview-loss": self._loss(),
            "overview-difference": self._difference(),
            "overview-ratio": self._ratio(self.view.tests, ("grad_norm",)),
        }
        for test in self.view.tests:
            figures |= self._of_set(test)
        return {
            "series": self.series,
            "figures": {name: figure for name, figure in figures.items() if _drawn(figure)},
        }

    # ------------------------------------------------------------- overview

    def _loss(self) -> Figure:
        traces = [
            *(self._control(control) for control in self.view.controls),
            *self._seeds(self.view.tests),
            *(
                self._line(test, f"{test.run.anchor}/loss", test.run.signal("loss"))
                for test in _thin_first(self.view.tests)
            ),
        ]
        return figure(traces, _LOSS_TITLE, levels=self._floor(), smooth=True)

    def _difference(self) -> Figure:
        pairs = [(test, test.comparison("loss")) for test in _thin_first(self.view.tests)]
        distinct = list(dict.fromkeys(pair.limit for _, pair in pairs if pair.limit))
        repeats = [repeat.comparisons["loss"].difference for repeat in self.view.repeats]
        every = [*(pair.difference for _, pair in pairs), *repeats, *distinct]
        traces = [
            *chain(*(self._limit(f"limit-{index}", limit) for index, limit in enumerate(distinct))),
            *self._repeats(self.view.repeats, "loss"),
            *(
                self._line(test, f"{test.run.anchor}/difference-loss", pair.difference)
                for test, pair in pairs
            ),
        ]
        return figure(traces, _DIFFERENCE_TITLE, signed=_signed_axis(SignedLog.over(every)))

    # -------------------------------------------------------------- one set

    def _of_set(self, test: TestView) -> dict[str, Figure]:
        anchor, onset = test.run.anchor, test.verdict.onset_step
        control = self.controls[test.verdict.control]
        loss = figure(
            [
                self._control(control),
                *self._seeds((test,)),
                self._line(test, f"{anchor}/loss", test.run.signal("loss"), alone=True),
                *self._replays(test, "loss", _superseded(test, "loss")),
                self._resumes(test),
            ],
            _LOSS_TITLE,
            levels=self._floor(),
            onset=onset,
            smooth=True,
        )
        figures = {f"{anchor}-loss": loss}
        for signal in ("loss", "grad_norm"):
            names = [
                name
                for name in (signal, f"{signal}_recomputed")
                if test.comparison(name).difference
            ]
            curves = [test.comparison(name).difference for name in names]
            limit = test.comparison(signal).limit
            replays = [
                (number, found.difference) for number, found in _superseded_against(test, signal)
            ]
            repeats = [each for each in self.view.repeats if each.control == control.name]
            of_repeats = [repeat.comparisons[signal].difference for repeat in repeats]
            drawn = [*curves, limit, *of_repeats, *(curve for _, curve in replays)]
            traces = [
                *self._limit(f"{anchor}/limit-{signal}", limit),
                *self._repeats(repeats, signal),
                *(
                    self._line(
                        test,
                        f"{anchor}/difference-{name}",
                        curve,
                        name=SIGNAL_TITLES[name],
                        reported=name == signal,
                        alone=True,
                    )
                    for name, curve in zip(names, curves, strict=True)
                ),
                *self._replays(test, f"difference-{signal}", replays),
            ]
            figures[f"{anchor}-difference-{signal}"] = figure(
                traces,
                _DIFFERENCE_TITLE,
                signed=_signed_axis(SignedLog.over(drawn)),
                onset=onset,
            )
        figures[f"{anchor}-ratio"] = self._ratio(
            (test,), ("grad_norm", "grad_norm_recomputed"), onset=onset, alone=True
        )
        if test.gradients:
            figures[f"{anchor}-gradients"] = _heat_map(test.gradients)
        if test.resumed:
            lines = [_mark_line(mark) for mark in marks(test.resumed, _LABEL_CHARACTERS)]
            figures = {
                name: drawn if drawn["heat"] else drawn | {"marks": lines}
                for name, drawn in figures.items()
            }
        return figures

    # ---------------------------------------------------------------- parts

    def _ratio(
        self,
        tests: Sequence[TestView],
        signals: Sequence[str],
        onset: int | None = None,
        *,
        alone: bool = False,
    ) -> Figure:
        """``alone``: one set has the figure, and its replays are drawn."""
        chosen = [
            (test, signal, test.comparison(signal).ratio)
            for test in _thin_first(tests)
            for signal in signals
        ]
        traces = [
            self._line(
                test,
                f"{test.run.anchor}/ratio-{signal}",
                curve,
                name=SIGNAL_TITLES[signal] if len(signals) > 1 else None,
                reported=signal == "grad_norm",
                alone=alone,
            )
            for test, signal, curve in chosen
        ]
        curves = [curve for _, _, curve in chosen]
        if alone:
            replays = [
                (number, found.ratio) for number, found in _superseded_against(tests[0], signals[0])
            ]
            traces += self._replays(tests[0], f"ratio-{signals[0]}", replays)
            curves += [curve for _, curve in replays]
        log = ratio_needs_log(curves)
        level = {"y": 1.0, "text": "", "colour": _INK}
        span = ratio_range(curves)
        title = "test / control"
        return figure(traces, title, levels=[level], log=log, span=span, onset=onset, smooth=True)

    def _floor(self) -> list[dict[str, Any]]:
        floor = self.view.entropy_floor
        if floor is None:
            return []
        return [{"y": floor, "text": f"entropy floor {digits(floor)}", "colour": _QUIET}]

    def _line(
        self,
        test: TestView,
        key: str,
        curve: Curve,
        *,
        name: str | None = None,
        reported: bool = True,
        alone: bool = False,
    ) -> dict[str, Any] | None:
        colour, stroke = self.styles[test.run.anchor]
        passes = test.verdict.judgement is Judgement.PASS
        return self._trace(
            key,
            curve,
            name or test.run.name,
            owner=test.run.anchor,
            colour=colour,
            stroke=stroke if reported else "dot",
            width=_THIN if (passes and not alone) or not reported else _THICK,
        )

    def _replays(
        self, test: TestView, key: str, curves: Iterable[tuple[int, Curve]]
    ) -> list[dict[str, Any]]:
        """Values at steps that a later pass trained again, labelled by the number of their pass."""
        traces: list[dict[str, Any]] = []
        for which, curve in curves:
            trace = self._trace(
                f"{test.run.anchor}/{key}-pass-{which}",
                curve,
                "replayed",
                owner=test.run.anchor,
                colour=_QUIET,
                width=_THIN,
                stroke="dot",
            )
            if trace:
                # Mostly they are on the curve itself, where only rings are visible.
                trace |= {"mode": "lines+markers", "symbol": "circle-open"}
                trace |= {"hover": f"pass {which}, replayed", "unlisted": bool(traces)}
                traces.append(trace)
        return traces

    def _resumes(self, test: TestView) -> dict[str, Any] | None:
        """The first step of every pass but the first, on the curve."""
        passes = test.resumed.passes[1:] if test.resumed else ()
        firsts = {each.steps[0] for each in passes if each.steps}
        curve = test.run.signal("loss")
        chosen = [step in firsts for step in curve.steps.tolist()]
        trace = self._trace(
            f"{test.run.anchor}/resumes",
            Curve(curve.steps[chosen], curve.values[chosen]),
            "resumed",
            owner=test.run.anchor,
            colour=self.styles[test.run.anchor].colour,
            width=_THIN,
        )
        return trace and {**trace, "mode": "markers", "symbol": "diamond"}

    def _control(self, control: RunView) -> dict[str, Any] | None:
        """A broad band under the other lines: curves that agree are inside it."""
        trace = self._trace(
            f"{control.anchor}/loss",
            control.signal("loss"),
            control_called(control.name),
            colour=_INK,
            width=_BAND,
        )
        return trace and {**trace, "opacity": 0.25}

    def _seeds(self, tests: Sequence[TestView]) -> list[dict[str, Any] | None]:
        """Runs by other seeds: thin, in the colour of their set, and the controls' grey."""
        sets = dict.fromkeys((test.verdict.control for test in tests), ("", _QUIET)) | {
            test.run.name: (test.run.anchor, self.styles[test.run.anchor].colour) for test in tests
        }
        traces = []
        for name, (owner, colour) in sets.items():
            for run in self.view.seeds_of(name):
                trace = self._trace(
                    f"{run.anchor}/loss",
                    run.signal("loss"),
                    run.name,
                    owner=owner,
                    colour=colour,
                    width=_THIN,
                )
                hover = label(f"{run.name}, a seed of {name}")
                traces.append(trace and {**trace, "hover": hover, "unlisted": True})
        return traces

    def _limit(self, key: str, limit: Curve) -> list[dict[str, Any]]:
        """Both sides of the envelope, shaded to zero."""
        trace = self._trace(
            key, corners(limit), "tolerance", colour=_QUIET, width=1.0, stroke="dash"
        )
        if trace is None:
            return []
        trace |= {"fill": _SHADE}
        return [trace, trace | {"times": -1, "unlisted": True}]

    def _repeats(self, repeats: Iterable[RepeatView], signal: str) -> list[dict[str, Any]]:
        """Repeats of the control: how much correct runs differ. The figure's hint explains them."""
        traces: list[dict[str, Any]] = []
        for repeat in repeats:
            trace = self._trace(
                f"{repeat.run.anchor}/difference-{signal}",
                repeat.comparisons[signal].difference,
                "A/A repeats",
                colour=_QUIET,
                width=_THIN,
                stroke="dot",
            )
            if trace:
                hover = label(f"A/A {repeat.run.repeat or repeat.run.name}")
                traces.append(trace | {"hover": hover, "unlisted": True})
        return traces

    def _trace(
        self,
        key: str,
        curve: Curve,
        name: str,
        *,
        colour: str,
        width: float,
        stroke: str = "solid",
        owner: str = "",
    ) -> dict[str, Any] | None:
        """A drawn curve; None when it has nothing to draw."""
        if not curve:
            return None
        if key not in self.series:  # several figures draw the control, and a set's loss
            self.series[key] = _packed(downsample(curve))
        return {
            "series": key,
            "owner": owner,
            "colour": colour,
            "stroke": stroke,
            "width": width,
            "name": label(name),
            # A curve of one step is a point, and a point has no line.
            "mode": "markers" if len(curve) == 1 else "lines",
        }


def _drawn(figure: Figure) -> bool:
    return bool(figure["traces"] or figure["heat"])


def _superseded(test: TestView, signal: str) -> list[tuple[int, Curve]]:
    passes = test.resumed.passes if test.resumed else ()
    return [(each.number, each.superseded.get(signal, Curve())) for each in passes]


def _superseded_against(test: TestView, signal: str) -> list[tuple[int, Comparison]]:
    passes = test.resumed.passes if test.resumed else ()
    return [(each.number, each.superseded_against.get(signal, Comparison())) for each in passes]


def _thin_first(tests: Iterable[TestView]) -> list[TestView]:
    """What needs attention is drawn last, so on top."""
    return sorted(tests, key=lambda test: test.verdict.judgement is not Judgement.PASS)


# ------------------------------------------------------------------------ parts


def figure(
    traces: Iterable[dict[str, Any] | None],
    y_title: str,
    *,
    levels: Sequence[dict[str, Any]] = (),
    signed: dict[str, Any] | None = None,
    log: bool = False,
    span: tuple[float, float] | None = None,
    onset: int | None = None,
    smooth: bool = False,
) -> Figure:
    """A figure; ``smooth`` where the page's slider may smooth its curves."""
    return {
        "traces": [trace for trace in traces if trace],
        "yTitle": y_title,
        "levels": list(levels),
        "signed": signed,
        "log": log,
        "span": list(span) if span else None,
        "digits": math.ceil(1 - math.log10(span[1] - span[0])) if span else None,
        "onset": onset,
        "smooth": smooth,
        "heat": None,
    }


def _heat_map(found: GradientMap) -> Figure:
    """Differences of all gradients, a row per parameter and a column per sampled step."""
    cells = {
        name: typed_array(np.minimum(values, np.finfo(np.float32).max).astype("<f4"))
        for name, values in (("difference", found.difference), ("limit", found.limit))
    }
    rows = [label(name) for name in found.names]
    return figure([], "") | {"heat": {"rows": rows, "steps": list(found.steps), **cells}}


def _signed_axis(axis: SignedLog) -> dict[str, Any]:
    """What the page needs to place differences on their axis and to label it."""
    return {
        "unit": axis.unit,
        "values": list(axis.ticks),
        "labels": list(axis.ticks.values()),
        "range": list(axis.span),
    }


def _mark_line(mark: Mark) -> dict[str, Any]:
    return {
        "x": mark.step,
        "text": label(mark.text),
        "kind": mark.kind.value,
        "row": mark.row,
        "leftwards": mark.leftwards,
    }


def label(text: str) -> str:
    """Plotly reads text as a subset of HTML, and text between dollars as TeX."""
    return html.escape(text, quote=False).replace("$", "&#36;")


def _packed(curve: Curve) -> dict[str, Any]:
    """Little-endian float32 in base64, plotly's own form: a third of the size of text.

    Enough to draw with; ``report.json`` and the run folders hold every digit.
    """
    # Clipped, because a larger number would become an infinity, which plotly draws as a gap.
    largest = np.finfo(np.float32).max
    finite = np.where(np.isfinite(curve.values), curve.values, math.nan)
    result: dict[str, Any] = {"y": typed_array(np.clip(finite, -largest, largest).astype("<f4"))}
    if np.all(np.diff(curve.steps) == 1):
        return result | {"x0": int(curve.steps[0]), "dx": 1}
    return result | {"x": typed_array(curve.steps.astype("<i4"))}
