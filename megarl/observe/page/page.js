// Lays out the page from the data in it.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
runs.forEach((run, number) => { run.samples = new SampleStore(run.samples, number); });

function table(head, rows, isNumeric = () => false) {
  const cell = (name, value, column) => html(name, { class: isNumeric(column) ? "number" : null }, short(value));
  return html("div", { class: "scrolls" }, html("table", {},
    html("thead", {}, html("tr", {}, ...head.map((value, column) => cell("th", value, column)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value, column) => cell("td", value, column)))))));
}

// Links to what torch's profiler wrote; the page itself shows none of it.
function profiles() {
  const linked = runs.filter((run) => run.profiles.length);
  if (!linked.length) return [];
  const links = (run) => run.profiles.map(({ name, href }) => html("li", {}, html("a", { href }, name)));
  return [html("h3", {}, "Profiled steps"),
    html("p", { class: "note" }, "Traces open in ui.perfetto.dev, memory snapshots in docs.pytorch.org/memory_viz."),
    ...linked.map((run) => html("ul", { class: "profiles" }, run.name, ...links(run)))];
}

function timelines() {
  const traced = runs.filter((run) => run.trace.length);
  if (!traced.length) return [html("p", { class: "note" }, "No timeline was written."), ...profiles()];
  const what = [...new Set(traced.flatMap((run) => run.trace.flatMap((row) => Object.values(row.spans).flat().map((span) => span[0]))))];
  const colors = new Map(what.map((name) => [name, phaseColor(name)]));
  const run = html("select", { id: "trace-run" }, ...traced.map((one, place) => html("option", { value: place }, one.name)));
  const from = html("input", { id: "trace-from", type: "number" }), to = html("input", { id: "trace-to", type: "number" });
  const box = html("div", { class: "wide scrolls", id: "timeline" });
  function show() {
    const rows = Object.create(null);  // a span may have any name
    for (const { step, spans } of traced[run.value].trace) {
      if (step < Number(from.value) || step > Number(to.value)) continue;
      for (const [who, list] of Object.entries(spans)) (rows[who] ??= []).push(...list);
    }
    box.replaceChildren(...Object.values(rows).some((list) => list.length) ? [timeline(rows, colors)] : ["no spans at these steps"]);
  }
  function choose() {
    const steps = traced[run.value].trace.map((row) => row.step);
    to.value = Math.max(...steps);
    from.value = Math.max(Math.min(...steps), to.value - 2);
    show();
  }
  run.addEventListener("input", choose);
  for (const input of [from, to]) input.addEventListener("input", show);
  choose();
  const keys = what.map((name) => html("span", { class: "key" }, html("span", { class: "swatch", style: `background: ${colors.get(name)}` }), name));
  return [html("div", { class: "filters" }, html("label", {}, "run", run), html("label", {}, "from step", from), html("label", {}, "to step", to)),
    html("p", {}, ...keys), box, ...profiles()];
}

function spreads() {
  return runs.flatMap((run) => {
    const kinds = run.distributions.length ? Object.keys(run.distributions[0]).filter((name) => name !== "step") : [];
    const maps = kinds.map((kind) => {
      const rows = run.distributions.map((row) => ({ step: row.step, ...row[kind] })).filter((row) => row.counts?.length);
      return rows.length ? heatmap(kind, rows) : null;
    });
    const charts = [...maps, mismatchChart(run)].filter(Boolean);
    if (!charts.length) return [];
    return [html("details", { open: runs.length === 1 ? "" : null }, html("summary", {}, run.name), html("div", { class: "charts" }, ...charts))];
  });
}

const NEWEST = 2000;

// Of the newest samples, which are those whose tokens have numbers.
function mismatchChart(run) {
  const exponents = [-7, -6, -5, -4, -3, -2, -1, 0];
  const counts = new Array(exponents.length).fill(0);
  let seen = 0;
  for (let place = Math.max(0, run.samples.length - NEWEST); place < run.samples.length; place++) {
    const sample = run.samples.at(place);
    (sample.log_probs ?? []).forEach((value, token) => {
      if (!sample.sampled[token] || !isNumber(value) || !isNumber(sample.engine[token])) return;
      const exponent = Math.ceil(Math.log10(Math.max(Math.abs(value - sample.engine[token]), 1e-30)));
      counts[Math.min(counts.length - 1, Math.max(0, exponent + 7))] += 1;
      seen += 1;
    });
  }
  const labels = exponents.map((exponent, place) => place < exponents.length - 1 ? `≤1e${exponent}` : ">0.1");
  return seen ? barChart("|trainer − engine| log-prob of the samples' tokens", labels, counts) : null;
}

