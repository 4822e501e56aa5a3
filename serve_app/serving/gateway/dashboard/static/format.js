// Formatting of numbers with their units.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// Keeps a number and its unit on one line.
const SPACE = "\u00a0";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Placeholder for a value that the engine does not report, or that is not known yet. */
export const NONE = "–";

export const whole = (value) => (isNumber(value) ? WHOLE.format(value) : NONE);

/** Format a count in few characters: 950, 12.3k, 4.56M. */
export function compact(value) {
  if (!isNumber(value)) return NONE;
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= limit) return `${digits(value / (unit === "k" ? 1e3 : limit))}${unit}`;
  }
  return WHOLE.format(value);
}

/** Format a time with its unit: 0.4 ms, 35 ms, 1.25 s, 3 min 20 s, 2 h 5 min. */
export function seconds(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return `0${SPACE}s`;
  if (size < 0.9995) return `${digits(value * 1e3)}${SPACE}ms`;
  if (size < 119.5) return `${digits(value)}${SPACE}s`;
  const minutes = Math.floor(Math.round(size) / 60);
  const [much, rest] = minutes < 120 ? [`${minutes}${SPACE}min`, [Math.round(size) % 60, "s"]] : [`${Math.floor(minutes / 60)}${SPACE}h`, [minutes % 60, "min"]];
  return rest[0] ? `${much} ${rest.join(SPACE)}` : much;
}

/** Format a share. A share just below 1 is rounded down: 99.97 % becomes "99.9 %", never "100 %". */
export function percent(share) {
  if (!isNumber(share)) return NONE;
  const nearlyAll = share > 0.99 && share < 1;
  return `${nearlyAll ? Math.floor(1e3 * share) / 10 : digits(100 * share, 2)}${SPACE}%`;
}

export const perSecond = (value) => (isNumber(value) ? `${digits(value)}/s` : NONE);

/** Format a score with three significant digits. */
export function score(value) {
  if (!isNumber(value)) return NONE;
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(1);
  return Math.abs(value) < 1 ? String(Number(value.toPrecision(2))) : digits(value);
}

/** Format a count with its noun: "12 requests", "1 request". */
export const counted = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

/** Shorten a long id to its last part; tooltips show the full id. */
export const shortId = (id) => (id.length > 18 ? `…${id.slice(-14)}` : id);

function digits(value, most = 3) {
  const size = Math.abs(value);
  const after = size >= 100 ? 0 : size >= 10 ? Math.max(0, most - 2) : most - 1;
  return Number(value.toFixed(after)).toLocaleString("en", { maximumFractionDigits: after });
}
