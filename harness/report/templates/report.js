"use strict";
// The page's behaviour. All data is in #payload; plotly is in #plotly, compressed; nothing is fetched.

const payload = JSON.parse(document.getElementById("payload").textContent);
const nonce = document.currentScript.nonce;
const drawn = new Set();
const hidden = new Set();
const narrow = matchMedia("(max-width: 820px)");

function theme() {
  const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(["ink", "quiet", "shade", "grid", "paper", "rule", "fail"].map((name) => [name, read(name)]));
}

// ------------------------------------------------------------------- curves

const decoded = new Map();

// A loop: Uint8Array.from walks a string by code points, which takes ten times as long.
function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  return bytes;
}

function typed(packed, kind) {
  return new kind(bytesOf(packed.bdata).buffer);
}

// Steps and values of a series, read once.
function curveOf(key) {
  if (!decoded.has(key)) {
    const series = payload.series[key];
    const y = typed(series.y, Float32Array);
    decoded.set(key, { x: series.x ? typed(series.x, Int32Array) : Int32Array.from(y, (_, index) => series.x0 + index), y });
  }
  return decoded.get(key);
}

// Exponential moving average without the bias to its first value; gaps stay gaps.
function smoothed({ x, y }, weight) {
  let sum = 0, mass = 0;
  return { x, y: y.map((value) => {
    if (Number.isNaN(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  }) };
}

// The visible part of a curve: the least and the greatest value of every bucket of the shown steps,
// and the first gap. Drawing more costs browsers seconds and shows nothing more.
function visible({ x, y }, range, buckets) {
  let first = 0, last = y.length - 1;
  if (range) {
    while (first < last && x[first + 1] < range[0]) first += 1;
    while (last > first && x[last - 1] > range[1]) last -= 1;
  }
  const count = last - first + 1;
  if (count <= 3 * buckets) return { x: x.subarray(first, last + 1), y: y.subarray(first, last + 1) };
  const kept = [first];
  for (let bucket = 0; bucket < buckets; bucket += 1) {
    const from = first + Math.floor((bucket * count) / buckets), to = first + Math.floor(((bucket + 1) * count) / buckets);
    let low = -1, high = -1, gap = -1;
    for (let index = from; index < to; index += 1) {
      if (Number.isNaN(y[index])) { if (gap < 0) gap = index; continue; }
      if (low < 0 || y[index] < y[low]) low = index;
      if (high < 0 || y[index] > y[high]) high = index;
    }
    kept.push(...[...new Set([low, high, gap])].filter((index) => index >= 0).sort((one, other) => one - other));
  }
  kept.push(last);
  return { x: kept.map((index) => x[index]), y: kept.map((index) => y[index]) };
}

const place = (value, unit) => Math.sign(value) * Math.log10(1 + Math.abs(value) / unit);
const difference = (value) => (value === 0 ? "0" : value.toExponential(2));

// ------------------------------------------------------------------ figures

const smoothing = document.getElementById("smoothing");
const ranges = new WeakMap(); // of a row of charts: the steps that all of them show
const heights = new WeakMap(); // of a chart: the values that it shows

function traceOf(spec, figure, colours, element, weight) {
  const value = figure.span ? `%{y:.${figure.digits}~f}` : "%{y:.5~g}";
  const whole = curveOf(spec.series);
  // Two points per pixel: more are not visible, and a zoom downsamples again.
  const { x, y } = visible(weight ? smoothed(whole, weight) : whole, ranges.get(rowOf(element)), Math.max(150, element.clientWidth));
  const times = spec.times ?? 1;
  return {
    x, y: figure.signed ? Array.from(y, (each) => place(times * each, figure.signed.unit)) : y,
    text: figure.signed ? Array.from(y, (each) => difference(times * each)) : undefined,
    type: "scatter", mode: spec.mode, name: spec.name, meta: spec.owner,
    visible: !hidden.has(spec.owner) || !isOverview(element),
    line: { color: colours[spec.colour] || spec.colour, dash: spec.stroke, width: spec.width },
    opacity: spec.opacity,
    marker: { color: colours[spec.colour] || spec.colour, size: 9, symbol: spec.symbol },
    showlegend: !spec.unlisted,
    fill: spec.fill ? "tozeroy" : "none", fillcolor: colours[spec.fill],
    hovertemplate: `step %{x}: ${figure.signed ? "%{text}" : value}<extra>${spec.hover ?? "%{fullData.name}"}</extra>`,
    hoverinfo: spec.fill ? "skip" : undefined,
  };
}

// The curves of a figure; behind a smoothed curve the measured one stays visible, faintly.
function tracesOf(figure, colours, element) {
  const weight = figure.smooth ? Number(smoothing.value) : 0;
  const measured = figure.traces.map((spec) => traceOf(spec, figure, colours, element, 0));
  if (!weight) return measured;
  const lines = figure.traces.filter((spec) => spec.mode === "lines");
  const faint = measured.filter((trace) => trace.mode === "lines")
    .map((trace) => ({ ...trace, opacity: 0.22, showlegend: false, hovertemplate: undefined, hoverinfo: "skip" }));
  return [...faint, ...lines.map((spec) => traceOf(spec, figure, colours, element, weight)), ...measured.filter((trace) => trace.mode !== "lines")];
}

function isOverview(element) {
  return element.id.startsWith("overview-");
}

function rowOf(element) {
  return element.closest(".charts");
}

const LABEL_ROW = 14; // pixels

function spaceFor(marks) {
  return LABEL_ROW * Math.max(0, ...marks.map((mark) => mark.row + 1));
}

// Lines where the passes of a run meet. Labels are above the curves, in rows, each on top of its line.
function drawMarks(marks, colours, shapes, annotations) {
  for (const mark of marks) {
    const rise = LABEL_ROW * (mark.row + 1);
    const line = { color: mark.kind === "fault" ? colours.fail : colours.quiet, width: 1.2, dash: mark.kind === "restart" ? "dot" : "solid" };
    const where = { type: "line", yref: "paper", x0: mark.x, x1: mark.x, layer: "above", line };
    shapes.push({ ...where, y0: 0, y1: 1 }, { ...where, ysizemode: "pixel", yanchor: 1, y0: 0, y1: rise });
    annotations.push({
      text: mark.text, x: mark.x, yref: "paper", y: 1, yanchor: "top", yshift: rise, showarrow: false, borderpad: 0,
      xanchor: mark.leftwards ? "right" : "left", xshift: mark.leftwards ? -2 : 2,
      bgcolor: colours.paper, font: { size: 10, color: colours.ink },
    });
  }
}

// The legend is above the labels. It wraps by itself, so its height is known only when it is drawn.
function liftLegend(element, above) {
  const { _size: size, legend } = element._fullLayout;
  const top = above + legend._height + 4;
  const height = size.t + size.h - top;
  return Plotly.relayout(element, { "margin.t": top, "legend.y": 1 + (above + 2) / height });
}

function layoutOf(figure, colours, single) {
  const axis = {
    gridcolor: colours.grid, linecolor: colours.rule, zeroline: false, automargin: true,
    tickfont: { size: 11 }, title: { font: { size: 11 }, standoff: 10 },
  };
  const smooth = figure.smooth && Number(smoothing.value) ? ", smoothed" : "";
  const y = { ...axis, title: { ...axis.title, text: figure.yTitle + smooth }, type: figure.log ? "log" : "linear" };
  if (figure.signed) {
    Object.assign(y, { tickvals: figure.signed.values, ticktext: figure.signed.labels, range: figure.signed.range, automargin: false });
  } else if (figure.span) {
    Object.assign(y, { tickformat: `.${figure.digits}~f`, range: figure.span });
  } else {
    y.tickformat = "~g";
  }
  const shapes = figure.levels.map((level) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: level.y, y1: level.y, layer: "below",
    line: { color: colours[level.colour], width: 1.2, dash: level.text ? "dot" : "solid" },
  }));
  const annotations = figure.levels.filter((level) => level.text).map((level) => ({
    text: level.text, xref: "paper", x: 0, xanchor: "left", xshift: 4, y: figure.log ? Math.log10(level.y) : level.y,
    yanchor: "bottom", showarrow: false, font: { size: 11, color: colours.quiet },
  }));
  if (figure.signed) shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, layer: "below", line: { color: colours.quiet, width: 1 } });
  if (figure.onset !== null) {
    shapes.push({
      type: "line", yref: "paper", y0: 0, y1: 1, x0: figure.onset, x1: figure.onset,
      line: { color: colours.fail, width: 1.5, dash: "dash" },
    });
    annotations.push({
      text: `onset ${figure.onset}`, x: figure.onset, yref: "paper", y: 1, xanchor: "left", yanchor: "top", xshift: 3,
      showarrow: false, font: { size: 11, color: colours.ink },
    });
  }
  drawMarks(figure.marks ?? [], colours, shapes, annotations);
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colours.ink },
    margin: { l: figure.signed ? 64 : 48, r: 12, t: single ? 22 : 8, b: 46 },
    xaxis: { ...axis, automargin: false, title: { ...axis.title, text: "step" }, rangemode: "normal" },
    yaxis: y, shapes, annotations, hovermode: "closest", hoverdistance: 40,
    showlegend: single, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
    dragmode: narrow.matches ? false : "zoom",
  };
}

const OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

// Draws a figure in the present state: theme, zoom, smoothing, hidden sets.
function draw(element) {
  const figure = payload.figures[element.id];
  const colours = theme();
  if (figure.heat) {
    drawHeat(element, figure.heat, colours);
  } else {
    const layout = layoutOf(figure, colours, !isOverview(element));
    const range = ranges.get(rowOf(element)), height = heights.get(element);
    if (range) layout.xaxis.range = [...range];
    if (height) layout.yaxis.range = [...height];
    const above = spaceFor(figure.marks ?? []);
    element.style.setProperty("--above", `${above}px`);
    const ready = Plotly.react(element, tracesOf(figure, colours, element), layout, OPTIONS);
    if (above) ready.then(() => liftLegend(element, above));
  }
  if (drawn.has(element)) return;
  drawn.add(element);
  nameControls(element);
  if (figure.heat) return;
  element.on("plotly_relayout", (change) => zoomed(element, change));
  element.on("plotly_hover", (event) => pointAt(element, event.points[0]));
  element.on("plotly_unhover", () => pointAt(element, null));
}

function nameControls(element) {
  for (const button of element.querySelectorAll("a.modebar-btn, button.modebar-btn")) button.setAttribute("aria-label", button.dataset.title ?? "");
}

// Layers by steps. Colour is the size of the difference; a cross means that it is outside its limit.
function drawHeat(element, heat, colours) {
  const found = typed(heat.difference, Float32Array), limits = typed(heat.limit, Float32Array), across = heat.steps.length;
  const rows = (make) => heat.rows.map((_, row) => heat.steps.map((_, column) => make(row * across + column)));
  const outside = [...found.keys()].filter((index) => !(found[index] <= limits[index]));
  const tiny = narrow.matches ? 16 : 60;
  const short = heat.rows.map((name) => (name.length > tiny ? `…${name.slice(-tiny)}` : name));
  const steps = heat.steps.map((_, column) => column), places = heat.rows.map((_, row) => row);
  const pixels = Math.min(1400, 15 * heat.rows.length + 90);
  element.style.height = `${pixels}px`;
  const axis = { gridcolor: colours.grid, linecolor: colours.rule, zeroline: false, tickfont: { size: narrow.matches ? 9 : 11 }, showgrid: false, ticks: "" };
  const left = 10 + (narrow.matches ? 5.6 : 6.6) * Math.max(...short.map((name) => name.length));
  const logs = rows((index) => (found[index] === 0 ? null : Math.log10(found[index])));
  const every = logs.flat().filter((value) => value !== null);
  const low = Math.floor(Math.min(0, ...every)), high = Math.min(3, Math.ceil(Math.max(low + 1, ...every)));
  const ticks = Array.from({ length: high - low + 1 }, (_, index) => low + index).filter((value) => (value - high) % Math.ceil((high - low) / 6) === 0);
  Plotly.react(element, [
    {
      type: "heatmap", x: steps, y: places, z: logs, zmin: low, zmax: high, colorscale: "Cividis", xgap: 1, ygap: 1, hoverongaps: true,
      text: rows((index) => `${difference(found[index])}, limit ${difference(limits[index])}`),
      customdata: rows((index) => `step ${heat.steps[index % across]}: ${heat.rows[Math.floor(index / across)]}`),
      hovertemplate: "%{customdata}<br>%{text}<extra></extra>",
      colorbar: { thickness: 10, tickvals: ticks, ticktext: ticks.map((value) => `1e${value}`), tickfont: { size: 11, color: colours.ink }, outlinewidth: 0, title: { text: narrow.matches ? "" : "relative", font: { size: 11 } } },
    },
    {
      type: "scatter", mode: "markers", x: outside.map((index) => index % across), y: outside.map((index) => Math.floor(index / across)), hoverinfo: "skip", showlegend: false,
      marker: { symbol: "x-thin", size: 7, line: { width: 1.4, color: "#ffffff" }, color: "#ffffff" },
    },
  ], {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: pixels, font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colours.ink },
    margin: { l: left, r: 64, t: 8, b: 44 }, dragmode: narrow.matches ? false : "zoom",
    xaxis: { ...axis, title: { text: "sampled step", font: { size: 11 }, standoff: 8 }, tickvals: steps, ticktext: heat.steps },
    yaxis: { ...axis, tickvals: places, ticktext: short, range: [heat.rows.length - 0.5, -0.5] },
  }, OPTIONS);
}

