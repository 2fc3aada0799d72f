"use strict";
// The table of runs with search, filters and sorting, which the charts follow. A click, or the
// page's address (#run-ID), opens a run.

const $ = (id) => document.getElementById(id);
const phone = matchMedia("(max-width: 42rem)").matches;
const goTo = (id) => (location.hash = `run-${id}`);

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// key, title, format, minimum width, weight for sharing the remaining width, whether phones show it
const COLUMNS = [
  ["name", "run", "run", phone ? 150 : 230, 6, true],
  ["algorithm", "algorithm", "text", 112, 2, false],
  ["dataset", "data set", "text", 112, 2, false],
  ["metric", "metric", "metric", 92, 1, false],
  ["value", "test", "value", 88, 0.5, true],
  ["epsilon_tight", "ε tight", "epsilon", 86, 0.5, true],
  ["epsilon_claimed", "ε claimed", "epsilon", 112, 0.5, false],
  ["epsilon_of", "ε of", "text", 88, 0.5, false],
  ["provenance", "data", "mark", 84, 0.5, false],
  ["started_utc", "date", "date", 100, 0.5, false],
];
const FILTERS = {
  algorithm: "any algorithm",
  model: "any network",
  dataset: "any data set",
  metric: "any metric",
  epsilon_of: "ε of any unit",
  provenance: "any provenance",
  recipe: "any recipe",
  paper: "any table",
};
const ROWS = PAGE.runs.map((run, index) => {
  const searched = [...(run.Configuration ?? []), ...(run["Name, tags and notes"] ?? [])];
  const settings = searched.map((pair) => PAGE.pairs[pair].join("="));
  const words = [...Object.values(run.cells), ...settings].join(" ").toLowerCase();
  return { ...run.cells, index, words };
});

// Sort numbers by value and other values by name. Missing values come last in both directions.
function compare(a, b, rowA, rowB, column, direction) {
  const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);
  if (isMissing(a) || isMissing(b)) return (isMissing(a) - isMissing(b)) * (direction === "asc" ? 1 : -1);
  if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a < b ? -1 : 1;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

const cellOf = (key, kind) => (cell) => {
  const value = cell.getValue();
  const row = cell.getData();
  if (value === null || value === undefined) return "";
  if (kind === "run") {
    const link = element("a", { href: `#run-${encodeURI(row.run)}`, textContent: value });
    return element("span", {}, link, element("small", { textContent: row.what }));
  }
  const over = key === "epsilon_claimed" && roundUp(row.epsilon_tight) > roundUp(value);
  const className = kind === "mark" ? `mark ${value}` : over ? "over" : "";
  return element("span", { className, textContent: (WRITE[kind] ?? WRITE.text)(value, row.metric) });
};

// As in `records.plain_cell`, a text that a spreadsheet would compute gets a leading '.
const plain = (value) => (value === Infinity ? "inf" : value === -Infinity ? "-inf" : typeof value === "string" && /^\s*[=+\-@＝＋－＠]/.test(value) ? `'${value}` : value);

const table = new Tabulator("#runs-table", {
  data: ROWS,
  index: "index", // the field that identifies a row
  columns: COLUMNS.map(([field, title, kind, minWidth, widthGrow, narrow]) => ({
    ...{ field, title, minWidth, widthGrow, visible: narrow || !phone, sorter: compare },
    ...{ formatter: cellOf(field, kind), formatterPrint: cellOf(field, kind), accessorDownload: plain },
    hozAlign: ["value", "epsilon"].includes(kind) ? "right" : "left",
    headerHozAlign: ["value", "epsilon"].includes(kind) ? "right" : "left",
  })),
  layout: "fitColumns",
  renderVertical: "basic",
  initialSort: [{ column: "started_utc", dir: "desc" }],
  pagination: true,
  paginationSize: phone ? 10 : 15,
  paginationSizeSelector: [10, 15, 50, true],
  paginationButtonCount: phone ? 3 : 5,
  placeholder: PAGE.runs.length ? "No run matches." : "No runs yet: zdp-bench run recipe=quickstart adds one.",
  printAsHtml: true,
  printStyled: false,
  printRowRange: "active",
});

// Search and filters

const filters = Object.entries(FILTERS).map(([key, any]) => {
  const values = [...new Set(ROWS.map((row) => row[key]).filter((value) => value !== undefined))].sort();
  const choice = element("select", { ariaLabel: any, name: key }, element("option", { value: "", textContent: any }));
  choice.append(...values.map((value) => element("option", { value, textContent: value })));
  if (values.length > 1) $("filters").append(choice);
  return { key, choice };
});

function passes(row) {
  const limit = $("limit").value;
  return (
    $("search").value.toLowerCase().split(/\s+/).every((word) => row.words.includes(word)) &&
    filters.every(({ key, choice }) => !choice.value || row[key] === choice.value) &&
    (limit === "" || row.epsilon_tight <= Number(limit))
  );
}

function refilter() {
  for (const { choice } of filters) choice.classList.toggle("set", choice.value !== "");
  table.setFilter(passes);
  writeAddress();
}

// The filter in the page's address: #search=mnist&algorithm=DP-SGD&limit=3

function writeAddress() {
  const set = new URLSearchParams([...new FormData($("tools"))].filter(([, value]) => value !== ""));
  history.replaceState(null, "", set.size ? `#${set}` : location.pathname + location.search);
}

