"use strict";
const EVERY_SECONDS = 2, CURVES_SECONDS = 10, PAGE_SIZE = 20, MAX_WORDS = 400, LONG = 700;
const ACTIVE = ["running", "preparing"];
const find = (id) => document.getElementById(id);
const rows = new Map(), lines = new Map(), ticked = new Set();
let server = "", number = 0, waiting = 0, sorted = { by: "", up: true }, order = null, since = "";
let shown = "", curves = null, curvesAt = 0, predictions = null, numExamples = PAGE_SIZE;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// --- words of numbers ---

const known = (value) => value !== null && value !== undefined;
const count = (value) => value.toLocaleString("en-US");
const decimal = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share) => `${Math.round(100 * share)} %`;
const showLoss = (value) => (Math.abs(value) < 1000 ? decimal(value, 3) : value.toExponential(2));
const showScore = (value) => decimal(value, 2);

function span(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const total = Math.round(seconds);
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
}

function date(text) {
  const at = new Date(text || "");
  if (Number.isNaN(at.getTime())) return "";
  const two = (value) => String(value).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

const shortKey = (key) => key.split(".").slice(-2).join(".").replace(/\.name$/, "").replace(/^(train|optimizer|data|task|model)\./, "");

function describeActivity(row) {
  if (!ACTIVE.includes(row.state)) return "";
  if (row.activity) {
    const { what, done, total } = row.activity;
    return [what, total ? `${count(done)} of ${count(total)}` : done ? count(done) : ""].filter(Boolean).join(" ");
  }
  return known(row.step) ? "training" : "";
}

const describeInterval = ({ interval }) => (interval ? interval.map((value) => decimal(value, 1)).join(" to ") : "");

function describeProgress(row) {
  if (!known(row.step)) return "";
  if (row.state === "finished") return `${count(row.step)} steps`;
  return row.num_steps ? `step ${count(row.step)} of ${count(row.num_steps)}` : `step ${count(row.step)}`;
}

function describeSpeed(row) {
  if (!ACTIVE.includes(row.state)) return "";
  const facts = [];
  if (known(row.tokens_per_second)) facts.push(`${count(Math.round(row.tokens_per_second))} tokens/s`);
  if (known(row.utilisation)) facts.push(`${row.on_gpu ? "GPU" : "CPU"} ${percent(row.utilisation)}`);
  return facts.join(", ");
}

// --- the server ---

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "omit" });
  } catch {
    throw new Error("The board's server does not answer. Start it again: fivetune board");
  }
  const found = await answer.json().catch(() => ({}));
  if (answer.ok) return found;
  throw new Error((found.error && found.error.message) || `The server answered ${answer.status}.`);
}

async function update() {
  const found = await ask(`/runs.json?server=${encodeURIComponent(server)}&since=${number}`);
  ({ server, number, waiting } = found);
  for (const row of found.rows) rows.set(row.name, row);
  const names = new Set(found.names);
  for (const name of [...rows.keys()]) {
    if (names.has(name)) continue;
    rows.delete(name);
    ticked.delete(name);
    if (lines.has(name)) lines.get(name).line.remove();
    lines.delete(name);
  }
  if (found.rows.length || found.names.length !== lines.size || order === null) {
    for (const row of found.rows) fillLine(row);
    showList();
  }
  find("clock").textContent = `\u00b7 ${new Date().toLocaleTimeString("en-GB")}`;
  await showDetail(found.rows.some((row) => row.name === shown));
}

async function watch() {
  if (!document.hidden) {
    try {
      await update();
      fail("");
    } catch (error) {
      fail(error.message);
    }
  }
  setTimeout(watch, waiting ? 0 : 1000 * EVERY_SECONDS);
}

function fail(message) {
  if (find("failure").textContent !== message) find("failure").textContent = message;
  find("failure").hidden = !message;
}

// --- the list ---

