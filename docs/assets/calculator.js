// The calculator of guides/is-it-for-me.md: reads calculator.json, which the simulator wrote, and interpolates.
// tools/bench-calculator writes the points, and checks what `estimate` says.

// What a call of the engine takes for a whole prompt, seconds: see kvabr.types.cost.PrefillCost.
const computing = ([constant, linear, quadratic, , floor], tokens) =>
  Math.max(floor, constant + linear * tokens + quadratic * tokens * tokens);

// The two points of a scale around a number, and how far it is from the first to the second, by logarithms.
const around = (number, scale) => {
  if (scale.length === 1) return [[0, 1]];
  const above = Math.min(scale.length - 1, Math.max(1, scale.findIndex((each) => each >= number)));
  const share = Math.log(number / scale[above - 1]) / Math.log(scale[above] / scale[above - 1]);
  return [[above - 1, 1 - share], [above, share]];
};

// The logarithm of a value is linear in those of what it depends on. `scales` has a number and its scale for each axis.
const between = (values, scales) => {
  let corners = [[0, 1]];
  for (const [number, scale] of scales) {
    const ends = around(number, scale);
    corners = corners.flatMap(([at, share]) => ends.map(([index, part]) => [at * scale.length + index, share * part]));
  }
  return Math.exp(corners.reduce((sum, [at, share]) => sum + share * Math.log(values(at)), 0));
};

const outside = (number, scale) => !(number >= scale[0] && number <= scale[scale.length - 1]);
const range = (scale) => `${scale[0].toLocaleString("en")} to ${scale[scale.length - 1].toLocaleString("en")}`;

// Seconds and losses of each way: {cold, ways: [{way, title, seconds, loss}]}, or {problem}.
// `speed` and `kilobytes` (tokens a second, FP16 bytes of a token) are of the reader's own engine and model.
const estimate = (entries, { name, tokens, mbit, speed, kilobytes }) => {
  const entry = entries.find((each) => each.name === name);
  const own = entry.cost === null;
  const cost = own ? [0, 1 / speed, 0, 0, 0] : entry.cost;
  if (own && kilobytes !== undefined && !(kilobytes > 0)) return { problem: "Give the kilobytes of a token, more than 0." };
  // A model with twice the bytes a token is as one with half the rate.
  const rate = own && kilobytes ? mbit * entry.kilobytes / kilobytes : mbit;
  if (outside(tokens, entry.tokens)) return { problem: `Give ${range(entry.tokens)} tokens.` };
  if (outside(rate, entry.mbit)) {
    return { problem: `Give ${range(entry.mbit.map((each) => Math.round(each * mbit / rate)))} Mbit/s.` };
  }
  if (own && outside(speed, entry.speeds)) return { problem: `Give ${range(entry.speeds)} tokens a second.` };
  const cold = computing(cost, tokens);
  const ways = entry.ways.map(({ way, title, computes, seconds, loss }) => {
    const scales = [[tokens, entry.tokens], [rate, entry.mbit]];
    if (computes) scales.unshift([speed, entry.speeds]);
    // Times of ways that may compute are multiples of computing all: where they compute, they take exactly as long.
    const size = entry.tokens.length * entry.mbit.length;
    const whole = (at) => computing(own ? [0, 1 / entry.speeds[Math.floor(at / size)], 0, 0, 0] : cost,
      entry.tokens[Math.floor(at % size / entry.mbit.length)]);
    const value = computes
      ? cold * between((at) => seconds[at] / whole(at), scales)
      : between((at) => seconds[at], scales);
    return { way, title, seconds: value, loss: between((at) => loss[at], scales) };
  });
  return { cold, ways };
};

if (typeof module !== "undefined") {
  module.exports = { estimate };
} else {
  document.addEventListener("DOMContentLoaded", async () => {
    const form = document.getElementById("calculator");
    if (!form) return;
    const entries = await (await fetch(form.dataset.points)).json();
    const select = form.elements.name;
    select.append(...entries.map(({ name }) => new Option(name)));
    const seconds = (number) => `${number.toPrecision(3)} s`;
    const show = () => {
      const { name, ...given } = Object.fromEntries(new FormData(form));
      const numbers = Object.fromEntries(Object.entries(given).map(([key, value]) => [key, Number(value)]));
      const own = entries.find((each) => each.name === name).cost === null;
      form.querySelectorAll(".own").forEach((label) => { label.hidden = !own; });
      const { problem, cold, ways } = estimate(entries, { name, ...numbers });
      const out = form.querySelector("output");
      if (problem) {
        out.textContent = problem;
        return;
      }
      const rows = ways.map(({ title, seconds: ttft, loss }) => {
        const won = Math.abs(cold - ttft) < 1e-3 * cold ? "0" : seconds(cold - ttft);
        return `<tr><td>${title}</td><td>${seconds(ttft)}</td><td>${won}</td><td>${loss < 2e-9 ? 0 : loss.toExponential(1)}</td></tr>`;
      });
      out.innerHTML = `<table><tr><th></th><th>first token</th><th>won</th><th>expected loss, nats a token</th></tr>
        <tr><td>computing all</td><td>${seconds(cold)}</td><td></td><td>0</td></tr>${rows.join("")}</table>`;
    };
    // Another engine starts in the middle of its range.
    const choose = () => {
      const entry = entries.find((each) => each.name === select.value);
      const middle = (scale) => scale[Math.floor(scale.length / 2)];
      for (const key of ["tokens", "mbit"]) form.elements[key].value = middle(entry[key]);
      form.elements.speed.value = middle(entry.speeds);
      form.elements.kilobytes.value = entry.kilobytes;
      show();
    };
    select.addEventListener("change", choose);
    form.addEventListener("input", show);
    choose();
  });
}
