// The samples of a run: columns of numbers at hand, texts in chunks, which `open` unpacks and which are parsed when they are
// first asked for.
"use strict";

const CHUNK = 1000;
const FIELDS = ["id", "group", "response", "rewards", "tokens", "finish", "answer"];

class SampleStore {
  constructor(columns, number) {
    this.columns = columns;
    this.number = number;
    this.texts = new Map();
    this.chunks = new Map();
    this.late = [];
    this.inPage = columns.step.length;
    this.groupCount = 1 + columns.group.reduce((most, group) => Math.max(most, group), -1);
  }

  get length() { return this.columns.step.length; }

  // Unpack all texts; nothing but columns may be asked for before.
  async open() {
    const names = ["prompts", ...Array.from({ length: Math.ceil(this.inPage / CHUNK) }, (_, chunk) => String(chunk))];
    await Promise.all(names.map(async (name) => {
      const element = document.getElementById(`samples-${this.number}-${name}`);
      if (!element) return;
      const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
      element.remove();
      this.texts.set(name, await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text());
    }));
  }

  part(name) {
    const text = this.texts.get(String(name));
    this.texts.delete(String(name));
    return text === undefined ? [] : JSON.parse(text);
  }

  get prompts() { return this.known ??= this.part("prompts"); }

  row(place) {
    if (place >= this.inPage) return this.late[place - this.inPage];
    const chunk = Math.floor(place / CHUNK);
    if (!this.chunks.has(chunk)) this.chunks.set(chunk, this.part(chunk));
    return this.chunks.get(chunk)[place % CHUNK];
  }

  prompt(place) { return this.prompts[this.columns.prompt[place]]; }

  at(place) {
    const row = this.row(place), sample = { ...(row[FIELDS.length] || {}) };
    FIELDS.forEach((name, column) => { sample[name] = row[column]; });
    for (const name of ["step", "reward", "advantage"]) sample[name] = this.columns[name][place];
    return sample;
  }

  // Which samples have `text` in their prompt or response, or in the name of a server's tenant or model; the letters of all
  // are made small once.
  has(text) {
    this.smallPrompts ??= [];
    this.small ??= [];
    for (let place = this.smallPrompts.length; place < this.prompts.length; place++) this.smallPrompts.push(this.prompts[place].toLowerCase());
    for (let place = this.small.length; place < this.length; place++) this.small.push(this.textOf(place).toLowerCase());
    const inPrompt = this.smallPrompts.map((prompt) => prompt.includes(text));
    return (place) => inPrompt[this.columns.prompt[place]] || this.small[place].includes(text);
  }

  textOf(place) {
    const row = this.row(place), { served } = row[FIELDS.length] || {};
    return served ? `${row[2]}\n${served.tenant}\n${served.model}` : row[2];
  }

  // Samples that a run wrote since the page was made, in the same form as those in it.
  add({ columns, prompts, rows }) {
    const numbers = prompts.map((prompt) => {
      const known = this.prompts.indexOf(prompt);
      return known >= 0 ? known : this.prompts.push(prompt) - 1;
    });
    // a group whose first samples are here already goes on
    const goesOn = rows.length && this.length && columns.step[0] === this.columns.step.at(-1) && rows[0][1] === this.row(this.length - 1)[1];
    const first = this.groupCount - (goesOn ? 1 : 0);
    for (const name of ["step", "reward", "advantage"]) this.columns[name].push(...columns[name]);
    this.columns.prompt.push(...columns.prompt.map((number) => numbers[number]));
    this.columns.group.push(...columns.group.map((group) => group + first));
    this.groupCount = 1 + this.columns.group.at(-1);
    this.late.push(...rows);
  }
}
