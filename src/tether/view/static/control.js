import { h, number, facts, named, namedValues, table } from "./text.js";
import { chart, histogram } from "./chart.js";
import { flag, meanings, stepLinks } from "./step.js";

export async function episodes(overview, state, ask, go) {
  const at = { run: state.run, step: state.step };
  const listed = await ask("samples", { ...at, ...(state.sort ? { sort: state.sort } : {}) });
  const spread = await ask("distributions", at);
  return [
    h("h1", {}, `Training step ${state.step}: ${listed.total} segments of episodes`),
    stepLinks(overview, state, go),
    h("div", { class: "histograms" }, spread.map(histogram)),
    h("p", { class: "faint" }, `Rows marked recorded open, step by step.${listed.left_out ? ` ${listed.left_out} more were chosen and did not fit into the size of a step (${listed.record_more}).` : ""} A segment is what a rollout has of an episode.`),
    table([{ name: "episode", show: (row) => row.row, sortable: false, title: "row of the step" }, { name: "recorded", sortable: false, title: "whether its steps were recorded", show: (row) => row.recorded ? "yes" : "" },
      ...listed.columns.map((name) => ({ name, title: listed.meanings[name], show: (row) => name === "success" ? (row.success ? "yes" : "no") : flag(row[name]) }))], listed.rows,
      { onRow: (row) => go({ sample: row.row, token: null, view: null }), opens: (row) => row.recorded, sort: state.sort, onSort: (sort) => go({ sort }) }),
    listed.rows.length < listed.total ? h("p", { class: "faint" }, `The first ${listed.rows.length} of ${listed.total}.`) : null,
    ...Object.entries(listed.not_recorded).map(([name, needs]) => h("p", { class: "faint small" }, `No ${name} in this run. It needs ${needs}.`)),
    meanings(listed),
  ];
}

export async function tasks(state, ask, go) {
  const listed = await ask("tasks", { run: state.run });
  if (!listed.length) return [h("h1", {}, "Success by task"), h("p", { class: "faint" }, "This run reports no success: its environments have neither success nor is_success in their infos. Other numbers of a task are named in env.train.info_metrics.")];
  return [
    h("h1", {}, "Success by task, the worst first"),
    h("p", { class: "faint" }, "Share of the episodes that ended in a recorded step and had solved their task; bands are 95 % intervals. A click on a curve opens its step."),
    h("div", { class: "grid", id: "tasks" }, listed.map((one) => h("div", { class: "card" }, h("h3", {}, one.task),
      h("p", { class: "small faint" }, `${number(100 * one.recent, 3)} % lately${one.episodes ? `; ${one.episodes} episodes in all` : ""}`),
      chart({ series: [{ name: "success", x: one.steps, y: one.values, low: one.low, high: one.high }], onPick: (step) => go({ view: "step", step }) })))),
  ];
}

function film(data, canvas) {
  const [count, height, width, channels] = data.shape;
  const bytes = Uint8Array.from(atob(data.data), (letter) => letter.charCodeAt(0)), size = height * width * channels;
  canvas.width = width; canvas.height = height;
  canvas.style.width = `${Math.max(width, Math.min(360, width * 8))}px`;
  const context = canvas.getContext("2d");
  canvas.dataset.frames = count;
  return (index) => {
    const picture = context.createImageData(width, height), frame = bytes.subarray(Math.min(index, count - 1) * size);
    for (let pixel = 0; pixel < width * height; pixel++)
      for (let channel = 0; channel < 4; channel++)
        picture.data[4 * pixel + channel] = channel === 3 ? 255 : frame[pixel * channels + Math.min(channel, channels - 1)];
    context.putImageData(picture, 0, 0);
  };
}

