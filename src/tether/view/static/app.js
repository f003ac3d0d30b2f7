import { h, link } from "./text.js";
import { compared, trend } from "./trend.js";
import { group, prompts, sample, step, validation } from "./step.js";
import { episode, episodes, tasks } from "./control.js";

const FOLLOW_SECONDS = 2;
const embedded = document.getElementById("answers");
const answers = embedded && JSON.parse(embedded.textContent);
let current = 0, drawn = "";

async function ask(question, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [name, String(value)]);
  const address = `${question}?${new URLSearchParams(given.sort(([a], [b]) => a < b ? -1 : 1))}`;
  if (answers) {
    if (!(address in answers)) throw new Error("This is not in the exported file. Open the run with: tether view RUN");
    return answers[address];
  }
  const response = await fetch(`ask/${address}`), answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

const read = () => ({ run: "0", ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) });

function go(changes, quiet = false) {
  const state = { ...read(), ...changes };
  const kept = Object.entries(state).filter(([name, value]) => value !== null && value !== undefined && value !== "" && !(name === "run" && value === "0"));
  const address = `#${new URLSearchParams(kept)}`;
  if (quiet) history.replaceState(null, "", address);
  else if (address === location.hash) draw();
  else location.hash = address;
}

function viewOf(state, overview, runs) {
  if (state.view === "compare") return () => compared(runs, state, ask, go);
  const text = overview.kind === "text";
  const last = overview.steps.at(-1);
  if (state.sample !== undefined && state.step !== undefined && !state.view) return () => text ? sample(runs, state, ask, go) : episode(overview, state, ask, go);
  switch (state.view) {
    case "samples": return () => step(overview, { ...state, step: undefined }, ask, go);
    case "step": return () => (text ? step : episodes)(overview, { ...state, step: nearest(overview.steps, state.step ?? last) }, ask, go);
    case "group": return () => group(state, ask, go);
    case "prompts": return () => prompts(overview, state, ask, go);
    case "tasks": return () => tasks(state, ask, go);
    case "validation": return () => validation(overview, state, ask, go);
  }
  if (state.step !== undefined && !state.view) return () => (text ? step : episodes)(overview, state, ask, go);
  return () => trend(overview, state, ask, go);
}

function nearest(steps, step) {
  if (!steps.length) throw new Error("No samples of training steps were recorded. trainer.record_mb records them.");
  return steps.reduce((best, one) => Math.abs(one - step) < Math.abs(best - step) ? one : best);
}

function tabs(state, overview, runs) {
  const text = overview.kind === "text";
  const last = overview.steps.at(-1);
  const all = [["trend", "Trend"], ["step", text ? "Step" : "Episodes"], ...(text ? [["samples", "All samples"], ["prompts", "Prompts and rewards"], ["validation", "Validation"]] : overview.has_tasks ? [["tasks", "Tasks"]] : []), ...(runs.names.length > 1 ? [["compare", "Compare"]] : [])];
  const now = state.view ?? (state.step !== undefined ? "step" : "trend");
  document.getElementById("tabs").replaceChildren(...all.map(([view, title]) => h("a", { href: "#", "aria-current": now === view || (now === "group" && view === "step") ? "page" : null,
    onclick: (event) => { event.preventDefault(); location.hash = new URLSearchParams({ run: state.run, view, ...(view === "step" && (state.step ?? last) !== undefined ? { step: state.step ?? last } : {}) }); } }, title)));
  const chooser = document.getElementById("run");
  chooser.hidden = runs.names.length < 2;
  chooser.replaceChildren(...runs.names.map((name, index) => h("option", { value: index, selected: String(index) === state.run }, name)));
  chooser.onchange = () => { location.hash = new URLSearchParams({ run: chooser.value, view: "trend" }); };
  document.getElementById("state").textContent = answers ? "exported" : overview.running ? `running, step ${overview.last_step}` : `step ${overview.last_step}`;
  document.title = `${overview.name} - tether`;
}

