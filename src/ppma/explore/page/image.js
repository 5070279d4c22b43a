// The view of one image: click a token, see its decays, mask and attention.

const PANELS = [
  { name: "alpha", title: "decay α (horizontal)", map: "cividis" },
  { name: "beta", title: "decay β (vertical)", map: "cividis" },
  { name: "mask", title: "mask", map: "viridis" },
  { name: "attention", title: "attention, no mask", map: "viridis" },
  { name: "masked", title: "attention, masked", map: "viridis" },
  { name: "masked", title: "masked, on the image", map: null },
];

class ImageView {
  constructor(data, changed) {
    this.data = data;
    this.changed = changed;
    this.records = new Map(data.records.map((record) => [record.name, record]));
    this.state = { image: data.records[0].name, at: [0.5, 0.5], layer: 0, head: -1, mask: "", formulation: "",
      edges: !data.trained, strength: 1, scale: "" };
    this.picture = $("picture").querySelector("img");
    this.panels = PANELS.map((panel) => this.makePanel(panel));
    this.makeControls();
    this.makeSamples();
    const place = (event, target) => {
      const box = target.getBoundingClientRect();
      return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    };
    this.place = place;
    $("picture").addEventListener("pointerdown", (event) => this.set({ at: place(event, this.picture) }));
    $("picture").addEventListener("keydown", (event) => this.key(event));
  }

  makePanel({ title, map }) {
    const canvas = element("canvas"), box = element("div", { class: "box" }), value = element("span", { class: "value" });
    const surface = element("div", { class: "map" }, canvas, box);
    surface.addEventListener("pointerdown", (event) => this.set({ at: this.place(event, canvas) }));
    surface.addEventListener("pointermove", (event) => this.read(panel, this.place(event, canvas)));
    surface.addEventListener("pointerleave", () => { value.textContent = ""; });
    const low = element("span"), high = element("span"), bar = element("i");
    if (map) bar.style.background = gradient(map);
    else { bar.style.background = "none"; low.textContent = "dark: little attention"; }
    $("panels").append(element("figure", { class: "panel" },
      element("div", { class: "title" }, element("span", {}, title), value), surface,
      element("div", { class: "scale" }, low, bar, high)));
    const panel = { canvas, box, value, low, high };
    return panel;
  }

  makeControls() {
    const bind = (id, key, parse = (text) => text) =>
      $(id).addEventListener("input", () => this.set({ [key]: parse($(id).value) }));
    const options = (id, pairs) => $(id).replaceChildren(...pairs.map(([value, text]) => element("option", { value }, text)));
    const own = ["", "the model’s own"];
    options("mask", [own, ...this.data.masks.map((name) => [name, name])]);
    options("formulation", [own, ...this.data.formulations.map((name) => [name, name])]);
    this.options = options;
    bind("layer", "layer", Number);
    bind("head", "head", Number);
    bind("mask", "mask");
    bind("formulation", "formulation");
    bind("decays", "edges", (value) => value === "edges");
    bind("strength", "strength", Number);
    bind("scale", "scale");
    $("overlay").querySelector("input").addEventListener("input", () => this.drawPrediction());
    $("upload").hidden = !this.data.live;
    $("upload").title = `Up to ${this.data.megabytes} MB; the image stays on this machine`;
    $("upload").querySelector("input").addEventListener("change", ({ target }) => {
      if (target.files.length) this.fetchRecord("record", { method: "POST", body: target.files[0] });
      target.value = "";
    });
  }

  makeSamples() {
    const pictures = new Map(Object.entries(this.data.samples));
    for (const [name, record] of this.records) if (!pictures.has(name)) pictures.set(name, record.picture);
    $("samples").replaceChildren(...(pictures.size > 1 ? [...pictures] : []).map(([name, url]) =>
      element("button", { title: name, "data-name": name, onclick: () => this.open(name) }, element("img", { src: url, alt: name }))));
  }

  /** Show an image of the page, or ask the server for it. */
  open(name) {
    if (this.records.has(name)) this.set({ image: name });
    else if (this.data.live) this.fetchRecord(`record?sample=${encodeURIComponent(name)}`);
  }