function fillLine(row) {
  if (!lines.has(row.name)) lines.set(row.name, makeLine(row.name));
  const { cells } = lines.get(row.name);
  const progress = describeProgress(row), isActive = ACTIVE.includes(row.state);
  const badge = () => make("span", { class: `badge ${row.state}` }, row.state);
  const reason = ["finished", ...ACTIVE].includes(row.state) ? row.verdict : row.why;
  const tone = row.is_bad || ["failed", "unreadable"].includes(row.state) ? "bad" : "doubt";
  cells.about.replaceChildren(
    make("span", { class: "small" }, [row.task, row.model.split("/").pop(), row.device].filter(Boolean).join(" \u00b7 ")),
    make("span", { class: "small narrow" }, badge(), ` ${[progress, date(row.started)].filter(Boolean).join(" \u00b7 ")}`),
    reason ? make("span", { class: `small clamped ${tone}`, title: reason }, reason) : "");
  const share = row.num_steps && known(row.step) ? row.step / row.num_steps : 0;
  const bar = make("progress", { max: 1, value: share.toFixed(4), "aria-label": `progress of ${row.name}` });
  const left = known(row.seconds_left) ? `${span(row.seconds_left)} left` : "";
  cells.state.replaceChildren(badge(), ...(isActive ? [bar] : []));
  const activity = describeActivity(row);
  for (const text of [progress, left, activity === "training" ? "" : activity, describeSpeed(row)]) {
    if (text) cells.state.append(make("span", { class: "small" }, text));
  }
  const interval = describeInterval(row);
  cells.score.replaceChildren(...(known(row.score) ? [
    make("span", { class: "value" }, showScore(row.score)), make("span", { class: "small" }, row.metric.replaceAll("_", " ")),
    make("span", { class: "small" }, interval)] : []));
  cells.loss.replaceChildren(...(known(row.loss) ? [showLoss(row.loss), drawSpark(row.losses)] : []));
  cells.date.replaceChildren(date(row.started), make("span", { class: "small" }, known(row.seconds) ? span(row.seconds) : ""));
  const most = 4, more = row.settings.length - most;
  cells.settings.replaceChildren(...row.settings.slice(0, most).map(([key, value]) =>
    make("span", { class: "pair", title: `${key}: ${value}` }, make("i", {}, `${shortKey(key)} `), value.length > 40 ? `${value.slice(0, 39)}\u2026` : value)));
  if (more > 0) cells.settings.append(make("span", { class: "pair" }, make("i", {}, `and ${more} more`)));
  lines.get(row.name).text = [row.name, row.task, row.model, row.state, row.device, ...row.settings.flat()].join(" ").toLowerCase();
}

function makeLine(name) {
  const box = make("input", { type: "checkbox", "aria-label": `Tick ${name}` });
  box.addEventListener("change", () => {
    if (box.checked) ticked.add(name);
    else ticked.delete(name);
    showTicked();
  });
  const link = make("a", { href: `#run=${encodeURIComponent(name)}` }, name);
  const report = make("a", { href: `/report?run=${encodeURIComponent(name)}`, target: "_blank", rel: "noopener", "aria-label": `Report of ${name}` }, "Report");
  const cells = { about: make("div") };
  const line = make("tr", {}, make("td", { class: "tick" }, box), make("td", { class: "name" }, link, cells.about));
  for (const kind of ["state", "score", "loss", "date", "settings"]) {
    cells[kind] = make("td", { class: kind });
    line.append(cells[kind]);
  }
  line.append(make("td", { class: "links" }, report));
  return { line, cells, box, text: "" };
}

function drawSpark(losses) {
  const width = 88, height = 22;
  if (losses.length < 2) return "";
  const low = Math.min(...losses), size = Math.max(...losses) - low || 1;
  const points = losses.map((loss, i) => `${((i / (losses.length - 1)) * width).toFixed(1)},${(height - 1 - ((loss - low) / size) * (height - 2)).toFixed(1)}`);
  return draw("svg", { class: "spark", width, height, "aria-hidden": "true" }, draw("path", { d: `M${points.join("L")}` }));
}

function compareRows(one, other) {
  const { by, up } = sorted, text = (row) => String(row[by] || "");
  if (!by) { // active runs first, then the newest
    const first = ACTIVE.includes(other.state) - ACTIVE.includes(one.state);
    return first || String(other.started || "").localeCompare(String(one.started || "")) || one.name.localeCompare(other.name, "en", { numeric: true });
  }
  if (known(one[by]) !== known(other[by])) return known(one[by]) ? -1 : 1; // unknown values are last
  const found = typeof one[by] === "number" ? one[by] - other[by] : text(one).localeCompare(text(other), "en", { numeric: true });
  return up ? found : -found;
}

