"use strict";

const root = document.documentElement;
const theme = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
}

function paint() {
  theme.textContent = isDark() ? "Light page" : "Dark page";
}

try {
  const kept = localStorage.getItem("theme");
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
} catch { /* a page from disk may have no storage */ }
theme.hidden = false;
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as above */ }
  paint();
});
system.addEventListener("change", paint);
paint();

/* Charts: the nearest point to the pointer, or the one that the arrow keys lead to. */
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const tip = plot.querySelector(".tip");
  let at = null;

  const shown = () => [...plot.querySelectorAll(":scope > svg")].find((svg) => svg.clientWidth);
  const scale = (svg, axis) => {
    const [low, high, start, end] = svg.dataset[axis].split(" ").map(Number);
    return (value) => start + (value - low) / (high - low) * (end - start);
  };

  function clear() {
    at = null;
    tip.textContent = "";
    for (const one of plot.querySelectorAll(".ring")) one.remove();
    for (const one of plot.querySelectorAll(".lit")) one.classList.remove("lit");
  }

  function show(series, point) {
    clear();
    at = [series, point];
    const svg = shown(), one = data.series[series];
    const x = scale(svg, "x")(one.x[point]), y = scale(svg, "y")(one.y[point]);
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    for (const [name, value] of [["class", "ring"], ["cx", x], ["cy", y], ["r", 6]])
      ring.setAttribute(name, value);
    svg.append(ring);
    svg.querySelector(`[data-n="${series}"]`).classList.add("lit");
    tip.textContent = words(one, point);
    const ratio = svg.clientWidth / svg.viewBox.baseVal.width;
    const left = Math.min(Math.max(x * ratio - tip.offsetWidth / 2, 0), plot.clientWidth - tip.offsetWidth);
    const above = y * ratio - tip.offsetHeight - 12;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < 0 ? y * ratio + 14 : above}px`;
  }

  function words(one, point) {
    const told = one.labels ? [one.labels[point]] : [];
    if (!data.rows) told.push(`${data.x} ${number(one.x[point])}`, `${data.y} ${number(one.y[point])}`);
    return `${one.name}: ${told.join(", ")}`;
  }

  const number = (value) => String(Number(value.toPrecision(4))).replace("-", "\u2212");
  const known = (series, point) => data.series[series].y[point] !== null && data.series[series].x[point] !== null;

  plot.addEventListener("pointermove", (event) => {
    const svg = shown(), box = svg.getBoundingClientRect();
    const ratio = svg.viewBox.baseVal.width / box.width;
    const here = [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
    const x = scale(svg, "x"), y = scale(svg, "y");
    let best = null, least = 40 * 40;
    data.series.forEach((one, series) => one.x.forEach((value, point) => {
      if (!known(series, point)) return;
      const far = (x(value) - here[0]) ** 2 + (y(one.y[point]) - here[1]) ** 2;
      if (far < least) { least = far; best = [series, point]; }
    }));
    if (!best) clear();
    else if (!at || at[0] !== best[0] || at[1] !== best[1]) show(...best);
  });
  plot.addEventListener("pointerleave", clear);
  plot.addEventListener("blur", clear);
  plot.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if (event.key === "Escape") return clear();
    if (!(event.key in steps)) return;
    event.preventDefault();
    const [down, right] = steps[event.key];
    const count = data.series.length;
    const series = at ? (at[0] + down + count) % count : 0;
    const last = data.series[series].x.length - 1;
    let point = Math.min(at ? Math.max(0, at[1] + right) : 0, last);
    while (point > 0 && point < last && !known(series, point)) point += right || 1;
    if (known(series, point)) show(series, point);
  });
}

/* Tables: a click on a head orders the rows by its column, a second one the other way round. */
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "descending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "ascending" : "descending");
    const text = (row) => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
    const value = (row) => parseFloat(text(row).replaceAll(",", "").replace("\u2212", "-"));
    const rows = [...body.rows].sort((a, b) => {
      const gap = value(a) - value(b);
      return Number.isNaN(gap) ? text(a).localeCompare(text(b)) : gap;
    });
    body.append(...(down ? rows : rows.reverse()));
  });
}

/* Of several charts the chosen one. */
for (const choice of document.querySelectorAll(".choice")) {
  const select = choice.querySelector("select"), charts = choice.querySelectorAll("figure");
  const choose = () => charts.forEach((chart, place) => { chart.hidden = place !== select.selectedIndex; });
  select.addEventListener("change", choose);
  choose();
}
