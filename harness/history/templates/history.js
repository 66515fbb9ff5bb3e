"use strict";
// The page's behaviour. All data is in #payload; plotly is in #plotly, compressed; nothing is fetched.

const payload = JSON.parse(document.getElementById("payload").textContent);
const nonce = document.currentScript.nonce;
const drawn = new Set();
const ranges = new Map(); // test set → range of its nights on screen

const SHAPES = { PASS: "square", FAIL: "x", ERROR: "diamond", INVALID: "triangle-up", INCONCLUSIVE: "circle-open" };
const OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"], showTips: false };

function theme() {
  const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const names = ["ink", "quiet", "grid", "paper", "rule", "pass", "fail", "error", "invalid", "inconclusive"];
  return Object.fromEntries(names.map((name) => [name, read(name)]));
}

function unpacked({ dtype, bdata }) {
  const bytes = Uint8Array.from(atob(bdata), (char) => char.charCodeAt(0));
  return Array.from(dtype === "i4" ? new Int32Array(bytes.buffer) : new Float32Array(bytes.buffer));
}

function tracesOf(set, trend, colours) {
  const places = unpacked(trend.places);
  const x = places.map((place) => set.nights[place]);
  const heights = unpacked(trend.heights), limits = unpacked(trend.limits);
  const outside = new Set(trend.outside);
  const text = places.map((place, at) => `${trend.measured[at]}, limit ${Number.isNaN(limits[at]) ? "none" : limits[at].toPrecision(3)}<br>${set.verdicts[place]}, commit ${set.commits[place]}`);
  return [
    { x, y: limits, type: "scatter", mode: "lines", name: "limit", line: { color: colours.quiet, width: 1.4, dash: "dash", shape: "hv" }, hoverinfo: "skip" },
    {
      x, y: heights, text, type: "scatter", mode: "lines+markers", name: "deviation", connectgaps: false,
      line: { color: "#0072B2", width: 1 },
      marker: {
        size: places.map((_, at) => (outside.has(at) ? 9 : 5)),
        symbol: places.map((_, at) => (outside.has(at) ? "x" : "circle")),
        color: places.map((_, at) => (outside.has(at) ? colours.fail : "#0072B2")),
      },
      hovertemplate: "%{x|%Y-%m-%d %H:%M}: %{text}<extra></extra>",
    },
    {
      x: set.nights, y: set.nights.map(() => 0), yaxis: "y2", type: "scatter", mode: "markers", name: "verdict of the night",
      marker: { size: 7, symbol: set.verdicts.map((word) => SHAPES[word]), color: set.verdicts.map((word) => colours[word.toLowerCase()]) },
      text: set.verdicts.map((word) => `${payload.symbols[word]} ${word}`), hovertemplate: "%{x|%Y-%m-%d}: %{text}<extra></extra>",
    },
  ];
}

// A line where a level begins, and beside it what changed; labels of neighbours stand in rows.
function marksOf(set, trend, colours) {
  const shapes = [], annotations = [];
  const middle = set.nights.length / 2;
  trend.steps.forEach((step, index) => {
    const x = set.nights[step.place];
    const colour = step.worse ? colours.fail : colours.pass;
    shapes.push({ type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: colour, width: 1.4, dash: "dot" } });
    annotations.push({
      x, yref: "paper", y: 1, yanchor: "top", yshift: -14 * (index % 3), showarrow: false, borderpad: 1,
      xanchor: step.place > middle ? "right" : "left", text: `${step.worse ? "▲" : "▼"} ${step.text}`,
      bgcolor: colours.paper, font: { size: 10, color: colours.ink },
    });
  });
  return { shapes, annotations };
}

function draw(element) {
  const set = payload.sets[element.dataset.set];
  const trend = set.trends[Number(element.dataset.trend)];
  const colours = theme();
  const range = ranges.get(element.dataset.set);
  const axis = { gridcolor: colours.grid, linecolor: colours.rule, zeroline: false, automargin: true };
  const layout = {
    ...marksOf(set, trend, colours),
    margin: { l: 60, r: 12, t: 24, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colours.ink, size: 12, family: "inherit" }, hovermode: "closest", dragmode: "zoom",
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    xaxis: { ...axis, type: "date", anchor: "y2", ...(range ? { range: [...range] } : {}) },
    yaxis: { ...axis, type: "log", exponentformat: "e", domain: [0.1, 1], title: { text: "deviation" } },
    yaxis2: { domain: [0, 0.07], visible: false, fixedrange: true, range: [-1, 1] },
  };
  Plotly.react(element, tracesOf(set, trend, colours), layout, OPTIONS);
  for (const button of element.querySelectorAll("a.modebar-btn, button.modebar-btn")) button.setAttribute("aria-label", button.dataset.title ?? "");
  if (drawn.has(element)) return;
  drawn.add(element);
  element.on("plotly_relayout", (change) => zoomed(element, change));
}

function zoomed(element, change) {
  const name = element.dataset.set, before = JSON.stringify(ranges.get(name));
  if (change["xaxis.autorange"]) ranges.delete(name);
  else if (change["xaxis.range[0]"]) ranges.set(name, [change["xaxis.range[0]"], change["xaxis.range[1]"]]);
  else if (change["xaxis.range"]) ranges.set(name, [...change["xaxis.range"]]);
  if (JSON.stringify(ranges.get(name)) === before) return;
  for (const other of drawn) if (other !== element && other.dataset.set === name) draw(other);
}

async function loadPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// Names of places are plain letters; what somebody else wrote there is looked up as it is.
function openLinked() {
  const section = document.getElementById(location.hash.slice(1));
  const details = section?.querySelector("details");
  if (details) details.open = true;
  section?.scrollIntoView();
}

// Charts are drawn when they come near: the first screen must not wait for the others.
const nearby = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting && !drawn.has(target)) draw(target);
}, { rootMargin: "600px" });

addEventListener("hashchange", openLinked);
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const plot of document.querySelectorAll(".plot")) if (!drawn.has(plot)) draw(plot);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));

(async () => {
  if (!("DecompressionStream" in window)) {
    for (const plot of document.querySelectorAll(".plot")) plot.textContent = "Charts need a browser of 2023 or later.";
    return;
  }
  await loadPlotly();
  for (const plot of document.querySelectorAll(".plot")) nearby.observe(plot);
  if (location.hash) openLinked();
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
