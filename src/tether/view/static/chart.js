import { h, number, tip } from "./text.js";

const NS = "http://www.w3.org/2000/svg";
const MARGIN = { left: 46, right: 8, top: 8, bottom: 18 };
export const COLORS = Array.from({ length: 8 }, (_, index) => `var(--c${index})`);

function svg(tag, attributes = {}, content) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "fill" || name === "stroke") element.style[name] = value;
    else element.setAttribute(name, value);
  }
  if (content !== undefined) element.textContent = content;
  return element;
}

function ticks(low, high, count, whole = false) {
  const raw = Math.max((high - low) / count || 1, whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

function path(x, y, at) {
  let line = "", pen = "M";
  x.forEach((value, index) => {
    if (y[index] == null) return void (pen = "M");
    line += `${pen}${at.x(value).toFixed(1)} ${at.y(y[index]).toFixed(1)}`;
    pen = "L";
  });
  return line;
}

// Series are {name, x, y, low, high, color, dash, title}; marks are {step, kind, text, until}.
export function chart({ series, marks = [], height = 130, stacked = false, wide = false, label = "", onPick, cursor, domain }) {
  const shown = series.filter((one) => one.x.length), width = wide ? Math.max(320, Math.min(innerWidth, 1600) - 60) : 460;
  const box = h("div", { class: "chart" });
  // Beside a name: the value at the cursor, and without one the last value.
  const beside = shown.map(() => h("output"));
  const legend = h("div", { class: "legend" }, shown.map((one, index) => {
    const swatch = h("i");
    swatch.style.background = one.color ?? COLORS[index % COLORS.length];
    return h("span", { title: one.title ?? "" }, swatch, one.name, "  ", beside[index]);
  }));
  const tell = (value) => shown.forEach((one, index) => {
    const i = value == null ? one.y.length - 1 : one.x.indexOf(value);
    beside[index].textContent = i < 0 ? "-" : number(one.y[i], 3);
  });
  box.append(legend);
  if (!shown.length) return box;
  const x = shown.flatMap((one) => one.x);
  const dropped = stacked ? [] : shown.flatMap((one, index) => (one.discarded ?? []).map((branch) => ({ ...branch, color: one.color ?? COLORS[index % COLORS.length] })));
  let layers = shown.map((one) => one.y);
  if (stacked) {
    const steps = shown[0].x, total = new Array(steps.length).fill(0);
    layers = shown.map((one) => { const by = new Map(one.x.map((at, i) => [at, one.y[i]])); return steps.map((at, i) => (total[i] += by.get(at) ?? 0)); });
  }
  const values = [...layers.flat(), ...shown.flatMap((one) => [...(one.low ?? []), ...(one.high ?? [])])].filter((v) => v != null && Number.isFinite(v));
  let low = stacked ? 0 : Math.min(...values), high = Math.max(...values);
  const constant = low === high ? low : null;
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const all = [...x, ...dropped.flatMap((branch) => branch.x)];
  const [first, last] = domain ?? [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  const at = {
    x: (value) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (last === first ? 0.5 : (value - first) / (last - first)),
    y: (value) => MARGIN.top + (height - MARGIN.top - MARGIN.bottom) * (1 - (value - low) / (high - low)),
  };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label || shown.map((one) => one.name).join(", ") });
  for (const tick of constant === null ? ticks(low, high, Math.max(3, height / 45)) : [constant]) {
    picture.append(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: at.y(tick), y2: at.y(tick) }));
    picture.append(svg("text", { x: MARGIN.left - 5, y: at.y(tick) + 4, "text-anchor": "end" }, number(tick, 3)));
  }
  if (low < 0 && high > 0) picture.append(svg("line", { class: "zero", x1: MARGIN.left, x2: width - MARGIN.right, y1: at.y(0), y2: at.y(0) }));
  for (const tick of ticks(first, last, width / 90, x.every(Number.isInteger))) picture.append(svg("text", { x: at.x(tick), y: height - 4, "text-anchor": at.x(tick) > width - 24 ? "end" : "middle" }, number(tick, 4)));
  for (const mark of marks.filter((one) => one.step >= first && one.step <= last)) {
    const end = mark.until ?? mark.step;
    picture.append(mark.kind === "discarded"
      ? svg("rect", { class: "discarded", x: at.x(mark.step), width: Math.max(3, at.x(end) - at.x(mark.step)), y: MARGIN.top, height: height - MARGIN.top - MARGIN.bottom })
      : svg("line", { class: `mark ${mark.kind}`, x1: at.x(mark.step), x2: at.x(mark.step), y1: MARGIN.top, y2: height - MARGIN.bottom }));
  }
  // Branches that a resume left, where their values fit: they do not stretch the chart.
  for (const branch of dropped) picture.append(svg("path", { class: "dropped-branch", d: path(branch.x, branch.y.map((value) => value < low || value > high ? null : value), at), fill: "none", stroke: branch.color }));
  layers.forEach((y, index) => {
    const one = shown[index], color = one.color ?? COLORS[index % COLORS.length];
    if (stacked) {
      const below = index ? layers[index - 1] : y.map(() => 0);
      const steps = shown[0].x;
      const area = path(steps, y, at) + path([...steps].reverse(), [...below].reverse(), at).replace("M", "L") + "Z";
      picture.append(svg("path", { d: area, fill: color, opacity: 0.75 }));
      return;
    }
    if (one.low?.length) {
      const band = path(one.x, one.high, at) + path([...one.x].reverse(), [...one.low].reverse(), at).replace("M", "L") + "Z";
      picture.append(svg("path", { d: band, fill: color, opacity: 0.18 }));
    }
    picture.append(svg("path", { d: path(one.x, y, at), fill: "none", stroke: color, "stroke-width": 1.6, "stroke-dasharray": one.dash ?? "" }));
    if (one.x.length < 25) one.x.forEach((value, i) => y[i] != null && picture.append(svg("circle", { cx: at.x(value), cy: at.y(y[i]), r: 2.2, fill: color })));
  });
  const line = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  picture.append(line);
  const move = (value) => {
    tell(value);
    line.setAttribute("visibility", value == null ? "hidden" : "visible");
    if (value != null) ["x1", "x2"].forEach((name) => line.setAttribute(name, at.x(value)));
  };
  const nearest = (event) => {
    const frame = picture.getBoundingClientRect();
    const value = first + ((event.clientX - frame.left) / frame.width * width - MARGIN.left) / (width - MARGIN.left - MARGIN.right) * (last - first);
    return x.reduce((best, one) => Math.abs(one - value) < Math.abs(best - value) ? one : best);
  };
  picture.addEventListener("mousemove", (event) => {
    const value = nearest(event);
    move(value);
    const lines = shown.map((one) => { const i = one.x.indexOf(value); return i < 0 ? null : `${one.name}: ${number(one.y[i], 6)}` + (one.low?.length ? ` (${number(one.low[i], 4)} to ${number(one.high[i], 4)})` : ""); });
    const noted = marks.filter((mark) => mark.kind !== "checkpoint" && Math.abs(at.x(mark.step) - at.x(value)) < 4).map((mark) => `${mark.kind}: ${mark.text}`);
    const healthy = shown.filter((one) => one.healthy).map((one) => `healthy ${one.name}: ${one.healthy}`);
    tip([`${label || "step"} ${number(value, 8)}`, ...lines, ...healthy, ...noted].filter(Boolean).join("\n"), event);
  });
  picture.addEventListener("mouseleave", () => { tip(null); move(cursor); });
  if (onPick) picture.addEventListener("click", (event) => onPick(nearest(event)));
  move(cursor);
  box.append(picture);
  box.setCursor = (value) => { cursor = value; move(value); };
  return box;
}

