// A page that `megarl report --watch` serves: asks it for the rows that were written since.
"use strict";

const POLL_MS = 2000;

function follow() {
  const told = html("span", { id: "live", class: "badge running" }, "live");
  document.querySelector("h1").append(" ", told);
  const say = (text, kind) => { told.textContent = text; told.className = `badge ${kind}`; };
  async function ask() {
    try {
      const at = runs.map((run) => `${run.rows_written}.${run.samples_written}`).join(",");
      const answer = await fetch(`rows?at=${at}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const news = await answer.json();
      if (news.reload) { location.reload(); return; }
      take(news.runs);
      say("live", "running");
    } catch (error) {
      say("no connection", "stopped");
    }
    setTimeout(ask, POLL_MS);
  }
  setTimeout(ask, POLL_MS);
}

// Append what is new, and draw again what shows it.
function take(news) {
  let hasRows = false, hasSamples = false, hasState = false;
  news.forEach((fresh, place) => {
    const run = runs[place];
    hasState ||= JSON.stringify(run.status) !== JSON.stringify(fresh.status);
    Object.assign(run, { status: fresh.status, summary: fresh.summary });
    if (fresh.rows.length) {
      hasRows = true;
      for (const row of fresh.rows) {
        for (const name of Object.keys(row)) if (name !== "step") run.curves[name] ??= new Array(run.steps.length).fill(null);
        for (const name of Object.keys(run.curves)) run.curves[name].push(row[name] ?? null);
        run.steps.push(row.step);
      }
      for (const [name, values] of Object.entries(fresh.axes)) (run.axes[name] ??= []).push(...values);
      run.rows_written += fresh.rows.length;
    }
    run.samples_written += fresh.samples_written;
    if (fresh.samples.rows.length) { hasSamples = true; run.samples.add(fresh.samples); }
  });
  if (hasRows || hasState) document.querySelector("#overview").replaceChildren(html("h2", {}, "Overview"), ...overview());
  if (hasRows) refreshCurves();
  if (hasSamples) refreshSamples();
}

// A full-size view, the pages that are open and what is typed stay as they are.
function refreshCurves() {
  const section = document.querySelector("#curves");
  const open = [...section.querySelectorAll("details[open]")].map((part) => part.dataset.group ?? part.id);
  const text = section.querySelector("#metric-text").value;
  for (const card of section.querySelectorAll(".chart")) if (card.plot) { plots.delete(card.plot); card.plot.destroy(); }
  section.replaceChildren(html("h2", {}, "Curves"), ...curves());
  for (const part of section.querySelectorAll("details")) if (open.includes(part.dataset.group ?? part.id)) { part.open = true; part.fillUp?.(); }
  const search = section.querySelector("#metric-text");
  search.value = text;
  search.dispatchEvent(new Event("input"));
}

function refreshSamples() {
  if (samplesSection.refresh) samplesSection.refresh();
  else document.querySelector("#samples").replaceChildren(html("h2", {}, "Samples"), ...samplesSection(runs, data.pictures, data.pictures_left_out));
}
