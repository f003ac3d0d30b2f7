import { h, facts, link, table } from "./text.js";
import { chart, COLORS } from "./chart.js";
import { adviceBox, noAdvice } from "./advice.js";

function explained(overview, key) {
  const one = overview.metrics[key];
  return one ? `${key}: ${one.meaning}${one.healthy ? `\nhealthy: ${one.healthy}` : ""}` : key;
}

export async function trend(overview, state, ask, go) {
  const axis = state.axis ?? "step", run = state.run;
  const keys = [...new Set(overview.panels.flatMap((panel) => panel.charts.flatMap((one) => one.keys)))];
  if (state.key) keys.push(state.key);
  const all = await ask("curves", { run, keys: Object.keys(overview.metrics).join(","), axis });
  const toStep = (key) => (x) => { const curve = all[key]; return go({ view: "step", step: curve.step[curve.x.indexOf(x)] ?? Math.round(x) }); };
  const at = (marks) => axis === "step" ? marks : [];
  const draw = (title, keys, stacked = false, height = 120) => chart({
    series: keys.filter((key) => all[key]).map((key, index) => ({ ...all[key], name: short(key), title: explained(overview, key), healthy: overview.metrics[key]?.healthy, color: COLORS[index % COLORS.length] })),
    marks: at(overview.marks), stacked, label: axis, onPick: toStep(keys[0]), height,
  });
  const found = h("div", { class: "grid", id: "found" });
  const search = h("input", { class: "wide", type: "search", placeholder: `Search all ${Object.keys(overview.metrics).length} metrics and their meanings`, "aria-label": "Search metrics", value: state.find ?? "",
    oninput: (event) => show(event.target.value) });
  function show(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = Object.keys(overview.metrics).filter((key) => wanted.length && wanted.every((word) => explained(overview, key).toLowerCase().includes(word)));
    found.replaceChildren(...matching.slice(0, 24).map((key) => h("div", { class: "card", "data-key": key }, h("h3", {}, key),
      h("p", { class: "small faint" }, overview.metrics[key].meaning, overview.metrics[key].healthy ? ` Healthy: ${overview.metrics[key].healthy}.` : ""), draw(key, [key]))));
    if (wanted.length && !matching.length) found.append(h("p", {}, "No metric of this run has these words in its name or meaning."));
  }
  show(state.find ?? "");
  const counts = {}, happened = overview.marks.filter((mark) => mark.kind !== "checkpoint");
  overview.marks.forEach((mark) => { counts[mark.kind] = (counts[mark.kind] ?? 0) + 1; });
  return [
    facts({ kind: overview.kind, step: `${overview.last_step}${overview.total_steps ? ` of ${overview.total_steps}` : ""}`, state: overview.running ? "running" : "not running", folder: overview.folder }),
    overview.advice.length ? adviceBox(overview.advice, overview, go) : noAdvice(overview),
    overview.film ? h("p", { id: "film-of" }, "The recorded episodes have a film: ", link(`episode ${overview.film.row} of step ${overview.film.step}`, () => go({ view: null, token: null, step: overview.film.step, sample: overview.film.row })), overview.videos.length ? null : ". env.eval.video_cfg.save_video=True films evaluations, too", ".") : null,
    overview.videos.length ? h("p", { id: "videos" }, "Videos of evaluations: ", overview.videos.map((name, at) => [at ? ", " : "", h("a", { href: `video/${run}/${encodeURIComponent(name)}`, target: "_blank" }, name)])) : null,
    ...Object.entries(overview.missing).map(([name, needs]) => h("p", { class: "faint" }, `No ${name} recorded. What records it: ${needs}.`)),
    h("div", { class: "bar" }, "by ", h("select", { "aria-label": "Axis", onchange: (event) => go({ axis: event.target.value }) }, overview.axes.map((name) => h("option", { value: name, selected: name === axis }, name))),
      h("span", { class: "small faint" }, Object.entries(counts).map(([kind, count]) => `${count} ${kind}${count > 1 ? "s" : ""}`).join(", "), overview.marks.length ? ". " : "", "The number beside a name is its last value; bands are 95 % intervals. A click on a curve opens its step.")),
    h("div", { class: "grid" }, overview.panels.map((panel) => h("section", { class: "card panel" }, h("h3", { class: "explained", title: panel.charts.flatMap((one) => one.keys).map((key) => explained(overview, key)).join("\n\n") }, panel.title),
      panel.charts.map((one) => [panel.charts.length > 1 ? h("div", { class: "small faint" }, one.title) : null, draw(one.title, one.keys, one.title === "by phase", panel.charts.length > 2 ? 84 : 120)])))),
    h("h2", {}, "All metrics"), h("div", { class: "bar" }, search), found,
    h("h2", {}, "What happened"),
    happened.length ? table([{ name: "step" }, { name: "kind" }, { name: "text" }], happened.slice(-100), { onRow: (mark) => go({ view: "step", step: mark.step }) }) : h("p", { id: "nothing", class: "faint" }, counts.checkpoint ? "Nothing but checkpoints." : "Nothing."),
  ];
}