  async fetchRecord(url, options) {
    document.body.style.cursor = "progress";
    try {
      const answer = await fetch(url, options), record = await answer.json();
      if (!answer.ok) throw new Error(record.error);
      this.records.set(record.name, record);
      this.makeSamples();
      this.set({ image: record.name });
    } catch (error) {
      showMessage(error instanceof TypeError ? "The server does not answer: is `ppma explore` still running?" : error.message);
    }
    document.body.style.cursor = "";
  }

  get record() { return this.records.get(this.state.image); }

  /** The chosen layer, its tensors decoded once. */
  get layer() {
    const layer = this.record.layers[this.state.layer];
    for (const name of ["q", "k", "alpha", "beta"]) {
      if (typeof layer[name] === "string") layer[name] = decodeHalf(layer[name]);
    }
    return layer;
  }

  get edges() {
    const edges = this.record.edges[this.layer.grid.join("x")];
    for (const name of ["alpha", "beta"]) if (typeof edges[name] === "string") edges[name] = decodeHalf(edges[name]);
    return edges;
  }

  /** The query's token. */
  get query() {
    return this.layer.grid.map((extent, axis) => Math.min(Math.max(Math.floor(this.state.at[axis] * extent), 0), extent - 1));
  }

  set(changes) {
    showMessage("");
    Object.assign(this.state, changes);
    const { state } = this;
    if (!this.records.has(state.image)) state.image = this.data.records[0].name;
    state.layer = Math.min(Math.max(state.layer, 0), this.record.layers.length - 1) || 0;
    if (!(state.head >= -1 && state.head < this.layer.heads)) state.head = -1;
    this.draw();
    this.changed();
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const moved = this.query.map((index, axis) => Math.min(Math.max(index + step[axis], 0), this.layer.grid[axis] - 1));
    this.set({ at: moved.map((index, axis) => (index + 0.5) / this.layer.grid[axis]) });
  }

  draw() {
    const started = performance.now(), { record, layer, query, state } = this, [H, W] = layer.grid;
    this.drawControls();
    const choice = { ...state, query };
    const values = queryPanels(layer, choice, this.edges, record.orders[layer.grid.join("x")]);
    const finite = [...values.alpha, ...values.beta].filter((value) => !Number.isNaN(value));
    const lowest = Math.max(0, Math.min(0.9, Math.floor(10 * Math.min(...finite)) / 10));
    const most = Math.max(...values.attention, ...values.masked);
    const limits = { alpha: [lowest, 1], beta: [lowest, 1], mask: [0, 1], attention: [0, most], masked: [0, most] };
    this.drawn = PANELS.map((panel) => ({ ...panel, values: values[panel.name], limits: limits[panel.name],
      log: state.scale === "log" && panel.map === "viridis" }));
    this.drawn.forEach((panel, n) => {
      const { canvas, low, high, box } = this.panels[n];
      this.mark(box);
      if (!panel.map) return;
      drawMap(canvas, panel, layer.grid);
      [low.textContent, high.textContent] = ends(panel);
    });
    this.mark($("picture").querySelector(".box"));
    if (this.picture.dataset.name !== record.name || this.picture.src !== record.picture) {
      this.picture.src = record.picture;
      this.picture.alt = this.picture.dataset.name = record.name;
    }
    const overlay = () => drawOverlay(this.panels[5].canvas, this.picture, values.masked, layer.grid);
    if (this.picture.complete) overlay();
    else this.picture.onload = overlay;
    this.drawPrediction();
    $("caption").textContent = this.caption();
    $("panels").dataset.milliseconds = (performance.now() - started).toFixed(1);
  }

  mark(box) {
    const [H, W] = this.layer.grid, [i, j] = this.query;
    Object.assign(box.style, { top: `${(100 * i) / H}%`, left: `${(100 * j) / W}%`, width: `${100 / W}%`, height: `${100 / H}%` });
  }

  read(panel, at) {
    const [H, W] = this.layer.grid, i = Math.floor(at[0] * H), j = Math.floor(at[1] * W);
    if (i < 0 || j < 0 || i >= H || j >= W) return;
    panel.value.textContent = `(${i + 1}, ${j + 1}): ${short(this.drawn[this.panels.indexOf(panel)].values[i * W + j])}`;
  }

