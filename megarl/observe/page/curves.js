// Curves over steps, tokens or hours, drawn by uPlot: smoothing, log scale, one pointer over all of them, a full-size view.
"use strict";

const view = { x: "step", smooth: 0, log: false };
const plots = new Set();
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paint = (name) => name.startsWith("--") ? css(name) : name;
const X_NAMES = { step: "step", tokens: "tokens", hours: "hours of training" };

function compact(value) {
  if (!isNumber(value)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / (unit === "k" ? 1e3 : size)).toPrecision(3))}${unit}`;
  }
  return brief(value);
}

// As few digits as a label of an axis has room for: 5.5e-14 instead of 5.50e-14.
function brief(value) {
  const text = short(value);
  return text.includes("e") ? text.replace(/\.?0*e/, "e") : text;
}

function withAlpha(color, alpha) {
  const digits = color.length === 4 ? [...color.slice(1)].map((digit) => digit + digit).join("") : color.slice(1);
  return `#${digits}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;
}

// The exponential moving average, divided by the weight that it has so far, so that it starts at the first value.
function smoothed(values, weight) {
  let sum = 0, share = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

function placesOf(run) {
  return view.x === "step" || !run.axes[view.x]?.at(-1) ? run.steps : run.axes[view.x];
}

// `lines`: [{label, color, xs, steps, values, thin, points, band, fill}] as uPlot's table over all places.
function tableOf(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, place) => [x, place]));
  const spread = (line, values) => {
    const row = new Array(xs.length).fill(null);
    line.xs.forEach((x, place) => {
      const value = values[place];
      if (isNumber(value) && !(view.log && value <= 0)) row[at.get(x)] = value;
    });
    return row;
  };
  return { xs, spread };
}

function drawCurves(box, lines, { stacked = false, height = 190, readout } = {}) {
  const { xs, spread } = tableOf(lines);
  const series = [{}], rows = [xs], bands = [], told = [];
  const isSmooth = view.smooth > 0 && !stacked;
  for (const line of lines) {
    const color = () => paint(line.color);
    const few = line.points || line.values.filter(isNumber).length === 1;
    const points = { show: few, size: few ? 7 : 4, fill: color, stroke: color };
    const raw = spread(line, line.values);
    told.push({ label: line.label, row: line.told ? spread(line, line.told) : raw });
    if (line.low) {
      rows.push(spread(line, line.high), spread(line, line.low));
      series.push({ width: 0, points: { show: false } }, { width: 0, points: { show: false } });
      bands.push({ series: [rows.length - 2, rows.length - 1], fill: () => withAlpha(paint(line.color), 0.16) });
    }
    const faint = line.thin || isSmooth && !line.points;
    rows.push(raw);
    series.push({
      label: line.label, stroke: () => stacked ? css("--card") : faint ? withAlpha(paint(line.color), isSmooth ? 0.28 : 0.5) : color(), width: faint || stacked ? 1 : 2,
      scale: line.right ? "share" : "y", dash: line.points || line.right ? [4, 4] : undefined, points, spanGaps: true, fill: line.fill ? () => paint(line.color) : undefined,
    });
    if (isSmooth && !line.points && !line.thin) {
      rows.push(spread(line, smoothed(line.values, view.smooth)));
      series.push({ label: `${line.label} smoothed`, scale: line.right ? "share" : "y", stroke: color, width: 2, points: { show: false }, spanGaps: true });
    }
  }
  const grid = { stroke: () => css("--line"), width: 1 };
  const axis = { stroke: () => css("--faint"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const plot = new uPlot({
    width: Math.max(240, box.clientWidth || 340), height, series, bands, legend: { show: false }, padding: [8, 10, 0, 0],
    cursor: { sync: { key: `runs-${view.x}`, setSeries: false }, points: { size: 6 }, y: false },
    scales: {
      x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] },
      share: { range: [0, 1] },
      y: view.log && !stacked ? { distr: 3 } : { range: (_, low, high) => room(low, high, stacked) },
    },
    axes: [
      { ...axis, grid: { show: false }, size: 24, gap: 2, incrs: view.x === "step" ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] : undefined, values: (_, marks) => marks.map(compact) },
      { ...axis, grid, size: wideEnough, gap: 4, values: (_, marks) => marks.map((mark) => mark === null ? "" : compact(mark)) },
      ...(lines.some((line) => line.right) ? [{ ...axis, scale: "share", side: 1, size: 52, gap: 12, grid: { show: false }, values: (_, marks) => marks.map((mark) => `${Math.round(100 * mark)} %`) }] : []),
    ],
    hooks: {
      setCursor: [(one) => {
        if (!readout) return;
        const place = one.cursor.idx;
        if (place === null || place === undefined || one.cursor.left < 0) { readout.textContent = readout.dataset.rest ?? ""; return; }
        const values = told.filter(({ row }) => isNumber(row[place])).map(({ label, row }) => `${label} ${short(row[place])}`);
        readout.textContent = `${view.x} ${compact(xs[place])}: ${values.join(", ")}`;
      }],
    },
  }, rows, box);
  plots.add(plot);
  if (readout) readout.textContent = readout.dataset.rest = X_NAMES[view.x];
  return plot;
}

// Pixels for an axis whose labels are `texts`, at least those that most charts of a page need.
const wideEnough = (_, texts) => Math.max(48, 8 + 6.7 * Math.max(...(texts ?? [""]).map((text) => text.length)));

