// The grid playground: set query and key, draw walls, and read the mask or the steps of a scan.

const LARGEST = 8, CELL = 64, MARGIN = 5;

class Playground {
  constructor(changed) {
    this.changed = changed;
    this.tool = "wall";
    this.state = { rows: 5, columns: 6, query: [1, 1], key: [3, 4], shown: "2d", open: 0.9, wall: 0.1, step: 0 };
    this.preset("wall");
    for (const button of document.querySelectorAll("[data-tool]")) {
      button.addEventListener("click", () => { this.tool = button.dataset.tool; this.draw(); });
    }
    const bind = (id, change) => $(id).addEventListener("input", () => { change($(id).value); this.draw(); this.changed(); });
    for (const id of ["rows", "columns"]) {
      bind(id, (text) => {
        const size = Math.round(Number(text));
        if (size >= 2 && size <= LARGEST) this.resize(id, size);
      });
    }
    bind("shown", (value) => Object.assign(this.state, { shown: value, step: 0 }));
    bind("preset", (value) => { if (value) this.preset(value); $("preset").value = ""; });
    bind("open", (value) => this.revalue("open", Number(value)));
    bind("wall", (value) => this.revalue("wall", Number(value)));
    bind("step", (value) => { this.state.step = Number(value); });
    $("board").addEventListener("pointerdown", (event) => { $("board").setPointerCapture(event.pointerId); this.touch(event, true); });
    $("board").addEventListener("pointermove", (event) => { if (event.buttons) this.touch(event, false); });
  }

  get grid() { return [this.state.rows, this.state.columns]; }

