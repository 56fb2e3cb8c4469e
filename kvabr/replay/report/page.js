// The page: draws the overview once, and the chosen play whenever the choice changes; keys, address, size.

const unique = (values) => [...new Set(values)];

/** Go to a play; the zoom stays only where the time axis means the same. */
function selectPlay(play) {
  if (play === state.play) return;
  const zoom = samePlay(DATA.plays[play], current()) ? state.zoom : null;
  // To go to the play that is compared with swaps the two.
  const swapped = rival() === DATA.plays[play];
  update({ ...nowhere, pinned: false, zoom, play, versus: swapped ? current().policy : state.versus });
}

function nearest(wanted) {
  const fit = (play) => (play.trace === wanted.trace ? 4 : 0) + (play.start_s === wanted.start_s ? 2 : 0) + (play.policy === wanted.policy ? 1 : 0);
  const all = [...DATA.plays.keys()];
  return all.reduce((best, i) => (fit(DATA.plays[i]) > fit(DATA.plays[best]) ? i : best), all[0]);
}

function choice(label, values, chosen, name, onpick) {
  const picked = values.indexOf(chosen);
  const go = (step) => onpick(values[(picked + step + values.length) % values.length]);
  const select = el("select", { "aria-label": label, onchange: (event) => onpick(values[event.target.selectedIndex]) },
    values.map((value, i) => el("option", { selected: i === picked }, name(value))));
  const several = values.length > 1;
  return el("div", { class: "choice" }, el("span", { class: "muted" }, label),
    several && el("button", { onclick: () => go(-1), "aria-label": `previous ${label}` }, "\u2039"), select,
    several && el("button", { onclick: () => go(1), "aria-label": `next ${label}` }, "\u203a"));
}

/** Policies that were played on the trace and start shown, best first. */
function policiesHere() {
  const here = current();
  const names = new Set(DATA.plays.filter((play) => samePlay(play, here)).map((play) => play.policy));
  const ranked = DATA.policies.map((policy) => policy.name).filter((name) => names.has(name));
  return [...ranked, ...[...names].filter((name) => !ranked.includes(name))];
}

function drawPicker() {
  const here = current();
  const traces = unique(DATA.plays.map((play) => play.trace));
  const starts = unique(DATA.plays.filter((play) => play.trace === here.trace).map((play) => play.start_s)).sort((a, b) => a - b);
  byId("picker").replaceChildren(
    choice("trace", traces, here.trace, String, (trace) => selectPlay(nearest({ ...here, trace, start_s: null }))),
    choice("start", starts, here.start_s, seconds, (start) => selectPlay(nearest({ ...here, start_s: start }))),
    choice("policy", policiesHere(), here.policy, String, (policy) => selectPlay(nearest({ ...here, policy }))));
}

function drawTools() {
  byId("tools").replaceChildren(el("h3", {}, "Over time"), sweepButton(),
    state.zoom && el("button", { onclick: () => update({ ...nowhere, pinned: false, zoom: null }) },
      `${seconds(state.zoom[0])} to ${seconds(state.zoom[1])} \u00b7 show all`) || "",
    versusChoice(), exportButtons());
}

const compareWith = (versus) => update({ versus });

function versusChoice() {
  const others = policiesHere().filter((name) => name !== current().policy);
  if (!others.length) return "";
  const names = [null, ...others];
  const picked = rival() ? names.indexOf(state.versus) : 0;
  return el("label", { class: "choice versus" }, el("span", { class: "muted" }, "compare with"),
    el("select", { onchange: (event) => compareWith(names[event.target.selectedIndex]) },
      names.map((name, i) => el("option", { selected: i === picked }, name ?? "no other policy"))));
}

function stepVersus() {
  const names = [null, ...policiesHere().filter((name) => name !== current().policy)];
  compareWith(names[(names.indexOf(rival() ? state.versus : null) + 1) % names.length]);
}

function drawPlay() {
  drawPicker();
  drawMultiples();
  drawHead();
  drawStrip();
  drawTools();
  drawTimeline();
  drawFilters();
  logFilter.all = false;
  drawLog();
  drawInspector();
  for (const button of document.querySelectorAll("[data-policy]")) {
    button.toggleAttribute("aria-current", button.dataset.policy === current().policy);
  }
}

watchers.push((changed) => {
  if (changed.has("play") || changed.has("versus")) drawPlay();
  else {
    if (changed.has("zoom")) {
      drawTools();
      drawTimeline();
    }
    moveCursor();
    paintStrip();
    markLog();
    drawInspector();
  }
  if (sweep) return; // the address need not follow every frame
  if (changed.has("play") || changed.has("versus") || state.pinned || changed.has("pinned")) writeAddress();
});

// ---------------------------------------------------------------- animation

/** Seconds that an animation takes at least; longer plays run in real time. */
const LEAST_SWEEP = 4;

/** The animation under way: its play, its last frame's time in ms, and the moment that it has reached; null if none is. */
let sweep = null;

function sweepButton() {
  const text = sweep ? "\u275a\u275a pause" : "\u25b6 play";
  return el("button", { class: "sweep", "aria-pressed": String(sweep !== null), onclick: toggleSweep, title: "Run through the play (space)" }, text);
}

