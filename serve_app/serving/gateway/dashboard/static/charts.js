// Small SVG charts. A table next to each has the same data, so screen readers treat the chart as one image.

import { h } from "./dom.js";

/** Inner widths of the containers of charts, observed so that frames need no layout query. */
const widths = new WeakMap();
const seen = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) widths.set(target, Math.round(contentRect.width));
});

/** Return the available width of a chart in pixels: the inner width of an element that always exists. */
export function widthOf(id) {
  const element = document.getElementById(id);
  if (!element) return 800;
  if (!widths.has(element)) {
    const { paddingLeft, paddingRight } = getComputedStyle(element);
    widths.set(element, Math.round(element.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight)));
    seen.observe(element);
  }
  return Math.max(260, widths.get(element) || 800);
}

/** Return round axis steps from 0 up to at least `most`. */
export function steps(most, wanted = 4) {
  if (!(most > 0)) return [0, 1];
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = 0; at < most + step * 0.999; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const HEIGHT = 170;
const LEFT = 52;
const BOTTOM = 22;
const TOP = 8;

/**
 * Return a chart with axes: time from `span` seconds ago to now, and values from 0.
 * `draw({x, y})` returns its content; `x` maps seconds ago, and `y` maps a value.
 */
export function timeChart({ label, width, span, most, unit, draw }) {
  const marks = steps(most);
  const top = marks[marks.length - 1];
  const x = (ago) => LEFT + (width - LEFT - 8) * (1 - ago / span);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  // The outer labels are not centred, so neighbours need one and a half of the longest, "10 min ago".
  const every = [120, 300, 600].find((each) => x(0) - x(each) > 110) ?? span;
  const times = [];
  for (let ago = 0; ago <= span; ago += every) times.push(ago);
  return h("svg", { role: "img", "aria-label": label, width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` },
    marks.map((mark) => h("g", { class: "grid" },
      h("line", { x1: LEFT, x2: width - 8, y1: y(mark), y2: y(mark) }),
      h("text", { x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, unit(mark)))),
    times.map((ago) => h("g", { class: "grid" },
      h("text", { x: x(ago), y: HEIGHT - 6, "text-anchor": ago === 0 ? "end" : ago === span ? "start" : "middle" }, ago ? `${ago / 60} min ago` : "now"))),
    draw({ x, y, height: HEIGHT - BOTTOM }));
}

/** Return the lines of one series, with gaps where a slot has no value. */
export function line(points, { x, y }, kind) {
  const pieces = [];
  let current = null;
  for (const [ago, value] of points) {
    if (value === null || value === undefined) { current = null; continue; }
    if (!current) pieces.push((current = []));
    current.push(`${x(ago).toFixed(1)},${y(value).toFixed(1)}`);
  }
  return pieces.map((each) => each.length === 1
    ? h("circle", { class: `dot ${kind}`, cx: each[0].split(",")[0], cy: each[0].split(",")[1], r: 2 })
    : h("polyline", { class: `line ${kind}`, points: each.join(" ") }));
}

/** Return a legend of `[kind, name]`; kinds that begin with "line" are lines of a chart, others are areas. */
export const legend = (entries) =>
  h("ul", { class: "legend" }, entries.map(([kind, name]) => h("li", { key: name }, kind.startsWith("line ")
    ? h("svg", { class: "sample", width: 28, height: 8, "aria-hidden": "true" }, h("line", { class: kind, x1: 0, x2: 28, y1: 4, y2: 4 }))
    : h("span", { class: `swatch ${kind}` }), name)));

/** Return a bar for a share; callers add the number as text. */
export const bar = (share, kind = "") =>
  h("span", { class: `bar ${kind}`, "aria-hidden": "true" },
    h("span", { vars: { "--share": `${Math.max(0, Math.min(1, share || 0)) * 100}%` } }));

/**
 * Return a table: `columns` are `[name, "figure"?]`, each row is `{key, cells, kind?}`. On narrow screens each row
 * becomes a list of named cells; the roles keep it a table for screen readers.
 */
export const table = (caption, columns, rows, empty) =>
  h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { role: "table" },
      h("caption", null, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
        columns.map(([name, kind]) => h("th", { role: "columnheader", scope: "col", class: kind, key: name }, name)))),
      h("tbody", { role: "rowgroup" }, rows.length
        ? rows.map((row) => h("tr", { key: row.key, class: row.kind, role: "row" }, row.cells.map((cell, place) => cellOf(cell, place, columns[place]))))
        : h("tr", { key: "none", role: "row" }, h("td", { role: "cell", colspan: columns.length, class: "none" }, empty)))));

const cellOf = (cell, place, [name, kind]) => (place
  ? h("td", { role: "cell", class: kind, "data-name": name }, cell)
  : h("th", { role: "rowheader", scope: "row" }, cell));
