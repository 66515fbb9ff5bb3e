"""The interactive figures as data: series once, figures that refer to them.

``templates/report.js`` turns a figure into a plotly call; colours of the theme are its business.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.model import Judgement
from harness.report.curves import Curve
from harness.report.downsample import corners, downsample
from harness.report.palette import style
from harness.report.scales import decades, raised, ratio_needs_log, zero_line
from harness.report.text import number
from harness.report.view import SIGNAL_TITLES, ReportView, RunView, TestView

_THIN, _THICK, _BAND = 1.2, 2.4, 8.0
_LOSS_TITLE = "loss, nats per token"
_INK = "ink"
"""A colour name that the page replaces by its theme's text colour; so are the two below."""
_QUIET = "quiet"
_SHADE = "shade"

Figure = dict[str, Any]


class Figures:
    """Builds the payload of a page."""

    def __init__(self, view: ReportView) -> None:
        self.view = view
        self.series: dict[str, dict[str, Any]] = {}
        self.controls = {control.name: control for control in view.references}
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
            "figures": {name: figure for name, figure in figures.items() if figure["traces"]},
        }

    # ------------------------------------------------------------- overview

    def _loss(self) -> Figure:
        traces = [
            *(self._control(control) for control in self.view.controls),
            *(
                self._line(test, f"{test.run.anchor}/loss", test.run.signal("loss"))
                for test in _thin_first(self.view.tests)
            ),
        ]
        return _figure(traces, _LOSS_TITLE, levels=self._floor())

    def _difference(self) -> Figure:
        pairs = [(test, test.comparison("loss")) for test in _thin_first(self.view.tests)]
        repeats = [(repeat, repeat.comparisons["loss"].difference) for repeat in self.view.repeats]
        limits = [pair.limit for _, pair in pairs if pair.limit]
        distinct = list(dict.fromkeys(limits))
        every = [*(pair.difference for _, pair in pairs), *(c for _, c in repeats), *distinct]
        zero = zero_line(every)
        traces = [
            *(self._limit(f"limit-{index}", limit) for index, limit in enumerate(distinct)),
            *(
                self._trace(
                    f"{repeat.run.anchor}/difference",
                    raised(curve, zero),
                    f"A/A {repeat.run.repeat or repeat.run.name}",
                    colour=_QUIET,
                    width=_THIN,
                    stroke="dot",
                )
                for repeat, curve in repeats
            ),
            *(
                self._line(test, f"{test.run.anchor}/raised-loss", raised(pair.difference, zero))
                for test, pair in pairs
            ),
        ]
        return _figure(traces, "relative difference", ticks=_ticks(zero, every))

    # -------------------------------------------------------------- one set

    def _of_set(self, test: TestView) -> dict[str, Figure]:
        anchor, onset = test.run.anchor, test.verdict.onset_step
        control = self.controls[test.verdict.control]
        loss = _figure(
            [
                self._control(control),
                self._line(test, f"{anchor}/loss", test.run.signal("loss")),
            ],
            _LOSS_TITLE,
            levels=self._floor(),
            onset=onset,
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
            zero = zero_line([*curves, limit])
            traces = [self._limit(f"{anchor}/limit-{signal}", limit)] if limit else []
            traces += [
                self._line(
                    test,
                    f"{anchor}/difference-{name}",
                    raised(curve, zero),
                    name=SIGNAL_TITLES[name],
                    reported=name == signal,
                )
                for name, curve in zip(names, curves, strict=True)
            ]
            figures[f"{anchor}-difference-{signal}"] = _figure(
                traces, "relative difference", ticks=_ticks(zero, [*curves, limit]), onset=onset
            )
        figures[f"{anchor}-ratio"] = self._ratio(
            (test,), ("grad_norm", "grad_norm_recomputed"), onset=onset
        )
        return figures

    # ---------------------------------------------------------------- parts

    def _ratio(
        self, tests: Sequence[TestView], signals: Sequence[str], onset: int | None = None
    ) -> Figure:
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
            )
            for test, signal, curve in chosen
        ]
        log = ratio_needs_log(curve for _, _, curve in chosen)
        level = {"y": 1.0, "text": "", "colour": _INK}
        return _figure(traces, "test / control", levels=[level], log=log, onset=onset)

    def _floor(self) -> list[dict[str, Any]]:
        floor = self.view.entropy_floor
        if floor is None:
            return []
        return [{"y": floor, "text": f"entropy floor {number(floor)}", "colour": _QUIET}]

    def _line(
        self,
        test: TestView,
        key: str,
        curve: Curve,
        *,
        name: str | None = None,
        reported: bool = True,
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
            width=_THIN if passes or not reported else _THICK,
        )

    def _control(self, control: RunView) -> dict[str, Any] | None:
        """A broad band under the other lines: what agrees runs inside it."""
        trace = self._trace(
            f"{control.anchor}/loss",
            control.signal("loss"),
            f"control {control.name}",
            colour=_INK,
            width=_BAND,
        )
        return trace and {**trace, "opacity": 0.25}

    def _limit(self, key: str, limit: Curve) -> dict[str, Any] | None:
        trace = self._trace(
            key, corners(limit), "tolerance", colour=_QUIET, width=1.0, stroke="dash"
        )
        return trace and {**trace, "fill": _SHADE}

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
        """A drawn curve; None when nothing of it can be drawn."""
        if not curve:
            return None
        drawn = downsample(curve)
        self.series.setdefault(key, _packed(drawn))
        return {
            "series": key,
            "owner": owner,
            "colour": colour,
            "stroke": stroke,
            "width": width,
            # Plotly reads names as a subset of HTML, and what stands between dollars as TeX.
            "name": html.escape(name, quote=False).replace("$", "&#36;"),
            # A curve of one step is a point, and a point has no line.
            "mode": "markers" if len(drawn) == 1 else "lines",
        }