function configs() {
  const names = ["field", ...runs.map((run) => run.name)];
  const different = Object.entries(data.differences).map(([name, values]) => [name, ...values.map((value) => value === null ? "–" : JSON.stringify(value))]);
  const parts = runs.length > 1 ? [html("h3", {}, "Where the runs differ"), table(names, different)] : [];
  return [...parts, ...runs.map((run) => html("details", {}, html("summary", {}, `config of ${run.name}`), html("pre", {}, run.config)))];
}

function comparison() {
  const rows = Object.entries(data.last).filter(([, values]) => values.some(isNumber));
  return [html("p", { class: "note" }, "Means of the last 10 steps; of evaluations the last value."),
    table(["metric", ...runs.map((run) => run.name)], rows.map(([name, values]) => [name, ...values]), (column) => column > 0)];
}

function environments() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.environment)))];
  const words = (name, value) => name.endsWith("_bytes") && isNumber(value) ? `${(value / 2 ** 30).toFixed(1)} GiB` : value;
  const of = { folder: (run) => run.folder, started: (run) => run.status.started, seed: (run) => run.seed, commit: (run) => run.status.commit };
  const rows = [...Object.entries(of).map(([name, value]) => [name, ...runs.map(value)]).filter((row) => row.slice(1).some((value) => value !== null && value !== undefined)),
    ...names.map((name) => [name.replace(/_bytes$/, ""), ...runs.map((run) => words(name, run.environment[name]))])];
  const empty = names.length ? [] : [html("p", { class: "note" }, "The rest is written when a run starts.")];
  return [table(["", ...runs.map((run) => run.name)], rows), ...empty];
}

function faultTables() {
  return runs.flatMap((run) => {
    if (!run.faults.length) return [html("p", { class: "note" }, `${run.name}: none`)];
    const head = [...new Set(run.faults.flatMap((fault) => Object.keys(fault)))];
    const text = (value) => value !== null && typeof value === "object" ? JSON.stringify(value) : value;
    return [html("h3", {}, run.name), table(head, run.faults.map((fault) => head.map((name) => text(fault[name]))))];
  });
}

function rewardErrors() {
  return runs.filter((run) => run.reward_errors.length).flatMap((run) => {
    const head = Object.keys(run.reward_errors[0]).filter((name) => name !== "traceback");
    const tracebacks = run.reward_errors.filter((row) => row.traceback).map((row) =>
      html("details", {}, html("summary", {}, `first traceback of ${row.reward}`), html("pre", {}, row.traceback)));
    return [html("h3", {}, run.name), table(head, run.reward_errors.map((row) => head.map((name) => row[name]))), ...tracebacks];
  });
}

function slowRanks() {
  return runs.filter((run) => run.slow_ranks.length).flatMap((run) => {
    const head = Object.keys(run.slow_ranks[0]);
    return [html("h3", {}, run.name), table(head, run.slow_ranks.map((row) => head.map((name) => name === "behind" ? percent(row[name]) : row[name])))];
  });
}

const SECTIONS = {
  Overview: overview, Curves: curves, Samples: () => samplesSection(runs, data.pictures, data.pictures_left_out), Timeline: timelines,
  ...(runs.some((run) => run.experts.length) ? { Experts: () => expertsSection(runs) } : {}), Distributions: spreads,
  ...(runs.length > 1 ? { Comparison: comparison } : {}), Config: configs, Environment: environments, Faults: faultTables,
  ...(runs.some((run) => run.reward_errors.length) ? { "Reward errors": rewardErrors } : {}),
  ...(runs.some((run) => run.slow_ranks.length) ? { "Slow ranks": slowRanks } : {}),
};
const WITH_TEXTS = ["Samples", "Distributions"];
document.querySelector("h1").textContent = document.title;
const later = [];
for (const [name, make] of Object.entries(SECTIONS)) {
  const id = name.toLowerCase().replaceAll(" ", "-");
  document.querySelector("nav").append(html("a", { href: `#${id}` }, name));
  const section = html("section", { id }, html("h2", {}, name));
  document.querySelector("main").append(section);
  if (WITH_TEXTS.includes(name)) later.push(() => section.append(...make()));
  else section.append(...make());
}
// The rest is shown while the texts of samples, which stand behind this script, are read and unpacked.
const parsed = new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
const opened = parsed.then(() => Promise.all(runs.map((run) => run.samples.open()))).then(() => {
  for (const fill of later) fill();
  if (data.live) follow();
}, (error) => document.querySelector("#samples").append(html("p", { class: "note" }, `Samples cannot be unpacked by this browser: ${error}`)));
