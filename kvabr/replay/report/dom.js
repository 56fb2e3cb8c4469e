// Small tools that all parts of the page use: elements, numbers in words, colours, and the state that they share.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const RECOMPUTED = -1;

/** Index of a column by kind of row and name, e.g. COL.requests.sent. */
const COL = Object.fromEntries(
  Object.entries(DATA.fields).map(([kind, names]) => [kind, Object.fromEntries(names.map((name, i) => [name, i]))]),
);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);
const known = (value) => value !== null && value !== undefined;
/** What to call a group: its number, or class and number where the model has several layer classes. */
const groupName = (group) => DATA.units[group] || `group ${group}`;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** How an SVG element says what it is: a title child, which browsers show and screen readers read. */
const titled = (text) => svg("title", {}, text);

// ---------------------------------------------------------------- numbers in words

const DASH = "\u2013";

function fixed(value, digits) {
  return known(value) ? value.toFixed(digits) : DASH;
}

/** A number with this many significant digits, without an exponent. */
function digits(value, count = 3) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  const places = count - 1 - Math.floor(Math.log10(Math.abs(value)));
  return value.toFixed(clamp(places, 0, 12));
}

function seconds(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size > 0 && size < 0.0095) return `${digits(value * 1000, 2)} ms`;
  if (size < 1) return `${value.toFixed(3)} s`;
  return `${value.toFixed(size < 100 ? 2 : 0)} s`;
}

function nats(value) {
  if (!known(value)) return DASH;
  return value !== 0 && Math.abs(value) < 1e-6 ? value.toExponential(0) : digits(value, 2);
}

function scaled(value, units, base = 1000) {
  if (!known(value)) return DASH;
  let unit = 0;
  let size = value;
  while (Math.abs(size) >= base * 0.9995 && unit < units.length - 1) {
    size /= base;
    unit += 1;
  }
  return `${unit === 0 && Number.isInteger(size) ? size : digits(size, 3)} ${units[unit]}`;
}

const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]);
const rate = (value) => scaled(known(value) ? value * 8 : value, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]);
const percent = (value, places = 0) => (known(value) ? `${(value * 100).toFixed(places)}\u202f%` : DASH);
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : DASH);
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A tick's label: no digits that say nothing. */
const trimmed = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

/** About `about` round numbers from low to high. */
function ticks(low, high, about) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// ---------------------------------------------------------------- tracks

const trackName = (track) => (track === RECOMPUTED ? "recomputed" : known(track) ? DATA.tracks[track] : "nothing");
const trackColour = (track) => (track === RECOMPUTED ? "var(--tr)" : known(track) ? `var(--t${track})` : "transparent");

function swatch(track) {
  const kind = track === RECOMPUTED ? "swatch weaved" : "swatch";
  return el("span", { class: kind, style: `background-color:${trackColour(track)}`, "aria-hidden": "true" });
}

const trackLabel = (track) => el("span", { class: "track" }, swatch(track), trackName(track));

// ---------------------------------------------------------------- shared state

/**
 * What is being looked at. `play`: index of a play. Under the pointer: `t`, the moment, seconds; `request`, index of a
 * row of requests; `group`; `decision`, index of a row of decisions; `mark`, a moment that is pointed out without going
 * there. `pinned`: whether all that stays when the pointer moves on. `zoom`: [from, to] in seconds. `versus`: name of the
 * policy to compare with, or null.
 */
const nowhere = { t: null, request: null, group: null, decision: null, mark: null };
const state = { play: 0, ...nowhere, pinned: false, zoom: null, versus: null };
const watchers = [];

/** Change the state and tell every part what has changed. */
function update(change) {
  const changed = new Set(Object.keys(change).filter((key) => state[key] !== change[key]));
  if (!changed.size) return;
  Object.assign(state, change);
  for (const watcher of watchers) watcher(changed);
}

/** The pointer is on something: look at it, unless another moment is pinned. */
function look(change) {
  if (!state.pinned) update({ ...nowhere, ...change });
}

/** A click: pin this, or let go of what is pinned. */
function pin(change) {
  update(state.pinned ? { ...nowhere, ...change, pinned: false } : { ...nowhere, ...change, pinned: true });
}

const current = () => DATA.plays[state.play];
const samePlay = (a, b) => a.trace === b.trace && a.start_s === b.start_s && a.deadline_s === b.deadline_s;

/** The play that the current one is compared with: of another policy, on the same trace and start; null if there is none. */
function rival() {
  const here = current();
  if (state.versus === null || here.policy === state.versus) return null;
  return DATA.plays.find((play) => play.policy === state.versus && samePlay(play, here)) ?? null;
}
const playTitle = (play) => `${play.policy} on ${play.trace} from ${seconds(play.start_s)}`;

/** Index of the last row whose time is at or before t; -1 if there is none. */
function lastAt(times, t) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