// Histograms of a step: [{name, edges, counts, mean, ...quartiles}].
export function histogram(one) {
  const width = 230, height = 70, bottom = 54, picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Histogram of ${one.name}` });
  const most = Math.max(...one.counts), bar = (width - 10) / one.counts.length;
  const bounds = (i) => `${number(one.edges[i], 4)} to ${number(one.edges[i + 1], 4)}: ${one.counts[i]}`;
  one.counts.forEach((count, i) => {
    const rect = svg("rect", { x: 5 + i * bar, width: Math.max(1, bar - 1), y: bottom - 48 * count / most, height: 48 * count / most, fill: COLORS[0] });
    rect.append(svg("title", {}, bounds(i)));
    picture.append(rect);
  });
  picture.append(svg("text", { x: 5, y: height - 3 }, number(one.lowest, 3)), svg("text", { x: width - 5, y: height - 3, "text-anchor": "end" }, number(one.highest, 3)));
  const between = one.counts.map((_, i) => bounds(i)).join("; ");
  return h("div", { class: "card histogram", "data-name": one.name, "data-counts": one.counts.join(" "), title: between }, h("h3", {}, one.name), picture,
    h("div", { class: "small faint" }, `median ${number(one.median, 3)}, half between ${number(one["first quartile"], 3)} and ${number(one["third quartile"], 3)}, mean ${number(one.mean, 3)}`));
}
