// The chosen play over time, in panels above one time axis: throughput, requests by group, decoder, engine, loss, slack.

const MARGIN = { left: 76, right: 14, top: 30, bottom: 22 };
const NARROW = 520;
let chart = null;
/** Whether the chart is so narrow that the keys of a panel go below its title. */
let stacked = false;

/** What the charts need again and again, worked out once a play. */
function layout(play, width) {
  stacked = width < NARROW;
  const other = rival();
  MARGIN.left = stacked ? 68 : 76;
  MARGIN.top = other ? 43 : 30;
  const [from, to] = state.zoom || [0, Math.max(play.until, other ? other.until : 0)];
  const inner = Math.max(80, width - MARGIN.left - MARGIN.right);
  const x = (t) => MARGIN.left + ((t - from) / (to - from)) * inner;
  const time = (px) => from + ((px - MARGIN.left) / inner) * (to - from);
  const panels = {};
  let top = MARGIN.top;
  const add = (name, height, gap) => {
    top += gap + (stacked && gap >= 20 ? 15 : 0);
    panels[name] = { top, height, bottom: top + height };
    top += height;
  };
  add("rate", 150, 20);
  add("requests", clamp(play.groups_total * 4, 96, 280), 30);
  add("decoder", 12, 8);
  if (play.computed.length) add("engine", 12, 6);
  if (play.published.length) add("prefill", 12, 6);
  if (other) add("rival", panels.requests.height, 30);
  if (play.losses.length) add("loss", 60, 30);
  add("slack", 88, 30);
  return { play, other, width, from, to, x, time, panels, height: top + MARGIN.bottom, right: MARGIN.left + inner };
}

function drawTimeline() {
  const host = byId("timeline");
  const play = current();
  const area = layout(play, host.clientWidth || 900);
  const against = area.other ? `, compared with ${area.other.policy}` : "";
  const label = `Timeline of ${playTitle(play)}${against}: throughput, requests, decoder, engine, loss and slack over ${seconds(play.until)}`;
  const root = svg("svg", { class: "timeline", width: area.width, height: area.height, role: "img", "aria-label": label });
  root.append(svg("clipPath", { id: "plot" },
    svg("rect", { x: MARGIN.left, y: 0, width: area.right - MARGIN.left, height: area.height })));
  const inPlot = svg("g", { "clip-path": "url(#plot)" });
  root.append(grid(area), inPlot);
  inPlot.append(ratePanel(area, root), requestPanel(area, root), decoderPanel(area, root), slackPanel(area, root));
  if (area.other) inPlot.append(requestPanel(area, root, area.other, area.panels.rival));
  if (area.panels.loss) inPlot.append(lossPanel(area, root));
  if (area.panels.engine) inPlot.append(enginePanel(area, root));
  if (area.panels.prefill) inPlot.append(prefillPanel(area, root));
  // Titles stay readable where the lines of milestones cross them.
  root.append(milestones(area), ...root.querySelectorAll(".heading"));
  const cursor = svg("g", { class: "cursor", visibility: "hidden" },
    svg("line", { y1: MARGIN.top - 6, y2: area.height - MARGIN.bottom }), svg("text", { y: MARGIN.top - 9 }));
  const halo = svg("rect", { class: "halo", visibility: "hidden" });
  const brush = svg("rect", { class: "brush", visibility: "hidden", y: MARGIN.top, height: area.height - MARGIN.top - MARGIN.bottom });
  root.append(halo, cursor, brush);
  host.replaceChildren(root);
  chart = { area, root, cursor, halo, brush };
  listen();
  moveCursor();
}

// ---------------------------------------------------------------- frame

function grid(area) {
  const marks = ticks(area.from, area.to, Math.max(3, Math.min(10, area.width / 110)));
  const bottom = area.height - MARGIN.bottom;
  return svg("g", { class: "grid" },
    marks.map((t) => [
      svg("line", { x1: area.x(t), x2: area.x(t), y1: MARGIN.top + 18, y2: bottom }),
      svg("text", { x: area.x(t), y: bottom + 15, "text-anchor": "middle" }, `${Number(t.toPrecision(6))} s`),
    ]),
    Object.values(area.panels).map((panel) => svg("line", { class: "base", x1: MARGIN.left, x2: area.right, y1: panel.bottom, y2: panel.bottom })));
}

