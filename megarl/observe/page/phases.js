// The colour of each phase and span: the same in every report.
"use strict";

// The first two lines: what a step spends its time on, told apart also by readers who are colour-blind (a test computes it).
const PHASES = {
  generate: "#3b82f6", reward: "#a68200", log_probs: "#11704f", reference: "#9f047e", advantages: "#e43b7d",
  update: "#00d778", sync: "#a81401", evaluate: "#3e0cff", other: "#9aa5b1",
  save: "#a16207", start: "#94a3b8", export: "#b08968", rollback: "#dc2626", teacher: "#6366f1",
  critic: "#84a020", forward: "#5eb3a8", add_role: "#c0a8e0",
};
const SPARE = ["#7c6f9c", "#6b8e7f", "#b5838d", "#7f8fa9", "#9c8b6f", "#5f7d8c"];

// A name that is not in the table gets a colour by its letters, so that it too is the same everywhere.
function phaseColor(name) {
  if (Object.hasOwn(PHASES, name)) return PHASES[name];
  const sum = [...name].reduce((total, letter) => (total * 31 + letter.codePointAt(0)) % 65521, 7);
  return SPARE[sum % SPARE.length];
}
