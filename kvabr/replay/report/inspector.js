// The moment under the cursor in numbers and words: what the link did, what the player believed, what it decided and why.

function pairs(rows) {
  return el("dl", { class: "pairs" }, rows.filter(([, value]) => known(value)).map(([name, value, className]) =>
    el("div", {}, el("dt", { class: className || null }, name), el("dd", {}, value))));
}

function stepValue(times, values, t) {
  const i = lastAt(times, t);
  return i < 0 ? null : values[i];
}

/** The decision to show: the one asked for, that of the request asked for, or the last one before the moment. */
function decisionOf(play) {
  if (state.decision !== null) return state.decision;
  if (state.request !== null) {
    const id = play.requests[state.request][COL.requests.id];
    const found = play.decisions.findIndex((row) => row[COL.decisions.request] === id);
    return found < 0 ? null : found;
  }
  if (state.t === null) return null;
  const found = lastAt(play.decisions.map((row) => row[COL.decisions.t]), state.t);
  return found < 0 ? null : found;
}

function momentCard(play) {
  const t = state.t ?? state.mark;
  const left = play.deadline_s - t;
  const tracks = tracksAt(play, t);
  const counts = new Map();
  for (const track of tracks) if (track !== undefined) counts.set(track, (counts.get(track) || 0) + 1);
  const order = [...counts.keys()].sort((a, b) => (a === RECOMPUTED) - (b === RECOMPUTED) || a - b);
  const placed = tracks.filter((track) => track !== undefined).length;
  return el("div", { class: "card" },
    el("h4", {}, seconds(t), el("small", {}, left >= 0 ? ` ${seconds(left)} to the deadline` : ` ${seconds(-left)} late`)),
    el("div", { class: "share tall" }, order.map((track) => el("span", {
      class: track === RECOMPUTED ? "weaved" : "",
      style: `width:${(counts.get(track) / play.groups_total) * 100}%;background-color:${trackColour(track)}`,
    }))),
    pairs([
      ["in place", `${placed} of ${play.groups_total} groups`],
      ["link", rate(stepValue(play.link.t, play.link.mean, t)), "key-link"],
      ["achieved", rate(stepValue(play.achieved.t, play.achieved.rate, t)), "key-achieved"],
      ["estimate", rate(stepValue(play.belief.t, play.belief.rate, t)), "key-estimate"],
      ["lower bound", rate(stepValue(play.belief.t, play.belief.lower, t)), "key-lower"],
      ["slack", seconds(stepValue(play.belief.t, play.belief.slack, t))],
    ]));
}

/** What the other policy had at the same moment. */
function rivalCard(other) {
  const t = state.t ?? state.mark;
  const placed = tracksAt(other, t).filter((track) => track !== undefined).length;
  return el("div", { class: "card rival" },
    el("h4", {}, other.policy, el("small", {}, ` at ${seconds(t)}`)),
    pairs([
      ["in place", `${placed} of ${other.groups_total} groups`],
      ["achieved", rate(stepValue(other.achieved.t, other.achieved.rate, t)), "key-rival"],
      ["lower bound", rate(stepValue(other.belief.t, other.belief.lower, t))],
      ["slack", seconds(stepValue(other.belief.t, other.belief.slack, t))],
    ]));
}

function requestCard(play) {
  const row = play.requests[state.request];
  const at = (name) => row[COL.requests[name]];
  const moving = at("end") - (at("first_byte") ?? at("end"));
  const ended = { done: "complete", cancelled: "cancelled", failed: "failed", open: "never finished" }[at("outcome")];
  return el("div", { class: "card" },
    el("h4", {}, trackLabel(at("track")), el("small", {}, ` ${groupName(at("group"))}, request ${at("id")}`)),
    pairs([
      ["size", bytes(at("bytes"))],
      ["sent", seconds(at("sent"))],
      ["first byte", known(at("first_byte")) ? `after ${seconds(at("first_byte") - at("sent"))}` : "never"],
      [ended, seconds(at("end"))],
      ["received", at("outcome") === "done" ? null : bytes(at("received"))],
      ["rate", moving > 0 && at("received") ? rate(at("received") / moving) : null],
      ["in place", known(at("decoded")) ? `${seconds(at("decoded"))}, decoded in ${seconds(at("decoded") - at("end"))}` : null],
    ]),
    at("reason") && el("p", { class: "reason bad" }, at("reason")));
}

