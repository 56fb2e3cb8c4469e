// Tracks by group: one cell a group, coloured by its track. Small for all policies of one play, large for the chosen one.

const SOURCE_WORDS = { fetched: "fetched", upgraded: "fetched, then upgraded", recomputed: "recomputed by the engine" };

/** Track of every group that is in place at time t; undefined where none is, as in a hole. */
function tracksAt(play, t) {
  const found = new Array(play.groups_total).fill(undefined);
  if (t === null) {
    play.groups.forEach((row, group) => { found[group] = row[COL.groups.track] ?? undefined; });
    return found;
  }
  const events = [];
  for (const row of play.requests) {
    const at = row[COL.requests.decoded];
    if (known(at) && at <= t) events.push([at, row[COL.requests.group], row[COL.requests.track]]);
  }
  for (const [, end, first, last] of play.computed) {
    if (end <= t) for (let group = first; group < last; group += 1) events.push([end, group, RECOMPUTED]);
  }
  events.sort((a, b) => a[0] - b[0]);
  for (const [, group, track] of events) found[group] = track;
  return found;
}

/** A strip of cells that fills its container; `onhover(group)` and `onleave()` are optional. */
function buildStrip(play, { label = null, marks = false, onhover = null, onleave = null } = {}) {
  const count = play.groups_total;
  const cells = Array.from({ length: count }, () => el("span"));
  const root = el("div", { class: count > 160 ? "strip dense" : "strip", role: label ? "img" : null, "aria-label": label, "aria-hidden": label ? null : "true" }, cells);
  const paint = (tracks) => tracks.forEach((track, group) => {
    cells[group].style.backgroundColor = track === undefined ? "" : trackColour(track);
    cells[group].className = track === undefined ? "hole" : track === RECOMPUTED ? "weaved" : "";
  });
  paint(tracksAt(play, null));
  if (onhover) {
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      onhover(clamp(Math.floor(((event.clientX - box.left) / box.width) * count), 0, count - 1));
    });
    root.addEventListener("pointerleave", onleave);
  }
  return { node: el("div", { class: "strip-frame" }, root, marks && upgradeMarks(play, count)), paint, cells };
}

/** Small triangles over groups that were upgraded. */
function upgradeMarks(play, count) {
  return el("div", { class: "marks", "aria-hidden": "true" }, play.groups.map((row, group) =>
    row[COL.groups.source] === "upgraded" &&
      el("span", { style: `left:${((group + 0.5) / count) * 100}%` }, "\u25b2")));
}

function outcome(play) {
  if (!known(play.ttft_s)) return el("span", { class: "missed" }, "\u2717 given up");
  return el("span", { class: play.met ? "met" : "missed" }, `${play.met ? "\u2713" : "\u2717"} ${seconds(play.ttft_s)}`);
}

function stripLabel(play) {
  const counts = new Map();
  for (const track of tracksAt(play, null)) counts.set(track, (counts.get(track) || 0) + 1);
  return [...counts].map(([track, count]) => `${plural(count, "group")} ${trackName(track)}`).join(", ");
}

/** All policies of the trace and start that is shown, one row each. */
function drawMultiples() {
  const here = current();
  const rank = new Map(DATA.policies.map((policy, i) => [policy.name, i]));
  const plays = [...DATA.plays.keys()]
    .filter((i) => samePlay(DATA.plays[i], here))
    .sort((a, b) => (rank.get(DATA.plays[a].policy) ?? 99) - (rank.get(DATA.plays[b].policy) ?? 99));
  const rows = plays.map((i) => {
    const play = DATA.plays[i];
    const strip = buildStrip(play);
    const label = `${play.policy}: ${play.met ? "met" : "missed"} the deadline, loss ${nats(play.loss)}; ${stripLabel(play)}`;
    return el("button", { class: "multiple", "aria-pressed": String(i === state.play), "aria-label": label, onclick: () => selectPlay(i) },
      el("span", { class: "name" }, play.policy), strip.node, outcome(play),
      el("span", { class: "number" }, nats(play.loss)));
  });
  const bound = known(here.clairvoyant_loss) ? `; a clairvoyant player would lose ${nats(here.clairvoyant_loss)}` : "";
  byId("multiples").replaceChildren(
    el("div", { class: "multiple-head" }, el("span", {}, "policy"),
      el("span", {}, `tracks of the ${whole(here.groups_total)} groups, first to last${bound}`),
      el("span", {}, "TTFT"), el("span", { class: "number" }, "loss")),
    ...rows);
}

let mainStrip = null;
let rivalStrip = null;

function drawStrip() {
  const play = current();
  mainStrip = buildStrip(play, {
    label: `Final track of every group: ${stripLabel(play)}`,
    marks: true,
    onhover: (group) => look({ group, ...momentOf(play, group) }),
    onleave: () => look({}),
  });
  const other = rival();
  rivalStrip = other && buildStrip(other, { label: `The same for ${other.policy}: ${stripLabel(other)}` });
  const last = play.groups_total - 1;
  byId("strip").replaceChildren(mainStrip.node, other ? el("small", {}, other.policy) : "", other ? rivalStrip.node : "", el("div", { class: "strip-axis", "aria-hidden": "true" },
    ticks(0, last, 8).map((group) => el("span", { style: `left:${((group + 0.5) / (last + 1)) * 100}%` }, String(group)))));
  paintStrip();
}

/** The moment and request at which a group came to its final place. */
function momentOf(play, group) {
  const row = play.groups[group];
  if (!row || !known(row[COL.groups.ready])) return {};
  const t = row[COL.groups.ready];
  const request = play.requests.findIndex((r) =>
    r[COL.requests.group] === group && r[COL.requests.decoded] === t && r[COL.requests.track] === row[COL.groups.track]);
  return { mark: t, request: request < 0 ? null : request };
}

/** While the cursor is on a moment the strip shows what was in place by then, otherwise what was delivered. */
function paintStrip() {
  const play = current();
  const tracks = tracksAt(play, state.t);
  mainStrip.paint(tracks);
  mainStrip.cells.forEach((cell, group) => cell.classList.toggle("on", group === state.group));
  if (rivalStrip) rivalStrip.paint(tracksAt(rival(), state.t));
  const placed = tracks.filter((track) => track !== undefined).length;
  byId("strip-note").textContent = state.t === null
    ? "as delivered; \u25b2 upgraded, striped: recomputed"
    : `in place at ${seconds(state.t)}: ${placed} of ${play.groups_total}`;
}