async function draw() {
  const mine = ++current, state = read(), main = document.getElementById("main");
  document.getElementById("tip").hidden = true;
  try {
    const runs = await ask("runs");
    if (runs.names.length > 1 && !location.hash) return go({ view: "compare" });
    const overview = await ask("overview", { run: state.run });
    const nodes = await viewOf(state, overview, runs)();
    if (mine !== current) return;
    tabs(state, overview, runs);
    const focused = document.activeElement?.getAttribute?.("aria-label"), top = drawn === location.hash ? scrollY : 0;
    const samePage = drawn.replace(/&?(token|by)=[^&]*/g, "") === location.hash.replace(/&?(token|by)=[^&]*/g, "");
    const keep = scrollY, unfolded = samePage ? [...main.querySelectorAll("details")].map((one) => one.open) : [];
    main.replaceChildren(...nodes.flat(Infinity).filter(Boolean));
    main.querySelectorAll("details").forEach((one, index) => { one.open ||= unfolded[index] ?? false; });
    scrollTo(0, samePage ? keep : top);
    if (focused) document.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
    drawn = location.hash;
    main.dataset.drawn = `${location.hash} ${runs.versions}`;
  } catch (error) {
    if (mine === current) main.replaceChildren(h("p", { class: "bad", id: "error" }, error.message), h("p", {}, link("back", () => history.back()), " or ", link("to the trend", () => go({ view: "trend", sample: null, token: null }))));
  }
}

document.addEventListener("keydown", async (event) => {
  const state = read();
  if (event.target.matches("input:not([type=range]), select, textarea") || event.ctrlKey || event.metaKey || event.altKey || state.sample === undefined) return;
  const moves = { j: 1, k: -1 }, samples = { l: 1, h: -1 };
  if (event.key in moves) {
    const slider = document.querySelector("main input[type=range]");
    const last = slider ? Number(slider.max) : document.querySelectorAll("#strip span").length - 1;
    const shown = slider ? Number(slider.value) : Number(state.token ?? -1);
    go({ token: Math.max(0, Math.min(last, shown + moves[event.key])) });
  } else if (event.key in samples) {
    const overview = await ask("overview", { run: state.run });
    const one = await ask(overview.kind === "text" ? "sample" : "episode", { run: state.run, step: state.step, row: state.sample });
    const at = one.neighbours.indexOf(Number(state.sample)) + samples[event.key];
    if (one.neighbours[at] !== undefined) return go({ sample: one.neighbours[at], token: null });
    const other = overview.steps[overview.steps.indexOf(Number(state.step)) + samples[event.key]];
    if (other !== undefined) {
      const listed = (await ask("samples", { run: state.run, step: other })).rows.filter((row) => row.recorded).map((row) => row.row).sort((a, b) => a - b);
      if (listed.length) go({ step: other, sample: samples[event.key] > 0 ? listed[0] : listed.at(-1), token: null });
    }
  } else if (event.key === "u") go({ view: "step", sample: null, token: null });
});

addEventListener("hashchange", draw);
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(draw, 200); });
draw();
if (!answers) setInterval(async () => {
  if (document.hidden || document.activeElement?.matches("input:not([type=range]), select")) return;
  const runs = await ask("runs").catch(() => null), state = document.getElementById("state");
  const main = document.getElementById("main"), shown = read();
  if (!runs) state.textContent = "the server has ended";
  else if (drawn !== location.hash || main.dataset.drawn?.endsWith(` ${runs.versions}`)) return;
  else if (shown.sample === undefined || shown.view) draw();
  else { // What was recorded of a step does not change while somebody reads it.
    const overview = await ask("overview", { run: shown.run }).catch(() => null);
    if (!overview) return;
    tabs(shown, overview, runs);
    main.dataset.drawn = `${location.hash} ${runs.versions}`;
  }
}, 1000 * FOLLOW_SECONDS);
