// Draws the maps, profiles and tables of an inspection, or of several, from the JSON that the page carries.
(function () {
  "use strict";

  const DATA = JSON.parse(document.getElementById("data").textContent);
  const RUNS = DATA.runs;
  const QUANTITIES = DATA.quantities;
  const FAVORITES = ["entropy", "score_variance", "sink_mass", "previous_mass", "head_class",
    "gradient_cosine", "qk_norm"];
  // A sheet of paper is not as wide as the tables: these columns are printed.
  const PRINTED = ["stack", "layer", "head", "entropy", "perplexity", "score_variance", "peak", "sink_mass", "self_mass", "previous_mass",
    "head_class", "gradient_cosine", "qk_norm", "expansion", "monotone_share", "mlp_expansion", "norm_contraction", "effective_rank",
    "token_cosine", "kurtosis", "fc_linear_r2", "field_symmetry", "ascent_cosine"];
  const CLASSES = ["I", "II", "III", "IV"];
  const CLASS_MEANING = ["more than 1/2", "1/8 to 1/2", "1/32 to 1/8", "at most 1/32"];
  const FEW_ROWS = 60;
  const byId = (id) => document.getElementById(id);
  const isDark = () => document.documentElement.dataset.theme === "dark" && !printing;
  const known = (value) => value !== null && value !== undefined && value !== "";
  let printing = false;

  // ---- elements: text only ever enters as text ----
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "style") for (const [key, style] of Object.entries(value)) element.style.setProperty(key, style);
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }
  const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  // ---- numbers ----
  function decimals(value, digits) {
    const small = Math.abs(value) < 0.5 * Math.pow(10, -digits) && Math.abs(value) > 1e-7;
    const text = small ? value.toPrecision(1) : value.toFixed(Math.abs(value) >= 1000 ? 0 : digits);
    return text.replace("e-", "e−").replace(/^-(?!0\.?0*$)/, "−").replace(/^-/, "");
  }
  const digitsOf = (name) => (QUANTITIES[name] && QUANTITIES[name].digits !== undefined ? QUANTITIES[name].digits : 2);
  function show(name, value) {
    if (!known(value)) return "–";
    return typeof value === "number" ? decimals(value, digitsOf(name)) : String(value);
  }
  // A value in a cell of a map, where seven digits have no room.
  function short(name, value) {
    const text = show(name, value), size = Math.abs(value);
    return text.length > 6 && (size < 0.01 || size >= 1e5) ? value.toExponential(0).replace("+", "").replaceAll("-", "−") : text;
  }
  function showError(name, error) {
    return known(error) ? "± " + decimals(error, digitsOf(name)) : "";
  }
  function reason(name) {
    if (name === "head_class") return "the rows are too short to tell the classes apart";
    const table = QUANTITIES[name] ? QUANTITIES[name].table : "heads";
    return table === "heads" ? "does not apply to this head or could not be measured (see the notes)"
      : "does not apply to this layer or there were too few tokens (see the notes)";
  }
  const rank = (value) => (typeof value === "number" ? value : CLASSES.indexOf(value));

  // ---- the tables of the runs ----
  const column = (run, table, name) => run[table][name] || [];
  const length = (table) => (table.layer || []).length;
  function stacksOf(run, table) {
    return [...new Set(column(run, table, "stack"))];
  }
  function place(run, table, number) {
    const head = column(run, table, "head")[number];
    const stack = stacksOf(run, table).length > 1 ? capital(column(run, table, "stack")[number]) + " layer " : "Layer ";
    return stack + column(run, table, "layer")[number] + (known(head) ? " · head " + head : "");
  }
  const capital = (word) => (word === "cross" ? "Cross-attention" : word ? word[0].toUpperCase() + word.slice(1) : "");
  const measured = (table) => Object.keys(QUANTITIES).filter((name) =>
    QUANTITIES[name].table === table && QUANTITIES[name].group !== "Controls" && name !== "rows" && name !== "tokens" &&
    RUNS.some((run) => column(run, table, name).some(known)));

  // ---- color ----
  function scaleFor(name, values, difference) {
    const kind = difference ? "diverging" : QUANTITIES[name].scale;
    const numbers = values.filter((value) => typeof value === "number");
    if (kind === "class") {
      return { kind, colors: DATA.colors.classes, at: (value) => CLASSES.indexOf(value) / (CLASSES.length - 1), ends: [] };
    }
    const reach = Math.max(...numbers.map(Math.abs)) || 1;
    const [low, high] = difference ? [-reach, reach] : DATA.limits[name];
    const curve = kind === "logarithmic" && low > 0 ? Math.log : (value) => value;
    const at = (value) => (high > low ? (curve(value) - curve(low)) / (curve(high) - curve(low)) : 0.5);
    const middle = kind === "diverging" ? (low + high) / 2 : curve === Math.log ? Math.sqrt(low * high) : null;
    return { kind, colors: DATA.colors[kind === "diverging" ? "diverging" : "sequential"], at, ends: [low, middle, high] };
  }
  const pick = (colors, share) => colors[Math.round(Math.min(Math.max(share, 0), 1) * (colors.length - 1))];
  function inkOn(color) {
    const [red, green, blue] = [1, 3, 5].map((start) => Math.pow(parseInt(color.slice(start, start + 2), 16) / 255, 2.2));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 ? "#15171b" : "#ffffff";
  }
  function paint(scale, value) {
    const [light, dark] = scale.colors.map((colors) => pick(colors, scale.at(value)));
    return { "--light": light, "--dark": dark, "--text-light": inkOn(light), "--text-dark": inkOn(dark) };
  }

  // ---- tooltip ----
  const tip = byId("tip");
  function showTip(event, title, text) {
    event.target.setAttribute("aria-describedby", "tip");
    tip.replaceChildren(html("b", {}, title), document.createTextNode(text));
    tip.hidden = false;
    const box = event.target.getBoundingClientRect();
    const x = event.clientX || box.left + box.width / 2, y = event.clientY || box.bottom;
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 18) + "px";
  }
  const hideTip = () => { tip.hidden = true; };

  // ---- labels that explain themselves: a label shows the entry of the glossary that it leads to ----
  function termOf(event) {
    const label = event.target.closest ? event.target.closest(".term") : null;
    const entry = label ? byId(label.dataset.term || label.getAttribute("href").slice(1)) : null;
    return entry && entry.matches(".glossary > div") ? [label, entry] : null;
  }
  function explain(event) {
    const found = termOf(event);
    if (!found) return;
    const [label, entry] = found;
    const unit = entry.querySelector(".unit");
    showTip({ target: label, clientX: event.clientX, clientY: event.clientY },
      entry.querySelector("dt").firstChild.textContent.trim() + (unit ? " " + unit.textContent : ""), [entry.querySelector(".meaning").textContent.trim(), usualOf(entry.id.slice(2))].join(" ").trim());
  }
  // The medians of the models in the table of usual values, as a sentence.
  function usualOf(name) {
    const row = byId("u-" + name);
    if (!row) return "";
    const models = [...byId("reference").tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    const medians = [...row.cells].map((cell, number) => `${models[number]} ${cell.firstChild ? cell.firstChild.textContent.trim() : ""}`);
    return `Usual medians: ${medians.filter((words, number) => number && number !== 2 && !words.endsWith("–")).join(", ")}.`;
  }
  for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, explain);
  for (const kind of ["pointerout", "focusout"]) document.addEventListener(kind, (event) => { if (termOf(event)) hideTip(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  const term = (name, title) => html("a", { class: "term", href: "#q-" + name }, title || QUANTITIES[name].title);

  // ---- maps of the heads ----
  const state = { quantity: null, run: 0, head: 0, named: [] };

  function drawMaps() {
    const name = state.quantity;
    const scale = scaleFor(name, RUNS.flatMap((run) => column(run, "heads", name)).filter(known));
    const maps = [], apart = [];
    RUNS.forEach((run, number) => stacksOf(run, "heads").forEach((stack) => {
      const values = column(run, "heads", name);
      maps.push(drawMap(run, stack, number, values, scale, titleOf(run, stack), name));
    }));
    const difference = differences(name);
    if (difference) {
      const last = RUNS[RUNS.length - 1];
      const own = scaleFor(name, difference.filter(known), true);
      stacksOf(last, "heads").forEach((stack) => {
        const among = stacksOf(last, "heads").length > 1 ? ", " + stack : "";
        apart.push(drawMap(last, stack, RUNS.length - 1, difference, own, "Difference, last − first" + among, name, legendOf(own, name, false)));
      });
    } else if (RUNS.length > 1 && QUANTITIES[name].scale !== "class") {
      apart.push(html("p", { class: "note" }, "No difference is drawn: the first and the last run have different heads."));
    }
    byId("maps").replaceChildren(...maps);
    if (byId("differences")) byId("differences").replaceChildren(...apart);
    const missing = RUNS.some((run) => column(run, "heads", name).some((value) => !known(value)));
    byId("legend").replaceChildren(...legendOf(scale, name, missing));
    const entry = byId("q-" + name);
    byId("caption").replaceChildren(...(entry ? [...entry.cloneNode(true).childNodes] : []), html("p", { class: "usual" }, usualOf(name)));
    drawHeadProfile(name);
  }
  function titleOf(run, stack) {
    const parts = [RUNS.length > 1 ? run.name : null, stacksOf(run, "heads").length > 1 ? capital(stack) : null];
    return parts.filter(Boolean).join(" · ");
  }
  function differences(name) {
    if (RUNS.length < 2 || QUANTITIES[name].scale === "class") return null;
    const [first, last] = [RUNS[0], RUNS[RUNS.length - 1]].map((run) => run.heads);
    const same = ["stack", "layer", "head"].every((key) => JSON.stringify(first[key]) === JSON.stringify(last[key]));
    if (!same || !first[name] || !last[name]) return null;
    return last[name].map((value, row) => (known(value) && known(first[name][row]) ? value - first[name][row] : null));
  }

  function drawMap(run, stack, number, values, scale, title, name, legend) {
    const rows = [...Array(length(run.heads)).keys()].filter((row) => run.heads.stack[row] === stack);
    const layers = [...new Set(rows.map((row) => run.heads.layer[row]))];
    const heads = Math.max(...rows.map((row) => run.heads.head[row])) + 1;
    const size = heads > 32 ? 14 : heads > 16 ? 24 : 44;
    const gap = size > 20 ? 2 : 1, left = 34, top = 20;
    const width = left + heads * size, height = top + layers.length * size;
    const steps = Math.max(1, Math.ceil(26 / size));
    const label = (text, x, y, anchor) => svg("text", { x, y, "text-anchor": anchor, "font-size": 11 }, String(text));
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "grid", "data-stack": stack, "data-run": number,
      "aria-label": `${QUANTITIES[name].title}, layers by heads${title ? ", " + title : ""}`, style: { "max-width": `${width * 1.25}px`, "min-width": `${heads > 16 ? width * 0.6 : 0}px` } },
      svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, svg("path", { d: "M0 6L6 0", "stroke-width": 1 }))),
      label("layer", 0, 11, "start"),
      ...[...Array(heads).keys()].filter((head) => head % steps === 0).map((head) => label(head, left + (head + 0.5) * size, 13, "middle")));
    layers.forEach((layer, line) => {
      const y = top + line * size;
      const group = svg("g", { role: "row" });
      if (line % steps === 0) group.append(label(layer, left - 9, y + size / 2 + 4, "end"));
      rows.filter((row) => run.heads.layer[row] === layer).forEach((row) => {
        const x = left + run.heads.head[row] * size;
        group.append(...cell(run, number, row, values, scale, name, { x, y, size, gap, line }));
      });
      picture.append(group);
    });
    picture.addEventListener("keydown", (event) => walk(event, picture));
    const first = picture.querySelector(".cell");
    if (first) first.setAttribute("tabindex", "0");
    return html("div", { class: "map" }, title ? html("h3", {}, title) : null, html("div", { class: "box" }, picture),
      legend ? html("div", { class: "legend" }, ...legend) : null);
  }

  function cell(run, number, row, values, scale, name, { x, y, size, gap, line }) {
    const value = values[row];
    const box = { x: x + gap / 2, y: y + gap / 2, width: size - gap, height: size - gap, rx: size > 20 ? 2 : 1 };
    const error = values === column(run, "heads", name) ? showError(name, column(run, "heads", name + "_se")[row]) : "";
    const unit = QUANTITIES[name].unit ? " " + QUANTITIES[name].unit : "";
    const words = known(value) ? `${show(name, value)}${error ? " " + error : ""}${unit}` : "– " + reason(name);
    const title = place(run, "heads", row);
    const choose = () => { state.run = number; state.head = row; drawCard(); markCells(); };
    const rect = svg("rect", { ...box, class: known(value) ? "cell" : "cell none", role: "gridcell", tabindex: -1, "data-row": row,
      "data-line": line, "data-head": run.heads.head[row], "aria-label": `${title}: ${QUANTITIES[name].title} ${words}`, style: known(value) ? paint(scale, value) : {},
      onpointermove: (event) => showTip(event, title, words), onpointerleave: hideTip, onclick: choose,
      onfocus: (event) => { choose(); showTip(event, title, words); }, onblur: hideTip });
    if (size <= 40) return [rect];
    const text = svg("text", { class: "value", x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle", "font-size": 11,
      style: known(value) ? paint(scale, value) : {} }, short(name, value));
    return [rect, text];
  }

  function walk(event, picture) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!steps || !event.target.classList.contains("cell")) return;
    event.preventDefault();
    const [line, head] = [Number(event.target.dataset.line) + steps[0], Number(event.target.dataset.head) + steps[1]];
    const next = picture.querySelector(`.cell[data-line="${line}"][data-head="${head}"]`);
    if (!next) return;
    event.target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  function markCells() {
    document.querySelectorAll(".map .cursor, .map .named").forEach((mark) => mark.remove());
    document.querySelectorAll(".map svg").forEach((picture) => {
      const run = RUNS[picture.dataset.run];
      const outline = (rect, kind) => picture.append(svg("rect", { class: kind, x: rect.x.baseVal.value, y: rect.y.baseVal.value,
        width: rect.width.baseVal.value, height: rect.height.baseVal.value, rx: 2 }));
      picture.querySelectorAll(".cell").forEach((rect) => {
        const row = Number(rect.dataset.row);
        const at = [run.heads.stack[row], run.heads.layer[row], run.heads.head[row]];
        const named = state.named.some((where) => (where.length === 3 ? where : [at[0], ...where]).every((part, i) => part === at[i]));
        if (named) outline(rect, "named");
        if (row === state.head && RUNS.length === 1) outline(rect, "cursor");
      });
    });
  }

  function legendOf(scale, name, missing) {
    const gone = missing ? [html("span", {}, "– does not apply or could not be measured")] : [];
    if (scale.kind === "class") {
      const swatches = CLASSES.map((label, number) => html("span", {}, html("i", { class: "swatch", style: paint(scale, label) }), html("b", {}, " " + label), " " + CLASS_MEANING[number]));
      const lengths = [...new Set(RUNS.map((run) => run.row_length).filter(known))];
      const at = lengths.length ? `, on rows of about ${lengths.join(" and ")} tokens` : "";
      return [html("span", {}, `Share of the tokens in sight that takes 90 % of the attention${at}; classes change with this length:`), ...swatches, ...gone];
    }
    const ramp = (colors) => `linear-gradient(90deg, ${colors.join(", ")})`;
    const [low, middle, high] = scale.ends.map((value) => (known(value) ? show(name, value) : null));
    const unit = QUANTITIES[name].unit ? " " + QUANTITIES[name].unit : "";
    const between = middle === null ? "" : scale.kind === "diverging" ? `neutral at ${middle}` : "logarithmic";
    return [html("span", {}, low), html("span", { class: "ramp", style: { "--light": ramp(scale.colors[0]), "--dark": ramp(scale.colors[1]) } }),
      html("span", {}, high + unit), between ? html("span", {}, `(${between})`) : null, ...gone].filter(Boolean);
  }

  function drawCard() {
    const card = byId("card");
    if (!card) return;
    const run = RUNS[0], row = state.head;
    const lines = measured("heads").map((name) => {
      const value = column(run, "heads", name)[row];
      const error = showError(name, column(run, "heads", name + "_se")[row]);
      return html("tr", { class: name === state.quantity ? "now" : null }, html("td", {}, term(name)),
        html("td", known(value) ? {} : { title: reason(name) }, show(name, value), error ? html("small", {}, " " + error) : null));
    });
    const rows = column(run, "heads", "rows")[row];
    card.replaceChildren(html("h3", {}, place(run, "heads", row)),
      html("p", {}, [column(run, "heads", "name")[row], known(rows) ? `${rows} rows` : null].filter(Boolean).join(", ")),
      html("table", {}, html("tbody", {}, ...lines)));
  }

  function choose(name, named) {
    state.quantity = name;
    state.named = named || [];
    byId("quantity").value = name;
    byId("chips").querySelectorAll("button").forEach((chip) => chip.setAttribute("aria-pressed", String(chip.value === name)));
    drawMaps();
    drawCard();
    markCells();
  }

  // ---- profiles ----
  const charts = [];
  function styles() {
    const root = getComputedStyle(document.documentElement);
    const color = (name, print) => (printing ? print : root.getPropertyValue(name).trim());
    return { ink: color("--ink", "#1d1f24"), soft: color("--soft", "#5b5f68"), rule: color("--rule", "#e3dfd5"), accent: color("--accent", "#1f4f9c"),
      mark: color("--mark", "#b3541e"), page: color("--page", "#ffffff"), lines: DATA.colors.lines[isDark() ? 1 : 0] };
  }

  // A chart remembers how to draw itself, because a canvas does not follow the theme, the width or the printer.
  function addChart(parent, spec) {
    const readout = html("p", { class: "readout" });
    const canvas = html("div", { role: "img", "aria-label": `${spec.title}: ${spec.series.map((line) => `${line.label} ${line.values.map((value) => show(spec.name, value)).join(", ")}`).join("; ")}` });
    const box = html("div", { class: "profile", id: spec.id || null }, html("h4", {}, term(spec.name, spec.title)), readout, canvas);
    parent.append(box);
    const rest = () => { readout.textContent = spec.rest; };
    const chart = { plot: null, draw() {
      if (chart.plot) chart.plot.destroy();
      const width = printing ? (spec.wide ? 440 : 205) : Math.max(160, Math.floor(box.clientWidth));
      chart.plot = new uPlot(options(spec, width, (index) => {
        if (index === null || index === undefined) return rest();
        const parts = spec.series.filter((line) => !line.silent && known(line.values[index]))
          .map((line) => `${line.label} ${show(spec.name, line.values[index])}${line.errors && known(line.errors[index]) ? " " + showError(spec.name, line.errors[index]) : ""}`);
        readout.textContent = `layer ${spec.x[index]}: ${parts.join(", ")}`;
      }), [spec.x, ...spec.series.map((line) => line.values.map((value) => (known(value) ? value : null)))], canvas);
    } };
    rest();
    charts.push(chart);
    return chart;
  }

  function options(spec, width, read) {
    const style = styles();
    const font = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';
    const colorOf = (line) => (line.kind === "control" && RUNS.length === 1 ? style.soft : line.kind === "theory" ? style.mark
      : RUNS.length === 1 ? style.accent : style.lines[line.run % style.lines.length]);
    const look = { control: { dash: [5, 4], width: 1.5 }, theory: { dash: [2, 3], width: 1.5 }, edge: { width: 0 }, measured: { width: 2 } };
    return {
      width, height: spec.wide ? 210 : printing ? 130 : 165, legend: { show: false }, padding: [8, 6, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false }, sync: { key: "layers" } },
      scales: { x: { time: false, range: () => [spec.x[0] - 0.4, spec.x[spec.x.length - 1] + 0.4] }, y: spec.ratios ? { distr: 3 } : { range: (plot, low, high) => padded(low, high) } },
      axes: [
        { stroke: style.soft, font, size: 24, gap: 3, grid: { show: false }, ticks: { stroke: style.rule, size: 4 }, incrs: [1, 2, 5, 10, 20, 50], space: 26 },
        { stroke: style.soft, font, size: 46, gap: 4, grid: { stroke: style.rule, width: 1 }, ticks: { show: false }, space: 32,
          values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : String(Number(tick.toPrecision(6))).replace("-", "−"))) },
      ],
      series: [{}, ...spec.series.map((line) => ({
        ...look[line.kind], stroke: colorOf(line),
        points: { show: line.kind === "measured" || (line.kind === "control" && spec.x.length === 1), size: 5, fill: colorOf(line), width: 0 },
      }))],
      bands: (spec.bands || []).map((series) => ({ series, fill: style.accent + "26" })),
      hooks: { setCursor: [(plot) => read(plot.cursor.left >= 0 ? plot.cursor.idx : null)] },
    };
  }
  function padded(low, high) {
    if (low === null || high === null) return [0, 1];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }
  function trend(name, values) {
    const found = values.filter(known);
    return found.length < 2 ? show(name, found[0]) : `${show(name, found[0])} → ${show(name, found[found.length - 1])}`;
  }

  function addProfile(parent, name, stack, wanted) {
    const quantity = QUANTITIES[name];
    const runs = RUNS.map((run, number) => ({ run, number, rows: [...Array(length(run.layers)).keys()].filter((row) => run.layers.stack[row] === stack) }))
      .filter(({ run, rows }) => rows.some((row) => known(column(run, "layers", name)[row])));
    if (!runs.length) return;
    const x = [...new Set(runs.flatMap(({ run, rows }) => rows.map((row) => run.layers.layer[row])))].sort((a, b) => a - b);
    const along = (run, rows, key) => x.map((layer) => {
      const row = rows.find((candidate) => run.layers.layer[candidate] === layer);
      return row === undefined ? null : column(run, "layers", key)[row];
    });
    const single = RUNS.length === 1;
    const series = [];
    const bands = [];
    const addBand = (middle, half) => {
      for (const sign of [1, -1])
        series.push({ label: "", values: middle.map((value, at) => (known(value) && known(half[at]) ? value + sign * Math.abs(half[at]) : null)), kind: "edge", run: 0, silent: true });
      bands.push([series.length - 1, series.length]);
    };
    for (const { run, number, rows } of runs) {
      const label = single ? "" : run.name;
      const values = along(run, rows, name), errors = along(run, rows, name + "_se");
      series.push({ label, values, errors, kind: "measured", run: number });
      if (single && errors.some(known)) addBand(values, errors.map((error) => (known(error) ? 2 * error : null)));
      if (!quantity.control || !column(run, "layers", quantity.control).some(known)) continue;
      const control = along(run, rows, quantity.control);
      if (quantity.control !== "kurtosis_band") {
        series.push({ label: "control", values: control, errors: along(run, rows, quantity.control + "_se"), kind: "control", run: number, silent: !single });
      } else if (single) addBand(x.map(() => 0), control);
    }
    const level = known(quantity.predicted) ? quantity.predicted : quantity.neutral;
    if (known(level)) series.push({ label: known(quantity.predicted) ? "theory" : "no change", values: x.map(() => level), kind: "theory", run: 0, silent: !known(quantity.predicted) });
    const controls = series.find((line) => line.kind === "control");
    const rest = single ? `${trend(name, series[0].values)}${quantity.unit ? " " + quantity.unit : ""}${controls ? `, ctrl ${trend(name, controls.values)}` : ""}`
      : quantity.unit || "\u00a0";
    const shown = series.filter((line) => line.kind === "measured" || line.kind === "control").flatMap((line) => line.values).filter(known);
    const ratios = quantity.neutral === 1 && Math.min(...shown) > 0 && Math.max(...shown) > 8 * Math.min(...shown);
    addChart(parent, { name, title: quantity.title, id: wanted, x, series, bands, rest, ratios });
  }

  // A sentence where tokens were examined and none of them is massive: charts with and without them would be the same.
  function massless() {
    const all = (name) => RUNS.flatMap((run) => column(run, "layers", name)).filter(known);
    if (!all("massive_tokens").length || all("massive_tokens").some((count) => count > 0)) return null;
    const norms = all("massive_norm");
    return "No token is massive" + (norms.length ? `: the largest norm is ${show("massive_norm", Math.max(...norms))} times the median of its passage` : "") +
      ". Charts with massive tokens included would repeat those above and are not drawn.";
  }

  function drawLayerProfiles() {
    const parent = byId("layer-profiles");
    const names = measured("layers");
    if (!names.length) return parent.append(html("p", { class: "note" }, "The layers were not measured in this inspection."));
    const stacks = [...new Set(RUNS.flatMap((run) => stacksOf(run, "layers")))];
    for (const group of new Set(names.map((name) => QUANTITIES[name].group))) {
      parent.append(html("h3", {}, group));
      if (group === "Massive activations" && massless()) {
        parent.append(html("p", {}, massless()));
        continue;
      }
      stacks.forEach((stack, number) => {
        if (stacks.length > 1) parent.append(html("p", { class: "key" }, capital(stack)));
        const grid = html("div", { class: "profile-group" });
        parent.append(grid);
        names.filter((name) => QUANTITIES[name].group === group).forEach((name) => addProfile(grid, name, stack, number ? null : "profile-" + name));
      });
    }
  }

  const headCharts = [];
  function drawHeadProfile(name) {
    headCharts.splice(0).forEach((chart) => { if (chart.plot) chart.plot.destroy(); charts.splice(charts.indexOf(chart), 1); });
    const parent = byId("head-profile");
    parent.replaceChildren();
    if (QUANTITIES[name].scale === "class") return;
    for (const stack of new Set(RUNS.flatMap((run) => stacksOf(run, "heads")))) {
      const many = RUNS.some((run) => stacksOf(run, "heads").length > 1);
      const layers = [...new Set(RUNS.flatMap((run) => run.heads.layer.filter((layer, row) => run.heads.stack[row] === stack)))].sort((a, b) => a - b);
      const reduce = (run, how) => layers.map((layer) => {
        const values = column(run, "heads", name).filter((value, row) => known(value) && run.heads.stack[row] === stack && run.heads.layer[row] === layer);
        return values.length ? how(values) : null;
      });
      const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
      const single = RUNS.length === 1;
      const series = RUNS.map((run, number) => ({ label: single ? "mean" : run.name, values: reduce(run, mean), kind: "measured", run: number }));
      if (layers.length < 2 || !series.some((line) => line.values.some(known))) continue;
      if (single) {
        series.push({ label: "highest", values: reduce(RUNS[0], (values) => Math.max(...values)), kind: "edge", run: 0 });
        series.push({ label: "lowest", values: reduce(RUNS[0], (values) => Math.min(...values)), kind: "edge", run: 0 });
      }
      const chart = addChart(parent, { name, title: `${QUANTITIES[name].title} by layer${many ? ", " + stack : ""}`, x: layers, series, wide: !many && RUNS.length === 1,
        bands: single ? [[2, 3]] : [], rest: single ? "mean, lowest and highest head" : "mean over the heads" });
      headCharts.push(chart);
      chart.draw();
    }
  }

  // ---- tables ----
  function buildTable(parent) {
    const which = parent.dataset.table, run = RUNS[0], table = run[which];
    const names = measured(which);
    if (!length(table) || !names.length) return parent.append(html("p", { class: "note" }, "Nothing was measured for this table."));
    const stacks = stacksOf(run, which);
    const keys = [...(stacks.length > 1 ? ["stack"] : []), "layer", ...(which === "heads" ? ["head"] : []), ...names];
    // The columns that name a row stay in sight, one beside the other.
    const wide = { stack: 5.5, layer: 4.2, head: 4.2 };
    const pinned = (number) => ({ left: `${keys.slice(0, number).reduce((sum, key) => sum + wide[key], 0)}rem`, "min-width": `${wide[keys[number]]}rem` });
    const sorting = { key: null, up: true };
    let all = length(table) <= FEW_ROWS;
    const body = html("tbody", {});
    const more = html("button", { type: "button", onclick: () => { all = true; draw(); } });
    const kind = (key) => [QUANTITIES[key] ? "n" : "", PRINTED.includes(key) ? "" : "screen"].join(" ").trim() || null;
    const headings = keys.map((key, number) => {
      const quantity = QUANTITIES[key];
      return html("th", { scope: "col", class: kind(key), "data-key": key, style: quantity ? {} : { ...pinned(number), "z-index": 2 } },
        html("button", { type: "button", class: quantity ? "term" : null, "data-term": "q-" + key, onclick: () => { sorting.up = sorting.key === key ? !sorting.up : true; sorting.key = key; draw(); } }, quantity ? quantity.title : capital(key)),
        quantity ? html("a", { class: "help", href: "#q-" + key, "aria-label": `Meaning of ${quantity.title}` }, "?") : null,
        quantity && quantity.unit ? html("small", {}, quantity.unit) : null);
    });
    function line(row) {
      return html("tr", {}, ...keys.map((key, number) => {
        const value = column(run, which, key)[row], quantity = QUANTITIES[key];
        if (!quantity) return html("th", { scope: "row", style: pinned(number) }, String(value));
        const error = showError(key, column(run, which, key + "_se")[row]);
        const control = quantity.control ? column(run, which, quantity.control)[row] : null;
        const beside = error || (known(control) ? (quantity.control === "kurtosis_band" ? "± " : "ctrl ") + show(key, control) : "");
        return html("td", { class: kind(key), "data-value": known(value) ? value : "", title: known(value) ? null : reason(key) }, show(key, value), beside ? html("small", {}, " " + beside) : null);
      }));
    }
    function draw() {
      const rows = [...Array(length(table)).keys()];
      if (sorting.key) {
        const values = column(run, which, sorting.key);
        const of = (row) => (sorting.key === "stack" ? stacks.indexOf(values[row]) : rank(values[row]));
        rows.sort((a, b) => (!known(values[a]) || !known(values[b]) ? known(values[b]) - known(values[a]) : (sorting.up ? 1 : -1) * (of(a) - of(b))));
      }
      body.replaceChildren(...(all ? rows : rows.slice(0, FEW_ROWS)).map(line));
      more.hidden = all;
      more.textContent = `Show all ${rows.length} rows`;
      headings.forEach((heading) => {
        if (heading.dataset.key === sorting.key) heading.setAttribute("aria-sort", sorting.up ? "ascending" : "descending");
        else heading.removeAttribute("aria-sort");
      });
    }
    draw();
    const box = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": capital(which) },
      html("table", { class: "plain" }, html("thead", {}, html("tr", {}, ...headings)), body));
    const hint = html("span", {}, "Press a heading to sort. " + (which === "heads" ? "± is a standard error." : "ctrl is the control, ± a standard error, or the sampling band of Gaussianity."));
    parent.append(html("div", { class: "tablebar" }, hint, more), box);
    const absent = Object.keys(QUANTITIES).filter((name) => QUANTITIES[name].table === which && !column(run, which, name).some(known) && QUANTITIES[name].group !== "Controls");
    if (absent.length) parent.append(html("p", { class: "note" }, `Without a value in this inspection, because they do not apply or were not requested: ${absent.map((name) => QUANTITIES[name].title).join("; ")}.`));
    parent.showAll = () => { all = true; draw(); };
  }

  function makeSortable(table) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, number) => {
      const text = heading.textContent;
      const value = (row) => {
        const field = row.cells[number], raw = field.dataset.value !== undefined ? field.dataset.value : field.textContent.replace("−", "-");
        return raw === "" || raw === "–" ? null : isNaN(Number(raw)) ? raw : Number(raw);
      };
      heading.replaceChildren(html("button", { type: "button", onclick: () => {
        const up = heading.getAttribute("aria-sort") !== "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const [first, second] = [value(a), value(b)];
          return first === null || second === null ? (second !== null) - (first !== null) : (up ? 1 : -1) * order(first, second);
        });
        table.tBodies[0].append(...rows);
      } }, text));
    });
  }

  // ---- theme, width, printer ----
  function redraw() {
    const style = styles();
    document.querySelectorAll("[data-run].line, .runs [data-run]").forEach((element) => element.style.setProperty("--run", style.lines[element.dataset.run % style.lines.length]));
    charts.forEach((chart) => chart.draw());
  }
  function setTheme(theme, keep) {
    document.documentElement.dataset.theme = theme;
    if (keep) try { localStorage.setItem("massieu-theme", theme); } catch (error) { /* files may not have storage */ }
    redraw();
  }
  let chosen = false;
  byId("theme").addEventListener("click", () => { chosen = true; setTheme(isDark() ? "light" : "dark", true); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { if (!chosen) setTheme(event.matches ? "dark" : "light", false); });
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll(".table").forEach((table) => table.showAll && table.showAll());
    redraw();
  });
  addEventListener("afterprint", () => { printing = false; redraw(); });
  let waiting = null, width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width || printing) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 120);
  });

  // ---- begin ----
  const names = measured("heads");
  if (names.length) {
    byId("chips").append(...FAVORITES.filter((name) => names.includes(name)).map((name) =>
      html("button", { type: "button", class: "term", "data-term": "q-" + name, value: name, "aria-pressed": "false", onclick: () => choose(name) }, QUANTITIES[name].title)));
    byId("quantity").querySelectorAll("option").forEach((option) => { if (!names.includes(option.value)) option.remove(); });
    byId("quantity").querySelectorAll("optgroup").forEach((group) => { if (!group.children.length) group.remove(); });
    byId("quantity").addEventListener("change", (event) => choose(event.target.value));
    const start = names.includes("entropy") ? "entropy" : names[0];
    const entropies = column(RUNS[0], "heads", start).map((value) => (typeof value === "number" ? value : Infinity));
    state.head = Math.max(0, entropies.indexOf(Math.min(...entropies)));
    choose(start);
  } else {
    byId("map").querySelector(".tools").remove();
    byId("maps").append(html("p", { class: "note" }, "No head was measured in this inspection."));
  }
  const key = byId("run-key");
  if (key) RUNS.forEach((run, number) => key.append(html("span", { class: "line", "data-run": number }), run.name));
  if (key) key.append(html("span", { class: "line control" }), "control", html("span", { class: "line theory" }), "theory or no change");
  drawLayerProfiles();
  redraw();
  document.querySelectorAll(".table").forEach(buildTable);
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll(".show").forEach((link) => link.addEventListener("click", () => {
    const found = link.dataset.finding !== undefined ? DATA.findings[link.dataset.finding] : { quantity: link.dataset.quantity, where: [] };
    if (QUANTITIES[found.quantity].table === "heads" && names.includes(found.quantity)) choose(found.quantity, found.where || []);
    document.querySelectorAll(".profile.lit").forEach((lit) => lit.classList.remove("lit"));
    const profile = byId("profile-" + found.quantity);
    if (profile) profile.classList.add("lit");
  }));
  document.documentElement.dataset.ready = "true";
})();
