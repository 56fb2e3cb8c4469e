// What stands above the plays: the facts, how the policies did, regret by trace family, the legend of tracks.

/** Whether any play computed a token; without an engine neither its mode nor a column of zeros says anything. */
const RECOMPUTES = DATA.policies.some((policy) => policy.tokens_recomputed_mean > 0);

function drawFacts() {
  const facts = DATA.facts;
  const rows = [
    ["asset", DATA.asset],
    ["cache", known(facts.groups) && `${plural(facts.groups, "group")}, ${bytes(facts.fp16_bytes)} at FP16`],
    ["deadline", facts.deadlines.length && facts.deadlines.map(seconds).join(", ")],
    ["plays", `${plural(facts.plays, "play")} of ${plural(facts.traces, "trace")}, ${plural(facts.runs, "run")}`],
    ["set apart", facts.apart && `${plural(facts.apart, "play")} that no schedule could bring in on time`],
    ["engine", facts.engine_mode && RECOMPUTES && `${facts.engine_mode} mode`],
  ];
  byId("facts").append(
    ...rows.filter(([, text]) => text).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))),
  );
}

function drawLegend() {
  const tracks = [...DATA.tracks.keys(), RECOMPUTED];
  const fp16 = DATA.facts.fp16_bytes;
  byId("legend").append(...tracks.map((track) => el("span", { class: "legend-item" }, trackLabel(track),
    known(DATA.track_bytes[track]) && el("small", {},
      ` ${fp16 ? percent(DATA.track_bytes[track] / fp16) : bytes(DATA.track_bytes[track])}, loss ${nats(DATA.track_loss[track])}`))));
}

/** The share of plays that met the deadline, and its confidence interval, on a line from 0 to 100 %. */
function hitGlyph(policy) {
  const width = 84;
  const x = (share) => 4 + share * (width - 8);
  const [low, high] = policy.ci;
  const text = `${percent(policy.hit_ratio)} of plays met the deadline` +
    (known(low) ? `, 95 % confidence ${percent(low)} to ${percent(high)}` : "");
  return svg("svg", { width, height: 14, class: "glyph hit", role: "img", "aria-label": text },
    titled(text),
    svg("line", { x1: x(0), x2: x(1), y1: 7, y2: 7, class: "rail" }),
    known(low) && svg("line", { x1: x(low), x2: x(high), y1: 7, y2: 7, class: "interval" }),
    known(policy.hit_ratio) && svg("circle", { cx: x(policy.hit_ratio), cy: 7, r: 3.5, class: "dot" }));
}

/** How TTFT is spread, from 0 to 1.5 deadlines, what is late in another colour. */
function ttftGlyph(policy) {
  const [width, height] = [132, 26];
  const bins = policy.ttft;
  const most = Math.max(1, ...bins);
  const step = width / bins.length;
  const text = `TTFT: median ${seconds(policy.ttft_p50_s)}, 95th percentile ${seconds(policy.ttft_p95_s)}; ` +
    "the line is the deadline, the last bar is all that came later than 1.4 deadlines";
  const deadline = (width * 2) / 3;
  return svg("svg", { width, height, class: "glyph", role: "img", "aria-label": text },
    titled(text),
    svg("line", { x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5, class: "rail" }),
    bins.map((count, i) => count > 0 && svg("rect", {
      x: i * step + 0.5,
      width: step - 1,
      y: height - 1 - Math.max(2, (count / most) * (height - 3)),
      height: Math.max(2, (count / most) * (height - 3)),
      class: i * step >= deadline - 0.01 ? "late" : "bar",
    })),
    svg("line", { x1: deadline, x2: deadline, y1: 0, y2: height, class: "deadline" }));
}

function shareGlyph(policy) {
  const total = policy.share.reduce((sum, part) => sum + (part || 0), 0) || 1;
  const parts = policy.share.map((part, i) => [i < DATA.tracks.length ? i : RECOMPUTED, (part || 0) / total]);
  const shown = parts.filter(([, part]) => part > 0);
  const text = shown.map(([track, part]) => `${trackName(track)} ${percent(part)}`).join(", ");
  return el("div", { class: "share", role: "img", "aria-label": text, title: text },
    shown.map(([track, part]) => el("span", {
      class: track === RECOMPUTED ? "weaved" : "",
      style: `width:${part * 100}%;background-color:${trackColour(track)}`,
    })));
}

/** Choose the play of this policy that is nearest to the one shown: same trace and start if there is one. */
function choosePolicy(name) {
  const here = current();
  const fit = (play) => (play.trace === here.trace ? 2 : 0) + (play.start_s === here.start_s ? 1 : 0);
  const plays = [...DATA.plays.keys()].filter((i) => DATA.plays[i].policy === name);
  if (plays.length) selectPlay(plays.reduce((best, i) => (fit(DATA.plays[i]) > fit(DATA.plays[best]) ? i : best)));
}

