"use strict";
// The table of runs: search, filters, columns, sorting; the scatter follows it.

const $ = (id) => document.getElementById(id);
const phone = matchMedia("(max-width: 42rem)").matches;
const SETTING = "setting:"; // a configuration key as a column
const goTo = (id) => (location.hash = `run-${id}`);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const ROWS = PAGE.runs.map((run, place) => {
  const settings = run.config.map((pair) => [SETTING + PAGE.pairs[pair][0], PAGE.pairs[pair][1]]);
  const words = [...Object.values(run.cells), ...run.config.map((pair) => PAGE.pairs[pair].join("="))];
  return { ...Object.fromEntries(settings), ...run.cells, place, words: words.join(" ").toLowerCase() };
});

// Numbers before words, and what a run lacks last, whichever way the column is sorted.
function compare(a, b, rowA, rowB, column, direction) {
  const lacks = (value) => value === null || value === undefined || Number.isNaN(value);
  if (lacks(a) || lacks(b)) return (lacks(a) - lacks(b)) * (direction === "asc" ? 1 : -1);
  if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a < b ? -1 : 1;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function cellOf(column) {
  return (cell) => {
    const value = cell.getValue();
    const row = cell.getData();
    if (value === null || value === undefined) return "";
    if (column.kind === "run") {
      const link = element("a", { href: `#run-${row.run}`, textContent: value });
      const below = phone && row.differs ? element("small", { textContent: row.differs }) : null;
      return element("span", {}, link, below);
    }
    const over = column.key === "epsilon_claimed" && row.epsilon_tight > 1.01 * value;
    const mark = column.kind === "mark" ? `mark ${value}` : over ? "over" : "";
    return element("span", { className: mark, textContent: WRITE[column.kind](value, row.metric) });
  };
}

// [least width, share of what is left over] by kind
const WIDTHS = { run: [190, 3], words: [210, 6], text: [112, 2], metric: [92, 1], value: [88, 0.5], mark: [84, 0.5], date: [100, 0.5], epsilon: [86, 0.5] };

function asColumn(column) {
  const right = ["number", "epsilon", "value", "seconds"].includes(column.kind);
  const [minWidth, widthGrow] = WIDTHS[column.kind] ?? [68, 0.5];
  return {
    field: column.key,
    title: column.title,
    titleFormatter: () => element("span", { textContent: column.title }),
    visible: phone ? column.narrow : column.wide,
    sorter: compare,
    formatter: cellOf(column),
    formatterPrint: cellOf(column),
    hozAlign: right ? "right" : "left",
    headerHozAlign: right ? "right" : "left",
    widthGrow,
    minWidth: phone && column.kind === "run" ? 150 : column.key === "epsilon_claimed" ? 112 : minWidth,
  };
}

const table = new Tabulator("#runs-table", {
  data: ROWS,
  index: "place",
  columns: PAGE.columns.map(asColumn),
  nestedFieldSeparator: false,
  layout: "fitColumns",
  renderVertical: "basic",
  initialSort: [{ column: "started_utc", dir: "desc" }],
  pagination: true,
  paginationSize: phone ? 10 : 15,
  paginationSizeSelector: [10, 15, 50, true],
  paginationButtonCount: phone ? 3 : 5,
  placeholder: PAGE.runs.length ? "No run matches." : "No runs yet: zdp-bench run recipe=quickstart makes one.",
  printAsHtml: true,
  printStyled: false,
  printRowRange: "active",
});

// Search and filters

const filters = PAGE.columns
  .filter((column) => column.any)
  .map((column) => {
    const values = [...new Set(ROWS.map((row) => row[column.key]).filter((value) => value !== undefined))].sort();
    const choice = element("select", { ariaLabel: column.title });
    choice.append(element("option", { value: "", textContent: column.any }));
    choice.append(...values.map((value) => element("option", { value, textContent: value })));
    if (values.length > 1) $("filters").append(choice);
    return { key: column.key, choice };
  });

function passes(row) {
  const words = $("search").value.toLowerCase().split(/\s+/);
  const limit = $("limit").value;
  return (
    words.every((word) => row.words.includes(word)) &&
    filters.every(({ key, choice }) => !choice.value || row[key] === choice.value) &&
    (limit === "" || row.epsilon_tight <= Number(limit))
  );
}

function refilter() {
  for (const { choice } of filters) choice.classList.toggle("set", choice.value !== "");
  table.setFilter(passes);
}

// Columns

const there = new Set(PAGE.columns.map((column) => column.key));

function addChoices(heading, columns, isOn, add) {
  if (!columns.length) return;
  $("columns").append(element("b", { textContent: heading }));
  for (const column of columns) {
    const box = element("input", { type: "checkbox", checked: isOn(column) });
    box.addEventListener("change", () => {
      if (!there.has(column.key)) there.add(column.key) && add(column);
      else table[box.checked ? "showColumn" : "hideColumn"](column.key);
      table.redraw(true);
    });
    $("columns").append(element("label", {}, box, ` ${column.title}`));
  }
}

const numeric = (key) => ROWS.every((row) => ["number", "undefined"].includes(typeof row[key]) || row[key] === null);
const settings = PAGE.settings.map((key) => ({
  key: SETTING + key,
  title: key,
  kind: numeric(SETTING + key) ? "number" : "text",
  wide: true,
  narrow: true,
}));
addChoices("Records", PAGE.columns, (column) => (phone ? column.narrow : column.wide), () => {});
addChoices("Configuration, what differs", settings, () => false, (column) => table.addColumn(asColumn(column)));

// The scatter

function choose(select, values, titles) {
  select.append(...values.map((value) => element("option", { value, textContent: titles(value) })));
}

const often = (metric) => ROWS.filter((row) => row.metric === metric).length;
const metrics = [...new Set(ROWS.map((row) => row.metric))].sort((a, b) => often(b) - often(a));
choose($("scatter-metric"), metrics, titleOf);
choose($("scatter-colour"), ["algorithm", "dataset", "model", "recipe"], (key) => PAGE.columns.find((c) => c.key === key).title);
let shown = ROWS;

function redrawScatter() {
  if (metrics.length) drawScatter(shown, $("scatter-metric").value, $("scatter-colour").value, goTo);
}

table.on("dataFiltered", (_, rows) => {
  shown = rows.map((row) => row.getData());
  $("count").textContent = `${shown.length} of ${ROWS.length} runs`;
  redrawScatter();
});
table.on("tableBuilt", () => {
  $("tools").addEventListener("input", (event) => event.target.closest(".choose") || refilter());
  $("tools").addEventListener("reset", () => setTimeout(refilter));
  $("tools").addEventListener("submit", (event) => event.preventDefault());
});
$("scatter-metric").addEventListener("change", redrawScatter);
$("scatter-colour").addEventListener("change", redrawScatter);
$("scatter-figure").hidden = !metrics.length;
document.addEventListener("click", (event) => event.target.closest(".choose") || ($("columns").parentElement.open = false));
