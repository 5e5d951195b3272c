"use strict";
// T tokens shown, H heads, L latents, S states: the window, if there is one, and the latents.
// ALL stands for p(s|t); any other state is an index into a layer's `names`.
(() => {
  const ALL = -1, ROWS = 12, STRONGEST = 0.8;
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const T = data.tokens.length;
  const chosen = { layer: 0, head: 0, token: T - 1, state: ALL };
  const unpacked = new Map();
  let request = 0;

  // The arrays of a layer, unpacked when it is first looked at.
  async function inflate(packed) {
    if (packed === null) return null;
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  async function arrays(layer) {
    const [states, keys, near] = await Promise.all(
      [layer.states, layer.keys, layer.window].map(inflate));
    return {
      layer,
      states: states && new Uint16Array(states),
      keys: keys && new Float32Array(keys),
      near: near && new Uint8Array(near),
    };
  }

  function unpack(index) {
    if (!unpacked.has(index)) unpacked.set(index, arrays(data.layers[index]));
    return unpacked.get(index);
  }

  // p(s|l,t): the softmax of a latent's keys over the tokens it has seen.
  function latentWeights({ layer, keys }, head, latent, token) {
    const weights = new Float64Array(token + 1);
    const last = token - layer.delay;
    if (last < 0) return weights;
    const step = layer.heads * layer.latents, start = head * layer.latents + latent;
    let top = -Infinity, sum = 0;
    for (let s = 0; s <= last; s++) top = Math.max(top, keys[s * step + start]);
    for (let s = 0; s <= last; s++) sum += weights[s] = Math.exp(keys[s * step + start] - top);
    return weights.map((weight) => weight / sum);
  }

  // The window's softmax, or p(s|t) itself where there are no latents.
  function windowWeights({ near }, head, token) {
    const start = (head * T + token) * T;
    const weights = Float64Array.from(near.subarray(start, start + token + 1), (byte) => byte * byte);
    const sum = weights.reduce((a, b) => a + b, 0);
    return sum > 0 ? weights.map((weight) => weight / sum) : weights;
  }

  // {p, parts, whole}: p(l|t), p(s|state,t) for every state, and their mixture p(s|t).
  function mixture(found, head, token) {
    const { layer, states } = found;
    if (states === null) return { p: [], parts: [], whole: windowWeights(found, head, token) };
    const S = layer.names.length, start = (token * layer.heads + head) * S;
    const p = Array.from(states.subarray(start, start + S), (value) => value / 65535);
    const parts = layer.names.map((name) => name === 0
      ? windowWeights(found, head, token) : latentWeights(found, head, name - 1, token));
    const whole = new Float64Array(token + 1);
    parts.forEach((part, index) => part.forEach((weight, s) => { whole[s] += p[index] * weight; }));
    return { p, parts, whole };
  }

  const total = (values) => values.reduce((a, b) => a + b, 0);
  const label = (s) => data.tokens[s].replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const stateName = (name) => (name === 0 ? "window" : `latent ${name}`);
  const hueOf = (name) => (name === 0 ? "var(--window)" : "var(--latent)");

  function element(tag, text = "", className = "") {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = className;
    return made;
  }

  // Options of a listbox: one is in the tab order, arrow keys move and select at once.
  function listbox(container, select, { vertical }) {
    const options = () => [...container.children];
    container.addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) move(options().indexOf(option));
    });
    container.addEventListener("keydown", (event) => {
      const all = options(), here = all.indexOf(document.activeElement);
      if (here < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
      const line = (step) => (vertical ? here + step : nearestOnLine(all, here, step));
      const target = {
        ArrowLeft: () => here - 1, ArrowRight: () => here + 1,
        ArrowUp: () => line(-1), ArrowDown: () => line(1),
        Home: () => 0, End: () => all.length - 1,
      }[event.key];
      if (!target) return;
      event.preventDefault();
      move(Math.min(all.length - 1, Math.max(0, target())));
    });
    function move(index) {
      select(index);
      options()[index].focus();
    }
  }

  // The token above or below, by where the lines happen to break.
  function nearestOnLine(all, here, step) {
    const boxes = all.map((option) => option.getClientRects()[0] ?? option.getBoundingClientRect());
    const from = boxes[here], middle = (box) => (box.left + box.right) / 2;
    let line = null, best = here;
    for (let i = here + step; i >= 0 && i < all.length; i += step) {
      if (Math.abs(boxes[i].top - from.top) < from.height / 2) continue;
      if (line === null) { line = boxes[i].top; best = i; }
      if (Math.abs(boxes[i].top - line) > from.height / 2) break;
      if (Math.abs(middle(boxes[i]) - middle(from)) < Math.abs(middle(boxes[best]) - middle(from))) {
        best = i;
      }
    }
    return best;
  }

  function mark(container, index) {
    [...container.children].forEach((option, i) => {
      option.setAttribute("aria-selected", String(i === index));
      option.tabIndex = i === index ? 0 : -1;
    });
  }

  const percent = (share) => `${(100 * share).toFixed(1)}%`;
  const fixed = (value, digits) => (value === null ? "–" : value.toFixed(digits));

  function showFacts(layer) {
    const row = layer.summaries[chosen.head];
    const facts = [["looks back on average", `${fixed(row.mean_distance, 1)} tokens`],
      ["effective sources", fixed(row.effective_sources, 1)]];
    if (layer.latents) {
      facts.push(["effective latents", `${fixed(row.effective_latents, 1)} of ${layer.latents}`],
        ["per token", fixed(row.effective_latents_per_token, 1)],
        ["unused", String(row.unused_among_latents)]);
    }
    if (row.window_share !== null) facts.push(["window's share", percent(row.window_share)]);
    at("facts").replaceChildren(...facts.map(([name, value]) => {
      const pair = element("div");
      pair.append(element("dt", name), element("dd", value));
      return pair;
    }));
  }

  function showText(weights, layer, name) {
    const largest = Math.max(...weights);
    at("text").style.setProperty("--hue", name === null ? "var(--all)" : hueOf(name));
    at("legend").style.setProperty("--hue", name === null ? "var(--all)" : hueOf(name));
    [...at("text").children].forEach((token, s) => {
      const visible = s <= chosen.token;
      const shade = visible && largest > 0 ? STRONGEST * Math.sqrt(weights[s] / largest) : 0;
      token.style.setProperty("--shade", shade.toFixed(4));
      token.classList.toggle("near", visible && layer.width !== null && s > chosen.token - layer.width);
      token.classList.toggle("later", !visible);
      token.classList.toggle("chosen", s === chosen.token);
      token.title = visible ? `${s}: ${weights[s].toPrecision(3)}` : `${s}: later`;
    });
    mark(at("text"), chosen.token);
    at("largest").textContent = largest.toPrecision(2);
    at("window-key").hidden = layer.width === null;
    at("window-words").textContent = `the window's ${layer.width} tokens`;
  }

  // One row for p(s|t) and one per state; made anew only for a layer of other states.
  function makeStates({ names }) {
    const rows = [["all", "var(--all)"], ...names.map((name) => [stateName(name), hueOf(name)])];
    at("states").replaceChildren(...rows.map(([name, hue]) => {
      const option = element("div", "", "state"), bar = element("div", "", "bar");
      option.style.setProperty("--hue", hue);
      option.setAttribute("role", "option");
      bar.append(element("span"));
      option.append(element("span", name), bar, element("span", "", "number"));
      return option;
    }));
  }

  function showStates({ layer }, { p }) {
    const rows = at("states");
    if (rows.children.length !== p.length + 1 || rows.dataset.first !== String(layer.names[0])) {
      makeStates(layer);
      rows.dataset.first = String(layer.names[0]);
    }
    [1, ...p].forEach((share, index) => {
      const [name, bar, number] = rows.children[index].children;
      bar.firstChild.style.width = percent(share);
      number.textContent = share.toFixed(4);
      rows.children[index].setAttribute("aria-label", `${name.textContent}, ${number.textContent}`);
    });
    mark(rows, chosen.state + 1);
    at("no-latents").hidden = layer.latents > 0;
    at("states-sum").hidden = layer.latents === 0;
    at("states-sum").textContent = `p(l|t) sums to ${total(p).toFixed(4)}`;
  }

  function showSources(weights, { layer }, { p, parts }) {
    const split = chosen.state === ALL && layer.names[0] === 0;
    const columns = ["position", "token", "p", ...(split ? ["by window", "by latents"] : [])];
    at("columns").replaceChildren(...columns.map((name) => {
      const head = element("th", name);
      head.scope = "col";
      return head;
    }));
    const order = [...weights.keys()].filter((s) => weights[s] > 0)
      .sort((a, b) => weights[b] - weights[a]).slice(0, ROWS);
    at("sources").replaceChildren(...order.map((s) => {
      const row = element("tr"), near = split ? p[0] * parts[0][s] : 0;
      const cells = [String(s), label(s), weights[s].toFixed(4)];
      if (split) cells.push(near.toFixed(4), Math.max(0, weights[s] - near).toFixed(4));
      row.append(...cells.map((text) => element("td", text)));
      return row;
    }));
    const what = chosen.state === ALL ? "p(s|t)" : "p(s|l,t)";
    const beyond = layer.width === null ? "" : `; ${percent(
      total(weights.subarray(0, Math.max(0, chosen.token + 1 - layer.width))))} beyond the window`;
    at("sources-sum").textContent = `${what} sums to ${total(weights).toFixed(4)} over `
      + `${weights.length} tokens, the largest ${order.length} shown${beyond}`;
    return order.length ? order[0] : null;
  }

  async function show() {
    const mine = ++request;
    const found = await unpack(chosen.layer);
    if (mine !== request) return; // something else was picked meanwhile
    const { layer } = found;
    const mixed = mixture(found, chosen.head, chosen.token);
    if (chosen.state >= mixed.p.length) chosen.state = ALL;
    const name = chosen.state === ALL ? null : layer.names[chosen.state];
    const weights = name === null ? mixed.whole : mixed.parts[chosen.state];
    showFacts(layer);
    showText(weights, layer, name);
    showStates(found, mixed);
    const most = showSources(weights, found, mixed);
    const where = most === null ? "sees nothing yet"
      : `looks most at token ${most} “${label(most)}”, with ${weights[most].toFixed(3)}`;
    at("status").textContent = `Token ${chosen.token} “${label(chosen.token)}”, layer `
      + `${layer.number}, head ${chosen.head}: ${name === null ? "p(s|t)" : stateName(name)} `
      + `${where}.`;
    document.body.dataset.shown = JSON.stringify(chosen);
    const address = new URLSearchParams({ ...chosen, layer: layer.number });
    history.replaceState(null, "", `#${address}`);
  }

  function fail(error) {
    at("status").textContent = typeof DecompressionStream === "undefined"
      ? "This browser is too old for this page: it needs DecompressionStream (2023)."
      : `This page cannot be shown: ${error.message}`;
    throw error;
  }

  const pick = (change) => { Object.assign(chosen, change); return show().catch(fail); };

  function fillHeads() {
    const { heads } = data.layers[chosen.layer];
    chosen.head = Math.min(chosen.head, heads - 1);
    at("head").replaceChildren(...Array.from({ length: heads }, (_, n) => new Option(n, n)));
    at("head").value = chosen.head;
  }

  // #layer=2&head=1&token=30&state=0 opens the page there.
  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    const number = (key, low, high) => {
      const value = given.has(key) ? Number(given.get(key)) : NaN;
      return Number.isInteger(value) && value >= low && value <= high ? value : chosen[key];
    };
    const layer = data.layers.findIndex((entry) => String(entry.number) === given.get("layer"));
    if (layer >= 0) chosen.layer = layer;
    chosen.head = number("head", 0, data.layers[chosen.layer].heads - 1);
    chosen.token = number("token", 0, T - 1);
    chosen.state = number("state", ALL, data.layers[chosen.layer].names.length - 1);
  }

  at("text").replaceChildren(...data.tokens.map((text, s) => {
    const token = element("span", text.replaceAll("\n", "⏎\n") || "∅", "token");
    token.setAttribute("role", "option");
    token.classList.toggle("special", s === 0);
    return token;
  }));
  at("layer").replaceChildren(...data.layers.map((layer, n) => new Option(layer.number, n)));
  readAddress();
  at("layer").value = chosen.layer;
  fillHeads();
  at("layer").addEventListener("change", (event) => {
    chosen.layer = Number(event.target.value);
    fillHeads();
    pick({});
  });
  at("head").addEventListener("change", (event) => pick({ head: Number(event.target.value) }));
  document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  listbox(at("text"), (token) => pick({ token }), { vertical: false });
  listbox(at("states"), (row) => pick({ state: row - 1 }), { vertical: true });
  pick({});
})();