function toggleSweep() {
  if (sweep) {
    stopSweep();
    return;
  }
  const [from, to] = chart ? [chart.area.from, chart.area.to] : [0, current().until];
  const t = state.t === null || state.t >= to - 1e-6 || state.t < from ? from : state.t;
  sweep = { play: state.play, last: null, t };
  update({ ...nowhere, t, pinned: true });
  drawTools();
  requestAnimationFrame(stepSweep);
}

/** Stop where the animation is; the moment stays pinned. */
function stopSweep() {
  sweep = null;
  drawTools();
  writeAddress();
}

function stepSweep(now) {
  // A click elsewhere or another play ends the animation.
  if (!sweep || sweep.play !== state.play || state.t !== sweep.t || !state.pinned) {
    if (sweep) stopSweep();
    return;
  }
  const { from, to } = chart.area;
  const speed = Math.min(1, (to - from) / LEAST_SWEEP);
  const passed = sweep.last === null ? 0 : Math.max(0, now - sweep.last) / 1000;
  sweep.last = now;
  sweep.t = Math.min(to, sweep.t + passed * speed);
  update({ ...nowhere, t: sweep.t, pinned: true });
  if (sweep.t >= to) stopSweep();
  else requestAnimationFrame(stepSweep);
}

// ---------------------------------------------------------------- address and keys

/** The address names what is shown, so that a moment can be passed on: #play=3&t=1.25, #play=3&decision=17, #play=3&with=mpc. */
function writeAddress() {
  const parts = [`play=${state.play}`];
  if (rival()) parts.push(`with=${encodeURIComponent(state.versus)}`);
  if (state.pinned && state.decision !== null) parts.push(`decision=${state.decision}`);
  else if (state.pinned && state.t !== null) parts.push(`t=${state.t.toFixed(5)}`);
  try {
    history.replaceState(null, "", `#${parts.join("&")}`);
  } catch {
    // Some viewers forbid it for local files; the page works without.
  }
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const index = (name, count) => {
    const text = wanted.get(name);
    return text !== null && /^\d+$/.test(text) && Number(text) < count ? Number(text) : null;
  };
  const play = index("play", DATA.plays.length) ?? DATA.opening;
  const change = { ...nowhere, pinned: false, zoom: null, play, versus: wanted.get("with") };
  const decision = index("decision", DATA.plays[play].decisions.length);
  const t = Number.parseFloat(wanted.get("t"));
  if (decision !== null) {
    const row = DATA.plays[play].decisions[decision];
    Object.assign(change, { decision, t: row[COL.decisions.t], group: row[COL.decisions.group], pinned: true });
  } else if (Number.isFinite(t)) {
    Object.assign(change, { t: clamp(t, 0, DATA.plays[play].until), pinned: true });
  }
  return change;
}

function stepDecision(step) {
  const { decisions } = current();
  const here = decisionOf(current());
  const next = clamp(here === null ? (step > 0 ? 0 : decisions.length - 1) : here + step, 0, decisions.length - 1);
  if (!decisions.length) return;
  const row = decisions[next];
  update({ ...nowhere, pinned: true, decision: next, t: row[COL.decisions.t], group: row[COL.decisions.group] });
}

function stepPlay(step) {
  const keys = DATA.plays.filter((play, i) => DATA.plays.findIndex((other) => samePlay(other, play)) === i);
  const here = keys.findIndex((play) => samePlay(play, current()));
  selectPlay(nearest({ ...keys[(here + step + keys.length) % keys.length], policy: current().policy }));
}

function stepPolicy(step) {
  const names = policiesHere();
  const next = names[(names.indexOf(current().policy) + step + names.length) % names.length];
  selectPlay(nearest({ ...current(), policy: next }));
}

const KEYS = {
  ArrowLeft: () => stepPolicy(-1),
  ArrowRight: () => stepPolicy(1),
  "[": () => stepPlay(-1),
  "]": () => stepPlay(1),
  ",": () => stepDecision(-1),
  ".": () => stepDecision(1),
  c: stepVersus,
  " ": toggleSweep,
  Escape: () => update({ ...nowhere, pinned: false, zoom: null }),
};

function start() {
  drawFacts();
  drawPolicies();
  drawGloss();
  drawApart();
  drawFamilies();
  drawLegend();
  if (!DATA.plays.length) return;
  byId("play-section").hidden = false;
  Object.assign(state, readAddress());
  drawPlay();
  addEventListener("hashchange", () => update(readAddress()));
  // A link to a play may stand far above it.
  addEventListener("click", (event) => {
    if (event.target.closest && event.target.closest('a[href^="#play="]')) byId("play-section").scrollIntoView();
  });
  addEventListener("keydown", (event) => {
    const typing = event.target.closest && event.target.closest("input, select, textarea");
    if (event.key === " " && event.target.closest && event.target.closest("button, a, summary")) return;
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  let width = innerWidth;
  new ResizeObserver(() => {
    if (byId("timeline").clientWidth !== chart.area.width || innerWidth !== width) {
      width = innerWidth;
      drawTimeline();
    }
  }).observe(byId("timeline"));
}

start();