/** A panel's title and the keys of its lines, above it. */
function heading(root, panel, title, keys = []) {
  const below = stacked && keys.length > 0;
  const text = svg("text", { class: "heading", x: MARGIN.left, y: panel.top - (below ? 23 : 8) }, svg("tspan", { class: "name" }, title));
  keys.forEach(([className, glyph, name], i) => {
    const place = below && i === 0 ? { x: MARGIN.left, dy: 15 } : { dx: stacked ? 9 : 14 };
    text.append(svg("tspan", { class: className, ...place }, glyph), svg("tspan", { dx: 4 }, name));
  });
  root.append(text);
}

function sideText(root, y, text) {
  root.append(svg("text", { class: "side", x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, text));
}

function milestones(area) {
  const { play } = area;
  const bottom = area.height - MARGIN.bottom;
  const found = [];
  const flag = (t, className, text, row) => {
    if (!known(t) || t < area.from || t > area.to) return;
    const x = area.x(t);
    const left = x > (MARGIN.left + area.right) / 2;
    found.push(svg("g", { class: className },
      svg("line", { x1: x, x2: x, y1: 14 + row * 13, y2: bottom }),
      svg("text", { x: x + (left ? -5 : 5), y: 12 + row * 13, "text-anchor": left ? "end" : "start" }, text)));
  };
  flag(play.deadline_s, "deadline", `deadline ${seconds(play.deadline_s)}`, 0);
  flag(play.ttft_s, `delivered ${play.met ? "met" : "missed"}`, `${play.met ? "\u2713" : "\u2717"} cache in place ${seconds(play.ttft_s)}`, 1);
  if (area.other) {
    const { policy, ttft_s, met } = area.other;
    flag(ttft_s, "delivered rival", `${met ? "\u2713" : "\u2717"} ${policy} ${seconds(ttft_s)}`, 2);
  }
  return svg("g", {}, found);
}

// ---------------------------------------------------------------- lines

/** A path that holds each value until the next; gaps where there is none. Ends at `end`. */
function steps(area, times, values, y, end) {
  let path = "";
  let open = false;
  for (let i = 0; i < times.length; i += 1) {
    if (!known(values[i])) { open = false; continue; }
    const until = i + 1 < times.length ? times[i + 1] : end;
    if (until < area.from || times[i] > area.to) { open = false; continue; }
    const height = y(values[i]).toFixed(1);
    path += `${open ? "L" : "M"}${area.x(times[i]).toFixed(1)} ${height}H${area.x(until).toFixed(1)}`;
    open = true;
  }
  return path;
}

/** The same as an area down to `base`. */
function filled(area, times, values, y, end, base) {
  const path = steps(area, times, values.map((value) => value ?? 0), y, end);
  if (!path) return "";
  const first = area.x(times.find((t, i) => (i + 1 < times.length ? times[i + 1] : end) >= area.from));
  const last = path.slice(path.lastIndexOf("H") + 1);
  return `${path}L${last} ${base}L${first.toFixed(1)} ${base}Z`;
}

function ratePanel(area, root) {
  const { play, other } = area;
  const panel = area.panels.rate;
  const lastByte = (one) => one.requests.reduce((most, row) => Math.max(most, row[COL.requests.end]), 0);
  const end = lastByte(play);
  const longest = other && other.until > play.until ? other : play;
  const seen = (times, values) => values.filter((value, i) => known(value) && times[i] >= area.from && times[i] <= area.to);
  const rates = [play, other].filter(Boolean).flatMap((one) => seen(one.achieved.t, one.achieved.rate));
  const top = 1.08 * Math.max(1, ...seen(longest.link.t, longest.link.mean), ...rates);
  const y = (value) => panel.bottom - Math.min(1.1, value / top) * panel.height;
  heading(root, panel, "Throughput", [
    ["key-link", "\u25a0", "link"], ["key-achieved", "\u2501", "achieved"],
    ["key-estimate", "\u2501", "estimate"], ["key-estimate", "\u2505", "lower bound"],
    ...(other && !stacked ? [["key-rival", "\u2501", other.policy]] : []),
  ]);
  const found = [];
  for (const value of ticks(0, top * 8, 4)) {
    if (value / 8 > top) continue;
    found.push(svg("line", { class: "rule", x1: MARGIN.left, x2: area.right, y1: y(value / 8), y2: y(value / 8) }));
    sideText(root, y(value / 8), value === 0 ? "0" : trimmed(rate(value / 8)));
  }
  const { t, mean, low } = longest.link;
  found.push(svg("path", { class: "link", d: filled(area, t, mean, y, longest.until, panel.bottom) }));
  if (low) found.push(svg("path", { class: "link low", d: filled(area, t, low, y, longest.until, panel.bottom) }));
  const achieved = (one, last) => steps(area, one.achieved.t.filter((at) => at <= last), one.achieved.rate, y, last);
  if (other) found.push(svg("path", { class: "rival-line", d: achieved(other, lastByte(other)) }));
  found.push(
    svg("path", { class: "achieved", d: achieved(play, end) }),
    svg("path", { class: "estimate", d: steps(area, play.belief.t, play.belief.rate, y, end) }),
    svg("path", { class: "lower", d: steps(area, play.belief.t, play.belief.lower, y, end) }));
  return svg("g", {}, found);
}

function slackPanel(area, root) {
  const { play, other } = area;
  const panel = area.panels.slack;
  const values = [play, other].filter(Boolean).flatMap((one) => one.belief.slack.filter(known));
  // A slack of many deadlines, either way, says no more than one deadline does.
  const limit = Math.max(play.deadline_s, 1e-6);
  const high = clamp(Math.max(0, ...values), limit * 0.1, limit);
  const low = clamp(Math.min(0, ...values), -limit, -limit * 0.1);
  const y = (value) => panel.top + ((high - clamp(value, low, high)) / (high - low)) * panel.height;
  heading(root, panel, "Slack", [["", "", stacked ? "time left less time needed" : "time to the deadline less the time that the rest needs"],
    ...(other ? [["key-rival", "\u2501", other.policy]] : [])]);
  const found = ticks(low, high, 4).map((value) => {
    sideText(root, y(value), trimmed(seconds(value)));
    return svg("line", { class: value === 0 ? "zero" : "rule", x1: MARGIN.left, x2: area.right, y1: y(value), y2: y(value) });
  });
  const { t, slack } = play.belief;
  const endOf = (one) => (known(one.ttft_s) ? Math.max(one.ttft_s, one.belief.t.at(-1) ?? 0) : one.until);
  const end = endOf(play);
  const part = (keep) => slack.map((value) => (known(value) && keep(value) ? value : 0));
  found.push(
    svg("path", { class: "ahead", d: filled(area, t, part((v) => v > 0), y, end, y(0)) }),
    svg("path", { class: "behind", d: filled(area, t, part((v) => v < 0), y, end, y(0)) }),
    svg("path", { class: "slack", d: steps(area, t, slack, y, end) }));
  if (other) found.push(svg("path", { class: "rival-line", d: steps(area, other.belief.t, other.belief.slack, y, endOf(other)) }));
  return svg("g", {}, found);
}

// ---------------------------------------------------------------- requests, decoder, engine

/** Vertical place of a group in the panel of requests: [top, height]. */
function rowOf(area, group, count = 1, panel = area.panels.requests) {
  const step = panel.height / area.play.groups_total;
  const height = Math.max(1.5, step * count - (step > 3 ? 0.8 : 0));
  return [panel.top + group * step, height];
}

function requestPanel(area, root, play = area.play, panel = area.panels.requests) {
  const kinds = new Set(play.requests.map((row) => row[COL.requests.outcome]));
  heading(root, panel, area.other ? `Requests by group: ${play.policy}` : "Requests by group", [
    ["key-wait", "\u25a0", "waiting for the first byte"],
    ...(kinds.has("cancelled") || kinds.has("failed") ? [["key-cancel", "\u25a8", "cancelled or failed"]] : []),
    ...(play.computed.length ? [["key-engine", "\u25a0", "recomputed"]] : []),
    ...(play.published.length ? [["key-edge", "\u2501", "live edge"]] : []),
  ]);
  for (const group of ticks(0, play.groups_total - 1, 4)) sideText(root, rowOf(area, group, 1, panel)[0] + 2, group === 0 ? "group 0" : String(group));
  const found = play.computed.map(([start, end, first, last]) => {
    const [top, height] = rowOf(area, first, last - first, panel);
    const box = { x: area.x(start), width: Math.max(1, area.x(end) - area.x(start)), y: top, height };
    return [svg("rect", { ...box, class: "engine" }), svg("rect", { ...box, class: "overlay weaved" })];
  });
  for (const row of play.requests) {
    const [start, first, end] = [row[COL.requests.sent], row[COL.requests.first_byte], row[COL.requests.end]];
    if (end < area.from || start > area.to) continue;
    const [top, height] = rowOf(area, row[COL.requests.group], 1, panel);
    const ended = row[COL.requests.outcome];
    const flow = known(first) ? first : end;
    const box = (from, to) => ({ x: area.x(from).toFixed(2), y: top, width: Math.max(0.8, area.x(to) - area.x(from)).toFixed(2), height });
    const fillStyle = `fill:${trackColour(row[COL.requests.track])}`;
    found.push(svg("rect", { ...box(start, flow), class: "wait", style: fillStyle }));
    if (known(first)) found.push(svg("rect", { ...box(first, end), class: `flow ${ended}`, style: fillStyle }));
    if (ended === "cancelled" || ended === "failed") {
      found.push(svg("rect", { ...box(start, end), class: `overlay hatched ${ended}${known(first) ? "" : " unheard"}` }));
    }
  }
  return svg("g", { class: "requests" }, found, liveEdge(area, play, panel), stopMark(area, play, panel));
}

/** How many groups existed when, as the player learned it: what lies below the line was not prefilled yet. */
function liveEdge(area, play, panel) {
  if (!play.published.length) return null;
  const y = (edge) => panel.top + (edge / play.groups_total) * panel.height;
  const steps = play.published.map((row) => `H${area.x(row[COL.published.t]).toFixed(1)}V${y(row[COL.published.edge]).toFixed(1)}`);
  return svg("path", { class: "edge", d: `M${area.x(0).toFixed(1)} ${panel.top}${steps.join("")}` });
}

/** Half the width of the sign at which a play was stopped, and of where it can be clicked. */
const STOP_SIGN = 4.5;
const STOP_REACH = 7;

/** Where the policy ended its play although better tracks were left, and the time until the deadline that it left unused. */
function stopMark(area, play, panel) {
  const { stopped } = play;
  if (!stopped || stopped.t > area.to || play.deadline_s < area.from) return null;
  const x = area.x(stopped.t);
  const end = Math.min(area.x(play.deadline_s), area.right);
  const top = panel.top + 4 + STOP_SIGN;
  const left = seconds(play.deadline_s - stopped.t);
  const texts = [`stopped ${left} before the deadline`, `stopped ${left} early`, "stopped"];
  const places = [...texts.map((text) => [text, area.right - x, true]), ...texts.map((text) => [text, x - MARGIN.left, false])];
  const [text, , after] = places.find(([words, room]) => 6.6 * words.length + 12 < room) ?? ["", 0, true];
  return svg("g", { class: "stop" },
    titled(`Stopped at ${seconds(stopped.t)}: ${stopped.reason}. ${plural(stopped.left, "group")} could have had a better track.`),
    svg("rect", { class: "unused", x, y: panel.top, width: Math.max(0, end - x), height: panel.height }),
    svg("line", { x1: x, x2: x, y1: panel.top, y2: panel.bottom }),
    stopped.t >= area.from && svg("rect", { class: "sign", x: x - STOP_SIGN, y: top - STOP_SIGN, width: 2 * STOP_SIGN, height: 2 * STOP_SIGN }),
    svg("text", { x: after ? x + 10 : x - 10, y: top + 4, "text-anchor": after ? "start" : "end" }, text));
}

/** The decision that ended the play, if a point of the chart is at its mark. */
function stopAt(area, px, py) {
  const { stopped } = area.play;
  const panel = area.panels.requests;
  const at = stopped && Math.abs(area.x(stopped.t) - px) <= STOP_REACH && py >= panel.top && py <= panel.bottom;
  return at ? stopped.decision : null;
}

function decoderPanel(area, root) {
  const panel = area.panels.decoder;
  sideText(root, panel.top + panel.height / 2, "decoded");
  return svg("g", {}, area.play.requests.filter((row) => known(row[COL.requests.decoded])).map((row) => {
    const x = area.x(row[COL.requests.decoded]).toFixed(1);
    return svg("line", { class: "decoded", x1: x, x2: x, y1: panel.top, y2: panel.bottom, style: `stroke:${trackColour(row[COL.requests.track])}` });
  }));
}

function enginePanel(area, root) {
  const panel = area.panels.engine;
  sideText(root, panel.top + panel.height / 2, "engine");
  return svg("g", {}, area.play.computed.map(([start, end, first, last, tokens]) => {
    const box = { x: area.x(start), width: Math.max(1, area.x(end) - area.x(start) - 0.5), y: panel.top, height: panel.height };
    const what = tokens ? `${tokens} tokens of passages, computed again` : `groups ${first} to ${last - 1}`;
    return [svg("rect", { ...box, class: "engine" }), svg("rect", { ...box, class: "overlay weaved" }, titled(what))];
  }));
}

/** What the producer prefilled meanwhile, from one news of it to the next. */
function prefillPanel(area, root) {
  const panel = area.panels.prefill;
  sideText(root, panel.top + panel.height / 2, "prefill");
  let [start, before] = [0, 0];
  return svg("g", {}, area.play.published.map((row) => {
    const [from, [end, edge]] = [start, [row[COL.published.t], row[COL.published.edge]]];
    const text = `${plural(edge - before, "group")} prefilled by ${seconds(end)}`;
    [start, before] = [end, edge];
    const box = { x: area.x(from), width: Math.max(1, area.x(end) - area.x(from) - 0.5), y: panel.top, height: panel.height };
    return svg("rect", { ...box, class: "prefill" }, titled(text));
  }));
}

// ---------------------------------------------------------------- pointer

/** The request under a point of the chart; null if there is none within a few pixels. */
function requestAt(area, px, py) {
  const panel = area.panels.requests;
  if (py < panel.top - 2 || py > panel.bottom + 2) return null;
  const t = area.time(px);
  const reach = (area.to - area.from) * (4 / (area.right - MARGIN.left));
  let best = null;
  let least = 7;
  area.play.requests.forEach((row, i) => {
    if (row[COL.requests.sent] > t + reach || row[COL.requests.end] < t - reach) return;
    const [top, height] = rowOf(area, row[COL.requests.group]);
    const away = Math.max(0, top - py, py - top - height);
    if (away < least) [best, least] = [i, away];
  });
  return best;
}

function underPointer(event) {
  const box = chart.root.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  const t = clamp(chart.area.time(px), chart.area.from, chart.area.to);
  const end = stopAt(chart.area, px, py);
  const at = { px: clamp(px, MARGIN.left, chart.area.right), t, request: null, group: null, decision: end };
  if (end !== null) return { ...at, t: chart.area.play.stopped.t };
  const request = requestAt(chart.area, px, py);
  return { ...at, request, group: request === null ? null : chart.area.play.requests[request][COL.requests.group] };
}

function listen() {
  const { root, brush, area } = chart;
  let grip = null;
  root.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType !== "touch") grip = underPointer(event).px;
  });
  root.addEventListener("pointermove", (event) => {
    const { px, ...at } = underPointer(event);
    if (grip !== null && Math.abs(px - grip) > 5) {
      fill(brush, { visibility: "visible", x: Math.min(px, grip), width: Math.abs(px - grip) }, []);
    }
    look(at);
  });
  root.addEventListener("pointerup", (event) => {
    const { px, ...at } = underPointer(event);
    const from = grip;
    grip = null;
    brush.setAttribute("visibility", "hidden");
    if (from !== null && Math.abs(px - from) > 5) {
      update({ ...nowhere, pinned: false, zoom: [area.time(Math.min(px, from)), area.time(Math.max(px, from))] });
    } else {
      pin(at);
    }
  });
  root.addEventListener("pointerleave", () => {
    grip = null;
    brush.setAttribute("visibility", "hidden");
    look({});
  });
  root.addEventListener("dblclick", () => update({ ...nowhere, pinned: false, zoom: null }));
}

function moveCursor() {
  if (!chart) return;
  const { area, cursor, halo } = chart;
  const t = state.t ?? state.mark;
  const shown = t !== null && t >= area.from && t <= area.to;
  cursor.setAttribute("visibility", shown ? "visible" : "hidden");
  cursor.classList.toggle("pinned", state.pinned);
  if (shown) {
    const x = area.x(t);
    const [line, text] = cursor.children;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    text.textContent = seconds(t);
    const left = x > area.right - 60;
    fill(text, { x: x + (left ? -5 : 5), y: area.panels.rate.top + 10, "text-anchor": left ? "end" : "start" }, []);
  }
  const row = state.request === null ? null : area.play.requests[state.request];
  halo.setAttribute("visibility", row ? "visible" : "hidden");
  if (row) {
    const [top, height] = rowOf(area, row[COL.requests.group]);
    const from = Math.max(area.x(row[COL.requests.sent]), MARGIN.left);
    fill(halo, { x: from - 1.5, y: top - 1.5, width: Math.max(3, Math.min(area.right, area.x(row[COL.requests.end])) - from + 3), height: height + 3 }, []);
  }
}