const GLOSS = {
  "mean loss, nats per token": "Expected KL divergence between the next-token distributions of this cache and of the exact one: " +
    "the mean over the first 8 tokens, 32 and all that were measured. A nat is 1.44 bits.",
  "mean regret": "Loss + price of time x TTFT + price of engine time + penalties for being late, minus the least that a clairvoyant player, " +
    "who knows the whole trace, could reach. 0 is perfect.",
  "TTFT, median": "Time to first token: when the cache was complete. Plays that were given up count as never.",
  "wasted": "Share of the fetched bytes that were not used: abandoned, failed or replaced transfers.",
};

/** A word with its meaning in a tooltip, if it has one. */
const glossed = (word) => (GLOSS[word] ? el("abbr", { title: GLOSS[word] }, word) : word);

function drawGloss() {
  byId("gloss").append("Loss: how far the next-token distribution is from that of the exact cache, in nats per token " +
    "(KL divergence; 1 nat is 1.44 bits), the mean of all plays; TTFT is their median. Regret: loss, time, engine time and " +
    "penalties for being late, each at its price, beyond the least " +
    "that a player who knows the future could reach.");
}

function drawPolicies() {
  const numbers = ["mean loss, nats per token", "mean regret", ...(RECOMPUTES ? ["recomputed"] : []), "wasted"];
  const heads = ["policy", "deadline met", "TTFT, median", ...numbers, "tracks of all groups"];
  // A policy that knows the future is no rival.
  const best = DATA.policies.findIndex((policy) => !policy.name.endsWith("oracle"));
  const played = new Set(DATA.plays.map((play) => play.policy));
  const rows = DATA.policies.map((policy, rank) => el("tr", { class: rank === best ? "best" : "" },
    el("th", { scope: "row" }, played.has(policy.name)
      ? el("button", { class: "link", onclick: () => choosePolicy(policy.name), "data-policy": policy.name }, policy.name)
      : policy.name),
    el("td", { "data-label": "deadline met" }, el("div", { class: "pair" }, hitGlyph(policy),
      el("span", {}, percent(policy.hit_ratio), el("small", {}, ` of ${whole(policy.counted)}`)))),
    el("td", { "data-label": "TTFT" }, el("div", { class: "pair" }, ttftGlyph(policy),
      el("span", {}, seconds(policy.ttft_p50_s), el("small", {}, ` p95 ${seconds(policy.ttft_p95_s)}`)))),
    el("td", { "data-label": "loss", class: "number" }, nats(policy.loss_mean), el("small", {}, ` p95 ${nats(policy.loss_p95)}`)),
    el("td", { "data-label": "mean regret", class: "number strong" }, nats(policy.regret_mean)),
    RECOMPUTES && el("td", { "data-label": "recomputed", class: "number" }, whole(policy.tokens_recomputed_mean), el("small", {}, " tokens")),
    el("td", { "data-label": "wasted", class: "number" }, percent(policy.bytes_wasted_share)),
    el("td", {}, shareGlyph(policy))));
  byId("policies").append(el("table", { class: "policies" },
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col", class: numbers.includes(head) ? "number" : null }, glossed(head))))),
    el("tbody", {}, rows)));
}

/** Plays that nobody could have made are in none of the numbers above; this says how late they were. */
function drawApart() {
  const rows = DATA.policies.filter((policy) => policy.infeasible > 0);
  if (!rows.length) return;
  const number = (text) => el("td", { class: "number" }, text);
  byId("apart").append(el("details", {},
    el("summary", {}, `Infeasible plays: ${whole(DATA.facts.apart)}, in none of the numbers above`),
    el("p", { class: "muted" }, "No schedule could have met the deadline of these plays."),
    el("div", { class: "scroll" }, el("table", { class: "families" },
      el("thead", {}, el("tr", {}, ["policy", "plays", "TTFT p50", "TTFT p95"].map((head, i) => el("th", { scope: "col", class: i ? "number" : null }, head)))),
      el("tbody", {}, rows.map((policy) => el("tr", {}, el("th", { scope: "row" }, policy.name), number(whole(policy.infeasible)),
        number(seconds(policy.infeasible_ttft_p50_s)), number(seconds(policy.infeasible_ttft_p95_s)))))))));
}

function drawFamilies() {
  if (DATA.families.length < 2) return;
  byId("families-section").hidden = false;
  // Regret spans decades, so the shade follows its logarithm, family by family.
  const depth = (value, least, most) => (known(value) ? Math.log((value + 1e-4) / (least + 1e-4)) / Math.log((most + 1e-4) / (least + 1e-4)) : 0);
  const cells = DATA.families.map((family) => {
    const least = Math.min(...family.regret.filter(known));
    const most = Math.max(...family.regret.filter(known), least + 1e-9);
    return family.regret.map((value) => el("td", {
      class: `number${known(value) && value <= least * 1.01 ? " strong" : ""}`,
      style: `--shade:${(depth(value, least, most) * 100).toFixed(0)}%`,
    }, nats(value)));
  });
  byId("families").append(el("table", { class: "families" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "policy"),
      DATA.families.map((family) => el("th", { scope: "col", class: "number" }, family.name, el("small", {}, plural(family.plays, "play")))))),
    el("tbody", {}, DATA.policies.map((policy, i) => el("tr", {}, el("th", { scope: "row" }, policy.name), cells.map((column) => column[i]))))));
}
