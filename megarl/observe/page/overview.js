// The first screen: what each run is and how it stands, six large charts, then every other metric.
"use strict";

function duration(seconds) {
  if (!isNumber(seconds)) return null;
  if (seconds < 90) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const percent = (value) => `${Number((100 * value).toFixed(1))} %`;

// What the held-out rows gave, before and after training or first and last so far: the mean reward, else the loss.
function heldOut(run) {
  const { before, after } = run.summary.eval ?? {};
  const of = (name) => (run.curves[`eval/${name}`] ?? []).filter(isNumber);
  for (const [name, label, tell] of [["reward", "held-out reward", short], ["accuracy", "held-out accuracy", percent], ["loss", "held-out loss", short]]) {
    const first = before?.[name] ?? of(name)[0], last = after?.[name] ?? of(name).at(-1);
    if (isNumber(first) || isNumber(last)) return [label, [first, last].filter(isNumber).map(tell).join(" → ")];
  }
  return ["held-out", null];
}

const MARKS = { passed: "✓", failed: "✗", "not measured": "–" };

// A line for each parity check: short words, and a mark where its bound is known; the figure where it failed or has no bound.
function checkLines(checks) {
  return checks.map(({ name, value, bound, state }) => {
    const figure = isNumber(value) ? short(value) : "not measured";
    const told = isNumber(bound) ? `${figure}, at most ${short(bound)}` : figure;
    const words = [MARKS[state], name, state === "failed" ? `(${told})` : state === "measured" ? figure : null];
    return html("div", { class: `check ${state.split(" ")[0]}`, title: told, "aria-label": `${name} ${state}: ${told}` }, words.filter(Boolean).join(" "));
  });
}

// Ten facts, of which five are figures: as many for every run, so that rows are full and runs stand side by side.
function runCard(run) {
  const status = run.status;
  const last = (run.curves["reward/mean"] ?? run.curves["train/loss"] ?? []).filter(isNumber).at(-1);
  const [heldOutName, heldOutValue] = heldOut(run);
  const took = [isNumber(status.seconds) ? html("span", { class: "whole" }, duration(status.seconds < 10 ? status.seconds : Math.round(status.seconds))) : null, isNumber(status.step_seconds) ? html("small", {}, `${short(status.step_seconds)} s a step`) : null];
  const ranks = [status.training, status.engines].filter(Boolean);
  const facts = [
    [run.curves["reward/mean"] || !run.curves["train/loss"] ? "reward, last step" : "loss, last step", isNumber(last) ? [short(last)] : []],
    [heldOutName, [heldOutValue]],
    ["best step", status.best ? [`${status.best[0]} (${short(status.best[1])})`] : []],
    ["tokens", status.tokens ? [compact(status.tokens)] : []],
    ["time", took],
    ["model", [status.model]],
    ["algorithm", [status.algorithm]],
    ["hardware", [status.hardware]],
    ["training ranks, engines", ranks.length ? [ranks.join(" · ")] : []],
    ["checks", checkLines(status.checks)],
  ];
  const cell = ([name, values], place) => {
    const known = values.filter((value) => value !== null && value !== undefined && value !== "");
    return html("div", { class: place < 5 ? "figure" : null }, html("dt", {}, name), html("dd", {}, ...(known.length ? known : ["–"])));
  };
  const notices = [["damaged files", run.damage.join("\n")], [status.state === "failed" ? "why it failed" : "why it ended", status.why]].filter(([, value]) => value);
  const share = isNumber(status.planned) && status.planned > 0 ? Math.min(1, status.done / status.planned) : status.state === "finished" ? 1 : 0;
  return html("article", { class: "run" },
    html("div", { class: "state" }, html("span", { class: `badge ${status.state}` }, status.state), html("b", {}, run.name),
      html("span", { class: "note" }, `step ${status.done}${isNumber(status.planned) ? ` of ${status.planned}` : ""}`
        + (status.faults ? `, ${status.faults} ${status.faults === 1 ? "fault" : "faults"}` : ""))),
    html("div", { class: "progress" }, html("div", { style: `width: ${(100 * share).toFixed(1)}%` })),
    ...notices.map(([name, value]) => html("p", { class: "notice" }, html("b", {}, name), ` ${value}`)),
    html("dl", { class: "facts" }, ...facts.map(cell)));
}

function overview() {
  // three cards abreast on a desk, or two, where the last row would have one card alone
  const width = runs.length % 3 === 1 ? 480 : 360;
  return [html("div", { class: "runs", style: `--card-width: ${width}px` }, ...runs.map(runCard))];
}

const lastOf = (name) => runs.length === 1 ? (runs[0].curves[name] ?? []).filter(isNumber).at(-1) : undefined;
const has = (name) => runs.some((run) => run.curves[name]?.some(isNumber));

// Reward with what evaluation gave as points; KL; entropy; lengths with the share that was cut; gradient norm; seconds by phase.
function headlines() {
  const one = (title, names, label) => {
    const name = names.find(has);
    if (!name) return null;
    const now = lastOf(name);
    return chartCard(title, () => linesOf(name), { isLarge: true, note: isNumber(now) ? short(now) : "", keys: label ?? [], attributes: { "data-headline": name } });
  };
  const withPoints = (title, name, other, label) => {
    if (!has(name) || !has(other)) return one(title, [name, other]);
    const single = runs.length === 1;
    const marks = () => linesOf(other).map((line) => ({ ...line, label: `${line.label} ${label}`, points: true, color: single ? "--c1" : line.color }));
    const now = lastOf(name);
    return chartCard(title, () => [...linesOf(name), ...marks()], {
      isLarge: true, note: isNumber(now) ? short(now) : "", attributes: { "data-headline": name },
      keys: single ? [["training", "--c0"], [label, "--c1"]] : [],
    });
  };
  return [
    has("reward/mean") ? withPoints("reward", "reward/mean", "eval/reward", "held-out") : withPoints("loss", "train/loss", "eval/loss", "held-out"),
    one("KL to the reference", ["kl/reference", "mismatch/k3"]),
    one("entropy", ["policy/entropy", "train/accuracy"]),
    lengths(),
    one("gradient norm", ["policy/grad_norm", "train/grad_norm"]),
    phaseChart(),
  ].filter(Boolean);
}

// Lengths in tokens, and on the axis at the right the share of responses that were cut.
function lengths() {
  const [tokens, cut] = ["response/tokens_mean", "response/truncated"];
  if (!has(tokens)) return null;
  const single = runs.length === 1;
  const shares = () => has(cut) ? linesOf(cut).filter((line) => !line.low).map((line) => ({ ...line, label: `${line.label} cut`, right: true, color: single ? "--c1" : line.color })) : [];
  return chartCard("response length", () => [...linesOf(tokens), ...shares()], {
    isLarge: true, note: isNumber(lastOf(tokens)) ? `${short(lastOf(tokens))} tokens` : "", attributes: { "data-headline": tokens },
    keys: single && has(cut) ? [["tokens", "--c0"], ["cut at the limit", "--c1"]] : [],
  });
}

// Seconds of each phase of a step, one above the other; of several runs the first one's.
function phaseChart() {
  const names = Object.keys(runs[0].curves).filter((name) => /^time\/.+_s$/.test(name) && name !== "time/step_s" && runs[0].curves[name].some(isNumber));
  if (!names.length) return null;
  const lines = () => {
    const run = runs[0], places = run.curves[names[0]].map((_, at) => at).filter((at) => names.some((name) => isNumber(run.curves[name][at])));
    const xs = places.map((at) => placesOf(run)[at]);
    let below = places.map(() => 0);
    const stack = names.map((name) => {
      const own = places.map((at) => run.curves[name][at] ?? 0);
      below = below.map((value, place) => value + own[place]);
      const phase = name.slice(5, -2);
      return { label: phase, color: phaseColor(phase), xs, values: below, told: own, fill: true };
    });
    return stack.reverse();
  };
  const keys = names.map((name) => [name.slice(5, -2), phaseColor(name.slice(5, -2))]);
  return chartCard(`seconds by phase${runs.length > 1 ? ` (${runs[0].name})` : ""}`, lines,
    { isLarge: true, stacked: true, keys, note: isNumber(lastOf("time/step_s")) ? `${short(lastOf("time/step_s"))} s` : "", attributes: { "data-headline": "time" } });
}

const changes = (name) => runs.some((run) => new Set(run.curves[name]?.filter(isNumber)).size > 1);

function chartOptions() {
  const pick = (id, options) => html("select", { id }, ...options.map(([value, label]) => html("option", { value }, label)));
  const x = pick("curve-x", Object.entries(X_NAMES).filter(([name]) => name === "step" || runs.some((run) => run.axes[name]?.at(-1))));
  const smooth = html("input", { id: "curve-smooth", type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth });
  const log = html("input", { id: "curve-log", type: "checkbox" });
  x.value = view.x;
  log.checked = view.log;
  const change = () => { Object.assign(view, { x: x.value, smooth: Number(smooth.value), log: log.checked }); redrawAll(); };
  for (const input of [x, smooth, log]) input.addEventListener("input", change);
  return html("div", { class: "options" }, html("label", {}, "axis ", x), html("label", {}, "smoothing ", smooth), html("label", {}, log, " log scale"));
}

function curves() {
  const keys = runs.length < 2 ? [] : data.repetitions.map((places, group) => keyOf([
    places.map((place) => runs[place].name).join(", ") + (places.length > 1 ? " (thick: mean, band: lowest to highest)" : ""), `--c${group % 8}`]));
  const cards = headlines();
  queueMicrotask(() => cards.forEach((card) => card.draw()));
  return [chartOptions(), keys.length ? html("p", {}, ...keys) : null, html("div", { class: "charts headlines" }, ...cards), ...allMetrics()].filter(Boolean);
}

const FIRST = ["reward", "eval", "train", "response", "policy", "kl", "mismatch", "staleness", "rollout"];

// Every metric that changes, by group and closed until it is asked for; those that never change are one line.
function allMetrics() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].filter(has).sort();
  const constant = names.filter((name) => !changes(name)), groups = new Map();
  for (const name of names.filter(changes)) {
    const group = name.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  const rank = (name) => FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length;
  const search = html("input", { id: "metric-text", type: "search", size: 24, placeholder: "part of a metric's name", "aria-label": "part of a metric's name" });
  const parts = [...groups.keys()].sort((a, b) => rank(a) - rank(b)).map((group) => {
    const box = html("div", { class: "charts" }), note = html("span", { class: "note" }, ` ${groups.get(group).length}`);
    const part = html("details", { "data-group": group }, html("summary", {}, group, note), box);
    part.fillUp = () => {
      if (box.children.length) return;
      box.append(...groups.get(group).map((name) => chartCard(name, () => linesOf(name), { attributes: { "data-metric": name } })));
      for (const card of box.children) card.draw();
      filter();
    };
    part.addEventListener("toggle", () => { if (part.open) part.fillUp(); });
    return part;
  });
  function filter() {
    const text = search.value.toLowerCase();
    for (const part of parts) {
      const isFound = !text || groups.get(part.dataset.group).some((name) => name.toLowerCase().includes(text));
      part.hidden = !isFound;
      if (text && isFound && !part.open) { part.open = true; part.fillUp(); }
      for (const chart of part.querySelectorAll(".chart")) chart.hidden = !chart.dataset.metric.toLowerCase().includes(text);
    }
  }
  search.addEventListener("input", filter);
  const value = (run, name) => run.curves[name]?.find(isNumber);
  const folded = constant.length ? [html("details", { id: "constant" }, html("summary", {}, `constant: ${constant.length} ${constant.length === 1 ? "metric" : "metrics"}`),
    table(["metric", ...runs.map((run) => run.name)], constant.map((name) => [name, ...runs.map((run) => value(run, name))]), (column) => column > 0))] : [];
  return [html("div", { class: "allmetrics" }, html("h3", {}, "All metrics"), search), ...parts, ...folded];
}
