// The colour of each phase and span: the same in every report.
"use strict";

const PHASES = {
  generate: "#3b82f6", reward: "#f59e0b", log_probs: "#14b8a6", reference: "#8b5cf6", advantages: "#ec4899", update: "#22a55b",
  sync: "#ef6c4d", save: "#a16207", evaluate: "#0ea5c6", start: "#94a3b8", export: "#b08968", rollback: "#dc2626", teacher: "#6366f1",
  critic: "#84a020", forward: "#5eb3a8", add_role: "#c0a8e0", other: "#9aa5b1",
};
const SPARE = ["#7c6f9c", "#6b8e7f", "#b5838d", "#7f8fa9", "#9c8b6f", "#5f7d8c"];

// A name that is not in the table gets a colour by its letters, so that it too is the same everywhere.
function phaseColor(name) {
  if (Object.hasOwn(PHASES, name)) return PHASES[name];
  const sum = [...name].reduce((total, letter) => (total * 31 + letter.codePointAt(0)) % 65521, 7);
  return SPARE[sum % SPARE.length];
}