def _thin_first(tests: Iterable[TestView]) -> list[TestView]:
    """What needs a person is drawn last, so on top."""
    return sorted(tests, key=lambda test: test.verdict.judgement is not Judgement.PASS)


def _figure(
    traces: Iterable[dict[str, Any] | None],
    y_title: str,
    *,
    levels: Sequence[dict[str, Any]] = (),
    ticks: dict[str, Any] | None = None,
    log: bool = False,
    onset: int | None = None,
) -> Figure:
    return {
        "traces": [trace for trace in traces if trace],
        "yTitle": y_title,
        "levels": list(levels),
        "ticks": ticks,
        "log": log or ticks is not None,
        "onset": onset,
    }


def _ticks(zero: float, curves: Sequence[Curve]) -> dict[str, Any]:
    """Ticks of a difference axis, whose lowest is zero itself."""
    exponents = decades(zero, curves)
    labels = ["0", *(f"1e{exponent}" for exponent in exponents[1:])]
    return {
        "values": [10.0**exponent for exponent in exponents],
        "labels": labels,
        "zero": 1.5 * zero,
        "range": [exponents[0] - 0.2, exponents[-1]],
    }


def _packed(curve: Curve) -> dict[str, Any]:
    """Little-endian float32 in base64, plotly's own form: a third of the size of text.

    Enough to draw with; ``report.json`` and the run folders hold every digit.
    """
    # Clipped, because a larger number would become an infinity, which plotly draws as a gap.
    largest = np.finfo(np.float32).max
    finite = np.where(np.isfinite(curve.values), curve.values, math.nan)
    packed: dict[str, Any] = {"y": _typed("f4", np.clip(finite, -largest, largest).astype("<f4"))}
    if np.all(np.diff(curve.steps) == 1):
        return packed | {"x0": int(curve.steps[0]), "dx": 1}
    return packed | {"x": _typed("i4", curve.steps.astype("<i4"))}


def _typed(dtype: str, values: npt.NDArray[np.float32] | npt.NDArray[np.int32]) -> dict[str, str]:
    return {"dtype": dtype, "bdata": base64.b64encode(values.tobytes()).decode()}