function showList() {
  const states = [...new Set([...rows.values()].map((row) => row.state))].sort();
  const chosen = find("states").value;
  if (find("states").options.length !== states.length + 1) {
    find("states").replaceChildren(make("option", { value: "" }, "all"), ...states.map((state) => make("option", { value: state }, state)));
    find("states").value = states.includes(chosen) ? chosen : "";
  }
  const words = find("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = (row) => (!find("states").value || row.state === find("states").value)
    && words.every((word) => lines.get(row.name).text.includes(word));
  const listed = [...rows.values()].filter(wanted).sort(compareRows);
  const names = listed.map((row) => row.name).join("\n");
  if (names !== order) { // a line that has the focus keeps it
    const focused = document.activeElement;
    find("rows").replaceChildren(...listed.map((row) => lines.get(row.name).line));
    if (focused !== document.body && document.contains(focused)) focused.focus({ preventScroll: true });
    order = names;
  }
  document.querySelector("#list > table").classList.toggle("alike", ![...rows.values()].some((row) => row.settings.length));
  find("none").hidden = listed.length > 0;
  find("none").textContent = rows.size ? "No run matches." : "No run yet. A training that starts appears here.";
  const counts = [...ACTIVE, ...states.filter((state) => !ACTIVE.includes(state))]
    .map((state) => [state, [...rows.values()].filter((row) => row.state === state).length]).filter(([, num]) => num);
  const left = waiting ? [`reading ${waiting} more`] : [];
  const text = [...counts.map(([state, num]) => `${num} ${state}`), ...left].join(", ") || "no run";
  if (!shown && find("about").textContent !== text) find("about").textContent = text;
  showTicked();
}

function showTicked() {
  for (const [name, { box }] of lines) box.checked = ticked.has(name);
  const names = [...ticked];
  find("compare").hidden = names.length < 2;
  find("clear").hidden = !names.length;
  find("hint").hidden = names.length > 1;
  find("compare").textContent = `Compare ${names.length} runs`;
  find("compare").href = `/comparison?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
}

// --- one run ---

async function showDetail(isChanged) {
  const row = rows.get(shown);
  if (!shown) return;
  if (!row) {
    find("about").textContent = "This run is not on the board.";
    return;
  }
  if (isChanged || curves === null) fillFacts(row);
  const name = shown, query = `?run=${encodeURIComponent(name)}`;
  const mark = `${row.num_evals} ${row.state}`;
  const isOld = mark !== since || (isChanged && Date.now() - curvesAt > 1000 * CURVES_SECONDS);
  if (curves === null || isOld) {
    const found = await ask(`/run.json${query}`);
    if (shown !== name) return;
    const isNew = mark !== since;
    [curves, curvesAt, since] = [found, Date.now(), mark];
    showCurves();
    if (isNew) {
      find("num-examples").textContent = "Reading the predictions";
      const read = await ask(`/predictions.json${query}`);
      if (shown !== name) return;
      predictions = read;
      showExamples();
    }
  } else if (isChanged && known(row.loss) && known(row.step)) {
    curves.steps.push([row.step, row.loss]);
    showLossChart();
  }
}

function fillFacts(row) {
  const interval = row.interval ? `${describeInterval(row)}, 95 %` : "";
  const facts = [
    ["State", row.state, describeActivity(row)],
    ["Step", known(row.step) ? count(row.step) : "", row.num_steps ? `of ${count(row.num_steps)}` : ""],
    [row.metric ? `Best ${row.metric.replaceAll("_", " ")}` : "Score", known(row.score) ? showScore(row.score) : "",
      [interval, known(row.score_step) ? `at step ${count(row.score_step)}` : ""].filter(Boolean).join(", ")],
    ["Loss", known(row.loss) ? showLoss(row.loss) : "", "last step"],
    ["Speed", known(row.tokens_per_second) ? count(Math.round(row.tokens_per_second)) : "", "tokens per second"],
    [row.on_gpu ? "GPU busy" : "CPU busy", known(row.utilisation) ? percent(row.utilisation) : "", row.device],
    ["Time left", known(row.seconds_left) ? span(row.seconds_left) : "", ""],
    ["Time", known(row.seconds) ? span(row.seconds) : "", row.started ? `started ${date(row.started)}` : ""],
  ];
  find("facts").replaceChildren(...facts.filter(([, value]) => value).map(([name, value, remark]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value), remark ? make("dd", { class: "small" }, remark) : "")));
  const reason = [row.why, row.verdict].filter(Boolean).join(" ");
  find("what").textContent = reason;
  find("what").hidden = !reason;
  find("what").className = `what ${row.is_bad || row.state === "failed" ? "error" : "hint"}`;
  find("about").textContent = [row.task, row.model, row.folder].filter(Boolean).join(" \u00b7 ");
  find("report").href = `/report?run=${encodeURIComponent(row.name)}`;
  const folder = /^[\w./+=@-]+$/.test(row.folder) ? row.folder : `'${row.folder.replaceAll("'", "'\\''")}'`;
  const next = {
    finished: `fivetune serve ${folder}`, interrupted: `fivetune train ${folder} --resume`,
    failed: `fivetune diagnose ${folder}`, pruned: `fivetune diagnose ${folder}`,
  }[row.state] || `fivetune watch ${folder}`;
  find("next").replaceChildren(make("code", {}, next));
  find("differing").replaceChildren(row.settings.length ? make("table", { class: "plain" },
    make("thead", {}, makeHead(["Differs between the runs of this task", "value"])),
    make("tbody", {}, ...row.settings.map(([key, value]) => make("tr", {}, make("td", {}, key), make("td", {}, value))))) : "");
}

const makeHead = (names, numbersFrom = names.length) => make("tr", {}, ...names.map((name, place) =>
  make("th", place < numbersFrom ? { scope: "col" } : { scope: "col", class: "num" }, name)));

function showCurves() {
  showLossChart();
  find("score-title").textContent = curves.metric ? `${curves.metric} at each evaluation` : "Score";
  const own = curves.evals.filter((one) => one.scores.length && known(one.scores[0].value));
  drawChart(find("score-chart"), own.map(({ step, scores: [{ value, interval }], is_best }) => ({ x: step, y: value, low: interval && interval[0], high: interval && interval[1], is_best })), curves.metric || "score", showScore);
  const numbers = (value, show) => make("td", { class: "num" }, known(value) ? show(value) : "");
  find("evals").replaceChildren(
    make("thead", {}, makeHead(["Step", "Split", "Examples", ...curves.scores, "Loss", "Time"], 2)),
    make("tbody", {}, ...curves.evals.map((one) => make("tr", { class: one.is_best ? "best" : "" },
      make("td", {}, `${count(one.step)}${one.is_best ? " (best)" : ""}`), make("td", {}, one.split), numbers(one.num_examples, count),
      ...one.scores.map((score) => numbers(score.value, showScore)), numbers(one.loss, showLoss), numbers(one.seconds, span)))));
  find("settings").replaceChildren(make("thead", {}, makeHead(["Setting", "value"])),
    make("tbody", {}, ...curves.settings.map(([key, value]) => make("tr", {}, make("td", {}, key), make("td", {}, value)))));
}

function showLossChart() {
  drawChart(find("loss-chart"), curves.steps.map(([x, y]) => ({ x, y })), "loss, nats per token", showLoss);
}

function chooseTicks(least, most) { // round numbers: 1, 2 or 5 times a power of ten apart
  const rough = (most - least) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const ticks = [];
  for (let i = Math.ceil(least / size); i * size <= most; i += 1) ticks.push(i * size);
  return ticks;
}

function drawChart(place, points, label, show) {
  const width = place.clientWidth, height = place.clientHeight, left = 52, bottom = 24, top = 10, right = 10;
  if (!points.length || !width) {
    place.replaceChildren(make("p", { class: "hint" }, "Nothing yet."));
    return;
  }
  const values = points.flatMap(({ y, low, high }) => [y, low, high]).filter(known);
  let [least, most] = [Math.min(...values), Math.max(...values)];
  if (least === most) [least, most] = [least - 0.5, most + 0.5];
  const [first, last] = [points[0].x, Math.max(points[points.length - 1].x, points[0].x + 1)];
  const x = (value) => left + ((value - first) / (last - first)) * (width - left - right);
  const y = (value) => top + ((most - value) / (most - least)) * (height - top - bottom);
  const start = points[0], end = points[points.length - 1];
  const svg = draw("svg", { width, height, role: "img", "aria-label": `${label}: ${show(start.y)} at step ${count(start.x)}, ${show(end.y)} at step ${count(end.x)}` });
  for (const value of chooseTicks(least, most)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, Number(value.toPrecision(6)).toLocaleString("en-US", { maximumSignificantDigits: 4 })));
  }
  svg.append(draw("text", { x: left, y: height - 6 }, `step ${count(Math.round(first))}`));
  svg.append(draw("text", { x: width - right, y: height - 6, "text-anchor": "end" }, count(Math.round(last))));
  const path = (list) => list.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
  const banded = points.filter(({ low }) => known(low));
  if (banded.length > 1) {
    const around = [...banded.map((one) => [x(one.x), y(one.high)]), ...banded.map((one) => [x(one.x), y(one.low)]).reverse()];
    svg.append(draw("path", { class: "band", d: `M${path(around)}Z` }));
  }
  svg.append(draw("path", { class: "line", d: `M${path(points.map((one) => [x(one.x), y(one.y)]))}` }));
  if (points.length < 40) {
    for (const one of points) {
      const title = draw("title", {}, `step ${count(one.x)}: ${show(one.y)}${one.is_best ? ", the best" : ""}`);
      svg.append(draw("circle", { class: one.is_best ? "best" : "dot", cx: x(one.x), cy: y(one.y), r: one.is_best ? 5 : 3 }, title));
    }
  }
  place.replaceChildren(svg);
}

// --- predictions over time ---

const splitWords = (text) => text.split(/(\s+)/).filter((word) => word.trim());
const equalWord = (one, other) => one.toLowerCase() === other.toLowerCase();

function diffWords(before, after) { // the longest common subsequence of words; null where the texts are too long
  const [a, b] = [splitWords(before), splitWords(after)];
  if (a.length > MAX_WORDS || b.length > MAX_WORDS) return null;
  const sizes = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      sizes[i][j] = equalWord(a[i], b[j]) ? sizes[i + 1][j + 1] + 1 : Math.max(sizes[i + 1][j], sizes[i][j + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && equalWord(a[i], b[j])) parts.push(["", b[j]]), i += 1, j += 1;
    else if (j >= b.length || (i < a.length && sizes[i + 1][j] >= sizes[i][j + 1])) parts.push(["del", a[i]]), i += 1;
    else parts.push(["ins", b[j]]), j += 1;
  }
  return { parts, common: sizes[0][0] };
}

// What the prediction has and the other text lacks is struck out; what it lacks is underlined.
function markDifferences(said, others) {
  const found = others.map((other) => diffWords(said, other)).filter(Boolean).sort((one, other) =>
    other.common - one.common || one.parts.length - other.parts.length)[0];
  if (!found) return [said];
  const nodes = [];
  let run = { kind: null, words: [] };
  const flush = () => {
    if (run.words.length) nodes.push(run.kind ? make(run.kind, {}, run.words.join(" ")) : run.words.join(" "), " ");
  };
  for (const [kind, word] of found.parts) {
    if (kind !== run.kind) {
      flush();
      run = { kind, words: [] };
    }
    run.words.push(word);
  }
  flush();
  return nodes;
}

const wordsOf = (answer) => (answer ? answer[0] : null);

function selectExamples() {
  const kind = find("kind").value, text = find("find-text").value.toLowerCase();
  return predictions.examples.filter(({ inputs, references, answers }) => {
    const given = answers.filter(Boolean), last = given[given.length - 1];
    if (text && ![inputs, ...references, ...given.map(wordsOf)].some((one) => one.toLowerCase().includes(text))) return false;
    if (kind === "changed") return new Set(given.map(wordsOf)).size > 1;
    if (kind === "all") return true;
    return last && known(last[1]) && (last[1] === 1) === (kind === "right");
  });
}

function showExamples() {
  const chosen = selectExamples();
  const drawn = predictions.examples.length, some = predictions.total > drawn ? `, drawn from ${count(predictions.total)}` : "";
  const kept = predictions.evals.length ? `${count(chosen.length)} of ${count(drawn)} examples${some}` : "This run has no predictions yet";
  find("num-examples").textContent = [kept, ...predictions.damage].join(". ");
  find("prediction-tools").hidden = !predictions.evals.length;
  find("examples").replaceChildren(...chosen.slice(0, numExamples).map(makeExample));
  find("more").hidden = chosen.length <= numExamples;
}

function makeInput(id, inputs) {
  const isLong = inputs.length > LONG;
  return make("div", { class: isLong ? "given long" : "given", dir: "auto", ...(isLong ? { tabindex: "0", role: "group", "aria-label": `Input of ${id}` } : {}) }, inputs);
}

function makeExample({ id, inputs, references, answers }) {
  const list = make("ol");
  const groups = []; // neighbouring evaluations with the same answer are one line
  answers.forEach((answer, place) => {
    if (!answer) return;
    const last = groups[groups.length - 1];
    if (last && last.answer[0] === answer[0] && last.answer[1] === answer[1]) last.to = predictions.evals[place];
    else groups.push({ answer, from: predictions.evals[place], to: predictions.evals[place], before: last });
  });
  for (const { answer: [text, score, confidence], from, to, before } of groups) {
    const steps = from === to ? `step ${count(from.step)}` : `steps ${count(from.step)} to ${count(to.step)}`;
    const others = find("against").value === "gold" ? references : before ? [before.answer[0]] : [];
    const [kind, verdict] = !known(score) ? ["", ""] : score === 1 ? ["right", "right"] : ["wrong", score > 0 ? `partly, ${decimal(score, 2)}` : "wrong"];
    const sure = known(confidence) ? `confidence ${percent(confidence)}` : "";
    list.append(make("li", {}, make("span", { class: "when" }, steps),
      make("span", { class: "said", dir: "auto" }, ...(text || others.some(Boolean) ? markDifferences(text, others.length ? others : [text]) : [make("span", { class: "empty" }, "no answer")])),
      make("span", { class: `mark ${kind}` }, [verdict, sure].filter(Boolean).join(", "))));
  }
  const gold = references.filter(Boolean);
  return make("article", { class: "example" }, make("h3", {}, id),
    makeInput(id, inputs),
    make("p", { class: "gold" }, "Gold: ", gold.length ? make("b", { dir: "auto" }, gold.join(" / ")) : make("span", { class: "empty" }, "no answer")), list);
}

// --- from view to view ---

function open() {
  const name = new URLSearchParams(location.hash.slice(1)).get("run") || "";
  [shown, curves, predictions, since, numExamples] = [name, null, null, "", PAGE_SIZE];
  find("list").hidden = Boolean(name);
  find("detail").hidden = !name;
  find("back").hidden = !name;
  find("title").textContent = name || "Runs";
  document.title = `${name || "Runs"} - FiveTune`;
  for (const id of ["facts", "evals", "settings", "examples", "differing", "loss-chart", "score-chart"]) find(id).replaceChildren();
  find("more").hidden = true;
  find("num-examples").textContent = "";
  if (!rows.size) return;
  window.scrollTo(0, 0);
  find("title").focus({ preventScroll: true });
  if (name) showDetail(true).catch((error) => fail(error.message));
  else showList();
}

window.addEventListener("hashchange", open);
window.addEventListener("resize", () => { if (curves) showCurves(); });
find("find").addEventListener("input", showList);
find("states").addEventListener("change", showList);
find("clear").addEventListener("click", () => { ticked.clear(); showTicked(); find("find").focus(); });
for (const id of ["kind", "against"]) find(id).addEventListener("change", () => { numExamples = PAGE_SIZE; showExamples(); });
find("find-text").addEventListener("input", () => { if (predictions) { numExamples = PAGE_SIZE; showExamples(); } });
find("more").addEventListener("click", () => {
  const first = numExamples;
  numExamples += PAGE_SIZE;
  showExamples();
  const next = find("examples").children[first];
  if (next) { next.tabIndex = -1; next.focus(); }
});
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const { by } = button.dataset, isText = ["name", "state"].includes(by);
    sorted = { by, up: sorted.by === by ? !sorted.up : isText || by === "loss" };
    for (const head of document.querySelectorAll("#list th")) head.removeAttribute("aria-sort");
    button.parentElement.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
    showList();
  });
}
open();
watch();
