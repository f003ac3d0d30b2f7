import { h, text, number, facts, link, table, wordDiff } from "./text.js";
import { chart, histogram } from "./chart.js";
import { strip } from "./strip.js";
import { adviceBox } from "./advice.js";
import { rewardOf } from "./reward.js";

export async function step(overview, state, ask, go) {
  const arguments_ = { run: state.run, step: state.step };
  for (const name of ["where", "text", "sort"]) if (state[name]) arguments_[name] = state[name];
  let problem = null;
  // A filter that is wrong stays in its field, to be corrected.
  const listed = await ask("samples", arguments_).catch((error) => {
    if (!arguments_.where && !arguments_.text && !arguments_.sort) throw error;
    problem = error.message;
    return ask("samples", { run: state.run, step: state.step });
  });
  const field = (name, label) => h("input", { class: "wide", placeholder: label, "aria-label": label, value: state[name] ?? "", onchange: (event) => go({ [name]: event.target.value || null }) });
  const rows = listed.rows;
  const named = rows.length && rows[0].response !== undefined;
  const columns = [
    ...(state.step ? [] : [{ name: "step" }]), { name: "sample", show: (row) => row.row, sortable: false }, { name: "reward", title: listed.meanings.reward },
    ...(named ? [{ name: "prompt", sortable: false }, { name: "response", sortable: false }, { name: "reason", sortable: false, title: "what the reward says of it", show: (row) => String(row.error ?? row.extra?.reason ?? "") }] : []),
    ...listed.columns.filter((name) => name !== "reward").map((name) => ({ name, title: listed.meanings[name], show: (row) => flag(row[name]) })),
  ];
  const spread = state.step ? await ask("distributions", { run: state.run, step: state.step }) : [];
  const groups = state.step ? await ask("groups", { run: state.run, step: state.step }) : [];
  const moved = groups.filter((one) => one.moved).sort((a, b) => b.moved - a.moved);
  const open = (row) => go({ view: null, step: row.step, sample: row.row, token: null });
  return [
    h("h1", {}, state.step ? `Step ${state.step}: ${listed.total} samples` : `All steps: ${listed.total} samples`),
    state.step ? stepLinks(overview, state, go) : null,
    h("div", { class: "bar" }, field("where", "Filter: reward==0 and length>200"), field("text", "Text in prompt or response"),
      h("button", { onclick: () => go({ step: null, view: "samples" }) }, "all steps")),
    problem ? h("p", { class: "bad", id: "problem" }, problem) : null,
    h("div", { class: "histograms" }, spread.map(histogram)),
    rows.length > 2 && named ? scatter(rows, open) : null,
    table(columns, rows, { onRow: open, sort: state.sort, onSort: (sort) => go({ sort }) }),
    rows.length < listed.total ? h("p", { class: "faint" }, `The first ${rows.length} of ${listed.total}.`) : null,
    meanings(listed),
    groups.length ? h("h2", {}, "Groups: who takes which share of the gradient") : null,
    groups.length ? table([{ name: "group" }, { name: "prompt" }, { name: "rewards", show: (row) => row.rewards.map((one) => number(one, 3)).join(", ") }, { name: "mean" },
      { name: "share of gradient", show: (row) => row.gradient_share === undefined ? "-" : `${(100 * row.gradient_share).toFixed(1)} %` },
      { name: "variance", show: (row) => row.without_variance ? withoutVariance(row) : "" }], groups, { onRow: (row) => go({ view: "group", group: row.group, sample: null }) }) : null,
    moved.length ? h("h2", {}, "What moved") : null,
    moved.length ? h("p", { class: "faint" }, "Sum of advantage times log-ratio: above 0 the update made rewarded answers likelier and others less likely, below 0 the reverse.") : null,
    moved.length ? table([{ name: "group" }, { name: "prompt" }, { name: "moved" }], [...moved.slice(0, 5), ...moved.slice(5).slice(-5)], { onRow: (row) => go({ view: "group", group: row.group }) }) : null,
    groups.length && !moved.length ? h("p", { class: "faint" }, "Nothing moved within the update: it was one optimizer step, at which the ratio is 1 for every token. Smaller mini-batches (actor.ppo_mini_batch_size) or more epochs show how answers move.") : null,
  ];
}

// Equal rewards teach nothing where rewards are compared within a group; with a critic they do.
const withoutVariance = (group) => group.gradient_share > 0 ? "none" : "none: teaches nothing";
export const flag = (value) => value === true ? "yes" : value === false ? "" : value;

export function meanings(listed) {
  const known = listed.columns.filter((name) => listed.meanings[name]);
  return known.length ? h("details", {}, h("summary", {}, "What the columns mean"), h("ul", {}, known.map((name) => h("li", {}, h("b", {}, name), `: ${listed.meanings[name]}`)))) : null;
}