// The range of an axis: all values, and a little more; from 0 where that is near, and not around a constant's rounding.
function room(low, high, isStacked) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  if (isStacked) return [0, high * 1.04 || 1];
  const wide = high - low || Math.abs(high) || 1;
  const from = low >= 0 && low < 0.4 * high ? 0 : low - 0.06 * wide;
  return [from, high + 0.06 * wide];
}

// Where a pointer would be needed, keys do: arrows, Home and End go over the places of a chart, + and - change how much it shows.
function steerByKeys(box, title, plotOf) {
  let at = null;
  for (const [name, value] of [["tabindex", 0], ["role", "img"], ["aria-label", `${title}: arrow keys go over the steps, + and - enlarge`]]) box.setAttribute(name, value);
  box.addEventListener("keydown", (event) => {
    const plot = plotOf(), xs = plot?.data[0] ?? [], last = xs.length - 1;
    const to = { ArrowLeft: (at ?? last + 1) - 1, ArrowRight: (at ?? -1) + 1, Home: 0, End: last }[event.key];
    const factor = { "+": 0.5, "-": 2 }[event.key];
    if (last < 0 || to === undefined && factor === undefined) return;
    event.preventDefault();
    if (factor) {
      const { min, max } = plot.scales.x, middle = xs[at ?? Math.round(last / 2)], half = (max - min) * factor / 2;
      plot.setScale("x", { min: Math.max(xs[0], middle - half), max: Math.min(xs[last], middle + half) });
    } else at = Math.min(last, Math.max(0, to));
    if (at !== null) plot.setCursor({ left: plot.valToPos(xs[at], "x"), top: 10 });
  });
  box.addEventListener("blur", () => { at = null; plotOf()?.setCursor({ left: -10, top: -10 }); });
}

// A card with a chart. `lines()` gives its lines anew, as the x axis, the smoothing and the rows change.
function chartCard(title, lines, { note = "", isLarge = false, stacked = false, keys = [], attributes = {} } = {}) {
  const readout = html("div", { class: "readout" }), box = html("div", { class: "plot" });
  const full = html("button", { class: "icon", title: "full size", "aria-label": `full size: ${title}`, onclick: () => enlarge(title, lines, { stacked, keys }) }, "⤢");
  const legend = keys.length ? html("div", { class: "keys" }, ...keys.map(keyOf)) : null;
  const card = html("div", { class: isLarge ? "chart large" : "chart", ...attributes },
    html("div", { class: "title" }, html("h3", {}, title), html("span", { class: "now" }, note), full), box, readout, legend);
  steerByKeys(box, title, () => card.plot);
  card.draw = () => {
    if (card.plot) { plots.delete(card.plot); card.plot.destroy(); }
    const current = lines();
    card.plot = current.length ? drawCurves(box, current, { stacked, height: isLarge ? 230 : 180, readout }) : null;
    card.hidden = !current.length;
  };
  return card;
}

const keyOf = ([label, color]) => html("span", { class: "key" },
  html("span", { class: "swatch", style: `background: ${color.startsWith("--") ? `var(${color})` : color}` }), label);

function enlarge(title, lines, { stacked, keys }) {
  const readout = html("div", { class: "readout" }), box = html("div", { class: "plot" });
  const close = html("button", { onclick: () => dialog.close() }, "close");
  const dialog = html("dialog", { id: "full" }, html("div", { class: "title" }, html("h3", {}, title), close), box,
    html("div", { class: "keys" }, ...keys.map(keyOf)), readout,
    html("p", { class: "note" }, "Drag over the chart to enlarge a part of it, double-click to go back; or give it the focus and press arrows, + and -."));
  document.body.append(dialog);
  dialog.showModal();
  const plot = drawCurves(box, lines(), { stacked, height: Math.max(240, Math.min(innerHeight - 210, 620)), readout });
  steerByKeys(box, title, () => plot);
  dialog.addEventListener("close", () => { plots.delete(plot); plot.destroy(); dialog.remove(); });
}

function redrawAll() {
  for (const card of document.querySelectorAll(".chart")) if (card.plot && card.draw) card.draw();
}

// Colours follow the system's theme, widths the window's.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const plot of plots) plot.redraw(false); });
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { for (const plot of plots) plot.setSize({ width: plot.root.parentNode.clientWidth, height: plot.height }); }, 120);
});

// The lines of one metric: each run's, and of runs that repeat each other their mean and range.
function linesOf(name, extra = {}) {
  const lines = [];
  data.repetitions.forEach((places, group) => {
    const tint = `--c${group % 8}`;
    for (const place of places) {
      const values = runs[place].curves[name];
      if (values?.some(isNumber)) lines.push({ label: runs[place].name, color: tint, xs: placesOf(runs[place]), values, thin: places.length > 1, ...extra });
    }
    if (places.length < 2 || view.x !== "step") return;
    const mean = meanAndBand(places, name);
    if (mean.xs.length) lines.push({ label: "mean", color: tint, ...mean, ...extra });
  });
  return lines;
}

function meanAndBand(places, name) {
  const byStep = new Map();
  for (const place of places) {
    (runs[place].curves[name] ?? []).forEach((value, at) => {
      if (!isNumber(value)) return;
      const step = runs[place].steps[at];
      byStep.set(step, [...(byStep.get(step) ?? []), value]);
    });
  }
  const xs = [...byStep.keys()].filter((step) => byStep.get(step).length === places.length).sort((a, b) => a - b);
  const all = xs.map((step) => byStep.get(step));
  return {
    xs,
    values: all.map((values) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: all.map((values) => Math.min(...values)),
    high: all.map((values) => Math.max(...values)),
  };
}
