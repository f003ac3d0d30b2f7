import { h, link } from "./text.js";

export function adviceBox(advice, overview, go) {
  const one = overview.kind === "text" ? "sample" : "episode";
  return h("div", { id: "advice" }, advice.map((found) => h("div", { class: "advice" }, h("b", {}, found.rule), ": ", found.text, " ", h("span", { class: "remedy" }, found.remedy), " ",
    link(`step ${found.step}`, () => go({ view: "step", step: found.step, sample: null })), ` (${found.why_step})`,
    found.rows.map((row) => [", ", link(`${one} ${row.row} of step ${row.step}`, () => go({ view: null, token: null, ...row, sample: row.row, row: null }))]),
    h("span", { class: "small faint" }, ` In the documentation: ${found.guide}.`))));
}

export function noAdvice(overview) {
  return h("div", { id: "no-advice", class: "faint" }, "No rule finds evidence of a problem in this run.",
    h("details", {}, h("summary", {}, `The ${overview.rules.length} rules`), overview.rules.join(", "), ". What each needs, in the documentation: view#advice."));
}