  drawControls() {
    const { state, layer, record } = this;
    this.options("layer", record.layers.map((one, n) => [n, `${one.label} · ${one.kind.replace("_", "-")}, ${one.grid.join(" × ")}`]));
    this.options("head", [[-1, "mean over the heads"], ...Array.from({ length: layer.heads }, (_, n) => [n, `head ${n + 1}`])]);
    for (const id of ["layer", "head", "mask", "formulation", "strength", "scale"]) $(id).value = state[id];
    $("decays").value = state.edges ? "edges" : "";
    $("strength-value").textContent = state.strength;
    for (const button of $("samples").children) button.setAttribute("aria-pressed", button.dataset.name === state.image);
  }

  drawPrediction() {
    const { prediction, overlay } = this.record;
    const rows = prediction.flatMap(([name, share]) => {
      const bar = element("div", { class: "bar" });
      bar.style.width = `${100 * share}%`;
      bar.style.background = this.data.colours[name] || "";
      return [element("span", { title: name }, name), bar, element("span", {}, `${(100 * share).toFixed(1)}%`)];
    });
    const title = rows.length ? `Prediction of ${this.data.model}${overlay ? ": share of the pixels" : ""}` : "";
    $("overlay").hidden = !overlay;
    const shown = overlay && $("overlay").querySelector("input").checked;
    $("picture").querySelector(".overlay").style.backgroundImage = shown ? `url(${overlay})` : "none";
    $("prediction").replaceChildren(...(title ? [element("span", { class: "title" }, title)] : []), ...rows);
  }

  /** What is shown: model, layer, mask, formulation, decays and strength. */
  caption() {
    const { data, state, layer, query } = this;
    const own = (value, theirs) => (value ? `${value} (changed)` : `${theirs} (the model’s own)`);
    const decays = state.mask === "none" ? "all 1" : state.mask === "rmt" ? "fixed, one for each head"
      : state.edges ? "set from the image’s edges, not learned"
      : layer.open ? "all 1: this model has no mask" : data.trained ? "learned" : "of random weights, not learned";
    const formulation = own(state.formulation, { hadamard: "paper", logit: "release" }[layer.combine]);
    const inside = (state.formulation || formulation).startsWith("paper") ? "after" : "inside";
    return [
      `${data.model}, ${layer.label}: ${layer.kind.replace("_", "-")} attention, ` +
        `${state.head < 0 ? `mean over ${layer.heads} heads` : `head ${state.head + 1} of ${layer.heads}`}.`,
      `Mask: ${own(state.mask, layer.mask)}. Formulation: ${formulation}, the mask ${inside} the softmax.`,
      `Decays: ${decays}. Strength: ${state.strength}.`,
      `Query: token (${query[0] + 1}, ${query[1] + 1}) of ${layer.grid.join(" × ")}.`,
    ].join(" ");
  }

  svg() {
    return panelsSvg(this.drawn, this.record.picture, this.layer.grid, this.query, this.caption());
  }

  link() {
    const { image, at, layer, head, mask, formulation, edges, strength, scale } = this.state;
    return { image, at: at.map((part) => part.toFixed(3)).join(","), layer, head, mask, formulation,
      decays: edges ? "edges" : "own", strength, scale };
  }

  restore(link) {
    const number = (text, low, high, otherwise) => {
      const value = Number(text);
      return text !== null && text !== "" && value >= low && value <= high ? value : otherwise;
    };
    const { state, data } = this, at = (link.get("at") || "").split(",").map((part) => number(part, 0, 1, 0.5));
    const one = (name, known) => (known.includes(link.get(name)) ? link.get(name) : "");
    const image = link.get("image") || state.image;
    this.set({
      image, at: at.length === 2 ? at : [0.5, 0.5], layer: Math.round(number(link.get("layer"), 0, 999, 0)),
      head: Math.round(number(link.get("head"), -1, 999, -1)), mask: one("mask", data.masks),
      formulation: one("formulation", data.formulations), scale: one("scale", ["log"]),
      edges: link.has("decays") ? link.get("decays") === "edges" : !data.trained, strength: number(link.get("strength"), 0, 8, 1),
    });
    if (!this.records.has(image) && image in data.samples) this.open(image);
  }
}
