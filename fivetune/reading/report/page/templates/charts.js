// Draws a figure as SVG, in the form that page/charts.py builds: a part of Plotly's, `data` and `layout` as plain objects.
// Colours are the page's CSS variables, so that one drawing serves light and dark.
const charts = (() => {
  "use strict";
  const DASHES = { dash: "7 5", dot: "1.5 3.5", dashdot: "7 4 1.5 4", longdash: "12 5" };
  const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif";
  const TEXT = 12, SMALL = 11; // px
  const NARROW = 480; // px; below, the name of a row is above its mark
  const NEAR = 24; // px from the pointer to what it shows
  const MAX_ROWS = 24; // of a label
  const canvas = document.createElement("canvas").getContext("2d");

  function make(tag, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // --- words ---

  function measure(text, size = TEXT) {
    canvas.font = `${size}px ${FONT}`;
    return canvas.measureText(text).width;
  }

  function shorten(text, width, size = TEXT) {
    if (measure(text, size) <= width) return text;
    let end = text.length;
    while (end > 1 && measure(`${text.slice(0, end)}\u2026`, size) > width) end--;
    return `${text.slice(0, end).trimEnd()}\u2026`;
  }

  function formatNumber(value, digits = 6) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e9)) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
    return value.toLocaleString("en-US", { maximumSignificantDigits: digits }).replace("-", "\u2212");
  }

  // A value in the format of a label: ".2f" has decimals, ".4~g" significant digits, "," is a whole number.
  function format(value, spec) {
    if (typeof value !== "number") return String(value ?? "");
    const digits = Number(/\.(\d+)/.exec(spec)?.[1] ?? 6);
    if (!spec.endsWith("f")) return formatNumber(value, digits);
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "\u2212");
  }

  // "%{y:.2f} at %{x}" and the values of a point.
  function fillIn(template, values) {
    return template.replace(/%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}/g, (_, name, place, spec = "") =>
      format(place === undefined ? values[name] : values[name][place], spec));
  }

  // --- axes ---

  const isName = (axis, values) => axis.type === "category" || values.some((value) => typeof value === "string");

  function listValues(traces, letter) {
    return traces.flatMap((trace) => trace[letter] ?? []).filter((value) => value !== null);
  }

  // An axis: its ends, and the number of each value on it; a name's number is its place, that of a log axis its logarithm.
  function makeAxis(letter, axis, traces, isStacked) {
    const given = listValues(traces, letter);
    const bars = traces.filter((trace) => trace.type === "bar");
    const isLength = (trace) => (trace.orientation === "h") === (letter === "x");
    if (isName(axis, given)) {
      const names = [...new Set(given.map(String))];
      const places = new Map(names.map((name, place) => [name, place]));
      return { names, low: -0.5, high: names.length - 0.5, isReversed: axis.autorange === "reversed", place: (value) => places.get(String(value)) };
    }
    const isLog = axis.type === "log";
    const place = isLog ? (value) => (value > 0 ? Math.log10(value) : NaN) : Number;
    const values = given.map(place);
    for (const trace of traces) {
      const error = trace[`error_${letter}`];
      if (error) trace[letter].forEach((value, i) => value !== null && values.push(place(value - error.arrayminus[i]), place(value + error.array[i])));
      if (trace.type === "bar" && !isLength(trace)) {
        trace[letter].forEach((value, i) => values.push(value - (trace.width?.[i] ?? 0) / 2, value + (trace.width?.[i] ?? 0) / 2));
      }
    }
    if (bars.some(isLength)) values.push(0);
    if (isStacked && bars.some(isLength)) {
      const sums = new Map();
      const other = letter === "x" ? "y" : "x";
      for (const bar of bars) bar[other].forEach((row, i) => sums.set(row, (sums.get(row) ?? 0) + (bar[letter][i] ?? 0)));
      values.push(...sums.values());
    }
    const finite = values.filter(Number.isFinite);
    let low = finite.reduce((one, other) => Math.min(one, other), Infinity);
    let high = finite.reduce((one, other) => Math.max(one, other), -Infinity);
    if (axis.range) [low, high] = axis.range;
    else if (!finite.length || (low === 0 && high === 0)) [low, high] = [0, 1];
    else {
      const isWide = letter === "y" || bars.some(isLength) || traces.some((trace) => (trace.mode ?? "").includes("markers"));
      const spare = (high - low || Math.abs(low) || 1) * (isWide ? 0.05 : 0);
      const fromZero = !isLog && (axis.rangemode === "tozero" || bars.some(isLength));
      [low, high] = [fromZero && low >= 0 ? 0 : low - spare, fromZero && high <= 0 ? 0 : high + spare];
      if (fromZero && low > 0) low = 0;
      if (low === high) [low, high] = [low - 0.5, high + 0.5];
    }
    return { low, high, isLog, place, isWhole: !isLog && given.every(Number.isInteger) };
  }

  // Ticks of an axis, about `num`: round numbers, powers of ten on a log axis, or all names.
  function listTicks(axis, num) {
    const { low, high } = axis;
    if (axis.names) return axis.names.map((name, at) => ({ at, text: name }));
    const ticks = [];
    if (axis.isLog) {
      const every = Math.max(1, Math.ceil((high - low) / num));
      const within = high - low < 1 ? [1, 2, 3, 5, 7] : high - low < 2 ? [1, 2, 5] : [1];
      for (let power = Math.floor(low); power <= high; power++) {
        for (const factor of every > 1 && power % every ? [] : within) {
          const at = power + Math.log10(factor);
          if (at >= low - 1e-9 && at <= high + 1e-9) ticks.push({ at, text: formatNumber(Number((10 ** at).toPrecision(2))) });
        }
      }
      return ticks;
    }
    const rough = (high - low) / num;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.7);
    if (axis.isWhole) step = Math.max(1, step);
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      ticks.push({ at: i * step, text: formatNumber(Number((i * step).toPrecision(10))) });
    }
    return ticks;
  }

  // --- marks ---

  const SYMBOLS = {
    circle: (r) => `M${-r},0a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`,
    diamond: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`,
    square: (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
    "triangle-up": (r) => `M0,${-1.2 * r}L${1.1 * r},${0.8 * r}H${-1.1 * r}Z`,
    x: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
    "line-ns": (r) => `M0,${-r}V${r}`,
  };

  function drawSymbol({ symbol = "circle", size = 6, line }, color, x, y) {
    const kind = symbol.replace("-open", "");
    const isHollow = symbol !== kind || kind === "x" || kind === "line-ns";
    const look = isHollow
      ? { fill: "var(--paper)", "fill-opacity": kind in { x: 1, "line-ns": 1 } ? 0 : 0.6, stroke: color, "stroke-width": line?.width ?? 1.5 }
      : { fill: color };
    return make("path", { d: SYMBOLS[kind](size / 2), transform: `translate(${round(x)},${round(y)})`, ...look });
  }

  const round = (value) => Math.round(10 * value) / 10;
  const colorAt = (color, i) => (Array.isArray(color) ? color[i] : color);
  const colorOf = (trace, i = 0) =>
    trace.fillcolor ?? (trace.mode === "markers" || trace.type === "bar" ? colorAt(trace.marker?.color, i) : trace.line?.color) ?? "var(--series-1)";

  // A line through points (null: a gap); a point between two gaps is a dot.
  function tracePath(points, isStairs) {
    let path = "";
    let before = null;
    points.forEach((point, i) => {
      if (point && before) path += isStairs ? `H${round(point[0])}V${round(point[1])}` : `L${round(point[0])},${round(point[1])}`;
      else if (point) path += `M${round(point[0])},${round(point[1])}${points[i + 1] ? "" : "h0"}`;
      before = point;
    });
    return path;
  }

  // --- a chart ---

  const isShown = (hidden, trace) => !hidden.has(trace.meta) && !hidden.has(`chart ${trace.name}`);

  function listEntries({ data, layout }) {
    if (layout.showlegend === false) return [];
    const entries = new Map();
    for (const trace of data) if (trace.name && trace.showlegend !== false && !entries.has(trace.name)) entries.set(trace.name, trace);
    return entries.size > 1 ? [...entries] : [];
  }

  function drawSample(trace) {
    const color = colorOf(trace);
    const sample = make("g");
    if (trace.fill || trace.type === "bar") sample.append(make("rect", { x: 2, y: -9, width: 16, height: 10, fill: color, "fill-opacity": trace.marker?.opacity }));
    else {
      const line = trace.line ?? {};
      if (trace.mode !== "markers") {
        sample.append(make("path", { d: "M0,-4H20", stroke: color, "stroke-width": line.width ?? 2, "stroke-dasharray": DASHES[line.dash], opacity: trace.opacity }));
      }
      if ((trace.mode ?? "").includes("markers")) sample.append(drawSymbol({ ...trace.marker, size: Math.min(10, trace.marker?.size ?? 6) }, colorAt(trace.marker?.color, 0) ?? color, 10, -4));
    }
    return sample;
  }

  // The sample as a picture of its own, for a legend beside the charts.
  const drawPicture = (trace) => make("svg", { width: 22, height: 12, viewBox: "-1 -10 22 12", fill: "none", "aria-hidden": "true" }, drawSample(trace));

  // The legend in rows above the plot; a click on a name hides its lines. Returns its height.
  function drawLegend(svg, figure, width, hidden, redraw) {
    let x = 0, y = 14;
    const entries = listEntries(figure);
    for (const [name, trace] of entries) {
      const text = shorten(name, width - 30);
      const size = 26 + measure(text) + 18;
      if (x && x + size - 18 > width) [x, y] = [0, y + 19];
      const label = make("text", { x: 26, fill: "var(--ink)" }, text);
      const key = `chart ${name}`;
      const entry = make("g", { class: "entry", transform: `translate(${round(x)},${y})`, opacity: isShown(hidden, trace) ? 1 : 0.4 }, drawSample(trace), label);
      entry.addEventListener("click", () => {
        hidden[hidden.has(key) ? "delete" : "add"](key);
        redraw();
      });
      svg.append(entry);
      x += size;
    }
    return entries.length ? y + 10 : 0;
  }

  // Draws a figure `width` pixels wide. `hidden` has the `meta` and names of the traces that are switched off, `zoom`
  // the ends of the x axis. Returns the SVG, and what a pointer finds in it.
  function draw(figure, width, hidden, zoom, redraw) {
    const { data, layout } = figure;
    const isStacked = layout.barmode === "stack";
    const shown = data.filter((trace) => isShown(hidden, trace));
    const xLayout = layout.xaxis ?? {};
    const xAxis = makeAxis("x", zoom ? { ...xLayout, range: zoom } : xLayout, data, isStacked);
    const lanes = Object.keys(layout)
      .filter((name) => name.startsWith("yaxis"))
      .map((name) => {
        const own = name.replace("axis", "");
        const traces = data.filter((trace) => (trace.yaxis ?? "y") === own);
        return { layout: layout[name], axis: makeAxis("y", layout[name], traces, isStacked), traces: traces.filter((trace) => shown.includes(trace)) };
      });
    const isMatrix = data.some((trace) => trace.type === "heatmap");
    const names = lanes[0].axis.names;
    const above = names && width < NARROW && !isMatrix; // names above their marks, in higher rows
    const height = layout.height + (above ? 12 * names.length : 0);
    const svg = make("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": TEXT, fill: "none" });

    // Margins: the legend, the names or numbers of the axes, and their titles.
    const legendHeight = drawLegend(svg, figure, width, hidden, redraw);
    const top = Math.max(legendHeight, 8) + (lanes.length > 1 ? 0 : 4);
    const yTitle = lanes.map((lane) => lane.layout.title?.text).find(Boolean) ?? "";
    const xTitle = xLayout.title?.text ?? "";
    const titled = yTitle ? 20 : 0;
    let left = 10 + titled;
    let bottom = 20 + (xTitle ? 20 : 0);
    const numY = (lane) => lane.layout.nticks ?? Math.max(2, Math.floor((height - top - bottom) / lanes.length / 42));
    for (const lane of lanes) {
      lane.ticks = listTicks(lane.axis, numY(lane));
      if (above) continue;
      const longest = Math.max(0, ...lane.ticks.map((tick) => measure(tick.text)));
      left = Math.max(left, 10 + titled + Math.min(longest, 0.4 * width));
    }
    const right = width - 16;
    // Names under the plot are cut where that leaves enough of them, and turned where it does not.
    const across = xAxis.names ? (right - left) / xAxis.names.length : 0;
    const longest = Math.max(0, ...(xAxis.names ?? []).map((name) => measure(name)));
    const isTurned = longest > across - 6 && across < 70;
    if (isTurned && xAxis.names) bottom += Math.min(longest, 110) - 6;
    const floor = height - bottom;
    const toX = (number) => left + ((number - xAxis.low) / (xAxis.high - xAxis.low)) * (right - left);
    for (const lane of lanes) {
      const [low, high] = lane.layout.domain ?? [0, 1];
      lane.bottom = floor - low * (floor - top);
      lane.top = floor - high * (floor - top);
      const { axis } = lane;
      const [from, to] = axis.isReversed ? [lane.top, lane.bottom] : [lane.bottom, lane.top];
      lane.toY = (number) => from + ((number - axis.low) / (axis.high - axis.low)) * (to - from);
      lane.rowHeight = axis.names ? (lane.bottom - lane.top) / Math.max(axis.names.length, 1) : 0;
      if (above) {
        const toRow = lane.toY;
        lane.toY = (number) => toRow(number) + 7;
      }
    }

    // Grid, ticks and titles.
    const muted = { fill: "var(--muted)" };
    const back = make("g", { stroke: "var(--grid)" });
    const words = make("g", muted);
    const xTicks = listTicks(xAxis, Math.max(2, Math.floor((right - left) / 65)));
    let free = -Infinity;
    for (const { at, text } of xTicks) {
      const x = round(toX(at));
      if (xLayout.showgrid) back.append(make("path", { d: lanes.map((lane) => `M${x},${round(lane.top)}V${round(lane.bottom)}`).join("") }));
      if (xAxis.names && isTurned) {
        words.append(make("text", { transform: `translate(${x + 4},${floor + 10}) rotate(-90)`, "text-anchor": "end" }, shorten(text, 110)));
        continue;
      }
      const word = xAxis.names ? shorten(text, across - 6) : text;
      const half = measure(word) / 2;
      if (x - half < free || x - half < 0) continue;
      free = x + half + 8;
      words.append(make("text", x + half > width ? { x: width, y: floor + 17, "text-anchor": "end" } : { x, y: floor + 17, "text-anchor": "middle" }, word));
    }
    for (const lane of lanes) {
      for (const { at, text } of lane.ticks) {
        const y = round(lane.toY(at));
        if (lane.layout.showgrid ?? true) back.append(make("path", { d: `M${left},${y}H${right}` }));
        if (above) {
          words.append(make("text", { x: 0, y: round(y + 5 - lane.rowHeight / 2) }, shorten(text, right)));
          continue;
        }
        const label = make("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, shorten(text, left - titled - 10));
        if (lane.axis.names) label.append(make("title", {}, text));
        words.append(label);
      }
      if (xLayout.showline ?? true) back.append(make("path", { d: `M${left},${round(lane.bottom)}H${right}` }));
    }
    if (xTitle) words.append(make("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, shorten(xTitle, right - left)));
    if (yTitle) words.append(make("text", { transform: `translate(12,${round((top + floor) / 2)}) rotate(-90)`, "text-anchor": "middle" }, shorten(yTitle, floor - top + 20)));
    const rules = make("g");
    const clip = make("svg", { x: left, y: top - 2, width: right - left, height: floor - top + 4, viewBox: `${left} ${top - 2} ${right - left} ${floor - top + 4}`, overflow: "hidden" });
    const front = make("g");
    svg.append(back, words, rules, clip, front);

    // Traces; `points` is what a pointer finds.
    const points = [];
    const isInside = (x, y) => x >= left - 1 && x <= right + 1 && y >= top - 1 && y <= floor + 1;
    for (const lane of lanes) {
      const ends = new Map(); // of stacked bars
      for (const trace of lane.traces) {
        const toPoint = (x, y) => {
          const [px, py] = [toX(xAxis.place(x)), lane.toY(lane.axis.place(y))];
          return x === null || y === null || !Number.isFinite(px + py) ? null : [px, py];
        };
        const add = (i, x, y, more = {}) => {
          if (trace.hoverinfo !== "skip" && isInside(x, y)) points.push({ trace, lane, i, x, y, ...more });
        };
        if (trace.type === "heatmap") drawMatrix(trace, toPoint, add);
        else if (trace.type === "bar") drawBars(trace, lane, toPoint, add, ends);
        else drawScatter(trace, lane, trace.x.map((x, i) => toPoint(x, trace.y[i])), add);
      }
    }

    function drawMatrix(trace, toPoint, add) {
      const across = (right - left) / trace.x.length, down = lanes[0].rowHeight;
      trace.y.forEach((row, i) => trace.x.forEach((column, j) => {
        const [x, y] = toPoint(column, row);
        const share = (trace.z[i][j] - trace.zmin) / (trace.zmax - trace.zmin);
        const cell = { x: round(x - across / 2 + 1), y: round(y - down / 2 + 1), width: round(across - 2), height: round(down - 2) };
        clip.append(make("rect", { ...cell, fill: trace.colorscale[0][1] }), make("rect", { ...cell, fill: trace.colorscale[1][1], "fill-opacity": share.toFixed(3) }));
        const text = format(trace.text[i][j], ",");
        if (measure(text) < across - 2) front.append(make("text", { x: round(x), y: round(y + 4), "text-anchor": "middle", fill: share > 0.6 ? "var(--paper)" : "var(--ink)" }, text));
        add(i, x, y, { box: [x - across / 2, y - down / 2, x + across / 2, y + down / 2], values: { x: column, y: row, z: trace.z[i][j], text: trace.text[i][j] } });
      }));
    }

    function drawBars(trace, lane, toPoint, add, ends) {
      const isLying = trace.orientation === "h";
      const room = above ? lane.rowHeight - 17 : Infinity;
      trace.x.forEach((_, i) => {
        const [row, length] = isLying ? [trace.y[i], trace.x[i]] : [trace.x[i], trace.y[i]];
        if (length === null) return;
        const start = isStacked ? ends.get(row) ?? 0 : 0;
        ends.set(row, start + length);
        const from = isLying ? toPoint(start, row) : toPoint(row, start);
        const to = isLying ? toPoint(start + length, row) : toPoint(row, start + length);
        if (!from || !to) return;
        const thick = Math.min(room, isLying ? lane.rowHeight * (1 - (layout.bargap ?? 0.2)) : Math.abs(toX((trace.width?.[i] ?? 0.8) + xAxis.low) - left));
        const box = isLying
          ? [Math.min(from[0], to[0]), from[1] - thick / 2, Math.max(from[0], to[0]), from[1] + thick / 2]
          : [from[0] - thick / 2, Math.min(from[1], to[1]), from[0] + thick / 2, Math.max(from[1], to[1])];
        clip.append(make("rect", { x: round(box[0]), y: round(box[1]), width: round(box[2] - box[0]), height: round(box[3] - box[1]), fill: colorOf(trace, i), "fill-opacity": trace.marker?.opacity }));
        if (trace.text && measure(trace.text[i], SMALL) < thick + 14) front.append(make("text", { x: round(to[0]), y: round(to[1] - 4), "text-anchor": "middle", "font-size": SMALL, ...muted }, trace.text[i]));
        add(i, isLying ? (box[0] + box[2]) / 2 : to[0], to[1], { box });
      });
    }

    function drawScatter(trace, lane, places, add) {
      const line = trace.line ?? {}, marker = trace.marker ?? {}, mode = trace.mode ?? "lines";
      const color = colorOf(trace);
      for (const letter of ["x", "y"]) {
        const error = trace[`error_${letter}`];
        if (error) front.append(make("path", { d: traceErrors(trace, error, letter, lane), stroke: error.color, "stroke-width": error.thickness }));
      }
      if (trace.fill) clip.append(make("path", { d: tracePath(places, false), fill: color }));
      else if (mode.includes("lines")) {
        clip.append(make("path", { d: tracePath(places, line.shape === "hv"), stroke: color, "stroke-width": line.width ?? 2, "stroke-dasharray": DASHES[line.dash], "stroke-linejoin": "round", "stroke-linecap": line.dash && line.dash !== "solid" ? "butt" : "round", opacity: trace.opacity }));
      }
      places.forEach((place, i) => {
        if (!place || !isInside(...place)) return;
        if (mode.includes("markers")) front.append(drawSymbol(marker, colorAt(marker.color, i) ?? color, ...place));
        add(i, ...place);
      });
    }

    function traceErrors(trace, error, letter, lane) {
      return trace.x.map((x, i) => {
        const middle = trace[letter][i];
        if (middle === null || x === null || trace.y[i] === null || (!error.array[i] && !error.arrayminus[i])) return "";
        const [low, high] = [middle - error.arrayminus[i], middle + error.array[i]];
        const [y, at] = [lane.toY(lane.axis.place(trace.y[i])), toX(xAxis.place(x))];
        if (letter === "x") {
          const [from, to] = [low, high].map((value) => round(Math.min(right, Math.max(left, toX(xAxis.place(value))))));
          return `M${from},${round(y)}H${to}M${from},${round(y - 4)}v8M${to},${round(y - 4)}v8`;
        }
        const [from, to] = [low, high].map((value) => round(lane.toY(lane.axis.place(value))));
        return `M${round(at)},${from}V${to}M${round(at - 4)},${from}h8M${round(at - 4)},${to}h8`;
      }).join("");
    }

    // Lines across the plot, and their labels.
    for (const shape of layout.shapes ?? []) {
      if (shape.yref === "paper" && !isInside(toX(xAxis.place(shape.x0)), top)) continue;
      const d = shape.yref === "paper"
        ? `M${round(toX(xAxis.place(shape.x0)))},${top}V${floor}`
        : `M${left},${round(lanes[0].toY(lanes[0].axis.place(shape.y0)))}H${right}`;
      rules.append(make("path", { d, stroke: shape.line.color, "stroke-width": shape.line.width, "stroke-dasharray": DASHES[shape.line.dash] }));
    }
    for (const note of layout.annotations ?? []) {
      const x = note.xref === "paper" ? left + note.x * (right - left) : toX(xAxis.place(note.x));
      const y = note.yref === "paper" ? floor - note.y * (floor - top) : lanes[0].toY(lanes[0].axis.place(note.y));
      if (!isInside(x, Math.max(y, top))) continue;
      const isLeft = (note.xanchor ?? "left") === "left" && x + measure(note.text, SMALL) + 4 <= width;
      front.append(make("text", {
        x: round(x + (isLeft ? 4 : -4)), y: round(note.yanchor === "top" ? y + 12 : y - 4), "text-anchor": isLeft ? "start" : "end", "font-size": SMALL,
        fill: note.font?.color ?? "var(--muted)", stroke: "var(--paper)", "stroke-width": 3, "paint-order": "stroke",
      }, note.text));
    }
    const guide = make("path", { stroke: "var(--muted)", "stroke-width": 1, "stroke-dasharray": "2 3", visibility: "hidden" });
    svg.append(guide);
    return { svg, points, guide, left, right, top, floor, xAxis, mode: layout.hovermode ?? "x unified" };
  }

  // --- what a pointer finds ---

  const nearest = (points, distance) => points.reduce((best, point) => (best === null || distance(point) < distance(best) ? point : best), null);

  function describe({ trace, i, values }, withX) {
    const point = values ?? { x: trace.x[i], y: trace.y[i], text: trace.text?.[i], customdata: trace.customdata?.[i] };
    const words = fillIn(trace.hovertemplate ?? "%{y:.4~g}", point);
    const name = trace.name ?? (typeof point.y === "string" && !values ? point.y : "");
    const row = withX && typeof point.y === "string" && point.y !== name ? `${point.y}: ` : "";
    return { name, color: colorOf(trace, i), words: row + words };
  }

  // The label at a place of a chart: its title, its rows, where it stands; null where nothing is near.
  function find(chart, x, y) {
    const { points, mode } = chart;
    if (!points.length) return null;
    const box = points.find(({ box }) => box && x >= box[0] && x <= box[2] && y >= box[1] && y <= box[3]);
    if (mode === "closest" || (box && mode !== "y unified")) {
      const distance = (point) => Math.hypot(point.x - x, point.y - y);
      const found = box ?? nearest(points.filter((point) => !point.box), distance);
      return found && (found.box || distance(found) <= NEAR) ? { title: "", rows: [describe(found, true)], x: found.x, y: found.y } : null;
    }
    if (mode === "y unified") {
      const row = nearest(points, (point) => Math.abs(point.y - y));
      const name = row.trace.y[row.i];
      return { title: name, rows: points.filter((point) => point.trace.y[point.i] === name).map((point) => describe(point, false)), x, y: row.y };
    }
    const first = nearest(points, (point) => Math.abs(point.x - x));
    const found = new Map(); // the nearest of each trace
    for (const point of points) {
      const away = Math.abs(point.x - first.x);
      if (away <= NEAR / 2 && (!found.has(point.trace) || away < Math.abs(found.get(point.trace).x - first.x))) found.set(point.trace, point);
    }
    let rows = [...found.values()];
    if (rows.length > MAX_ROWS) rows = rows.filter(({ lane }) => y >= lane.top && y <= lane.bottom).slice(0, MAX_ROWS);
    return { title: format(first.trace.x[first.i], ".6~g"), rows: rows.map((point) => describe(point, false)), x: first.x, y, isLine: true };
  }

  // The value of the x axis at a place, and the place of a value.
  const toValue = ({ left, right, xAxis }, x) => xAxis.low + ((x - left) / (right - left)) * (xAxis.high - xAxis.low);
  const toPlace = ({ left, right, xAxis }, value) => left + ((value - xAxis.low) / (xAxis.high - xAxis.low)) * (right - left);

  // --- files ---

  // A row per point: its series, its place on both axes, the ends of its intervals.
  function writeCsv({ data, layout }) {
    const title = (start) => Object.keys(layout).sort().filter((name) => name.startsWith(start)).map((name) => layout[name].title?.text).find(Boolean) ?? "name";
    const [x, y] = [title("xaxis"), layout.meta ?? title("yaxis")];
    const bars = ["x", "y"].filter((letter) => data.some((trace) => trace[`error_${letter}`]));
    const isMatrix = data.some((trace) => trace.type === "heatmap");
    const lines = [["series", x, y, ...bars.flatMap((letter) => [`${letter} low`, `${letter} high`]), ...(isMatrix ? ["number", "per cent"] : [])]];
    for (const trace of data) {
      if (isMatrix) trace.y.forEach((row, i) => trace.x.forEach((column, j) => lines.push([trace.name, column, row, trace.text[i][j], trace.z[i][j]])));
      else {
        trace.x.forEach((at, i) => {
          const ends = bars.flatMap((letter) => {
            const error = trace[`error_${letter}`], middle = trace[letter][i];
            return error && middle !== null ? [middle - error.arrayminus[i], middle + error.array[i]] : ["", ""];
          });
          lines.push([trace.name, at, trace.y[i], ...ends]);
        });
      }
    }
    const quote = (cell) => (/[",\n\r]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell);
    return lines.map((line) => `${line.map((cell) => quote(String(cell ?? ""))).join(",")}\n`).join("");
  }

  // The drawing as a file of its own: colours in place of the page's variables.
  function writeSvg(figure, width, hidden, zoom, style) {
    const { svg, guide } = draw(figure, width, hidden, zoom);
    guide.remove();
    const text = new XMLSerializer().serializeToString(svg);
    return text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  }

  return { draw, drawPicture, find, toPlace, toValue, writeCsv, writeSvg };
})();