export async function episode(overview, state, ask, go) {
  const one = await ask("episode", { run: state.run, step: state.step, row: state.sample });
  const steps = one.values.rewards.length, x = Array.from({ length: steps }, (_, i) => i);
  const columns = (rows) => (rows[0] ?? []).map((_, i) => rows.map((row) => row[i]));
  const several = (name, list) => list.slice(0, 8).map((y, i) => ({ name: `${name} ${i}`, x: y.map((_, at) => at), y }));
  const of = (name) => one.values[name] && { name: named(name), x, y: one.values[name] };
  const marked = (step, text) => one.largest_drop != null ? [{ step, kind: "alarm", text }] : [];
  const drop = marked(one.largest_drop, "the value drops most here");
  const charts = [];
  const at = h("input", { type: "range", min: 0, max: steps - 1, value: state.token ?? 0, "aria-label": "Step of the episode" });
  const numbers = h("div", { class: "facts", id: "cursor" });
  let draw = () => {};
  const seek = (value, link = false) => {
    const index = Math.max(0, Math.min(steps - 1, Number(value)));
    at.value = index;
    charts.forEach((one) => one.setCursor(index));
    draw(index);
    numbers.replaceChildren(...facts({ step: `${index} of 0-${steps - 1} (counted from 0)`, ...namedValues(one.values, index), action: one.actions[index].map((a) => number(a, 3)).join(", ") }).childNodes);
    if (link) go({ token: index }, true);
  };
  at.addEventListener("input", () => seek(at.value, true));
  const add = (title, series, marks = drop, note = null) => {
    const picture = chart({ series: series.filter(Boolean), marks, label: "step of the episode", height: 105, domain: [0, steps], onPick: (value) => seek(value, true), cursor: 0 });
    charts.push(picture);
    return h("section", { class: "card" }, h("h3", {}, title), picture, note && one.largest_drop != null ? h("p", { class: "small faint" }, note) : null);
  };
  const canvas = one.film ? h("canvas", { id: "film" }) : null;
  if (canvas) draw = film(one.film, canvas);
  const panels = [
    add("Value and return", [of("values"), of("returns")]), add("Reward", [of("rewards"), of("shaped_rewards")]),
    add("TD error and advantage", [of("td_error"), of("advantages")], marked(one.largest_drop - 1, "before the largest drop of the value"),
      `Marked one step earlier: the TD error of step ${one.largest_drop - 1} is reward + value of step ${one.largest_drop} - value of step ${one.largest_drop - 1}, which has the drop in it.`), add("Action", several("action", columns(one.actions))),
    ...Object.entries(one.observations).filter(([, rows]) => Array.isArray(rows)).map(([name, rows]) => add(`Observation: ${name}`, several(name, columns(rows)))),
  ];
  setTimeout(() => seek(state.token ?? one.largest_drop ?? 0));
  return [
    h("h1", {}, `Training step ${state.step}, episode ${state.sample}`),
    facts({ return: one.return, length: one.length, environment: one.env, "begins at a start": one.from_start ? "yes" : "no", ended: one.terminated ? "terminated" : one.truncated ? "truncated" : "goes on", task: one.task, success: one.success === undefined ? undefined : one.success ? "yes" : "no", seed: one.seed === null ? "none, its environment went on with its own generator" : one.seed, chosen: one.reasons.join(", ") }),
    one.largest_drop != null ? h("p", { id: "drop" }, "The critic's value drops most at ", h("button", { onclick: () => seek(one.largest_drop, true) }, `step ${one.largest_drop} of the episode`), ` (counted from 0, of ${steps}), from ${number(one.values.values[one.largest_drop - 1], 3)} to ${number(one.values.values[one.largest_drop], 3)}.`) : null,
    canvas ?? h("p", { class: "faint" }, one.no_film),
    ...Object.entries(one.observations).filter(([, value]) => typeof value === "string").map(([name, value]) => facts({ [name]: value })),
    ...Object.entries(one.left_out).map(([name, why]) => h("p", { class: "faint" }, `Observation ${name} not recorded (${why}).`)),
    h("div", { class: "bar" }, at), h("p", { class: "small faint" }, "Numbers beside names are those at the cursor. Keys: j and k next and previous step of the episode, l and h next and previous recorded episode, u back to the training step."), numbers, h("div", { class: "grid" }, panels),
  ];
}