// Charts of one row show the same steps. Drawing again sends no event, so links do not loop.
function zoomed(element, change) {
  const read = (axis) => change[`${axis}.range`] ?? (`${axis}.range[0]` in change ? [change[`${axis}.range[0]`], change[`${axis}.range[1]`]] : undefined);
  const height = read("yaxis"), range = read("xaxis");
  if (height) heights.set(element, height);
  if (change["yaxis.autorange"]) heights.delete(element);
  if (range) showSteps(element, range);
  else if (change["xaxis.autorange"]) showSteps(element, null);
}

function showSteps(element, range) {
  const row = rowOf(element);
  if (range) ranges.set(row, range);
  else ranges.delete(row);
  for (const plot of row.querySelectorAll(".plot")) if (drawn.has(plot)) draw(plot);
}

// A pointer on one chart is shown on all charts of its row: the step, and the same set's value there.
function pointAt(element, point) {
  const owner = point?.data.meta;
  for (const plot of rowOf(element).querySelectorAll(".plot")) {
    plot.querySelector(":scope > .cursor")?.remove();
    if (plot === element || !point || !drawn.has(plot)) continue;
    const { xaxis } = plot._fullLayout;
    const at = xaxis.l2p(point.x);
    if (at < 0 || at > xaxis._length) continue;
    const cursor = document.createElement("div");
    cursor.className = at > xaxis._length / 2 ? "cursor left" : "cursor";
    cursor.style.left = `${xaxis._offset + at}px`;
    const label = document.createElement("span");
    label.textContent = `step ${point.x}${valueAt(plot, owner, point.x)}`;
    cursor.append(label);
    plot.append(cursor);
  }
}

