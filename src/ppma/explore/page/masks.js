"use strict";
// Masks and attention of one query: what ppma.masks and ppma.explore.query compute, for one head at a time.
// Grids are row-major arrays. alpha[i][j] is the log-decay of the edge left of token (i, j), beta[i][j] of the edge
// above it. tests/explore/test_masks_js.py compares every function with the Python reference.

const CUT = -1e4; // stands for a log-decay of -infinity: exp(CUT) is 0, and differences stay numbers

/** Decode base64 of little-endian float16 values. */
function decodeHalf(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const values = new Float64Array(bytes.length / 2);
  for (let n = 0; n < values.length; n++) {
    const bits = bytes[2 * n] | (bytes[2 * n + 1] << 8);
    const exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const size = exponent === 0 ? fraction * 2 ** -24
      : exponent === 31 ? (fraction ? NaN : Infinity)
      : (1 + fraction / 1024) * 2 ** (exponent - 15);
    values[n] = bits & 0x8000 ? -size : size;
  }
  return values;
}

/** Sums of log-decays from `start` to every place of a line; edge(n) lies between n - 1 and n. */
function outward(length, start, edge) {
  const sums = new Float64Array(length);
  for (let n = start + 1; n < length; n++) sums[n] = sums[n - 1] + edge(n);
  for (let n = start - 1; n >= 0; n--) sums[n] = sums[n + 1] + edge(n + 1);
  return sums;
}

/** One path of a polyline mask: v2h follows the key's column and then the query's row, h2v the reverse. */
function polylinePath(alpha, beta, [H, W], order) {
  const row = (i, j) => outward(W, j, (l) => alpha[i * W + l]);
  const column = (l, i) => outward(H, i, (k) => beta[k * W + l]);
  const dense = (i, j) => {
    const sums = new Float64Array(H * W);
    const turn = order === "v2h" ? row(i, j) : column(j, i);
    for (let n = 0; n < turn.length; n++) {
      const line = order === "v2h" ? column(n, i) : row(n, j);
      for (let m = 0; m < line.length; m++) sums[order === "v2h" ? m * W + n : n * W + m] = turn[n] + line[m];
    }
    return sums;
  };
  return { order, row, column, dense };
}

/** One path of a scan mask: the decays between two tokens along a visiting order. */
function scanPath(decay, visit, [H, W], order) {
  const potential = new Float64Array(H * W);
  for (let n = 1; n < visit.length; n++) {
    potential[visit[n]] = potential[visit[n - 1]] + Math.max(decay[visit[n]], CUT);
  }
  const between = (a, b) => -Math.abs(potential[a] - potential[b]);
  const from = (a, count, token) => Float64Array.from({ length: count }, (_, n) => between(a, token(n)));
  return {
    order,
    row: (i, j) => from(i * W + j, W, (l) => i * W + l),
    column: (l, i) => from(i * W + l, H, (k) => k * W + l),
    dense: (i, j) => from(i * W + j, H * W, (token) => token),
  };
}

/** The paths of a mask of ppma.masks.KINDS; `hilbert` has the two visiting orders of the Hilbert mask. */
function maskPaths(kind, alpha, beta, grid, hilbert) {
  const [H, W] = grid;
  const polyline = (order) => polylinePath(alpha, beta, grid, order);
  if (kind === "cross") {
    const rows = Array.from({ length: H * W }, (_, n) => n);
    const columns = rows.map((n) => (n % H) * W + Math.floor(n / H));
    return [scanPath(alpha, rows, grid, "v2h"), scanPath(beta, columns, grid, "h2v")];
  }
  if (kind === "hilbert") return [scanPath(alpha, hilbert[0], grid, "v2h"), scanPath(beta, hilbert[1], grid, "h2v")];
  if (kind === "v2h") return [polyline("v2h")];
  if (kind === "2d" || kind === "shared") return [polyline("v2h"), polyline("h2v")];
  return [polyline("h2v")]; // "none" and "rmt"
}

/** The same paths with all decays 1. */
function openPaths(paths, [H, W]) {
  const zeros = new Float64Array(H * W);
  return paths.map((path) => polylinePath(zeros, zeros, [H, W], path.order));
}

