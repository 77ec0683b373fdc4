// The browser of samples: filters, and responses token by token, coloured by what the step made of them.
"use strict";

const SHOWN_AT_ONCE = 20;

const COLORINGS = {
  advantage: {
    title: "advantage (blue: to be said more, red: less)",
    value: (sample, token) => sample.advantages?.[token],
    paint: (value, most) => value === 0 ? null : `rgba(${value > 0 ? "var(--good)" : "var(--bad)"}, ${0.08 + 0.6 * Math.abs(value) / most})`,
  },
  difference: {
    title: "|trainer − engine| log-prob, of the same weights unless stale",
    value: (sample, token) => isNumber(sample.log_probs?.[token]) && isNumber(sample.engine[token])
      ? Math.abs(sample.log_probs[token] - sample.engine[token]) : undefined,
    paint: (value, most) => `rgba(var(--far), ${0.7 * value / most})`,
  },
  surprise: {
    title: "engine's log-prob (stronger: less likely)",
    value: (sample, token) => sample.engine[token],
    paint: (value, most) => `rgba(var(--bad), ${0.7 * Math.min(1, Math.abs(value) / Math.min(most, 8))})`,
  },
};

function tokensOf(sample, coloring, pictures, scale) {
  if (!sample.pieces) return [html("span", {}, sample.response)];
  const rule = COLORINGS[coloring];
  const values = sample.pieces.map((_, token) => sample.sampled[token] ? rule.value(sample, token) : undefined);
  const most = Math.max(...values.filter(isNumber).map(Math.abs), 1e-12);
  const told = (sample.media ?? []).filter(({ place }) => place !== undefined);
  return sample.pieces.map((piece, token) => {
    const media = told.find(({ place, tokens }) => token >= place && token < place + tokens);
    if (media) return token === media.place ? shownOf(pictures, media, sample, scale) : null;
    const facts = [`token ${token}`];
    if (!sample.sampled[token]) facts.push("not sampled by the policy");
    if (isNumber(sample.engine[token])) facts.push(`engine ${short(sample.engine[token])}`);
    for (const [name, list] of [["trainer", sample.log_probs], ["reference", sample.reference_log_probs], ["advantage", sample.advantages]]) {
      if (isNumber(list?.[token])) facts.push(`${name} ${short(list[token])}`);
    }
    const style = isNumber(values[token]) ? `background: ${rule.paint(values[token], most)}` : null;
    return html("span", { class: sample.sampled[token] ? "token" : "token told", style, title: facts.join(", ") }, piece);
  });
}

function sampleCard(sample, coloring, pictures, scale) {
  const facts = html("div", { class: "facts" }, `step ${sample.step} · ${sample.id} · `, html("b", {}, `reward ${short(sample.reward)}`));
  for (const [name, value] of Object.entries(sample.rewards)) facts.append(` · ${name} ${short(value)}`);
  if (sample.pieces) facts.append(` · ${sample.pieces.length} tokens`);
  if (sample.finish) facts.append(` · ended by ${sample.finish}`);
  if (sample.answer !== null && sample.answer !== undefined) facts.append(` · expected ${sample.answer}`);
  return html("article", { class: "sample" }, facts,
    ...mediaOf(pictures, sample, scale),
    html("div", { class: "text prompt" }, sample.prompt),
    html("div", { class: "text response" }, ...tokensOf(sample, coloring, pictures, scale)));
}

function samplesSection(runs, pictures, leftOut) {
  const field = (label, input) => html("label", {}, label, input);
  const choice = (id, options) => html("select", { id }, ...options.map(([value, label]) => html("option", { value }, label)));
  const withSamples = runs.map((run, place) => [place, run]).filter(([, run]) => run.samples.length);
  if (!withSamples.length) return [html("p", { class: "note" }, "No samples were written.")];
  const inputs = {
    run: choice("sample-run", withSamples.map(([place, run]) => [place, run.name])),
    from: html("input", { id: "sample-from", type: "number", placeholder: "first" }),
    to: html("input", { id: "sample-to", type: "number", placeholder: "last" }),
    least: html("input", { id: "sample-least", type: "number", step: "any", placeholder: "any" }),
    most: html("input", { id: "sample-most", type: "number", step: "any", placeholder: "any" }),
    text: html("input", { id: "sample-text", type: "search", placeholder: "in prompt or response" }),
    order: choice("sample-order", [["step", "step"], ["best", "best first"], ["worst", "worst first"]]),
    coloring: choice("sample-coloring", Object.entries(COLORINGS).map(([name, rule]) => [name, rule.title])),
    boxes: choice("sample-boxes", Object.entries(BOX_SCALES)),
  };
  const showBoxes = () => { inputs.boxes.value = runs[inputs.run.value].boxes_in; };
  const count = html("p", { class: "note", id: "sample-count" });
  const list = html("div", { id: "samples-list" });
  const more = html("button", { onclick: () => show(list.children.length + SHOWN_AT_ONCE) }, "show more");

  function chosen() {
    const bound = (input, other) => input.value === "" ? other : Number(input.value);
    const text = inputs.text.value.toLowerCase();
    const found = runs[inputs.run.value].samples.filter((sample) =>
      sample.step >= bound(inputs.from, -Infinity) && sample.step <= bound(inputs.to, Infinity)
      && sample.reward >= bound(inputs.least, -Infinity) && sample.reward <= bound(inputs.most, Infinity)
      && (sample.prompt + "\n" + sample.response).toLowerCase().includes(text));
    const sign = { step: 0, best: -1, worst: 1 }[inputs.order.value];
    return sign ? found.sort((a, b) => sign * (a.reward - b.reward)) : found;
  }

  function show(atMost) {
    const found = chosen(), run = runs[inputs.run.value];
    list.replaceChildren(...found.slice(0, atMost).map((sample) => sampleCard(sample, inputs.coloring.value, pictures, inputs.boxes.value)));
    count.textContent = `${Math.min(atMost, found.length)} shown of ${found.length} found among ${run.samples.length} `
      + `in this page (${run.samples_written} in samples.jsonl)` + (leftOut ? `; ${leftOut} pictures are left out, as the page has room for no more` : "");
    more.hidden = found.length <= atMost;
  }

  inputs.run.addEventListener("input", showBoxes);
  for (const input of Object.values(inputs)) input.addEventListener("input", () => show(SHOWN_AT_ONCE));
  showBoxes();
  show(SHOWN_AT_ONCE);
  const filters = html("div", { class: "filters" },
    field("run", inputs.run), field("from step", inputs.from), field("to step", inputs.to), field("reward at least", inputs.least),
    field("reward at most", inputs.most), field("text", inputs.text), field("order", inputs.order), field("colour by", inputs.coloring),
    Object.keys(pictures).length ? field("boxes (blue: answered, green: gold)", inputs.boxes) : null);
  return [filters, count, list, more];
}
