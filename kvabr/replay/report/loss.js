// What the cache in place was expected to lose when: the panel below the requests.

/** On a logarithmic axis, which has no zero: what is less than a thousandth of the most is drawn there. */
function lossPanel(area, root) {
  const t = area.play.losses.map((row) => row[0]);
  const loss = area.play.losses.map((row) => row[1]);
  const panel = area.panels.loss;
  const most = Math.log10(Math.max(...loss, 1e-9));
  const least = Math.max(most - 3, Math.log10(Math.max(Math.min(...loss), 1e-12)));
  const [high, low] = [most + 0.08, Math.min(least, most - 0.5) - 0.08];
  const y = (value) => panel.top + (1 - clamp((Math.log10(Math.max(value, 1e-12)) - low) / (high - low), 0, 1)) * panel.height;
  heading(root, panel, "Expected loss", [["", "", stacked ? "nats per token" : "nats per token, once every group is in place"]]);
  const found = [];
  for (let power = Math.ceil(low); power <= high; power += 1) {
    sideText(root, y(10 ** power), nats(10 ** power));
    found.push(svg("line", { class: "rule", x1: MARGIN.left, x2: area.right, y1: y(10 ** power), y2: y(10 ** power) }));
  }
  const end = known(area.play.ttft_s) ? Math.max(area.play.ttft_s, t.at(-1)) : area.play.until;
  return svg("g", {}, found, svg("path", { class: "loss", d: steps(area, t, loss, y, end) }));
}
