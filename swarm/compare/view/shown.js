/* Elements of a row, a list or a comparison. A model's text is only inserted as text, never as HTML. */

export function made(kind, given = {}, ...inside) {
  const one = document.createElement(kind);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
    else if (name === "text") one.textContent = value;
    else one.setAttribute(name, value === true ? "" : value);
  }
  one.append(...inside.filter((part) => part !== null && part !== undefined));
  return one;
}

export const whole = (count) => count.toLocaleString("en");

export function number(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value).replace("-", "\u2212");
  const small = Math.abs(value) < 1e-4;
  return (small ? value.toPrecision(2) : String(Number(value.toPrecision(4)))).replace("-", "\u2212");
}

const isObject = (value) => value !== null && typeof value === "object";
const isShares = (value) => isObject(value) && !Array.isArray(value) &&
  Object.keys(value).length > 0 && Object.values(value).every((one) => typeof one === "number");
const written = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 1);

/* The text of an answer, for copying. */
export const plain = (value) => value === null || value === undefined ? "" : written(value);

/* Probabilities, or their logarithms, as bars: the 20 greatest. */
export function bars(shares) {
  const all = Object.entries(shares).sort((a, b) => b[1] - a[1]);
  const logarithms = all.some(([, value]) => value < 0);
  const size = (value) => logarithms ? Math.exp(value) : value;
  const most = Math.max(1, ...all.map(([, value]) => size(value)));
  const box = made("div", { class: "bars" });
  for (const [token, value] of all.slice(0, 20))
    box.append(made("code", { text: JSON.stringify(token) }),
      track(size(value) / most), made("span", { class: "figure", text: number(value) }));
  const rest = all.length - 20;
  return rest > 0 ? made("div", {}, box, made("p", { class: "role", text: `and ${whole(rest)} more` })) : box;
}

function track(share) {
  const filled = made("i");
  filled.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return made("div", { class: "track" }, filled);
}

/* The content of a message or an answer: text, parts, probabilities, or nothing. */
export function content(value) {
  if (value === null || value === undefined) return made("p", { class: "missing", text: "nothing" });
  if (isShares(value)) return bars(value);
  if (Array.isArray(value)) return made("div", {}, ...value.map(part));
  if (value === "") return made("p", { class: "missing", text: "an empty text" });
  return made("pre", { class: "text", text: written(value) });
}

function part(value) {
  if (!isObject(value) || typeof value.text === "string") return content(isObject(value) ? value.text : value);
  const url = value.image_url?.url ?? value.image_url;
  if (typeof url !== "string") return content(written(value));
  if (/^data:image\/(png|jpeg|gif|webp);/.test(url)) return made("img", { src: url, alt: "picture of the message" });
  return made("p", { class: "missing", text: `a picture that is not loaded: ${url.slice(0, 200)}` });
}

function message(one) {
  if (!isObject(one)) return made("div", { class: "card asked" }, content(one));
  const { role, content: said, ...more } = one;
  return made("div", { class: `card asked ${role === "system" ? "system" : ""}` },
    made("p", { class: "role", text: role ?? "message" }),
    said === null && Object.keys(more).length ? null : content(said),
    Object.keys(more).length ? made("pre", { class: "text", text: written(more) }) : null);
}

function facts(cells) {
  const told = [["model", cells.model], ["group", cells.group], ["paraphrase", cells.paraphrase_ix]];
  return made("p", { class: "meta" }, ...told.filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => made("span", {}, made("small", { text: `${name} ` }), plain(value))));
}

/* Judges and other numbers of a row, each on a scale from 0 to at least 1 that covers its column. */
function scores(cells, about, names) {
  const box = made("dl", { class: "scores" });
  for (const name of names) {
    const value = cells[name];
    if (value === undefined) continue;
    box.append(made("dt", { text: name }));
    const [low, high] = about.ranges[name] ?? [0, 1];
    const least = Math.min(0, low), most = Math.max(1, high);
    if (typeof value === "number") box.append(
      made("dd", {}, track((value - least) / (most - least))),
      made("dd", { class: "figure", text: number(value) }));
    else box.append(made("dd", { class: "said" }, content(value)));
  }
  return box.childElementCount ? box : null;
}

export function answer(cells) {
  const failed = cells.error !== null && cells.error !== undefined;
  if (failed && (cells.answer === null || cells.answer === undefined))
    return made("div", { class: "card answer" }, made("pre", { class: "text wrong", text: `failed: ${plain(cells.error)}` }));
  return made("div", { class: "card answer" }, content(cells.answer),
    failed ? made("pre", { class: "text wrong", text: plain(cells.error) }) : null);
}

const others = (about) => about.listed.filter((name) => name !== "model" && name !== "group");