function valueAt(plot, owner, step) {
  const figure = payload.figures[plot.id];
  const spec = figure.traces.find((trace) => trace.owner === owner && trace.mode === "lines");
  if (!spec) return "";
  const { x, y } = curveOf(spec.series);
  const value = y[x.indexOf(step)];
  return value === undefined ? "" : `: ${figure.signed ? difference(value) : Number(value.toPrecision(6))}`;
}

function steerWithKeys(element, event) {
  const figure = payload.figures[element.id];
  if (figure.heat || !drawn.has(element) || event.ctrlKey || event.metaKey || event.altKey) return;
  const [from, to] = element._fullLayout.xaxis.range, size = to - from;
  const steps = {
    ArrowLeft: [from - size / 5, to - size / 5], ArrowRight: [from + size / 5, to + size / 5],
    "+": [from + size / 4, to - size / 4], "=": [from + size / 4, to - size / 4], "-": [from - size / 2, to + size / 2], 0: null,
  };
  if (!(event.key in steps)) return;
  event.preventDefault();
  if (event.key === "0") heights.delete(element);
  showSteps(element, steps[event.key]);
}

function drawInside(element) {
  if (!window.Plotly) return;
  for (const plot of element.querySelectorAll(".plot")) if (!drawn.has(plot)) draw(plot);
}

