// The heat map of experts: a row per layer, a column per expert, how much of the layer's mean load each got.
"use strict";

// Blue where an expert got less than the mean, red where it got more; twice the mean and more is the full red.
function loadColor(load) {
  const far = Math.min(1, Math.abs(load - 1));
  return load < 1 ? `rgba(var(--good), ${far.toFixed(3)})` : `rgba(var(--bad), ${far.toFixed(3)})`;
}

function expertMap(record) {
  const columns = Math.max(...record.loads.map((row) => row.length));
  const left = 34, top = 4, wide = Math.max(3, Math.min(22, 1100 / columns)), tall = 14;
  const width = left + columns * wide + 110, height = top + record.layers.length * tall + 18;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, style: `max-width: ${width}px`, role: "img" });
  record.loads.forEach((row, line) => {
    const y = top + line * tall;
    drawing.append(svg("text", { x: left - 5, y: y + tall - 4, "text-anchor": "end" }, record.layers[line]));
    row.forEach((load, expert) => {
      const label = `layer ${record.layers[line]}, expert ${expert}: ${short(load)} of the mean load`;
      const place = { x: left + expert * wide, y, width: wide, height: tall, fill: loadColor(load), stroke: "var(--line)", "stroke-width": 0.3 };
      drawing.append(svg("rect", place, svg("title", {}, label)));
    });
    const text = `max ${short(Math.max(...row))}, ${short(record.entropy[line])} nats`;
    drawing.append(svg("text", { x: left + columns * wide + 6, y: y + tall - 4 }, text));
  });
  for (const expert of ticks(0, columns, 8).filter(Number.isInteger)) {
    if (expert < columns) drawing.append(svg("text", { x: left + (expert + 0.5) * wide, y: height - 5, "text-anchor": "middle" }, expert));
  }
  return drawing;
}

function expertsSection(runs) {
  const maps = runs.flatMap((run) => run.experts.flatMap(({ step, ...roles }) =>
    Object.entries(roles).map(([role, record]) => ({ name: `${run.name}, ${role}`, step, record }))));
  const names = [...new Set(maps.map((map) => map.name))];
  const which = html("select", { id: "experts-of" }, ...names.map((name) => html("option", { value: name }, name)));
  const step = html("select", { id: "experts-step" });
  const box = html("div", { class: "wide scrolls", id: "experts-map" });
  const show = () => box.replaceChildren(expertMap(maps.find((map) => map.name === which.value && String(map.step) === step.value).record));
  function choose() {
    const steps = maps.filter((map) => map.name === which.value).map((map) => map.step);
    step.replaceChildren(...steps.map((one) => html("option", { value: one }, one)));
    step.value = steps.at(-1);
    show();
  }
  which.addEventListener("input", choose);
  step.addEventListener("input", show);
  choose();
  return [html("p", { class: "note" }, "Load of each expert over the mean load of its layer (row: layer, column: expert); beside each layer the busiest expert's, and the router's entropy."),
    html("div", { class: "filters" }, html("label", {}, "run", which), html("label", {}, "step", step)), box];
}