/** RMT's fixed log-decay of a head, rounded to float32 as in ppma.masks. */
const rmtLogDecay = (head, heads) => Math.fround(Math.log1p(-(2 ** -(2 + (4 * head) / heads))));

/** Weights of keys from scores and log mask: the mask after the softmax ("hadamard") or inside it ("logit"). */
function maskedSoftmax(scores, logMask, combine) {
  const inside = combine === "logit" ? scores.map((score, n) => score + logMask[n]) : scores;
  const largest = inside.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = inside.map((score) => Math.exp(score - largest));
  const total = weights.reduce((a, b) => a + b, 0);
  return weights.map((weight, n) => (weight / total) * (combine === "logit" ? 1 : Math.exp(logMask[n])));
}

/** Weights of low rank, s1 s2 times the mask; "logit" normalises them to a sum of 1. */
function maskedProduct(products, logMask, combine) {
  const weights = products.map((product, n) => product * Math.exp(logMask[n]));
  const total = combine === "logit" ? weights.reduce((a, b) => a + b, 0) : 1;
  return weights.map((weight) => (total === 0 ? 0 : weight / total));
}

/** Add the product over a path's two steps, row and column weights, to `sums`. */
function addCrissCross(sums, path, [H, W], [i, j], rowWeights, columnWeights) {
  const first = path.order === "v2h" ? rowWeights(i, j) : columnWeights(j, i);
  for (let n = 0; n < first.length; n++) {
    const second = path.order === "v2h" ? columnWeights(n, i) : rowWeights(n, j);
    for (let m = 0; m < second.length; m++) sums[path.order === "v2h" ? m * W + n : n * W + m] += first[n] * second[m];
  }
}

/** The mask of a query, 1 at the query itself: the mean over the paths. */
function queryMask(layer, paths, [i, j]) {
  const sums = new Float64Array(layer.grid[0] * layer.grid[1]);
  for (const path of paths) {
    if (layer.kind === "criss_cross") {
      const weights = (line) => (a, b) => line(a, b).map(Math.exp);
      addCrissCross(sums, path, layer.grid, [i, j], weights(path.row), weights(path.column));
    } else path.dense(i, j).forEach((value, token) => { sums[token] += Math.exp(value); });
  }
  return sums.map((sum) => sum / paths.length);
}

/** The attention of a query in one head; without a mask its weights sum to 1. `layer.q` is scaled already. */
function queryAttention(layer, head, paths, [i, j], combine) {
  const [H, W] = layer.grid, N = H * W, { q, k, dim, prefix } = layer, tokens = prefix + N;
  const scores = (query, keys) => Float64Array.from(keys, (key) => {
    let sum = 0;
    const a = (head * tokens + prefix + query) * dim, b = (head * tokens + prefix + key) * dim;
    for (let n = 0; n < dim; n++) sum += q[a + n] * k[b + n];
    return sum;
  });
  const sums = new Float64Array(N);
  const range = (count, token) => Array.from({ length: count }, (_, n) => token(n));
  if (layer.kind === "criss_cross") {
    for (const path of paths) {
      const rows = (a, b) =>
        maskedSoftmax(scores(a * W + b, range(W, (l) => a * W + l)), path.row(a, b), combine);
      const columns = (l, a) =>
        maskedSoftmax(scores(a * W + l, range(H, (n) => n * W + l)), path.column(l, a), combine);
      addCrissCross(sums, path, layer.grid, [i, j], rows, columns);
    }
  } else {
    const weigh = layer.kind === "full" ? maskedSoftmax : maskedProduct;
    const all = scores(i * W + j, range(tokens, (n) => n - prefix)); // prefix tokens are not masked
    for (const path of paths) {
      const logMask = new Float64Array(tokens);
      logMask.set(path.dense(i, j), prefix);
      weigh(all, logMask, combine).forEach((weight, n) => { if (n >= prefix) sums[n - prefix] += weight; });
    }
  }
  return sums.map((sum) => sum / paths.length);
}

/**
 * Decays, mask and attention of one query; as ppma.explore.query_panels of a changed record.
 * layer: a layer of a record, decoded. edges: {alpha, beta} of the image's edges. hilbert: two visiting orders.
 * choice: {query: [i, j], head (-1: mean), mask, formulation ("" for the model's own), edges, strength}.
 */
