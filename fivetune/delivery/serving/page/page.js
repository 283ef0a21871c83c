"use strict";
const find = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
let token = "", models = [], sending = null;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shorten(text, length = 140) {
  const characters = Array.from(text.replace(/\s+/g, " ").trim());
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}…` : characters.join("");
}

// --- requests ---

async function send(path, options = {}) {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}), ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("The server does not answer. Start it again, then send the input again."), { code: 0 });
  }
  const found = await response.json().catch(() => ({}));
  if (response.ok) return found;
  const seconds = response.headers.get("Retry-After");
  const known = {
    401: "The token is missing or wrong.",
    429: `The server is busy: its queue is full. Send the input again in ${seconds || 1} s.`,
  };
  const message = known[response.status] || (found.error && found.error.message) || `The server answered ${response.status}.`;
  throw Object.assign(new Error(message), { code: response.status });
}

async function load() {
  find("failure").hidden = true;
  try {
    ({ models } = await send("/demo.json"));
  } catch (error) {
    find("title").textContent = "FiveTune";
    if (error.code === 401) askForToken(token ? error.message : "");
    else fail(error.message);
    return;
  }
  find("access").hidden = true;
  find("work").hidden = false;
  showModels();
}

function askForToken(message) {
  find("work").hidden = find("examples").hidden = true;
  find("access").hidden = false;
  if (message) fail(message);
  find("token").focus();
}

function fail(message) {
  find("failure").textContent = message;
  find("failure").hidden = false;
}

// --- the form ---

/** Options of the search: name in requests, label, least and largest value. */
const OPTIONS = [
  ["temperature", "Temperature", 0, 2], ["top_k", "Top-k", 0, 2 ** 31], ["top_p", "Top-p", 0, 1],
  ["n", "Answers", 1, 8], ["max_tokens", "Most tokens", 1, 2 ** 31], ["seed", "Seed", 0, 2 ** 53 - 1],
];

const choose = (id) => models.find((one) => one.name === find(id).value);
const getMode = () => document.querySelector("[name=mode]:checked").value;

function showModels() {
  const names = models.map((one) => one.name);
  document.title = `${names.join(", ")} - FiveTune`;
  find("title").textContent = names.join(", ");
  find("about").textContent = models.map((one) => `${models.length > 1 ? `${one.name}: ` : ""}task ${one.task}, weights of step ${one.step}`).join(" · ");
  find("models").hidden = models.length < 2;
  find("first").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  showFirst();
}

function showFirst() {
  const first = choose("first"), shape = JSON.stringify(first.fields.map((one) => one.name));
  const others = models.filter((one) => one !== first && JSON.stringify(one.fields.map((each) => each.name)) === shape);
  find("second").replaceChildren(
    ...others.map((one) => make("option", { value: one.name }, one.name)), make("option", { value: "" }, "none"));
  find("second-field").hidden = others.length === 0;
  showFields();
  showOptions(first.search);
  showExamples(first);
}

function listFields() {
  const asked = choose("first").fields;
  const text = { name: "inputs", kind: "text", is_required: true };
  return getMode() === "record" ? asked : [text];
}

function showFields() {
  const before = Object.fromEntries([...document.querySelectorAll("#fields textarea")].map((area) => [area.name, area.value]));
  find("fields").replaceChildren(...listFields().map((field, number) => {
    const id = `field-${number}`, form = { list: "one per line", json: "JSON" }[field.kind];
    const remarks = [form, field.is_required ? "" : "optional"].filter(Boolean).join(", ");
    const label = make("label", { for: id }, getMode() === "text" ? "Text" : field.name);
    if (remarks) label.append(make("span", { class: "optional" }, ` (${remarks})`));
    const area = make("textarea", { id, name: field.name, rows: 2, dir: "auto", "aria-describedby": `${id}-wrong` });
    area.required = field.is_required;
    area.value = before[field.name] || "";
    area.addEventListener("input", () => mark(area, ""));
    return make("div", { class: "field" }, label, area, make("p", { class: "wrong-field", id: `${id}-wrong` }));
  }));
}

/** Show the options that a model takes, with the run's own values as placeholders; null: it takes none. */
function showOptions(own) {
  const before = Object.fromEntries([...document.querySelectorAll("#options .option")].map((area) => [area.name, area.value]));
  find("search").hidden = !own;
  const add = (name, label, control, remark) => {
    const attributes = { id: `option-${name}`, name, class: `option ${control.class || ""}`, "aria-describedby": `option-${name}-wrong` };
    const area = make(control.tag, { ...control.attributes, ...attributes });
    area.value = before[name] || "";
    area.addEventListener("input", () => mark(area, ""));
    const title = make("label", { for: area.id }, label);
    if (remark) title.append(make("span", { class: "optional" }, ` (${remark})`));
    return make("div", { class: control.class ? "field wide" : "field" }, title, area, make("p", { class: "wrong-field", id: `${area.id}-wrong` }));
  };
  const numbers = OPTIONS.filter(([name]) => own && name in own).map(([name, label, least, most]) => {
    const step = name === "temperature" || name === "top_p" ? "any" : 1;
    const largest = name === "max_tokens" ? own.max_tokens : most;
    const attributes = { type: "number", min: least, max: largest, step, inputmode: "decimal", placeholder: own[name] === null ? "any" : own[name] };
    return add(name, label, { tag: "input", attributes });
  });
  const stop = own ? [add("stop", "Stop texts", { tag: "textarea", class: "short", attributes: { rows: 1, dir: "auto", placeholder: own.stop.join("\n") } }, "one per line")] : [];
  find("options").replaceChildren(...numbers, ...stop);
}

/** The options that are filled in; null if one is wrong, which then has the focus. */
function readOptions() {
  const found = {};
  for (const area of find("search").hidden ? [] : document.querySelectorAll("#options .option")) {
    const isNumber = area.type === "number";
    mark(area, area.checkValidity() ? "" : `Allowed: ${area.step === "any" ? "" : "whole numbers "}${area.min} to ${area.max}.`);
    if (!area.checkValidity()) {
      find("search").open = true;
      area.focus();
      return null;
    }
    const lines = area.value.split("\n").filter(Boolean);
    if (lines.length) found[area.name] = isNumber ? Number(area.value) : lines;
  }
  return found;
}

function mark(area, message) {
  area.setAttribute("aria-invalid", String(Boolean(message)));
  find(`${area.id}-wrong`).textContent = message;
}

function readField(field, area) {
  const text = area.value;
  if (!text.trim()) {
    mark(area, field.is_required ? "Empty. Write something." : "");
    return undefined;
  }
  mark(area, "");
  if (field.kind === "list") return text.split("\n").filter((line) => line.trim());
  if (field.kind !== "json") return text;
  try {
    return JSON.parse(text);
  } catch (error) {
    mark(area, "Not JSON.");
    return undefined;
  }
}

/** The record or text of a request; null if a field is wrong, which then has the focus. */
function readForm() {
  const areas = [...document.querySelectorAll("#fields textarea")];
  const values = listFields().map((field, number) => [field.name, readField(field, areas[number])]);
  const wrong = areas.find((area) => area.getAttribute("aria-invalid") === "true");
  if (wrong) {
    wrong.focus();
    return null;
  }
  if (getMode() === "text") return values[0][1];
  return Object.fromEntries(values.filter(([, value]) => value !== undefined));
}

function fill(example) {
  document.querySelector(`[name=mode][value=${example.record ? "record" : "text"}]`).checked = true;
  showFields();
  for (const [number, field] of listFields().entries()) {
    const value = example.record ? example.record[field.name] : example.text;
    const area = find(`field-${number}`);
    area.value = value === undefined || value === null ? ""
      : typeof value === "string" ? value : field.kind === "list" ? value.join("\n") : JSON.stringify(value);
    mark(area, "");
  }
}

// --- answers ---

async function answer() {
  const given = readForm(), options = given && readOptions();
  if (!options) return;
  const body = { inputs: [given], ...options };
  if (sending) sending.abort();
  sending = new AbortController();
  const { signal } = sending;
  const asked = [choose("first"), find("second-field").hidden ? undefined : choose("second")].filter(Boolean);
  const cards = asked.map((model) => make("article", {}, make("h3", { dir: "auto" }, model.name), make("p", { class: "hint" }, "Computing …")));
  find("answers").replaceChildren(...cards);
  await Promise.all(asked.map(async (model, number) => {
    const started = performance.now();
    let parts;
    try {
      const found = await send(`/predict?model=${encodeURIComponent(model.name)}`, { method: "POST", body: JSON.stringify(body), signal });
      const [one] = found.predictions;
      parts = one.skipped ? [make("p", { class: "error" }, one.skipped)] : showAnswer(one, performance.now() - started, options.n > 1);
    } catch (error) {
      if (error.name === "AbortError") return;
      parts = [make("p", { class: "error" }, error.message)];
      if (error.code === 401) askForToken(error.message);
    }
    cards[number].replaceChildren(cards[number].firstChild, ...parts);
    const cut = cards[number].querySelector("del");
    if (cut) cut.parentElement.scrollTop = cut.offsetTop - 60;
  }));
}

function showAnswer(one, milliseconds, asksSeveral) {
  const name = (text) => text || "no answer";
  const given = one.unsure ? one.withheld : one.prediction;
  const parts = [make("p", { class: given && !one.unsure ? "answer" : "answer none", dir: "auto" }, one.unsure ? "unsure" : name(given))];
  if (one.unsure) parts.push(make("p", { class: "cut" }, `Withheld: ${one.reason}.`));
  const others = one.candidates || [], drawn = asksSeveral && others.length ? others : null;
  const rows = drawn ? [] : [[name(given), one.confidence]];
  for (const other of others) if (drawn || other.text !== given) rows.push([name(other.text), other.score]);
  if (one.no_answer_score !== undefined && rows.every(([text]) => text !== name(""))) rows.push(["no answer", one.no_answer_score]);
  const list = make("ol", { class: "scores", "aria-label": drawn ? "Answers, with their probabilities" : "Confidence, and other answers" });
  for (const [text, share] of rows.slice(0, drawn ? 9 : 6)) {
    if (share === undefined || share === null) continue;
    const bar = make("span");
    bar.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
    list.append(make("li", {}, make("span", { dir: "auto" }, shorten(text, 80)), make("span", { class: "percent" }, percent(share)), make("span", { class: "bar", "aria-hidden": "true" }, bar)));
  }
  parts.push(list);
  const facts = [`${one.num_input_tokens} tokens read`, `${Math.round(milliseconds)} ms`];
  if (one.hit_cap) facts.push("cut off at the length cap");
  parts.push(make("p", { class: "facts" }, facts.join(" · ")));
  if (one.num_clipped_tokens) parts.push(...showCut(one));
  return parts;
}

function showCut(one) {
  const note = make("p", { class: "cut" }, `The input is too long: ${one.num_clipped_tokens} tokens were not read.`);
  if (!one.clipped_spans) return [note];
  const characters = Array.from(one.inputs), read = make("div", { class: "read", dir: "auto", tabindex: "0", role: "group", "aria-label": "Input, with the part that was not read" });
  let end = 0;
  for (const [start, stop] of one.clipped_spans) {
    read.append(characters.slice(end, start).join(""), make("del", {}, characters.slice(start, stop).join("")));
    end = stop;
  }
  read.append(characters.slice(end).join(""));
  return [note, read];
}

// --- examples ---

function showExamples(model) {
  find("examples").hidden = model.examples.length === 0;
  for (const [id, isRight] of [["right", true], ["wrong", false]]) {
    const chosen = model.examples.filter((one) => one.is_right === isRight);
    find(id).replaceChildren(...chosen.map((one) => {
      const shown = one.record ? Object.values(one.record).filter((value) => typeof value === "string").sort((a, b) => a.length - b.length)[0] : one.text;
      const found = make("span", { class: "found", dir: "auto" }, make("b", {}, shorten(one.prediction, 80) || "no answer"));
      if (!isRight) found.append(` · right: ${shorten(one.references.find(Boolean) || "", 80) || "no answer"}`);
      const button = make("button", { type: "button" }, make("span", { class: "given", dir: "auto" }, shorten(shown || one.text)), found);
      button.addEventListener("click", () => {
        fill(one);
        find("ask").scrollIntoView({ block: "start" });
        answer();
      });
      return make("li", {}, button);
    }));
    if (chosen.length === 0) find(id).append(make("li", { class: "hint" }, "none"));
  }
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  answer();
});
find("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) answer();
});
find("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  load();
});
find("first").addEventListener("change", showFirst);
for (const one of document.querySelectorAll("[name=mode]")) one.addEventListener("change", showFields);
find("clear").addEventListener("click", () => {
  for (const area of document.querySelectorAll("#fields textarea")) [area.value] = [""], mark(area, "");
  find("answers").replaceChildren(make("p", { class: "hint" }, "Fill in the form, or take an example."));
  find("field-0").focus();
});
load();