/**
 * What a decision passed over, smallest first: the tracks that the policy says it compared, else all that are worth
 * playing. `arrives` is when a mean group of the track would have come, alone on a link at the lower bound.
 */
function rejected(row) {
  const at = (name) => row[COL.decisions[name]];
  const compared = at("alternatives");
  if (!compared && at("kind") !== "fetch" && at("kind") !== "upgrade") return [];
  const groups = DATA.facts.groups || 1;
  // An upgrade does not choose among tracks that lose more.
  const open = (track) => at("kind") !== "upgrade" || DATA.track_loss[track] < DATA.track_loss[at("track")];
  const places = compared ? [...compared.keys()].filter((place) => known(compared[place])) : DATA.worth.filter(open);
  return places.filter((place) => place !== at("track")).map((place) => {
    const track = place === DATA.tracks.length ? RECOMPUTED : place; // recomputing comes after the tracks
    const size = known(DATA.track_bytes[track]) ? DATA.track_bytes[track] / groups : null;
    return {
      track,
      size,
      loss: known(DATA.track_loss[track]) ? DATA.track_loss[track] / groups : null,
      arrives: known(size) && at("lower") > 0 ? at("t") + (at("ttfb") || 0) + size / at("lower") : null,
      compared: compared ? compared[place] : null,
    };
  });
}

/** The cheapest of the rejected tracks that would have lost less than the chosen one; undefined if there is none. */
function nextBetter(row) {
  const chosen = DATA.track_loss[row[COL.decisions.track]];
  const better = (one) => known(one.loss) && known(chosen) && one.loss * (DATA.facts.groups || 1) < chosen;
  return rejected(row).filter(better).sort((a, b) => a.size - b.size)[0];
}

const lateness = (t) => (known(t) && t > current().deadline_s ? "number bad" : "number");

function rejectedTable(row) {
  const found = rejected(row);
  if (!found.length) return null;
  const own = found.some((one) => known(one.compared));
  const compared = (value) => (Math.abs(value) >= 1000 ? bytes(value) : digits(value));
  const heads = ["rejected", ...(own ? ["compared"] : []), "size", "loss", "would arrive"];
  const about = "Size and expected loss of a mean group; when it would have arrived, alone on a link at the lower bound";
  return el("table", { class: "rejected", title: about },
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { scope: "col", class: i ? "number" : null }, head)))),
    el("tbody", {}, found.map((one) => el("tr", {}, el("th", { scope: "row" }, trackLabel(one.track)),
      own && el("td", { class: "number" }, known(one.compared) ? compared(one.compared) : DASH),
      el("td", { class: "number" }, bytes(one.size)), el("td", { class: "number" }, nats(one.loss)),
      el("td", { class: lateness(one.arrives) }, seconds(one.arrives))))));
}

function decisionCard(row) {
  const at = (name) => row[COL.decisions[name]];
  return el("div", { class: "card" },
    el("h4", {}, el("span", { class: `kind ${at("kind")}` }, at("kind")),
      known(at("group")) && ` ${groupName(at("group"))} `, known(at("track")) && trackLabel(at("track")),
      el("small", {}, ` at ${seconds(at("t"))}`)),
    el("p", { class: "reason" }, at("reason") || "no reason given"),
    pairs([
      ["estimate", at("rate") > 0 ? rate(at("rate")) : "not known yet", "key-estimate"],
      ["lower bound", at("lower") > 0 ? rate(at("lower")) : null, "key-lower"],
      ["first byte in", known(at("ttfb")) ? seconds(at("ttfb")) : null],
      ["slack", known(at("slack")) ? seconds(at("slack")) : null],
    ]),
    rejectedTable(row));
}

function groupCard(play) {
  const row = play.groups[state.group];
  if (!row) return null;
  const at = (name) => row[COL.groups[name]];
  return el("div", { class: "card" },
    el("h4", {}, `${groupName(state.group)} `, known(at("track")) ? trackLabel(at("track")) : "not in place"),
    pairs([
      ["came", SOURCE_WORDS[at("source")] || at("source")],
      ["bytes", at("bytes") ? bytes(at("bytes")) : null],
      [at("source") === "recomputed" ? "begun" : "requested", known(at("requested")) ? seconds(at("requested")) : null],
      ["in place", known(at("ready")) ? seconds(at("ready")) : null],
    ]));
}

