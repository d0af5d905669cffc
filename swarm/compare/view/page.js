"use strict";

import { list, made, means, pair, plain, row, whole } from "./shown.js";

const get = (id) => document.getElementById(id);
const root = document.documentElement, main = get("main");
const LISTED = 50, PAIRED = 10;
const VIEWS = ["row", "list", "pairs"];

/* The page's state is in its URL; the server reads the same parameters. */
let state = new URLSearchParams();
let about = null, current = null, turn = 0, moreIsOpen = false;

/* Light and dark */

const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
const paint = () => { get("theme").textContent = isDark() ? "Light page" : "Dark page"; };
try {
  const kept = localStorage.getItem("theme");
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
} catch { /* storage may be disabled */ }
get("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as above */ }
  paint();
});
system.addEventListener("change", paint);

/* The state and the server */

function begin() {
  state = new URLSearchParams(location.hash.slice(1));
  if (!state.has("sort")) state.set("sort", about.start.sort);
  if (!state.has("seed")) state.set("seed", about.start.seed);
  drawBar();
  load();
}

/* Changes the state; by default starting from the first row. */
function change(changes) {
  for (const name of ["at", "row", "from"]) state.delete(name);
  for (const [name, value] of Object.entries(changes))
    if (value === null || (value === "" && name !== "sort")) state.delete(name);
    else state.set(name, value);
  drawBar();
  load();
}

function keep() {
  history.replaceState(null, "", `#${state}`);
  for (const kind of ["csv", "jsonl"]) get(kind).href = `export.${kind}?${state}`;
}

async function ask(path, more = {}) {
  const given = new URLSearchParams(state);
  for (const [name, value] of Object.entries(more)) given.set(name, value);
  const reply = await fetch(`${path}?${given}`).catch(() => { throw new Error("The viewer has ended. Start it again and reload this page."); });
  const told = await reply.json();
  if (!reply.ok) throw new Error(told.error);
  return told;
}

async function load() {
  const mine = ++turn, view = VIEWS.includes(state.get("view")) ? state.get("view") : "row";
  keep();
  for (const tab of document.querySelectorAll("[data-view]"))
    tab.toggleAttribute("aria-current", tab.dataset.view === view);
  try {
    const draw = await { row: loadRow, list: loadList, pairs: loadPairs }[view]();
    if (mine !== turn) return;
    const { id, value, dataset } = document.activeElement ?? { dataset: {} }, typing = dataset.typing;
    // Removing a focused field fires a change event.
    delete dataset.typing;
    get("failure").hidden = true;
    draw();
    if (id) again(get(id), value, typing);
  } catch (error) {
    if (mine !== turn) return;
    get("failure").textContent = error.message;
    get("failure").hidden = false;
  }
}

/* Restores focus and input after redrawing: a number that is being typed is not lost. */
function again(element, value, typing) {
  element?.focus({ preventScroll: true });
  if (!element?.id.startsWith("goto")) return;
  if (typing) Object.assign(element, { value }).dataset.typing = typing;
  else element.select();
}

function counted(total) {
  get("count").textContent = total === about.count ? `${whole(total)} answers` : `${whole(total)} of ${whole(about.count)} answers`;
}

const nothing = () => main.replaceChildren(made("p", { class: "none", text: "No answer fits the search and the filters." }));

/* One by one */

async function loadRow() {
  const told = await ask("row");
  return () => {
    current = { ...told, step: (by) => moveTo(current.at + by), last: told.total - 1 };
    counted(told.total);
    if (told.row === null) return nothing();
    state.delete("at");
    state.set("row", told.row);
    keep();
    main.replaceChildren(pager(told.at, 1, told.total, moveTo, [
      told.at < 0 ? made("span", { class: "missing", text: "this one is outside the filters" }) : null,
      made("span", { class: "gap" }),
      made("button", { type: "button", id: "copy", text: "Copy", title: "Copy the answer (c)", onclick: copy }),
      made("button", { type: "button", id: "flag", text: told.flagged ? "⚑ Flagged" : "⚐ Flag", "aria-pressed": String(told.flagged), title: "Flag this answer (f)", onclick: flag }),
    ]), row(told.cells, about));
    const more = main.querySelector("[data-keep]");
    if (more) {
      more.open = moreIsOpen;
      more.addEventListener("toggle", () => { moreIsOpen = more.open; });
    }
  };
}