async function loadPlotly() {
  const packed = bytesOf(document.getElementById("plotly").textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// ------------------------------------------------------------- interaction

function toggleSet(button) {
  const shown = button.getAttribute("aria-pressed") === "false";
  button.setAttribute("aria-pressed", shown);
  hidden[shown ? "delete" : "add"](button.dataset.owner);
  for (const plot of drawn) if (isOverview(plot)) draw(plot);
}

let onlyVerdict = "";
function filterRows(button) {
  for (const other of document.querySelectorAll(".filters button")) other.setAttribute("aria-pressed", other === button);
  onlyVerdict = button.dataset.filter;
  showRows();
}

function showRows() {
  const words = (document.getElementById("find")?.value ?? "").toLowerCase().split(/\s+/);
  for (const row of document.querySelectorAll(".verdicts tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = (onlyVerdict !== "" && row.dataset.verdict !== onlyVerdict) || !words.every((word) => text.includes(word));
    document.getElementById(row.querySelector("th a").hash.slice(1)).hidden = row.hidden;
  }
}

// Drawing may be slower than the slider: the newest position is drawn when the last one is done.
let redrawing = 0;
function smooth() {
  document.querySelector("output[for=smoothing]").textContent = Number(smoothing.value) ? smoothing.value : "off";
  cancelAnimationFrame(redrawing);
  redrawing = requestAnimationFrame(() => drawn.forEach((plot) => payload.figures[plot.id].smooth && draw(plot)));
}

const THEMES = { auto: "screen and (prefers-color-scheme: dark)", dark: "screen", light: "not all" };
function useTheme(name) {
  document.getElementById("dark").media = THEMES[name];
  drawn.forEach(draw);
}

function nextTheme(button) {
  const names = Object.keys(THEMES);
  const name = names[(names.indexOf(button.textContent.split(": ")[1]) + 1) % names.length];
  button.textContent = `Theme: ${name}`;
  useTheme(name);
}

// j and k go from set to set, / finds sets; letters that are typed into a field are ignored.
function walk(event) {
  if (event.target.closest("input") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    document.getElementById("find")?.focus();
    event.preventDefault();
  }
  const by = { j: 1, k: -1 }[event.key];
  if (!by) return;
  const sets = [...document.querySelectorAll(".set[data-verdict]:not([hidden])")];
  const next = sets[Math.max(0, sets.findIndex((set) => `#${set.id}` === location.hash) + by)];
  if (next) location.hash = next.id;
}

function sortRows(header) {
  const column = [...header.parentNode.children].indexOf(header);
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = header.closest("table").tBodies[0];
  const key = (row) => row.children[column].dataset.sort ?? row.children[column].textContent;
  const rows = [...body.rows].sort((a, b) => key(a).localeCompare(key(b), undefined, { numeric: true }));
  body.append(...(ascending ? rows : rows.reverse()));
}

// Our fragment identifiers are plain letters; any other is looked up as it is.
function openLinked() {
  const target = document.getElementById(location.hash.slice(1));
  const details = target?.querySelector("details");
  if (details) {
    details.open = true;
    details.querySelector("summary").focus({ preventScroll: true });
  }
  target?.scrollIntoView();
}

async function copyCommand(button) {
  const text = button.parentNode.querySelector("code").textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(button.parentNode.querySelector("code")); // a browser that refuses: select it
  }
}

function listen(selector, handle) {
  for (const element of document.querySelectorAll(selector)) element.addEventListener("click", () => handle(element));
}

for (const swatch of document.querySelectorAll("[data-colour]")) swatch.style.borderColor = swatch.dataset.colour;
listen(".filters button", filterRows);
listen(".legend button", toggleSet);
listen(".copy", copyCommand);
for (const header of document.querySelectorAll(".verdicts thead th")) header.querySelector("button").addEventListener("click", () => sortRows(header));
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => details.open && drawInside(details));
addEventListener("hashchange", openLinked);
addEventListener("keydown", walk);
smoothing.addEventListener("input", smooth);
document.getElementById("find")?.addEventListener("input", showRows);
listen("#theme", nextTheme);
for (const plot of document.querySelectorAll(".plot")) {
  plot.addEventListener("keydown", (event) => steerWithKeys(plot, event));
  plot.addEventListener("pointerleave", () => drawn.has(plot) && !payload.figures[plot.id].heat && pointAt(plot, null));
}
// Paper is white: figures are drawn for it, and afterwards as before.
let beforePrint = "";
addEventListener("beforeprint", () => {
  beforePrint = document.getElementById("dark").media;
  document.getElementById("dark").media = "not all";
  for (const details of document.querySelectorAll("details")) details.open = true;
  drawn.forEach(draw);
  drawInside(document);
});
addEventListener("afterprint", () => {
  document.getElementById("dark").media = beforePrint;
  drawn.forEach(draw);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));

// Figures are drawn when they are scrolled near: the first screen must not wait for the rest.
const nearby = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting && !drawn.has(target)) draw(target);
}, { rootMargin: "600px" });

(async () => {
  if (!("DecompressionStream" in window)) {
    for (const plot of document.querySelectorAll(".plot")) plot.textContent = "Charts need a browser of 2023 or later; plots/ beside this file holds them as pictures.";
    return;
  }
  await loadPlotly();
  const overview = [...document.querySelectorAll(".overview .plot")];
  for (const plot of overview) if (plot.getBoundingClientRect().top < innerHeight) draw(plot);
  for (const plot of document.querySelectorAll(".set .plot")) nearby.observe(plot);
  if (location.hash) openLinked();
  // Ready: the screen is drawn and every control works. The rest is below the screen.
  document.documentElement.dataset.ready = Math.round(performance.now());
  for (const plot of overview) {
    await new Promise((resolve) => setTimeout(resolve));
    if (!drawn.has(plot)) draw(plot);
  }
  document.documentElement.dataset.drawn = Math.round(performance.now());
})();
