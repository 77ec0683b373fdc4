// Elements, numbers as text, and the small drawings that the chart library has no form for. Everything that comes from a run enters the page as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const html = (name, attributes = {}, ...children) => put(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => put(document.createElementNS(SVG, name), attributes, children);
const isNumber = (value) => typeof value === "number";

function short(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "–" : String(value);
  if (value === 0 || Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const found = [];
  for (let place = Math.ceil(low / every); place * every <= high + every * 1e-9; place++) found.push(place * every);
  return found;
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low === 0 && high === 0) return [0, 1];
  return low === high ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2] : [low, high];
}

function frame(xs, ys, width, height) {
  const left = 46, right = 8, top = 8, bottom = 20;
  const x = (value) => left + (value - xs[0]) / (xs[1] - xs[0]) * (width - left - right);
  const y = (value) => height - bottom - (value - ys[0]) / (ys[1] - ys[0]) * (height - top - bottom);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const value of ticks(ys[0], ys[1], 4)) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawing.append(svg("text", { x: left - 5, y: y(value) + 3, "text-anchor": "end" }, short(value)));
  }
  for (const value of ticks(xs[0], xs[1], 5).filter(Number.isInteger)) {
    drawing.append(svg("text", { x: x(value), y: height - 5, "text-anchor": "middle" }, short(value)));
  }
  return { drawing, x, y };
}

// Histograms over steps: `rows` [{step, low, high, counts}], dark where many are.
function heatmap(title, rows) {
  const width = 380, height = 190, bins = 24;
  const ys = range(rows.flatMap((row) => [row.low, row.high]));
  const known = rows.map((row) => row.step);
  const xs = [Math.min(...known) - 0.5, Math.max(...known) + 0.5];
  const { drawing, x, y } = frame(xs, ys, width, height);
  const wide = Math.max(1, (x(xs[1]) - x(xs[0])) / (xs[1] - xs[0]));
  const high = (ys[1] - ys[0]) / bins;
  for (const row of rows) {
    const total = row.counts.reduce((sum, count) => sum + count, 0);
    const shares = new Array(bins).fill(0);
    row.counts.forEach((count, place) => {
      const middle = row.low + (row.high - row.low) * (place + 0.5) / row.counts.length;
      shares[Math.min(bins - 1, Math.floor((middle - ys[0]) / high))] += count / total;
    });
    shares.forEach((share, bin) => {
      if (!share) return;
      const from = ys[0] + bin * high;
      const place = { x: x(row.step) - wide / 2, y: y(from + high), width: wide + 0.3, height: y(from) - y(from + high) + 0.3 };
      const label = `step ${row.step}: ${(100 * share).toFixed(1)} % at ${short(from)} to ${short(from + high)}`;
      drawing.append(svg("rect", { ...place, fill: "var(--c0)", opacity: 0.12 + 0.88 * Math.sqrt(share) }, svg("title", {}, label)));
    });
  }
  return html("div", { class: "chart", "data-distribution": title }, html("h3", {}, title.replaceAll("_", " ")), drawing);
}

// A bar for each of `counts`, with `labels` under them.
function barChart(title, labels, counts) {
  const width = 380, height = 190;
  const { drawing, x, y } = frame([0, counts.length], [0, Math.max(1, ...counts)], width, height);
  drawing.querySelectorAll("text[text-anchor=middle]").forEach((text) => text.remove());
  counts.forEach((count, place) => {
    const box = { x: x(place) + 1, y: y(count), width: x(1) - x(0) - 2, height: y(0) - y(count) };
    drawing.append(svg("rect", { ...box, fill: "var(--c0)" }, svg("title", {}, `${labels[place]}: ${count}`)));
    drawing.append(svg("text", { x: x(place + 0.5), y: height - 5, "text-anchor": "middle" }, labels[place]));
  });
  return html("div", { class: "chart", "data-distribution": title }, html("h3", {}, title), drawing);
}

// Black or white, whichever stands out more from `color` (#rrggbb): their contrasts are equal at a luminance of 0.179.
function inkOn(color) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255).map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

// Spans as bars, a row for each process: `rows` {name: [[what, begin, end]]}, times in seconds.
function timeline(rows, colors) {
  const names = Object.keys(rows);
  const width = 1200, left = 90, tall = 18, height = names.length * tall + 26;
  const all = Object.values(rows).flat();
  const begin = Math.min(...all.map((span) => span[1])), end = Math.max(...all.map((span) => span[2]));
  const x = (time) => left + (time - begin) / Math.max(end - begin, 1e-6) * (width - left - 8);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const tick of ticks(0, Math.max(end - begin, 1e-6), 10)) {
    drawing.append(svg("line", { class: "grid", x1: x(begin + tick), x2: x(begin + tick), y1: 0, y2: height - 18 }));
    drawing.append(svg("text", { x: x(begin + tick), y: height - 5, "text-anchor": "middle" }, `${short(tick)} s`));
  }
  names.forEach((name, place) => {
    drawing.append(svg("text", { x: left - 8, y: place * tall + 13, "text-anchor": "end" }, name));
    for (const [what, from, to] of rows[name]) {
      const box = { x: x(from), y: place * tall + 2, width: Math.max(0.5, x(to) - x(from)), height: tall - 4 };
      const label = `${name}: ${what}, ${short(to - from)} s`;
      drawing.append(svg("rect", { ...box, fill: colors.get(what), "data-span": what }, svg("title", {}, label)));
      if (box.width < 6.2 * what.length + 6) continue;
      const on = { x: box.x + box.width / 2, y: place * tall + 12.5, "text-anchor": "middle", class: "on-bar", style: `fill: ${inkOn(colors.get(what))}` };
      drawing.append(svg("text", on, what));
    }
  });
  return drawing;
}
