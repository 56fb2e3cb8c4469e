// The calculator of guides/is-it-for-me.md: reads load-or-compute.json, which the simulator wrote, and interpolates.
document.addEventListener("DOMContentLoaded", async () => {
  const form = document.getElementById("calculator");
  if (!form) return;
  const points = await (await fetch(form.dataset.points)).json();
  const LENGTHS = { "8k": 8192, "32k": 32768, "128k": 131072 };
  const cost = (engine, tokens) => {
    const [constant, linear, quadratic, , floor] = engine;
    return Math.max(floor, constant + linear * tokens + quadratic * tokens * tokens);
  };
  // Between two points of a scale, the logarithm of a value is linear in that of the scale.
  const between = (x, [x0, y0], [x1, y1]) => {
    if (x0 === x1) return y0;
    const at = (Math.log(x) - Math.log(x0)) / (Math.log(x1) - Math.log(x0));
    return Math.exp(Math.log(y0) + at * (Math.log(y1) - Math.log(y0)));
  };
  const around = (x, scale) => {
    const above = Math.max(1, scale.findIndex((each) => each >= x));
    return [scale[above - 1], scale[above]];
  };
  // Times of kvabr are multiples of computing all: where it computes, it takes exactly as long.
  const value = (model, way, field, tokens, mbit, per = () => 1) => {
    const known = points.filter((point) => point.shape.startsWith(`${model}, `) && point.way === way);
    const rates = [...new Set(known.map((point) => point.mbit))].sort((one, other) => one - other);
    const names = Object.keys(LENGTHS);
    const length = (name) => around(mbit, rates).map((rate) => {
      const point = known.find((each) => each.mbit === rate && each.shape === `${model}, ${name} tokens`);
      return [rate, Math.max(point[field] / per(LENGTHS[name]), 1e-9)];
    });
    const [low, high] = around(tokens, Object.values(LENGTHS));
    const ends = names.filter((name) => [low, high].includes(LENGTHS[name]))
      .map((name) => [LENGTHS[name], between(mbit, ...length(name))]);
    return per(tokens) * between(tokens, ...ends);
  };
  const seconds = (number) => `${number.toPrecision(3)} s`;
  const show = () => {
    const { model, tokens, mbit } = Object.fromEntries(new FormData(form));
    const engine = JSON.parse(form.dataset.engines)[model];
    const [length, rate] = [Number(tokens), Number(mbit)];
    const out = form.querySelector("output");
    if (!(length >= 8192 && length <= 131072 && rate >= 100 && rate <= 100000)) {
      out.textContent = "Give 8,192 to 131,072 tokens, and 100 to 100,000 Mbit/s.";
      return;
    }
    const cold = cost(engine, length);
    const ways = { "kvabr, beside the engine": "kvabr", "kvabr, in front of it (vLLM)": "kvabr, prefix",
      "fixed track Int8": "Int8", "fixed track FP16": "FP16" };
    const rows = Object.entries(ways).map(([title, way]) => {
      const per = way.startsWith("kvabr") ? (tokens) => cost(engine, tokens) : undefined;
      const [ttft, loss] = [value(model, way, "ttft_s", length, rate, per), value(model, way, "kl", length, rate)];
      const won = Math.abs(cold - ttft) < 1e-3 * cold ? "0" : seconds(cold - ttft);
      return `<tr><td>${title}</td><td>${seconds(ttft)}</td><td>${won}</td><td>${loss < 2e-9 ? 0 : loss.toExponential(1)}</td></tr>`;
    });
    out.innerHTML = `<table><tr><th></th><th>first token</th><th>won</th><th>expected loss, nats a token</th></tr>
      <tr><td>computing all</td><td>${seconds(cold)}</td><td></td><td>0</td></tr>${rows.join("")}</table>`;
  };
  form.addEventListener("input", show);
  show();
});
