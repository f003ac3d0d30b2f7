import { h, facts, number, table, text } from "./text.js";

// What the reward says when it is asked again, by run, step and sample: promises, so that a page that is drawn again waits, too.
const rescored = new Map();

export function rewardOf(sample, runs, state, ask) {
  const { pred, answer, reason, ...values } = sample.extra ?? {};
  const parts = Object.fromEntries(Object.entries(values).map(([name, value]) => [name in sample.weights ? `${name} (weight ${number(sample.weights[name])})` : name, value]));
  return [
    h("h2", {}, "Reward"),
    sample.error ? h("p", { class: "bad" }, sample.error) : null, sample.traceback ? h("details", {}, h("summary", {}, "traceback"), text(sample.traceback)) : null,
    facts({ expected: sample.ground_truth ?? "not recorded", extracted: pred ?? answer ?? "not returned by the reward (key pred)", reason: reason ?? "not returned by the reward (key reason)", ...parts, seconds: sample.reward_seconds }),
    again(runs, state, ask),
  ];
}

function again(runs, state, ask) {
  const key = `${state.run} ${state.step} ${state.sample}`, result = h("div", { id: "rescored" });
  const wait = async () => {
    result.replaceChildren(h("p", { class: "faint", role: "status" }, "Scoring it in another process ..."));
    result.replaceChildren(...await rescored.get(key));
  };
  const request = (by) => {
    rescored.set(key, ask("rescored", { run: state.run, step: state.step, row: state.sample, by }).then(sideBySide, (error) => [h("p", { class: "bad" }, error.message)]));
    return wait();
  };
  if (rescored.has(key)) wait();
  return h("div", { class: "card" }, h("div", { class: "bar" }, h("button", { onclick: () => request("run") }, "score it again by the reward of the run"),
    runs.reward ? h("button", { onclick: () => request("file") }, `score it by ${runs.reward}`) : null), result);
}

function sideBySide({ reward, rows: [{ recorded, now, same_score, warnings }] }) {
  const names = [...new Set([...Object.keys(recorded.extra), ...Object.keys(now.extra)])];
  const shown = (value) => value === undefined || value === null ? "-" : typeof value === "number" ? number(value, 7) : String(value);
  const row = (name, before, after) => ({ name, before: shown(before), after: shown(after) });
  const score = ({ score, error }) => score ?? (error ? "failed" : "none: the reward abstained");
  const listed = [row("score", score(recorded), score(now)), ...names.map((name) => row(name, recorded.extra[name], now.extra[name])), row("error", recorded.error, now.error)];
  return [
    h("p", {}, h("b", { class: same_score ? "good" : "bad" }, same_score ? "The score still holds" : "The score is another one now"), ` by ${reward}, in ${number(now.seconds, 2)} s.`),
    ...warnings.map((warning) => h("p", { class: "advice" }, warning)),
    table([{ name: "name" }, { name: "recorded", show: (one) => h("span", {}, one.before) }, { name: "now", show: (one) => h("span", { class: one.before === one.after ? "" : "changed" }, one.after) }], listed),
    now.traceback ? h("details", {}, h("summary", {}, "traceback"), text(now.traceback)) : null,
  ].filter(Boolean);
}