function queryPanels(layer, choice, edges, hilbert) {
  const [H, W] = layer.grid, N = H * W;
  const combine = { "": layer.combine, paper: "hadamard", release: "logit" }[choice.formulation];
  const kind = choice.mask || layer.mask, scanned = kind === "cross" || kind === "hilbert";
  const heads = choice.head < 0 ? Array.from({ length: layer.heads }, (_, n) => n) : [choice.head];
  const panels = {};
  for (const name of ["alpha", "beta", "mask", "attention", "masked"]) panels[name] = new Float64Array(N);
  const add = (name, values) => values.forEach((value, n) => { panels[name][n] += value / heads.length; });
  for (const head of heads) {
    let [alpha, beta] = choice.edges
      ? [edges.alpha, edges.beta]
      : [layer.alpha, layer.beta].map((values) => values.subarray(head * N, (head + 1) * N));
    if (choice.mask === "none") alpha = beta = new Float64Array(N);
    if (choice.mask === "rmt") alpha = beta = new Float64Array(N).fill(rmtLogDecay(head, layer.heads));
    if (choice.mask === "shared") beta = alpha;
    [alpha, beta] = [alpha, beta].map((values) =>
      values.map((value) => (choice.strength === 0 ? 0 : value * choice.strength)));
    const paths = maskPaths(kind, alpha, beta, layer.grid, hilbert);
    add("alpha", alpha.map(Math.exp));
    add("beta", beta.map(Math.exp));
    add("mask", queryMask(layer, paths, choice.query));
    add("attention", queryAttention(layer, head, openPaths(paths, layer.grid), choice.query, combine));
    add("masked", queryAttention(layer, head, paths, choice.query, combine));
  }
  if (!scanned) { // the edges of the first column and row lie outside the grid
    for (let i = 0; i < H; i++) panels.alpha[i * W] = NaN;
    for (let j = 0; j < W; j++) panels.beta[j] = NaN;
  }
  return panels;
}

/** The tokens [i, j] on the path from a key to a query, both included. */
function pathTokens([i, j], [k, l], order) {
  const tokens = [[k, l]];
  const walk = (axis, goal) => {
    for (;;) {
      const next = [...tokens[tokens.length - 1]];
      if (next[axis] === goal) return;
      next[axis] += Math.sign(goal - next[axis]);
      tokens.push(next);
    }
  };
  if (order === "v2h") { walk(0, i); walk(1, j); } else { walk(1, j); walk(0, i); }
  return tokens;
}

/**
 * The steps of a V2H or H2V mask times x in O(N): along each axis a recurrence forwards, one backwards, and their sum
 * minus x. Decays are not logarithms here. Each step has a title, the values so far (NaN: not computed) and the tokens
 * it computed.
 */
function scanSteps(x, alpha, beta, [H, W], order) {
  const steps = [{ title: "input x", values: Float64Array.from(x), written: [] }];
  let current = Float64Array.from(x);
  for (const axis of order === "v2h" ? ["column", "row"] : ["row", "column"]) {
    const [length, lines] = axis === "column" ? [H, W] : [W, H];
    const token = (n, line) => (axis === "column" ? n * W + line : line * W + n);
    const decay = axis === "column" ? beta : alpha;
    const sweep = (backwards, title) => {
      const f = new Float64Array(H * W).fill(NaN);
      for (let m = 0; m < length; m++) {
        const n = backwards ? length - 1 - m : m, before = backwards ? n + 1 : n - 1, written = [];
        for (let line = 0; line < lines; line++) {
          const here = token(n, line);
          const edge = decay[token(Math.max(n, before), line)];
          f[here] = current[here] + (m === 0 ? 0 : edge * f[token(before, line)]);
          written.push(here);
        }
        steps.push({ title, values: f.slice(), written });
      }
      return f;
    };
    const [there, back] = axis === "column" ? ["down", "up"] : ["right", "left"];
    const f = sweep(false, `${there}: f = decay · previous f + x`);
    const g = sweep(true, `${back}: g likewise`);
    current = current.map((value, n) => f[n] + g[n] - value);
    steps.push({ title: `f + g − x: every ${axis} is complete`, values: current.slice(), written: [...current.keys()] });
  }
  return steps;
}