export function stepLinks(overview, state, go) {
  const at = overview.steps.indexOf(Number(state.step)), beside = [[overview.steps[at - 1], "previous"], [overview.steps[at + 1], "next"]];
  return h("div", { class: "bar" }, beside.map(([step, name]) => h("button", { disabled: step === undefined, onclick: () => go({ step, sample: null, token: null }) }, `${name} step`)),
    "step ", h("input", { type: "number", min: 1, value: state.step, "aria-label": "Step", onchange: (event) => go({ step: event.target.value, view: "step" }) }));
}

function scatter(rows, open) {
  const NS = "http://www.w3.org/2000/svg", picture = document.createElementNS(NS, "svg");
  const scored = rows.filter((row) => row.reward != null), span = (name) => [Math.min(...scored.map((row) => row[name])), Math.max(...scored.map((row) => row[name]))];
  const [x, y] = [span("length"), span("reward")], at = (value, [low, high]) => high > low ? (value - low) / (high - low) : 0.5;
  picture.setAttribute("viewBox", "0 0 460 130");
  for (const row of scored) {
    const point = document.createElementNS(NS, "circle");
    Object.entries({ cx: 46 + 400 * at(row.length, x), cy: 112 - 100 * at(row.reward, y), r: 4 }).forEach(([name, value]) => point.setAttribute(name, value));
    point.style.fill = "var(--c0)"; point.style.opacity = 0.6; point.style.cursor = "pointer";
    point.addEventListener("click", () => open(row));
    picture.append(point);
  }
  [[46, 126, `length ${number(x[0])}`], [380, 126, `to ${number(x[1])}`], [2, 112, number(y[0], 3)], [2, 14, number(y[1], 3)], [2, 60, "reward"]].forEach(([left, top, words]) => {
    const label = document.createElementNS(NS, "text");
    label.setAttribute("x", left); label.setAttribute("y", top); label.textContent = words; picture.append(label);
  });
  const box = h("div", { class: "card chart", id: "scatter" }, h("h3", {}, "Reward by length"));
  box.style.maxWidth = "560px";
  box.append(picture);
  return box;
}

export async function group(state, ask, go) {
  const one = await ask("group", { run: state.run, step: state.step, group: state.group });
  return [
    h("h1", {}, `Step ${state.step}, group ${one.group}: ${one.rows.length} answers to one prompt`),
    facts({ "share of the gradient": `${(100 * one.gradient_share).toFixed(1)} %`, variance: one.without_variance ? withoutVariance(one) : "yes", expected: one.rows[0]?.ground_truth }),
    text(one.rows[0]?.prompt),
    h("div", { class: "pair" }, one.rows.map((row) => h("div", { class: "card" }, h("h3", {}, h("a", { href: "#", onclick: (event) => { event.preventDefault(); go({ view: null, sample: row.row }); } }, `sample ${row.row}`)),
      facts({ reward: row.reward, length: row.length, advantage: row.advantage, "share": row.gradient_share }), text(row.response)))),
  ];
}

export async function sample(runs, state, ask, go) {
  const one = await ask("sample", { run: state.run, step: state.step, row: state.sample });
  const history = await ask("prompt", { run: state.run, index: one.index }).catch(() => ({ training: [] }));
  const earlier = history.training, first = earlier[0], last = earlier.at(-1);
  const shown = [
    h("h1", {}, `Step ${state.step}, sample ${state.sample}`),
    h("p", { class: "faint small" }, "Keys: j and k next and previous token, l and h next and previous recorded sample, u back to the step."),
    facts({ reward: one.reward ?? "none", prompt: one.index, group: one.group, length: one.length, "cut by the limit": one.truncated ? "yes" : "no", advantage: one.advantage, ratio: one.ratio, "policy version": one.policy_version, chosen: one.reasons?.join(", ") }),
    ...rewardOf(one, runs, state, ask),
  ];
  if (one.tokens) {
    shown.push(h("h2", {}, "Tokens"), strip(one, state, go, ask));
    Object.entries(one.not_recorded).forEach(([name, needs]) => shown.push(h("p", { class: "faint small" }, `No ${name} in this run. It needs ${needs}.`)));
    shown.push(h("h2", {}, "Conversation"), ...one.turns.map(turn),
      h("details", { id: "exact" }, h("summary", {}, "exact string with special tokens"), text(one.exact_prompt + one.exact_response)),
      h("details", {}, h("summary", {}, "token ids"), text(`prompt: ${one.tokens.prompt_ids.join(" ")}\nresponse: ${one.tokens.ids.join(" ")}`)));
  } else shown.push(h("p", { class: "faint" }, one.why_no_tokens), h("h2", {}, "Conversation"), ...one.turns.map(turn));
  if (one.cut) shown.push(h("p", { class: "faint" }, `${one.cut} more characters of the response are not recorded; trainer.record_mb bounds them.`));
  if (earlier.length > 1) shown.push(h("h2", {}, `The same prompt through the run: ${earlier.length} samples`),
    chart({ series: [meanByStep(earlier)], label: "step", height: 90, wide: true, onPick: (at) => { const row = earlier.find((other) => other.step === at); return go({ step: row.step, sample: row.row, token: null }); } }),
    h("h3", {}, `Words of step ${first.step} and of step ${last.step}`), wordDiff(first.response, last.response));
  return shown;
}