export const short = (key) => key.replace(/^val-core\//, "validation ").replace(/^timing_s\//, "");

export async function compared(runs, state, ask, go) {
  const key = state.key ?? runs.key, axis = state.axis ?? "step";
  const curves = key ? await ask("mean_curves", { key, axis }) : [];
  const series = runs.experiments.map((one, index) => ({ ...curves[index], name: one.label, title: one.members.join(", "), color: COLORS[index % COLORS.length] }));
  const without = series.filter((one) => !one.x?.length).map((one) => one.name);
  return [
    h("h1", {}, `${runs.names.length} runs`),
    ...runs.warnings.map((warning) => h("p", { class: "advice" }, h("b", {}, "repeated seed"), ": ", warning)),
    ...runs.verdicts.map((verdict) => h("p", { class: "card verdict" }, h("b", { class: verdict.differ ? "good" : "" }, verdict.differ ? "They differ. " : "Not told apart. "), verdict.text)),
    h("div", { class: "bar" }, h("select", { "aria-label": "Metric", onchange: (event) => go({ key: event.target.value }) }, runs.keys.map((name) => h("option", { value: name, selected: name === key }, name))), " by ",
      h("select", { "aria-label": "Axis", onchange: (event) => go({ axis: event.target.value }) }, ["step", "samples", "tokens", "seconds"].map((name) => h("option", { value: name, selected: name === axis }, name))),
      h("span", { class: "small faint" }, "Line: mean over seeds. Band: its 95 % bootstrap interval at each step, to be read by eye. The verdict above takes 99 %, because it is one sentence that decides, and pairs of several experiments are many chances.")),
    h("div", { class: "card", id: "compared", "data-key": key }, curves ? chart({ series: series.filter((one) => one.x), label: axis, height: 260, wide: true }) : null,
      without.length ? h("p", { class: "small faint" }, `Without this metric by ${axis}: ${without.join("; ")}.`) : null),
    h("h2", {}, "Experiments"),
    table([{ name: "experiment", show: (row) => row.label }, { name: "runs", show: (row) => row.members.join(", ") }], runs.experiments),
    h("h2", {}, "Results"),
    table([{ name: "run", show: (row) => row.name }, { name: "experiment" }, { name: "seed" }, { name: "steps" }, { name: runs.key ?? "result", show: (row) => row.result }, { name: "seconds" }], runs.results, { onRow: (row) => go({ view: "trend", run: String(runs.results.indexOf(row)) }) }),
    h("h2", {}, "What differs in configuration and code"),
    runs.differences.length ? table([{ name: "key" }, ...runs.experiments.map((one, index) => ({ name: one.label, show: (row) => row.by_experiment[index] }))], runs.differences) : h("p", {}, "Nothing that was recorded."),
  ];
}