  /** Initial decays: open everywhere, two walls with gaps, or random. */
  preset(name) {
    const { rows: H, columns: W, open, wall } = this.state;
    // Mulberry32: the same random decays for everybody.
    let seed = 7;
    const random = () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return Math.round(30 + (70 * ((t ^ (t >>> 14)) >>> 0)) / 2 ** 32) / 100;
    };
    const make = () => Array.from({ length: H * W }, () => (name === "random" ? random() : open));
    this.alpha = make();
    this.beta = make();
    if (name !== "wall") return;
    for (let i = 0; i < H - 1; i++) this.alpha[i * W + Math.floor(W / 2)] = wall;
    for (let j = 2; j < W; j++) this.beta[Math.floor(H / 2) * W + j] = wall;
  }

  resize(id, size) {
    const before = this.grid, { alpha, beta } = this;
    this.state[id] = size;
    const [H, W] = this.grid;
    const keep = (values) => Array.from({ length: H * W }, (_, n) => {
      const i = Math.floor(n / W), j = n % W;
      return i < before[0] && j < before[1] ? values[i * before[1] + j] : this.state.open;
    });
    [this.alpha, this.beta] = [keep(alpha), keep(beta)];
    for (const token of ["query", "key"]) this.state[token] = this.state[token].map((n, axis) => Math.min(n, this.grid[axis] - 1));
  }

  /** Change the decay of all open edges, or of all walls. */
  revalue(name, value) {
    const before = this.state[name];
    for (const edges of [this.alpha, this.beta]) edges.forEach((edge, n) => { if (edge === before) edges[n] = value; });
    this.state[name] = value;
  }

  touch(event, pressed) {
    const box = $("board").getBoundingClientRect(), [H, W] = this.grid;
    const scale = (W * CELL + 2 * MARGIN) / box.width;
    const x = ((event.clientX - box.left) * scale - MARGIN) / CELL, y = ((event.clientY - box.top) * scale - MARGIN) / CELL;
    if (this.tool === "query" || this.tool === "key") {
      this.state[this.tool] = [[y, H], [x, W]].map(([at, extent]) => Math.min(Math.max(Math.floor(at), 0), extent - 1));
    } else {
      const column = Math.round(x), row = Math.round(y), dx = Math.abs(x - column), dy = Math.abs(y - row);
      if (Math.min(dx, dy) > (pressed ? 0.5 : 0.3) || Math.max(dx, dy) < 0.2) return; // no edge, or a corner
      const value = this.state[this.tool === "wall" ? "wall" : "open"];
      if (dx < dy) {
        if (column > 0 && column < W && y >= 0 && y < H) this.alpha[Math.floor(y) * W + column] = value;
      } else if (row > 0 && row < H && x >= 0 && x < W) this.beta[row * W + Math.floor(x)] = value;
    }
    this.draw();
    this.changed();
  }

  /** The numbers in the cells, their colour limits, and the cells computed by the scan step. */
  numbers() {
    const { shown, query, key, step } = this.state, [H, W] = this.grid;
    if (shown.startsWith("steps-")) {
      const x = new Float64Array(H * W);
      x[key[0] * W + key[1]] = 1;
      const steps = scanSteps(x, this.alpha, this.beta, this.grid, shown.slice(6));
      this.state.step = Math.min(step, steps.length - 1);
      return { ...steps[this.state.step], count: steps.length };
    }
    const logs = [this.alpha, this.beta].map((values) => Float64Array.from(values, Math.log));
    return { values: queryMask({ grid: this.grid, kind: "full" }, maskPaths(shown, ...logs, this.grid), query), written: [] };
  }

  draw() {
    const { state } = this, [H, W] = this.grid, { values, written, title, count } = this.numbers();
    const svg = this.board(values, written);
    $("board").setAttribute("viewBox", `0 0 ${W * CELL + 2 * MARGIN} ${H * CELL + 2 * MARGIN}`);
    $("board").innerHTML = svg;
    for (const button of document.querySelectorAll("[data-tool]")) button.setAttribute("aria-checked", button.dataset.tool === this.tool);
    for (const id of ["rows", "columns", "shown", "open", "wall"]) $(id).value = state[id];
    for (const id of ["open", "wall"]) $(`${id}-value`).textContent = state[id].toFixed(2);
    $("stepper").hidden = !count;
    if (count) {
      [$("step").max, $("step").value] = [count - 1, state.step];
      $("step-value").textContent = `${state.step} of ${count - 1}: ${title}`;
    }
    $("explained").textContent = count
      ? "The mask times x in O(N), with x = 1 at the key (square) and 0 elsewhere. The last step holds the weight of the key for each token."
      : "The mask of the query (circle): the weight of each token. Drag along edges to draw walls.";
    $("products").replaceChildren(...["v2h", "h2v"].flatMap((order) => {
      const factors = this.factors(order), product = factors.reduce((a, b) => a * b, 1);
      const text = factors.length ? `${factors.map((f) => f.toFixed(2)).join(" × ")} = ` : "";
      return [element("b", { class: order }, order.toUpperCase()), `: ${text}${short(product)}`, element("br")];
    }));
  }

  /** The decays on a path, from the key to the query. */
  factors(order) {
    const tokens = pathTokens(this.state.query, this.state.key, order), W = this.grid[1];
    return tokens.slice(1).map(([i, j], n) => {
      const [k, l] = tokens[n];
      return i === k ? this.alpha[i * W + Math.max(j, l)] : this.beta[Math.max(i, k) * W + j];
    });
  }

  /** The grid as SVG: cells with numbers, walls, paths, query and key. */
  board(values, written) {
    const [H, W] = this.grid, { query, key } = this.state, parts = [];
    const x = (j) => MARGIN + j * CELL, y = (i) => MARGIN + i * CELL, done = new Set(written);
    for (let i = 0; i < H; i++) for (let j = 0; j < W; j++) {
      const value = values[i * W + j], fill = colour({ map: "viridis", limits: [0, 1] }, value);
      const light = fill && 0.3 * fill[0] + 0.59 * fill[1] + 0.11 * fill[2] > 128;
      parts.push(`<rect x="${x(j) + 1}" y="${y(i) + 1}" width="${CELL - 2}" height="${CELL - 2}" fill="${fill ? `rgb(${fill})` : css("--outside")}"${
        done.has(i * W + j) && done.size < H * W ? ` stroke="${css("--query")}" stroke-width="3"` : ""}/>`);
      if (fill) parts.push(`<text x="${x(j + 0.5)}" y="${y(i + 0.5) + 6}" text-anchor="middle" font-size="17" fill="${light ? "#000" : "#fff"}">${value.toFixed(2)}</text>`);
    }
    for (const [order, shift, dash] of [["v2h", -25, ""], ["h2v", 25, ' stroke-dasharray="7 5"']]) {
      const corners = pathTokens(query, key, order).map(([i, j]) => `${x(j + 0.5) + shift},${y(i + 0.5) + shift}`);
      for (const [tone, width] of [["#fff", 6], [css(`--${order}`), 3]]) {
        parts.push(`<polyline points="${corners.join(" ")}" fill="none" stroke="${tone}" stroke-width="${width}" stroke-linejoin="round"${width === 3 ? dash : ""}/>`);
      }
    }
    const edge = (decay, x1, y1, x2, y2) => {
      if (decay >= 0.995) return;
      const width = (1 + 8 * (1 - decay)).toFixed(1);
      parts.push(`<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" stroke="${css("--page")}" stroke-width="${+width + 2.5}"/>`);
      parts.push(`<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" stroke="${css("--wall")}" stroke-width="${width}" opacity="${(0.15 + 0.85 * (1 - decay)).toFixed(2)}"/>`);
    };
    for (let i = 0; i < H; i++) for (let j = 0; j < W; j++) {
      if (j > 0) edge(this.alpha[i * W + j], x(j), y(i) + 3, x(j), y(i + 1) - 3);
      if (i > 0) edge(this.beta[i * W + j], x(j) + 3, y(i), x(j + 1) - 3, y(i));
    }
    const outline = (shape) => `<g fill="none"><g stroke="#fff" stroke-width="6">${shape}</g>`;
    const [qx, qy, kx, ky] = [x(query[1] + 0.5), y(query[0] + 0.5), x(key[1]) + 6, y(key[0]) + 6];
    const circle = `<circle cx="${qx}" cy="${qy}" r="26"/>`, square = `<rect x="${kx}" y="${ky}" width="${CELL - 12}" height="${CELL - 12}"/>`;
    parts.push(`${outline(square)}<g stroke="${css("--key")}" stroke-width="3.5">${square}</g></g>`);
    parts.push(`${outline(circle)}<g stroke="${css("--query")}" stroke-width="3.5">${circle}</g></g>`);
    return parts.join("");
  }

  svg() {
    const [H, W] = this.grid, { values, written } = this.numbers();
    const [width, height] = [W * CELL + 2 * MARGIN, H * CELL + 2 * MARGIN];
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="Helvetica, Arial, sans-serif"><rect width="100%" height="100%" fill="${css("--page")}"/>${this.board(values, written)}</svg>`;
  }

  link() {
    const { rows, columns, query, key, shown, open, wall, step } = this.state;
    const code = (values) => values.map((value) => Math.round(100 * value).toString(36).padStart(2, "0")).join("");
    return { rows, columns, query: query.join(","), key: key.join(","), shown, open, wall, step, alpha: code(this.alpha), beta: code(this.beta) };
  }

  restore(link) {
    const inside = (text, low, high) => text !== null && text !== "" && Number(text) >= low && Number(text) <= high;
    for (const id of ["rows", "columns"]) if (inside(link.get(id), 2, LARGEST)) this.resize(id, Math.round(Number(link.get(id))));
    for (const id of ["open", "wall"]) if (inside(link.get(id), 0, 1)) this.state[id] = Number(link.get(id));
    for (const id of ["query", "key"]) {
      const parts = (link.get(id) || "").split(",");
      if (parts.length === 2 && parts.every((part, axis) => inside(part, 0, this.grid[axis] - 1))) this.state[id] = parts.map(Number).map(Math.round);
    }
    if ([...$("shown").options].some((option) => option.value === link.get("shown"))) this.state.shown = link.get("shown");
    if (inside(link.get("step"), 0, 999)) this.state.step = Math.round(Number(link.get("step")));
    for (const id of ["alpha", "beta"]) {
      const values = ((link.get(id) || "").match(/../g) || []).map((pair) => parseInt(pair, 36) / 100);
      if (values.length === this[id].length && values.every((value) => value >= 0 && value <= 1)) this[id] = values;
    }
    this.draw();
  }
}