function followAddress() {
  const run = PAGE.runs.find((candidate) => `#run-${candidate.cells.run}` === decodeURIComponent(location.hash));
  if (run) return show(run);
  if (location.hash.includes("=")) {
    const set = new URLSearchParams(location.hash.slice(1));
    for (const field of $("tools").elements) if (field.name) field.value = set.get(field.name) ?? "";
    return refilter();
  }
  const target = location.hash.length > 1 && $(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
}

// The chart

const countOf = (rows, metric) => rows.filter((row) => row.metric === metric).length;
const metrics = [...new Set(ROWS.map((row) => row.metric))].sort((a, b) => countOf(ROWS, b) - countOf(ROWS, a));
const options = (values, title) => values.map((value) => element("option", { value, textContent: title(value) }));
$("scatter-metric").append(...options(metrics, titleOf));
$("scatter-colour").append(...options(["algorithm", "dataset", "model", "recipe"], (key) => FILTERS[key].replace("any ", "")));
let shown = ROWS;
let chosenMetric = metrics[0]; // drawn if one of the shown runs has it

function redrawScatter() {
  if (!metrics.length) return;
  const shownMetrics = metrics.filter((metric) => countOf(shown, metric));
  const mostFrequent = [...shownMetrics].sort((a, b) => countOf(shown, b) - countOf(shown, a))[0];
  $("scatter-metric").value = shownMetrics.includes(chosenMetric) ? chosenMetric : (mostFrequent ?? chosenMetric);
  $("scatter-note").textContent = drawScatter(shown, $("scatter-metric").value, $("scatter-colour").value, goTo);
}

table.on("dataFiltered", (_, rows) => {
  shown = rows.map((row) => row.getData());
  $("count").textContent = `${shown.length} of ${ROWS.length} runs`;
  redrawScatter();
});
table.on("tableBuilt", () => {
  $("tools").addEventListener("input", refilter);
  $("tools").addEventListener("reset", () => setTimeout(refilter));
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", followAddress);
  followAddress();
});
table.on("rowClick", (event, row) => event.target.closest("a") || goTo(row.getData().run));
$("download").addEventListener("click", () => table.download("csv", "runs.csv"));
$("scatter-metric").addEventListener("change", () => {
  chosenMetric = $("scatter-metric").value;
  redrawScatter();
});
$("scatter-colour").addEventListener("change", redrawScatter);

// The learning curves

let sorted = ROWS;
const redrawCurves = () => redrawOverlay(sorted.map((row) => PAGE.runs[row.index]));
$("curves-across").append(...options(Object.keys(ACROSS), (key) => ACROSS[key]));
table.on("dataSorted", (_, rows) => {
  sorted = rows.map((row) => row.getData());
  redrawCurves();
});
$("curves-metric").addEventListener("change", redrawCurves);
$("curves-across").addEventListener("change", redrawCurves);

// Show the curves of all runs of a recipe in one chart.
function showRecipe(recipe) {
  $("run").close();
  $("tools").reset();
  const { choice } = filters.find(({ key }) => key === "recipe");
  choice.value = recipe;
  setTimeout(() => {
    choice.value = recipe; // again, because the reset has cleared it
    refilter();
    $("curves-figure").scrollIntoView();
  });
}
$("scatter-figure").hidden = !metrics.length;

// One run

function folded([title, indices]) {
  const cell = (textContent) => element("td", { textContent });
  const row = ([key, value]) => element("tr", {}, cell(key), cell(value === Infinity ? "∞" : String(value)));
  const body = element("tbody", {}, ...indices.map((index) => row(PAGE.pairs[index])));
  const head = element("summary", {}, element("h3", { textContent: title }));
  return element("details", { className: "section", open: true }, head, element("table", { className: "pairs" }, body));
}

function show(run) {
  const { cells, record, curves, ...sections } = run;
  const tile = ([title, value]) => element("div", {}, element("span", { textContent: title }), element("b", { textContent: value }));
  const tiles = [
    [`test ${titleOf(cells.metric)}`, WRITE.value(cells.value, cells.metric)],
    ["ε tight", WRITE.epsilon(cells.epsilon_tight)],
    ["ε claimed", WRITE.epsilon(cells.epsilon_claimed)],
    ["δ", WRITE.number(cells.delta)],
  ];
  const close = element("button", { type: "button", textContent: "Close", onclick: () => $("run").close() });
  const under = element("div", { className: "soft", textContent: [cells.what, cells.algorithm].join(" · ") });
  const name = element("div", {}, element("h2", { id: "run-name", textContent: cells.name }), under);
  const file = element("p", { className: "soft" }, "Its record: ", element("a", { href: record, textContent: record }));
  const parts = element("div", { className: "halves" }, ...Object.entries(sections).map(folded));
  const numbers = element("div", { className: "tiles" }, ...tiles.map(tile));
  const drawing = runCurves(run);
  const figures = drawing ? [drawing.figure] : [];
  $("run-body").replaceChildren(element("div", { id: "run-head" }, name, close), numbers, ...figures, parts, file);
  if (!$("run").open) $("run").showModal();
  drawing?.draw();
  $("run").scrollTop = 0;
}

$("run").addEventListener("close", writeAddress);
$("run").addEventListener("click", (event) => event.target === $("run") && $("run").close());
