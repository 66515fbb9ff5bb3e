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

// ------------------------------------------------------------------ figures

// What a pointer reads on a difference axis: a value on the zero line is zero, not the line's height.
function readings(series, zero) {
  const bytes = Uint8Array.from(atob(series.y.bdata), (char) => char.charCodeAt(0));
  return Array.from(new Float32Array(bytes.buffer), (value) => (value < zero ? "0" : value.toExponential(2)));
}

function traceOf(spec, figure, colours) {
  const series = payload.series[spec.series];
  const value = figure.span ? `%{y:.${figure.digits}~f}` : "%{y:.5~g}";
  return {
    ...series,
    text: figure.ticks ? readings(series, figure.ticks.zero) : undefined,
    type: "scatter", mode: spec.mode, name: spec.name, meta: spec.owner,
    visible: !hidden.has(spec.owner),
    line: { color: colours[spec.colour] || spec.colour, dash: spec.stroke, width: spec.width },
    opacity: spec.opacity,
    marker: { color: colours[spec.colour] || spec.colour, size: 9, symbol: spec.symbol },
    showlegend: !spec.unlisted,
    fill: spec.fill ? "tozeroy" : "none", fillcolor: colours[spec.fill],
    hovertemplate: `step %{x}: ${figure.ticks ? "%{text}" : value}<extra>${spec.hover ?? "%{fullData.name}"}</extra>`,
    hoverinfo: spec.fill ? "skip" : undefined,
  };
}

const LABEL_ROW = 14; // pixels

function spaceFor(marks) {
  return LABEL_ROW * Math.max(0, ...marks.map((mark) => mark.row + 1));
}

// Where a run in passes is joined. Labels stand above the curves, in rows, each at the top of its line.
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

// The legend goes above the labels. It wraps as it likes, so its height is known only when it is drawn.
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
  const y = { ...axis, title: { ...axis.title, text: figure.yTitle }, type: figure.log ? "log" : "linear" };
  if (figure.ticks) {
    Object.assign(y, { tickvals: figure.ticks.values, ticktext: figure.ticks.labels, range: figure.ticks.range });
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
    margin: { l: 48, r: 12, t: single ? 22 : 8, b: 36 },
    xaxis: { ...axis, title: { ...axis.title, text: "step" }, rangemode: "normal" },
    yaxis: y, shapes, annotations, hovermode: "closest", hoverdistance: 40,
    showlegend: single, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
    dragmode: narrow.matches ? false : "zoom",
  };
}

function draw(element) {
  const figure = payload.figures[element.id];
  const colours = theme();
  const single = !element.id.startsWith("overview-");
  const traces = figure.traces.map((spec) => traceOf(spec, figure, colours));
  const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const above = spaceFor(figure.marks ?? []);
  element.style.setProperty("--above", `${above}px`);
  const ready = Plotly.react(element, traces, layoutOf(figure, colours, single), options);
  if (above) ready.then(() => liftLegend(element, above));
  if (!drawn.has(element)) {
    drawn.add(element);
    element.on("plotly_relayout", (change) => linkZoom(element, change));
  }
}

// Panels of one row show the same steps. A change that a link made must not start another.
let linking = false;
async function linkZoom(source, change) {
  const keys = Object.keys(change).filter((key) => key.startsWith("xaxis."));
  if (linking || !keys.length) return;
  linking = true;
  const update = Object.fromEntries(keys.map((key) => [key, change[key]]));
  const others = [...source.closest(".charts").querySelectorAll(".plot")].filter((plot) => plot !== source && drawn.has(plot));
  await Promise.all(others.map((plot) => Plotly.relayout(plot, update)));
  linking = false;
}

function drawInside(element) {
  if (!window.Plotly) return;
  for (const plot of element.querySelectorAll(".plot")) if (!drawn.has(plot)) draw(plot);
}

async function loadPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
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
  for (const plot of drawn) {
    if (!plot.id.startsWith("overview-")) continue;
    const which = plot.data.flatMap((trace, index) => (trace.meta === button.dataset.owner ? [index] : []));
    if (which.length) Plotly.restyle(plot, { visible: shown }, which);
  }
}

function filterRows(button) {
  for (const other of document.querySelectorAll(".filters button")) other.setAttribute("aria-pressed", other === button);
  for (const row of document.querySelectorAll("[data-verdict]")) {
    row.hidden = Boolean(button.dataset.filter) && row.dataset.verdict !== button.dataset.filter;
  }
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

function openLinked() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const details = target?.querySelector("details");
  if (details) details.open = true;
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
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  drawInside(document);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));

// Sections below the fold are drawn when they come near: the first screen must not wait for them.
const nearby = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting && !drawn.has(target)) draw(target);
}, { rootMargin: "600px" });

(async () => {
  if (!("DecompressionStream" in window)) {
    for (const plot of document.querySelectorAll(".plot")) plot.textContent = "Charts need a browser of 2023 or later; plots/ beside this file holds them as pictures.";
    return;
  }
  await loadPlotly();
  drawInside(document.querySelector(".overview"));
  for (const plot of document.querySelectorAll(".set .plot")) nearby.observe(plot);
  if (location.hash) openLinked();
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
