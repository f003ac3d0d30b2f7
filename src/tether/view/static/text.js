// Elements are made from text nodes only: what a model wrote is never parsed as HTML.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

export function link(words, follow) {
  return h("a", { href: "#", onclick: (event) => { event.preventDefault(); follow(); } }, String(words));
}

// The recorded values of tokens and steps as they are called on the page.
const LABELS = {
  values: "value", returns: "return", rewards: "reward", shaped_rewards: "reward after shaping", td_error: "TD error", advantages: "advantage",
  log_probs: "log-prob", old_log_probs: "log-prob before the update", new_log_probs: "log-prob in the update", sampler_log_probs: "log-prob of the sampler",
  ref_log_probs: "log-prob of the reference", ref_kl: "reference KL", loss_share: "share of the loss", weights: "importance weight", kept_count: "tokens to choose from", policy_version: "policy version",
};
export const named = (name) => LABELS[name] ?? name.replaceAll("_", " ");
export const namedValues = (values, at) => Object.fromEntries(Object.entries(values).map(([name, column]) => [named(name), column[at]]));

export function text(value) {
  return h("div", { class: "text" }, String(value ?? ""));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  return String(Number(value.toPrecision(digits)));
}

export function facts(pairs) {
  return h("div", { class: "facts" }, Object.entries(pairs).filter(([, value]) => value !== undefined)
    .map(([name, value]) => h("span", {}, h("b", {}, name), typeof value === "number" ? number(value) : value ?? "-")));
}

export function tip(content, event) {
  const box = document.getElementById("tip");
  box.hidden = !content;
  if (!content) return;
  box.textContent = content;
  const { clientX: x, clientY: y } = event;
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(4, y + 18 + box.offsetHeight > innerHeight ? y - box.offsetHeight - 12 : y + 18)}px`;
}

export function withTip(element, content) {
  element.addEventListener("mousemove", (event) => tip(typeof content === "function" ? content() : content, event));
  element.addEventListener("mouseleave", () => tip(null));
  return element;
}

// Columns are {name, title, show, sortable}; rows for which `opens` is false do nothing.
export function table(columns, rows, { onRow, opens = () => true, sort, onSort } = {}) {
  const head = columns.map(({ name, title, sortable = true }) => h("th", { "aria-sort": sort === name ? "ascending" : sort === `-${name}` ? "descending" : null, title: title ?? null },
    onSort && sortable ? h("button", { onclick: () => onSort(sort === `-${name}` ? name : `-${name}`) },
      name + (sort === name ? " ↑" : sort === `-${name}` ? " ↓" : "")) : name));
  const body = rows.map((row) => h("tr", onRow && opens(row) ? { tabindex: 0, onclick: () => onRow(row), onkeydown: (event) => event.key === "Enter" && onRow(row) } : {},
    columns.map(({ name, show }) => {
      const value = show ? show(row) : row[name];
      return h("td", {}, value instanceof Node ? value : typeof value === "string" && value.length > 24 ? h("span", { class: "clip" }, value) : number(value));
    })));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

// Words of two texts: what was removed and what was added, by their longest common subsequence.
export function wordDiff(before, after) {
  const a = before.split(/(\s+)/).slice(0, 800), b = after.split(/(\s+)/).slice(0, 800);
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  const shown = h("div", { class: "text" });
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) shown.append(a[i++]), j++;
    else if (j < b.length && (i >= a.length || longest[i][j + 1] >= longest[i + 1][j])) shown.append(h("ins", {}, b[j++]));
    else shown.append(h("del", {}, a[i++]));
  }
  return shown;
}
