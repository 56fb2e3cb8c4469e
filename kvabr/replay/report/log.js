// The decision log: every decision with its reason, filtered by kind and by words, tied to the charts both ways.

const MAX_ROWS = 600;
const logFilter = { words: "", hidden: new Set(), all: false };
let logRows = new Map();
const HINTS = {
  "next better": "The cheapest rejected track that loses less; the card of the decision lists all rejected tracks",
  "would arrive": "When a mean group of that track would have arrived, alone on a link at the lower bound; red: too late",
  "slack": "Time to the deadline minus the time that the rest needs at the lower bound",
};

function matches(row) {
  if (logFilter.hidden.has(row[COL.decisions.kind])) return false;
  if (!logFilter.words) return true;
  const track = row[COL.decisions.track];
  const group = row[COL.decisions.group];
  const text = `${row[COL.decisions.kind]} ${known(group) ? groupName(group) : ""} ${known(track) ? trackName(track) : ""} ${row[COL.decisions.reason]}`;
  return logFilter.words.split(/\s+/).every((word) => text.toLowerCase().includes(word));
}

function drawFilters() {
  const play = current();
  const counts = new Map();
  for (const row of play.decisions) counts.set(row[COL.decisions.kind], (counts.get(row[COL.decisions.kind]) || 0) + 1);
  const words = el("input", {
    type: "search", placeholder: "filter by words: group, track, reason", "aria-label": "Filter decisions by words", value: logFilter.words || null,
    oninput: (event) => { logFilter.words = event.target.value.trim().toLowerCase(); drawLog(); },
  });
  const chips = [...counts].map(([kind, count]) => el("button", {
    class: `chip ${kind}`, "aria-pressed": String(!logFilter.hidden.has(kind)),
    onclick: (event) => {
      if (!logFilter.hidden.delete(kind)) logFilter.hidden.add(kind);
      event.currentTarget.setAttribute("aria-pressed", String(!logFilter.hidden.has(kind)));
      drawLog();
    },
  }, kind, el("small", {}, ` ${count}`)));
  byId("log-filters").replaceChildren(words, ...chips);
}

function logRow(row, i) {
  const at = (name) => row[COL.decisions[name]];
  const t = at("t");
  const better = nextBetter(row);
  return el("tr", {
    "data-row": i,
    onpointerenter: () => look({ t, decision: i, group: at("group") }),
    onclick: () => pin({ t, decision: i, group: at("group") }),
  },
    el("td", { class: "number" }, t.toFixed(3)),
    el("td", {}, el("span", { class: `kind ${at("kind")}` }, at("kind"))),
    el("td", { class: "number" }, known(at("group")) ? DATA.units[at("group")] || String(at("group")) : ""),
    el("td", {}, known(at("track")) ? trackLabel(at("track")) : ""),
    el("td", { class: "why" }, at("reason")),
    el("td", {}, better && trackLabel(better.track)),
    el("td", { class: lateness(better && better.arrives) }, better ? seconds(better.arrives) : ""),
    el("td", { class: "number" }, at("rate") > 0 ? rate(at("rate")) : DASH),
    el("td", { class: "number" }, at("lower") > 0 ? rate(at("lower")) : DASH),
    el("td", { class: `number${at("slack") < 0 ? " bad" : ""}` }, seconds(at("slack"))));
}

function drawLog() {
  const play = current();
  const found = play.decisions.map((row, i) => [row, i]).filter(([row]) => matches(row));
  const shown = logFilter.all ? found : found.slice(0, MAX_ROWS);
  const rows = shown.map(([row, i]) => logRow(row, i));
  logRows = new Map(rows.map((row, k) => [shown[k][1], row]));
  const heads = [["t, s", "number"], ["decision", ""], ["group", "number"], ["track", ""], ["reason", ""], ["next better", ""], ["would arrive", "number"], ["estimate", "number"], ["lower bound", "number"], ["slack", "number"]];
  byId("log").replaceChildren(
    el("table", { onpointerleave: () => look({}) },
      el("thead", {}, el("tr", {}, heads.map(([head, className]) => el("th", { scope: "col", class: className, title: HINTS[head] }, head)))),
      el("tbody", {}, rows)),
    found.length > shown.length &&
      el("button", { class: "more", onclick: () => { logFilter.all = true; drawLog(); } }, `show all ${whole(found.length)}`) || "");
  const left = play.left_out ? `; ${plural(play.left_out, "repeated wait")} left out` : "";
  byId("log-note").textContent = `${found.length === play.decisions.length ? "" : `${whole(found.length)} of `}${whole(play.decisions.length)}${left}`;
  markLog();
}

/** Mark the row of the decision in view; bring it into view if the pointer is elsewhere. */
function markLog() {
  const decision = decisionOf(current());
  for (const row of byId("log").querySelectorAll("tr.on")) row.classList.remove("on");
  const row = logRows.get(decision);
  if (!row) return;
  row.classList.add("on");
  const host = byId("log");
  if (host.matches(":hover")) return;
  const head = host.querySelector("thead").offsetHeight;
  if (row.offsetTop - head < host.scrollTop || row.offsetTop + row.offsetHeight > host.scrollTop + host.clientHeight) {
    host.scrollTop = row.offsetTop - host.clientHeight / 2;
  }
}