function meanByStep(rows) {
  const by = Map.groupBy(rows.filter((row) => row.reward != null), (row) => row.step);
  return { name: "mean reward of the prompt", x: [...by.keys()], y: [...by.values()].map((list) => list.reduce((sum, row) => sum + row.reward, 0) / list.length) };
}

function turn({ role, spans }) {
  return h("div", { class: "turn" }, h("b", {}, role), spans.map(({ kind, text: words }) => kind === "thought" ? h("details", {}, h("summary", {}, "thoughts"), text(words))
    : h("div", { "data-kind": kind }, kind === "text" ? null : h("b", {}, kind), text(words))));
}

const ABOUT_PROMPTS = ["prompts never solved", "reward part is exploited", "format without accuracy", "validation falls"];

export async function prompts(overview, state, ask, go) {
  const listed = await ask("prompts", { run: state.run }), never = listed.rows.filter((one) => one.never);
  const parts = await ask("parts", { run: state.run });
  const advice = overview.advice.filter((one) => ABOUT_PROMPTS.includes(one.rule));
  const open = (row) => go({ view: null, step: row.step, sample: row.row });
  return [
    h("h1", {}, `${listed.total} training prompts, the hardest first`),
    advice.length ? adviceBox(advice, overview, go) : null,
    h("p", { id: "never" }, never.length ? [`${listed.never.length} were never solved: `, never.slice(0, 20).map((one, at) => [at ? ", " : "", link(one.index, () => open(one))]), listed.never.length > 20 ? ", ..." : "", "."] : "Every prompt that was recorded has been solved at least once.", ` Solved means: ${listed.solved_means}.`),
    table([{ name: "index" }, { name: "prompt" }, { name: "attempts" }, { name: "solved", title: listed.solved_means, show: (row) => row.never ? "never" : `${row.solved} (${(100 * row.solved / row.attempts).toFixed(0)} %)` }, { name: "mean reward", show: (row) => row.mean }, { name: "best reward", show: (row) => row.best }], listed.rows, { onRow: open }),
    listed.rows.length < listed.total ? h("p", { class: "faint" }, `The first ${listed.rows.length} of ${listed.total}; tether view RUN --prompts --json --limit ${listed.total} prints all of them.`) : null,
    parts.length ? h("h2", {}, "Parts of the reward") : null,
    parts.length ? h("p", { class: "faint" }, "Means over the recorded responses of a step. A part that rises while another falls is paid for at its expense.") : null,
    h("div", { class: "grid" }, parts.map((one) => h("div", { class: "card" }, chart({ series: [{ name: one.name, x: one.steps, y: one.means }], height: 100 })))),
  ];
}

export async function validation(overview, state, ask, go) {
  const steps = overview.validation_steps;
  if (!steps.length) return [h("h1", {}, "Validation"), h("p", { class: "faint" }, `No validation samples. What records them: ${overview.missing.validation ?? "trainer.test_freq"}.`)];
  const at = state.val ?? String(steps.at(-1));
  const listed = await ask("validation", { run: state.run, step: at, ...(state.sort ? { sort: state.sort } : {}) });
  return [
    h("h1", {}, `Validation at step ${at}: ${listed.total} samples`),
    h("div", { class: "bar" }, h("select", { "aria-label": "Step", onchange: (event) => go({ val: event.target.value }) }, steps.map((one) => h("option", { value: one, selected: String(one) === at }, `step ${one}`)))),
    table([{ name: "index" }, { name: "reward" }, { name: "truncated", show: (row) => row.truncated ? "cut" : "" }, { name: "ground_truth" }, { name: "pred", sortable: false, show: (row) => String(row.extra?.pred ?? "") }, { name: "reason", sortable: false, show: (row) => row.note || String(row.extra?.reason ?? "") }, { name: "prompt" }, { name: "response" }], listed.rows, { sort: state.sort, onSort: (sort) => go({ sort }) }),
  ];
}
