import { h, number, named, namedValues, withTip, facts, table } from "./text.js";
import { chart } from "./chart.js";

// What a token can be coloured by: the value at which it has no colour, and its meaning.
export const MEASURES = {
  advantages: [0, "advantage: how much better the token turned out than expected"],
  values: [null, "the critic's estimate of the return before the token"],
  returns: [null, "return: what the critic should have predicted"],
  td_error: [0, "TD error: reward + next value - value"],
  ratio: [1, "probability while the update trained on it over that before the update"],
  mismatch: [0, "log-prob of the trainer minus that of the sampler"],
  ref_kl: [0, "log-prob of the policy minus that of the reference"],
  entropy: [null, "entropy of the policy at the token, in nats"],
  rewards: [0, "reward on the token, after shaping"],
  weights: [1, "importance weight of the correction for the sampler"],
  kept_count: [null, "number of tokens from which the sampler could choose: those that top-k and top-p left"],
  loss_share: [null, "share of the response's sum of |advantage|"],
  policy_version: [null, "number of updates of the weights that sampled the token"],
};

// What was asked of a checkpoint, by run, step and sample: promises, so that a page that is drawn again waits, too.
const computed = new Map();

function alternatives(sample, state, token, ask) {
  const key = `${state.run} ${state.step} ${state.sample}`, box = h("div", { id: "alternatives" });
  const show = ({ source, tokens }) => {
    const one = tokens[token];
    const listed = one.ids.map((id, i) => ({ rank: i + 1, text: JSON.stringify(one.texts[i]), id, probability: Math.exp(one.log_probs[i]), reference: one.reference_log_probs && Math.exp(one.reference_log_probs[i]) }));
    box.replaceChildren(h("p", { class: "faint small" }, source),
      facts({ "its rank": one.rank, "its log-prob there": one.log_prob, "its log-prob by the reference": one.reference_log_prob, "its recorded log-prob": sample.tokens.values.old_log_probs?.[token] ?? sample.tokens.values.sampler_log_probs?.[token] }),
      table([{ name: "rank" }, { name: "text" }, { name: "id" }, { name: "probability" }, one.reference_log_probs && { name: "reference" }].filter(Boolean), listed));
  };
  const request = () => {
    if (!computed.has(key)) computed.set(key, ask("alternatives", { run: state.run, step: state.step, row: state.sample }));
    box.replaceChildren(h("p", { class: "faint", role: "status" }, "Loading the checkpoint in another process ..."));
    computed.get(key).then(show, (error) => { computed.delete(key); box.replaceChildren(h("p", { class: "bad" }, error.message)); });
  };
  if (computed.has(key)) request();
  else if (sample.checkpoint === null) box.append(h("p", { class: "faint small" }, "Alternatives to this token are computed from a checkpoint, and this run has none; trainer.save_freq saves them."));
  else box.append(h("button", { onclick: request }, `alternatives, from the checkpoint of step ${sample.checkpoint}`));
  return box;
}

export function strip(sample, state, go, ask) {
  const { pieces, ids, mask, values } = sample.tokens;
  const measures = Object.keys(MEASURES).filter((name) => values[name]);
  const by = measures.includes(state.by) ? state.by : measures[0];
  const box = h("div", { id: "strip-box" });
  const choice = h("select", { "aria-label": "Colour by", onchange: (event) => go({ by: event.target.value }) },
    measures.map((name) => h("option", { value: name, selected: name === by }, named(name))));
  const known = values[by].filter((value, i) => value != null && mask[i]);
  const sorted = [...known].sort((a, b) => a - b);
  const centre = MEASURES[by][0] ?? sorted[Math.floor(sorted.length / 2)] ?? 0;
  const widest = Math.max(...known.map((value) => Math.abs(value - centre)), 1e-12);
  const token = Number(state.token ?? -1);
  const spans = pieces.map((piece, i) => {
    const value = values[by][i], distance = value == null ? 0 : value - centre;
    const classes = [mask[i] ? distance > 0 ? "plus" : distance < 0 ? "minus" : "" : "masked"];
    const [low, high] = sample.clip;
    if (by === "ratio" && mask[i] && (value > 1 + high || value < 1 - low)) classes.push("clipped");
    if (i === token) classes.push("here");
    const shown = piece === "" ? "·" : piece.replaceAll("\n", "⏎\n");
    const span = h("span", { class: classes.join(" "), "data-token": i, "data-value": value ?? "", tabindex: i === token ? 0 : -1, onclick: () => go({ token: i }) }, shown);
    if (mask[i]) span.style.backgroundColor = `rgba(var(--${distance >= 0 ? "positive" : "negative"}), ${(0.75 * Math.abs(distance) / widest).toFixed(3)})`;
    return withTip(span, () => [`token ${i}, id ${ids[i]}${mask[i] ? "" : " (masked: not trained on)"}`, ...Object.entries(namedValues(values, i)).map(([name, value]) => `${name}: ${number(value, 6)}`)].join("\n"));
  });
  const [low, high] = [sorted[0], sorted.at(-1)];
  box.append(
    h("div", { class: "bar" }, "colour by ", choice, h("span", { class: "faint small" }, MEASURES[by][1])),
    h("div", { class: "small faint" }, `${number(low)} `, h("span", { class: "ramp" }), ` ${number(high)}; no colour: ${number(centre)}. `,
      "Solid line: above, dotted: below. Hatched: not trained on.", by === "ratio" ? " Framed: outside the clip range." : ""));
  if (values.values) {
    const x = pieces.map((_, i) => i), of = (name) => values[name] && { name: named(name), x, y: values[name] };
    box.append(chart({
      series: [of("values"), of("returns"), by !== "values" && by !== "returns" && of(by)].filter(Boolean),
      label: "token", height: 130, wide: true, cursor: token >= 0 ? token : null, onPick: (i) => go({ token: i }),
    }));
  }
  box.append(h("div", { class: "strip", id: "strip" }, spans));
  if (token >= 0 && token < pieces.length)
    box.append(h("h3", {}, `Token ${token} of 0-${pieces.length - 1} (counted from 0)`), facts({ text: JSON.stringify(pieces[token]), id: ids[token], trained: mask[token] ? "yes" : "no (masked)", ...namedValues(values, token) }), alternatives(sample, state, token, ask));
  return box;
}