function moveTo(at) {
  state.delete("row");
  const next = Math.max(0, Math.min(at, current?.last ?? at));
  // A key pressed before the response arrives continues from this row.
  if (current) current.at = next;
  state.set("at", next);
  load();
}

async function copy() {
  if (!current || current.row === null || current.row === undefined) return;
  const text = plain(current.cells.answer), button = get("copy");
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = made("textarea", {});
    area.value = text;
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
    area.remove();
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1200);
}

async function flag() {
  if (!current || current.row === null || current.row === undefined) return;
  const body = JSON.stringify({ row: current.row, flagged: !current.flagged });
  const reply = await fetch("flag", { method: "POST", headers: { "Content-Type": "application/json" }, body });
  about.flags = (await reply.json()).flags;
  drawActive();
  load();
}

/* The list */

async function loadList() {
  const first = Number(state.get("from")) || 0;
  const told = await ask("rows", { from: first, count: LISTED });
  return () => {
    counted(told.total);
    if (!told.rows.length) return nothing();
    const go = (at) => { state.set("from", Math.max(0, at)); load(); scrollTo(0, 0); };
    current = { at: first, step: (by) => { const next = first + by * LISTED; if (next >= 0 && next < told.total) go(next); } };
    const by = (column) => change({ sort: state.get("sort") === column ? `-${column}` : column });
    main.replaceChildren(pager(first, LISTED, told.total, go),
      list(told.rows, about, { ...sorted("sort"), by }, first, (at) => { change({ view: "row", at }); }),
      told.total > LISTED ? pager(first, LISTED, told.total, go, [], "2") : "");
  };
}

/* Compare */

function sides() {
  const columns = Object.keys(about.choices);
  const by = columns.includes(state.get("by")) ? state.get("by") : ["model", "group", ...columns].find((name) => columns.includes(name));
  if (!by) return null;
  const labels = about.choices[by].map(([label]) => label);
  const left = labels.includes(state.get("left")) ? state.get("left") : labels[0];
  const right = labels.includes(state.get("right")) ? state.get("right") : labels.find((label) => label !== left);
  return { columns, by, labels, left, right };
}

async function loadPairs() {
  const chosen = sides(), first = Number(state.get("from")) || 0;
  if (!chosen) return () => main.replaceChildren(made("p", { class: "none", text: "There is nothing to compare: no column has two values or more." }));
  const { by, left, right } = chosen;
  const told = await ask("pairs", { by, left, right, from: first, count: PAIRED });
  return () => {
    get("count").textContent = `${whole(told.total)} pairs of ${whole(about.count)} answers`;
    const names = { left: left || "(nothing)", right: right || "(nothing)" };
    const go = (at) => { state.set("from", Math.max(0, at)); load(); scrollTo(0, 0); };
    current = { step: (steps) => { const next = first + steps * PAIRED; if (next >= 0 && next < told.total) go(next); } };
    const open = (number) => change({ view: "row", row: number });
    main.replaceChildren(
      made("div", { class: "pager" },
        chooser("by", "Compare", chosen.columns, by, (value) => change({ by: value, left: null, right: null })),
        chooser("left", "left", chosen.labels, left, (value) => change({ by, left: value, right })),
        chooser("right", "right", chosen.labels, right, (value) => change({ by, left, right: value })),
        made("button", { type: "button", id: "swap", text: "Swap", onclick: () => change({ by, left: right, right: left }) })),
      told.total ? means(told.means, names) ?? "" : made("p", { class: "none", text: "No answer fits the search and the filters." }),
      told.total ? pager(first, PAIRED, told.total, go) : "",
      ...told.pairs.map((one) => pair(one, about, names, open)),
      told.total > PAIRED ? pager(first, PAIRED, told.total, go, [], "2") : "");
  };
}

function chooser(id, name, labels, chosen, choose) {
  const select = made("select", { id, onchange: () => choose(select.value) },
    ...labels.map((label) => made("option", { value: label, text: label || "(nothing)" })));
  select.value = chosen;
  return made("label", {}, `${name} `, select);
}