function helpCard() {
  const keys = [["\u2190 \u2192", "policy"], ["[ ]", "trace and start"], [", .", "decision before, after"], ["c", "compare with another policy"], ["space", "run through the play"], ["Esc", "let go, zoom out"]];
  return el("div", { class: "card help" },
    el("p", {}, "Move over the charts to scrub through the play. Click to pin a moment, drag to zoom, double-click to zoom out."),
    el("dl", { class: "pairs" }, keys.map(([key, what]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)))));
}

function drawInspector() {
  const play = current();
  const cards = [];
  const decision = decisionOf(play);
  if (state.t !== null || state.mark !== null) cards.push(momentCard(play), rival() && rivalCard(rival()));
  if (state.request !== null) cards.push(requestCard(play));
  else if (state.group !== null) cards.push(groupCard(play));
  if (decision !== null) cards.push(decisionCard(play.decisions[decision]));
  if (!cards.length) cards.push(helpCard());
  const host = byId("inspector");
  host.classList.toggle("pinned", state.pinned);
  host.replaceChildren(...cards.filter(Boolean));
}

// ---------------------------------------------------------------- the play in numbers

function drawHead() {
  const play = current();
  const late = known(play.ttft_s) ? play.ttft_s - play.deadline_s : null;
  const verdict = !known(play.ttft_s) ? "given up"
    : late > 0 ? `${seconds(late)} late`
    : late > -5e-4 ? "at the deadline" : `${seconds(-late)} to spare`;
  const measured = play.measured || {};
  const fp16 = DATA.facts.fp16_bytes;
  const tile = (name, value, note) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, note && el("small", {}, note)));
  const other = rival();
  byId("play-head").replaceChildren(
    el("h3", {}, play.policy, el("small", {}, ` on ${play.trace}, from ${seconds(play.start_s)}`),
      !play.feasible && el("span", { class: "badge bad" }, "no schedule could meet this deadline"),
      play.gave_up && el("span", { class: "badge bad" }, `given up: ${play.gave_up}`),
      play.wrapped && el("span", { class: "badge" }, "outlasts its trace, which begins anew")),
    el("dl", { class: "tiles" },
      tile("TTFT", outcome(play), verdict),
      tile("loss", nats(play.loss), known(play.clairvoyant_loss) ? `clairvoyant ${nats(play.clairvoyant_loss)}` : "nats per token"),
      tile("objective", nats(play.objective), known(play.clairvoyant_objective) ? `clairvoyant ${nats(play.clairvoyant_objective)} at ${seconds(play.clairvoyant_ttft_s)}` : "loss, time and lateness"),
      tile("regret", nats(play.regret)),
      known(measured.kl) && tile("measured loss", nats(measured.loss ?? measured.kl), known(measured.predicted) ? `predicted ${nats(measured.predicted)}` : "nats per token"),
      tile("fetched", bytes(play.bytes_fetched), fp16 ? `${percent(play.bytes_fetched / fp16)} of FP16` : null),
      tile("wasted", percent(play.bytes_fetched ? play.bytes_wasted / play.bytes_fetched : 0), bytes(play.bytes_wasted)),
      play.estimator && tile("estimator", play.estimator, known(play.rtt_s) ? `round trip ${seconds(play.rtt_s)}` : null),
      play.tail > 0 && tile("tail", whole(play.tail), "tokens computed behind the cache, in the question's call"),
      play.division && tile("expected", seconds(play.division.at_s + play.division.ends_s), `all played ${seconds(play.division.at_s + play.division.play_s)}, all computed ${seconds(play.division.at_s + play.division.compute_s)}; as of ${seconds(play.division.at_s)}`),
      play.tokens_recomputed > 0 && tile("recomputed", whole(play.tokens_recomputed), known(play.recompute_s) ? `tokens in ${seconds(play.recompute_s)}` : "tokens")),
    other ? el("p", { class: "rival" }, el("b", {}, other.policy), ": TTFT ", outcome(other), `, loss ${nats(other.loss)}, regret ${nats(other.regret)}, ` +
      `fetched ${bytes(other.bytes_fetched)}, wasted ${percent(other.bytes_fetched ? other.bytes_wasted / other.bytes_fetched : 0)}`) : "");
}
