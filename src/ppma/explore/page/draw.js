// Colours, heatmaps and SVG. Both colour maps are safe for colour-blind readers.

const COLOURS = {
  viridis: "440154481a6c472f7d41448739568c31688e2a788e23888e1f988b22a88435b77954c5687ad151a5db36d2e21bfde725",
  cividis: "00224e002e6c1e3a6f35456c47516c575d6d666970757575848279948e77a59c74b7a96ec8b866dbc75aeed649fee838",
};
for (const [name, text] of Object.entries(COLOURS)) {
  COLOURS[name] = text.match(/.{6}/g).map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
}

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const DECADES = 3; // of a logarithmic scale

/** The colour [r, g, b] of a value in a panel; null for NaN. */
function colour({ map, limits: [low, high], log }, value) {
  if (Number.isNaN(value)) return null;
  const place = log ? 1 + Math.log10(value / high) / DECADES : (value - low) / (high - low || 1);
  const stops = COLOURS[map], at = Math.min(Math.max(place || 0, 0), 1) * (stops.length - 1);
  const n = Math.min(Math.floor(at), stops.length - 2);
  return stops[n].map((part, c) => Math.round(part + (stops[n + 1][c] - part) * (at - n)));
}

/** A number with three significant digits, short. */
function short(value) {
  if (Number.isNaN(value)) return "outside";
  return value !== 0 && value < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(value < 0.1 ? 2 : 3)));
}

/** Make an element with attributes and children. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** What a panel's colour bar says at its ends. */
const ends = ({ limits: [low, high], log }) =>
  log ? [`≤ ${short(high / 10 ** DECADES)}`, `${short(high)}, log`] : [short(low), short(high)];

/** Draw a panel's values (H, W) on a canvas, one pixel per token; NaN is grey. */
function drawMap(canvas, panel, [H, W]) {
  [canvas.width, canvas.height] = [W, H];
  const pixels = new ImageData(W, H);
  panel.values.forEach((value, n) => {
    const grey = document.documentElement.dataset.theme === "dark" ? 58 : 217;
    pixels.data.set([...(colour(panel, value) || [grey, grey, grey]), 255], 4 * n);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

/** Draw an image, darkened where the weights (H, W) are small. */
function drawOverlay(canvas, image, weights, [H, W]) {
  const side = 224, largest = Math.max(...weights) || 1, context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [side, side];
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, side, side);
  weights.forEach((weight, n) => {
    const i = Math.floor(n / W), j = n % W;
    const [top, left, below, right] = [i / H, j / W, (i + 1) / H, (j + 1) / W].map((part) => Math.round(part * side));
    context.fillStyle = `rgba(0, 0, 0, ${shade(weight, largest)})`;
    context.fillRect(left, top, right - left, below - top);
  });
}

/** How dark the overlay is: a square root shows weak attention too. */
const shade = (weight, largest) => (0.88 * (1 - Math.sqrt(weight / largest))).toFixed(3);

const gradient = (map) => `linear-gradient(90deg, ${COLOURS[map].map((c) => `rgb(${c})`).join(", ")})`;

const escapeXml = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

/** Download text as a file. */
function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** The panels as one SVG: vector heatmaps with colour bars, the picture, and the caption below. */
function panelsSvg(panels, picture, [H, W], [i, j], caption) {
  const side = 150, gap = 26, top = 22, columns = 4, rows = Math.ceil((panels.length + 1) / columns);
  const high = side + top + 40, width = columns * (side + gap) - gap + 16, parts = [], bars = new Set();
  const box = `<rect x="${(j * side) / W}" y="${(i * side) / H}" width="${side / W}" height="${side / H}" fill="none" stroke="#d40000" stroke-width="1.5"/>`;
  const place = (n, title, body) => {
    const x = 8 + (n % columns) * (side + gap), y = 8 + Math.floor(n / columns) * high + top;
    parts.push(`<g transform="translate(${x},${y})"><text y="-7" font-weight="600">${escapeXml(title)}</text>${body}</g>`);
  };
  const image = `<image width="${side}" height="${side}" href="${picture}" preserveAspectRatio="none" style="image-rendering:pixelated"/>`;
  const cells = (values, fill) => `<g shape-rendering="crispEdges" transform="scale(${side / W} ${side / H})">${[...values].map((value, n) =>
    `<rect x="${n % W}" y="${Math.floor(n / W)}" width="1" height="1" ${fill(value)}/>`).join("")}</g>`;
  place(0, "image and query", image + box);
  panels.forEach((panel, n) => {
    const { title, values, map } = panel, [low, high] = map ? ends(panel).map(escapeXml) : [];
    if (!map) {
      const largest = Math.max(...values) || 1;
      place(n + 1, title, image + cells(values, (v) => `fill="#000" fill-opacity="${shade(v, largest)}"`) + box);
      return;
    }
    bars.add(map);
    const bar = `<rect y="${side + 7}" width="${side}" height="7" fill="url(#${map})"/><text class="tick" y="${side + 27}">${low}</text><text class="tick" x="${side}" y="${side + 27}" text-anchor="end">${high}</text>`;
    place(n + 1, title, cells(values, (v) => `fill="rgb(${colour(panel, v) || [217, 217, 217]})"`) + box + bar);
  });
  const stops = (map) => COLOURS[map].map((c, n, all) => `<stop offset="${n / (all.length - 1)}" stop-color="rgb(${c})"/>`).join("");
  const lines = caption.match(/.{1,105}(\s|$)/g) || [];
  const height = 8 + rows * high + 14 * lines.length + 8;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="Helvetica, Arial, sans-serif" font-size="12">
<style>.tick{font-size:11px}</style><defs>${[...bars].map((map) => `<linearGradient id="${map}">${stops(map)}</linearGradient>`).join("")}</defs>
<rect width="100%" height="100%" fill="#fff"/>${parts.join("\n")}
${lines.map((line, n) => `<text x="8" y="${8 + rows * high + 12 + 14 * n}" fill="#444">${escapeXml(line.trim())}</text>`).join("")}</svg>`;
}