/* Previous, next, go to; `size` rows at a time. */
function pager(first, size, total, go, more = [], mark = "") {
  const last = Math.min(first + size, total);
  const input = made("input", { type: "number", id: `goto${mark}`, min: 1, max: total, value: first + 1, "aria-label": "Go to number" });
  input.addEventListener("input", () => { input.dataset.typing = "yes"; });
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") input.dispatchEvent(new Event("change")); });
  input.addEventListener("change", () => {
    if (!input.dataset.typing) return;
    delete input.dataset.typing;
    const at = Math.max(1, Math.min(total, Math.round(Number(input.value)) || 1)) - 1;
    go(size === 1 ? at : Math.floor(at / size) * size);
  });
  return made("div", { class: "pager" },
    made("button", { type: "button", id: `previous${mark}`, "aria-label": "Previous", disabled: first <= 0, onclick: () => go(first - size) }, "←", made("span", { class: "word", text: " Previous" })),
    made("label", {}, input, made("span", { text: size === 1 ? `of ${whole(total)}` : `to ${whole(last)} of ${whole(total)}` })),
    made("button", { type: "button", id: `next${mark}`, "aria-label": "Next", disabled: last >= total, onclick: () => go(first + size) }, made("span", { class: "word", text: "Next " }), "→"),
    ...more);
}

/* The bar: search, order, filters */

const sorted = (key) => {
  const word = state.get(key) ?? "";
  const known = word === about.random || about.columns.includes(word);
  return { column: known ? word : word.replace(/^-/, ""), down: !known && word.startsWith("-") };
};

function drawBar() {
  if (document.activeElement !== get("search")) get("search").value = state.get("search") ?? "";
  for (const [key, button] of [["sort", "direction"], ["then", "thendirection"]]) {
    const { column, down } = sorted(key);
    get(key).value = column;
    get(button).textContent = down ? "↓ descending" : "↑ ascending";
    get(button).hidden = !column || column === about.random;
  }
  const column = sorted("sort").column, isChance = column === about.random;
  get("shuffle").hidden = !isChance;
  get("thenline").hidden = isChance || !column;
  if (get("thenline").hidden) get("thendirection").hidden = true;
  drawFields();
}

function drawFields() {
  const fields = get("fields"), parts = [], focused = document.activeElement?.id;
  const scrolled = new Map([...fields.querySelectorAll(".options")].map((one) => [one.dataset.name, one.scrollTop]));
  const order = ["model", "group", "paraphrase_ix", ...about.judges];
  const names = [...new Set([...order, ...about.columns])];
  for (const name of names) {
    if (about.choices[name]) parts.push(choices(name));
    if (about.ranges[name] && name !== "paraphrase_ix" && about.ranges[name][0] < about.ranges[name][1]) parts.push(range(name));
  }
  if (about.errors) parts.push(made("fieldset", {}, made("legend", { text: "errors" }),
    chooser("errors", "", ["", "none", "only"], state.get("errors") ?? "", (value) => change({ errors: value }))));
  const only = made("input", { type: "checkbox", id: "flagged", onchange: () => change({ flagged: only.checked ? "1" : null }) });
  only.checked = state.has("flagged");
  parts.push(made("fieldset", {}, made("legend", { text: "flags" }), made("label", {}, only, made("span", { id: "flags" }))));
  fields.replaceChildren(...parts);
  const words = { "": "shown", none: "left out", only: `alone (${whole(about.errors)})` };
  for (const option of fields.querySelectorAll("#errors option")) option.textContent = words[option.value];
  for (const one of fields.querySelectorAll(".options")) one.scrollTop = scrolled.get(one.dataset.name) ?? 0;
  if (focused) get(focused)?.focus({ preventScroll: true });
  drawActive();
}

function drawActive() {
  get("flags").textContent = `flagged alone (${whole(about.flags.length)})`;
  const names = new Set([...state.keys()].map((key) => key.replace(/^(is|min|max)\./, "").concat(key.includes(".") ? "." : ""))
    .filter((key) => key.endsWith(".") || key === "errors" || key === "flagged"));
  get("active").replaceChildren(names.size ? ` (${names.size}) ` : "");
  get("clear")?.remove();
  if (names.size) get("filters").after(made("button", { type: "button", id: "clear", class: "plain", text: "Clear filters", onclick: clear }));
}

