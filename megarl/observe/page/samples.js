// The browser of samples by group: the prompt once, its answers with reward and advantage, tokens coloured by what the step made of them.
"use strict";

const SHOWN_AT_ONCE = 10;
const ANSWERS_AT_ONCE = 8;

const COLORINGS = {
  advantage: {
    title: "advantage (blue: up, red: down)",
    value: (sample, token) => sample.advantages?.[token],
    paint: (value, most) => value === 0 ? "transparent" : `rgba(${value > 0 ? "var(--good)" : "var(--bad)"}, ${0.08 + 0.6 * Math.abs(value) / most})`,
  },
  difference: {
    title: "|trainer − engine| log-prob",
    value: (sample, token) => isNumber(sample.log_probs?.[token]) && isNumber(sample.engine[token])
      ? Math.abs(sample.log_probs[token] - sample.engine[token]) : undefined,
    paint: (value, most) => `rgba(var(--far), ${0.7 * value / most})`,
  },
  surprise: {
    title: "log-prob (strong: unlikely)",
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

// An answer: its reward, if it has one, as a bar over the range of the run's rewards, its advantage, and its text.
function answerRow(sample, coloring, pictures, scale, [least, most]) {
  const share = most > least ? (sample.reward - least) / (most - least) : 1;
  const sign = !isNumber(sample.advantage) || sample.advantage === 0 ? "even" : sample.advantage > 0 ? "up" : "down";
  const facts = html("div", { class: "facts" });
  if (isNumber(sample.reward)) facts.append(html("b", {}, `reward ${short(sample.reward)}`), html("span", { class: "bar", title: `of ${short(least)} to ${short(most)} in this run` }, html("span", { style: `width: ${(100 * share).toFixed(1)}%` })));
  if (isNumber(sample.advantage)) facts.append(html("span", { class: `advantage ${sign}` }, `advantage ${sample.advantage > 0 ? "+" : ""}${short(sample.advantage)}`));
  const more = Object.entries(sample.rewards).length > 1 ? Object.entries(sample.rewards).map(([name, value]) => `${name} ${short(value)}`) : [];
  if (sample.tokens) more.push(`${sample.tokens} ${sample.tokens === 1 ? "token" : "tokens"}`);
  if (sample.finish) more.push(`ended by ${sample.finish}`);
  facts.append(html("span", { class: "more" }, more.join(" · ")));
  facts.title = sample.id;
  const told = html("div", { class: "note token-facts", "aria-live": "polite" });
  const response = html("div", { class: "text response" }, ...tokensOf(sample, coloring, pictures, scale));
  if (sample.pieces) chooseTokens(response, told);
  return html("article", { class: "sample" }, facts, html("div", {}, ...mediaOf(pictures, sample, scale), response, told));
}

// What the pointer on a token shows, without one: a tap on it, or arrow keys in the response, write it below.
function chooseTokens(response, told) {
  let chosen = null;
  const choose = (token) => {
    chosen?.classList.remove("chosen");
    chosen = token;
    chosen.classList.add("chosen");
    chosen.scrollIntoView({ block: "nearest" });
    told.textContent = chosen.title;
  };
  response.setAttribute("tabindex", 0);
  response.setAttribute("role", "group");
  response.setAttribute("aria-label", "response: arrow keys go over its tokens");
  response.addEventListener("click", ({ target }) => { if (target.classList.contains("token")) choose(target); });
  response.addEventListener("keydown", (event) => {
    const tokens = [...response.querySelectorAll(".token")], at = tokens.indexOf(chosen);
    const next = { ArrowRight: tokens[at + 1], ArrowLeft: tokens[at - 1], Home: tokens[0], End: tokens.at(-1) }[event.key];
    if (!next) return;
    event.preventDefault();
    choose(next);
  });
}

function groupCard(store, places, { coloring, pictures, scale, bounds, follow }) {
  const samples = places.map((place) => store.at(place)), first = samples[0], rewards = samples.map((sample) => sample.reward).filter(isNumber);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const facts = [`step ${first.step}`, first.group, `${places.length} ${places.length === 1 ? "answer" : "answers"}`];
  if (first.served) facts.splice(1, 0, `tenant ${first.served.tenant}`, `model ${first.served.model}`);
  if (rewards.length) facts.push(`mean reward ${short(mean)}`);
  if (rewards.length && Math.max(...rewards) === Math.min(...rewards) && places.length > 1) facts.push(samples.some((sample) => sample.advantage) ? "all alike" : "all alike: no advantage");
  if (first.answer !== null && first.answer !== undefined) facts.push(`expected ${typeof first.answer === "object" ? JSON.stringify(first.answer) : first.answer}`);
  const answers = html("div", { class: "answers" });
  const rest = html("button", { onclick: () => show(places.length) }, `show all ${places.length} answers`);
  function show(count) {
    answers.replaceChildren(...samples.slice(0, count).map((sample) => answerRow(sample, coloring, pictures, scale, bounds)));
    rest.hidden = places.length <= count;
  }
  show(ANSWERS_AT_ONCE);
  const over = html("button", { class: "over", onclick: () => follow(store.columns.prompt[places[0]]) }, "this prompt over the steps");
  return html("section", { class: "group" }, html("div", { class: "head" }, html("span", { class: "where" }, facts.join(" · ")), over),
    html("div", { class: "text prompt" }, store.prompt(places[0])), answers, rest);
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
    text: html("input", { id: "sample-text", type: "search", placeholder: "in prompt or response", title: "of a server also the tenant and the model" }),
    order: choice("sample-order", [["newest", "newest first"], ["oldest", "oldest first"], ["best", "best first"], ["worst", "worst first"], ["spread", "most different first"]]),
    coloring: choice("sample-coloring", Object.entries(COLORINGS).map(([name, rule]) => [name, rule.title])),
    boxes: choice("sample-boxes", Object.entries(BOX_SCALES)),
  };
  let prompt = null, shown = SHOWN_AT_ONCE, waiting = 0;
  const showBoxes = () => { inputs.boxes.value = runs[inputs.run.value].boxes_in; };
  const count = html("p", { class: "note", id: "sample-count" });
  const list = html("div", { id: "samples-list" });
  const more = html("button", { id: "sample-more", onclick: () => { shown += SHOWN_AT_ONCE; show(); } }, "show more");
  const all = html("button", { id: "sample-all", hidden: "", onclick: () => { prompt = null; inputs.order.value = "newest"; restart(); } }, "all prompts again");

  function chosen(store) {
    const bound = (input, other) => input.value === "" ? other : Number(input.value);
    const { step, reward, prompt: prompts, group } = store.columns, groups = new Map();
    const from = bound(inputs.from, -Infinity), to = bound(inputs.to, Infinity), least = bound(inputs.least, -Infinity), most = bound(inputs.most, Infinity);
    const bounded = Number.isFinite(least) || Number.isFinite(most);
    const has = inputs.text.value ? store.has(inputs.text.value.toLowerCase()) : () => true;
    let found = 0;
    for (let place = 0; place < store.length; place++) {
      if (step[place] < from || step[place] > to) continue;
      if (isNumber(reward[place]) ? reward[place] < least || reward[place] > most : bounded) continue;
      if (prompt !== null && prompts[place] !== prompt || !has(place)) continue;
      found += 1;
      const known = groups.get(group[place]);
      if (known) known.push(place); else groups.set(group[place], [place]);
    }
    return { found, groups: inOrder([...groups.values()], step, reward) };
  }

  function inOrder(groups, step, reward) {
    const of = (rule) => { const known = new Map(groups.map((places) => [places, rule(places.map((place) => reward[place]))])); return (a, b) => known.get(b) - known.get(a); };
    if (inputs.order.value === "newest") return groups.sort((a, b) => step[b[0]] - step[a[0]]);
    if (inputs.order.value === "best") return groups.sort(of((rewards) => Math.max(...rewards)));
    if (inputs.order.value === "worst") return groups.sort(of((rewards) => -Math.min(...rewards)));
    if (inputs.order.value === "spread") return groups.sort(of((rewards) => Math.max(...rewards) - Math.min(...rewards)));
    return groups.sort((a, b) => step[a[0]] - step[b[0]]);
  }

  function show() {
    const run = runs[inputs.run.value], store = run.samples, { found, groups } = chosen(store);
    const follow = (number) => { prompt = number; inputs.order.value = "oldest"; restart(); list.scrollIntoView({ block: "nearest" }); };
    const looks = { coloring: inputs.coloring.value, pictures, scale: inputs.boxes.value, bounds: range(store.columns.reward), follow };
    list.replaceChildren(...groups.slice(0, shown).map((places) => groupCard(store, places, looks)));
    count.textContent = `${Math.min(shown, groups.length)} of ${groups.length} groups shown; ${found} of ${store.length} samples found`
      + (run.samples_written > store.length ? ` (samples.jsonl has ${run.samples_written})` : "")
      + (leftOut ? `; ${leftOut} pictures are left out, as the page has room for no more` : "");
    more.hidden = groups.length <= shown;
    all.hidden = prompt === null;
  }
  function restart() { shown = SHOWN_AT_ONCE; show(); }
  samplesSection.refresh = show;

  inputs.run.addEventListener("input", () => { prompt = null; showBoxes(); });
  for (const input of Object.values(inputs)) {
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      if (input === inputs.text && runs[inputs.run.value].samples.length > 5000) waiting = setTimeout(restart, 150);
      else restart();
    });
  }
  showBoxes();
  show();
  const filters = html("div", { class: "filters" },
    withSamples.length > 1 ? field("run", inputs.run) : null, field("from step", inputs.from), field("to step", inputs.to), field("reward at least", inputs.least),
    field("reward at most", inputs.most), field("text", inputs.text), field("order", inputs.order), field("colour tokens by", inputs.coloring),
    Object.keys(pictures).length ? field("boxes (dashed: gold)", inputs.boxes) : null);
  return [filters, html("div", { class: "counted" }, count, all), list, more];
}
