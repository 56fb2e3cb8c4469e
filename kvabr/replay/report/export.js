// The timeline as a picture: an SVG that stands alone, in the colours on the screen, or a PNG of it.

const PAINTED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin",
  "opacity", "paint-order", "font-size", "font-weight", "font-family"];
const EDGE = { side: 12, top: 34, legend: 24 };
const PNG_SCALE = 2;

/** Write an element's computed style into its copy, and the same for all that is inside; what is inherited is left out. */
function paintCopy(from, to, above = null) {
  const style = getComputedStyle(from);
  const values = PAINTED.map((name) => style.getPropertyValue(name).replaceAll('"', "'"));
  PAINTED.forEach((name, i) => {
    if (values[i] && (name === "opacity" ? values[i] !== "1" : !above || values[i] !== above[i])) to.setAttribute(name, values[i]);
  });
  to.removeAttribute("class");
  to.removeAttribute("style");
  for (let i = 0; i < from.children.length; i += 1) paintCopy(from.children[i], to.children[i], values);
}

/** A copy of an element that needs no style sheet. */
function painted(node) {
  const copy = node.cloneNode(true);
  paintCopy(node, copy);
  return copy;
}

/** The tracks that the shown plays used, as colours with names. */
function pictureLegend(tracks, y, ink) {
  let x = EDGE.side;
  return svg("g", {}, tracks.map((track) => {
    const colour = getComputedStyle(document.documentElement).getPropertyValue(track === RECOMPUTED ? "--tr" : `--t${track}`).trim();
    const item = [svg("rect", { x, y, width: 11, height: 11, rx: 2, fill: colour }), svg("text", { x: x + 16, y: y + 10, fill: ink }, trackName(track))];
    x += 34 + trackName(track).length * 7.2;
    return item;
  }));
}

/** The timeline as shown, without cursor and marks of the pointer: an SVG element with its size. */
function picture() {
  const { area, root } = chart;
  const ground = getComputedStyle(document.documentElement).getPropertyValue("--ground").trim();
  const ink = getComputedStyle(document.body).color;
  const body = painted(root);
  body.querySelectorAll("[visibility]").forEach((node) => node.remove());
  const plays = [area.play, area.other].filter(Boolean);
  const used = new Set(plays.flatMap((play) => [...play.requests.map((row) => row[COL.requests.track]), ...play.computed.map(() => RECOMPUTED)]));
  const tracks = [...DATA.tracks.keys(), RECOMPUTED].filter((track) => used.has(track));
  const [width, height] = [area.width + 2 * EDGE.side, area.height + EDGE.top + EDGE.legend + 8];
  body.setAttribute("x", EDGE.side);
  body.setAttribute("y", EDGE.top);
  const title = playTitle(area.play) + (area.other ? `, compared with ${area.other.policy}` : "");
  const whole = svg("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "system-ui, sans-serif", "font-size": 12 },
    titled(title), painted(document.querySelector(".defs defs")),
    svg("rect", { width, height, fill: ground }),
    svg("text", { x: EDGE.side, y: 22, fill: ink, "font-size": 15, "font-weight": 650 }, title),
    body, pictureLegend(tracks, area.height + EDGE.top + 8, ink));
  return { width, height, text: new XMLSerializer().serializeToString(whole) };
}

function save(blob, ending) {
  const name = playTitle(current()).replace(/[^A-Za-z0-9.]+/g, "-").replace(/^-|-$/g, "").slice(0, 80);
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: `kvabr-${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function saveSvg() {
  save(new Blob([picture().text], { type: "image/svg+xml" }), "svg");
}

function savePng() {
  const { width, height, text } = picture();
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  const image = new Image();
  image.onload = () => {
    const canvas = el("canvas", { width: width * PNG_SCALE, height: height * PNG_SCALE });
    const context = canvas.getContext("2d");
    context.scale(PNG_SCALE, PNG_SCALE);
    context.drawImage(image, 0, 0, width, height);
    URL.revokeObjectURL(address);
    canvas.toBlob((blob) => save(blob, "png"), "image/png");
  };
  image.setAttribute("src", address);
}

const exportButtons = () => el("span", { class: "export" },
  el("button", { onclick: saveSvg, title: "Save the timeline as shown as an SVG picture" }, "SVG"),
  el("button", { onclick: savePng, title: "Save the timeline as shown as a PNG picture" }, "PNG"));