function clear() {
  const gone = [...state.keys()].filter((key) => /^(is|min|max)\./.test(key) || key === "errors" || key === "flagged");
  change(Object.fromEntries(gone.map((key) => [key, null])));
}

function choices(name) {
  const key = `is.${name}`, chosen = state.getAll(key);
  const boxes = about.choices[name].map(([label, count], place) => {
    const box = made("input", { type: "checkbox", id: `${key}.${place}`, value: label });
    box.checked = chosen.includes(label);
    box.addEventListener("change", () => {
      const left = state.getAll(key).filter((one) => one !== label);
      state.delete(key);
      for (const one of box.checked ? [...left, label] : left) state.append(key, one);
      change({});
    });
    return made("label", {}, box, made("span", { text: label || "(nothing)" }), made("small", { text: whole(count) }));
  });
  return made("fieldset", {}, made("legend", { text: name === "paraphrase_ix" ? "paraphrase" : name }),
    made("div", { class: "options", "data-name": name }, ...boxes));
}

function range(name) {
  const inputs = ["min", "max"].map((which, place) => {
    const key = `${which}.${name}`;
    const input = made("input", { type: "number", step: "any", id: key, placeholder: String(Number(about.ranges[name][place].toPrecision(4))), "aria-label": `${name}, ${which === "min" ? "least" : "greatest"}` });
    input.value = state.get(key) ?? "";
    input.addEventListener("change", () => change({ [key]: input.value }));
    return input;
  });
  return made("fieldset", {}, made("legend", { text: name }), made("div", { class: "range" }, inputs[0], "to", inputs[1]));
}

function turnRound(key) {
  const { column, down } = sorted(key);
  change({ [key]: down ? column : `-${column}` });
}

let typing = 0;
get("bar").addEventListener("submit", (event) => event.preventDefault());
get("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => change({ search: get("search").value.trim() }), 150);
});
get("sort").addEventListener("change", () => change({ sort: get("sort").value }));
get("then").addEventListener("change", () => change({ then: get("then").value }));
get("direction").addEventListener("click", () => turnRound("sort"));
get("thendirection").addEventListener("click", () => turnRound("then"));
const shuffle = () => change({ sort: about.random, seed: String(Math.floor(Math.random() * 1e6)) });
get("shuffle").addEventListener("click", shuffle);
for (const tab of document.querySelectorAll("[data-view]"))
  tab.addEventListener("click", () => show(tab.dataset.view));
get("help").addEventListener("click", () => get("keys").showModal());

function show(view) {
  const at = Math.max(0, current?.at ?? 0);
  change({ view, ...{ row: { at }, list: { from: Math.floor(at / LISTED) * LISTED } }[view] });
}

const KEYS = {
  ArrowRight: () => current?.step(1), j: () => current?.step(1), ArrowLeft: () => current?.step(-1), k: () => current?.step(-1),
  g: () => { get("goto")?.focus(); get("goto")?.select(); }, "/": () => get("search").focus(), c: () => get("copy") && copy(), f: () => get("flag") && flag(),
  s: shuffle, 1: () => show("row"), 2: () => show("list"), 3: () => show("pairs"), "?": () => get("keys").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && /^(INPUT|SELECT)$/.test(event.target.tagName)) return event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || get("keys").open || !about) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});
addEventListener("hashchange", () => { if (about) begin(); });

async function open() {
  paint();
  try {
    about = await ask("about");
  } catch (error) {
    get("failure").textContent = error.message;
    get("failure").hidden = false;
    return;
  }
  document.title = about.name;
  get("name").textContent = about.name;
  const columns = about.columns.filter((name) => name !== "api_kwargs");
  const options = (first) => [...first, ...columns.map((name) => [name, name])].map(([value, text]) => made("option", { value, text }));
  get("sort").append(...options([[about.random, "by chance"], ["", "as in the data"]]));
  get("then").append(...options([["", "nothing"]]));
  begin();
  get("filters").open = get("clear") !== null;
}

open();