export function row(cells, about) {
  const messages = Array.isArray(cells.api_kwargs?.messages) ? cells.api_kwargs.messages
    : [{ role: "question", content: cells.question ?? null }];
  const shown = new Set(["answer", "model", "group", "paraphrase_ix", "error", ...others(about)]);
  if (cells.question !== undefined) shown.add("question");
  const shares = Object.entries(cells).filter(([name, value]) => !shown.has(name) && isShares(value));
  for (const [name] of shares) shown.add(name);
  const more = Object.entries(cells).filter(([name]) => !shown.has(name));
  return made("div", { class: "one" },
    made("section", { "aria-label": "Conversation" }, made("h2", { text: "Conversation" }), ...messages.map(message)),
    made("section", { "aria-label": "Answer" }, made("h2", { text: "Answer" }), facts(cells), answer(cells),
      scores(cells, about, others(about)),
      ...shares.map(([name, value]) => made("details", { open: shares.length < 3 && !name.endsWith("raw_answer") }, made("summary", { text: name }), bars(value))),
      more.length ? made("details", { "data-keep": "more" }, made("summary", { text: "All else" }), details(more)) : null));
}

function details(entries) {
  const body = made("tbody");
  for (const [name, value] of entries) {
    let told = value;
    if (name === "api_kwargs" && isObject(value)) { const { messages, ...rest } = value; told = rest; }
    body.append(made("tr", {}, made("th", { scope: "row", text: name }),
      made("td", {}, told === null ? made("span", { class: "missing", text: "nothing" }) : made("pre", { class: "text", text: written(told) }))));
  }
  return made("table", { class: "details" }, body);
}

export function list(rows, about, sort, first, open) {
  const names = ["question", "answer", ...about.listed, "paraphrase_ix", "error"].filter((name) =>
    rows.some((one) => one.cells[name] !== undefined) && (name !== "error" || rows.some((one) => one.cells.error !== null)));
  const head = made("tr", {}, made("th", { text: "#" }), ...names.map((name) => {
    const ordered = sort.column === name ? (sort.down ? "descending" : "ascending") : null;
    if (!about.columns.includes(name)) return made("th", { text: name });
    const mark = ordered ? (sort.down ? " ↓" : " ↑") : "";
    return made("th", { "aria-sort": ordered }, made("button", { type: "button", text: name + mark, onclick: () => sort.by(name) }));
  }));
  const body = made("tbody", {}, ...rows.map((one, place) => made("tr", {},
    made("td", { class: "n" }, made("button", { type: "button", text: whole(first + place + 1), "aria-label": `Open ${first + place + 1}`, onclick: () => open(first + place) }), one.flagged ? " ⚑" : null),
    ...names.map((name) => cell(name, one.cells[name])))));
  return made("div", { class: "scroll" }, made("table", { class: "list" }, made("thead", {}, head), body));
}

function cell(name, value) {
  const long = name === "question" || name === "answer" || name === "error";
  const text = value === null || value === undefined ? (name === "error" ? "" : "–") : typeof value === "number" ? number(value) : plain(value);
  const kind = typeof value === "number" ? "n" : long ? `long ${name}${name === "error" ? " wrong" : ""}` : "";
  return made("td", { class: kind, "data-name": name === "paraphrase_ix" ? "paraphrase" : name }, made("span", { class: long ? "clip" : "", text }));
}

export function pair(one, about, labels, open) {
  const place = one.paraphrase === null || one.paraphrase === undefined ? "" : `paraphrase ${plain(one.paraphrase)}, `;
  const side = (name) => one[name]
    ? made("div", {}, made("p", { class: "meta" }, labels[name], made("button", { type: "button", class: "plain", text: "open", onclick: () => open(one[name].row) })),
      answer(one[name].cells), scores(one[name].cells, about, others(about)))
    : made("div", {}, made("p", { class: "meta", text: labels[name] }), made("p", { class: "missing", text: "no such sample" }));
  return made("article", { class: "sides" },
    made("h3", {}, `${place}sample ${one.sample}`, made("span", { class: "text", text: one.question })), side("left"), side("right"));
}

export function means(told, labels) {
  const known = Object.entries(told).filter(([, [left, right]]) => left !== null && right !== null);
  if (!known.length) return null;
  const body = made("tbody", {}, ...known.map(([name, [left, right]]) => made("tr", {}, made("th", { scope: "row", text: name }),
    ...[left, right, right - left].map((value) => made("td", { class: "n", text: number(value) })))));
  const head = ["mean", labels.left, labels.right, "right − left"].map((text) => made("th", { text }));
  return made("div", { class: "scroll" }, made("table", { class: "means" }, made("thead", {}, made("tr", {}, ...head)), body));
}
