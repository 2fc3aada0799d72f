"use strict";
// The table of runs: search, filters, columns, sorting, choice; the scatter follows it.

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
      return element("span", {}, link, element("small", { textContent: row.what }));
    }
    const over = column.key === "epsilon_claimed" && row.epsilon_tight > 1.01 * value;
    const mark = column.kind === "mark" ? `mark ${value}` : over ? "over" : "";
    return element("span", { className: mark, textContent: WRITE[column.kind](value, row.metric) });
  };
}

// As `records.plain_cell`: text that a sheet would compute has a ' before it.
const plain = (value) => (value === Infinity ? "inf" : typeof value === "string" && /^\s*[=+\-@＝＋－＠]/.test(value) ? `'${value}` : value);

// [least width, share of what is left over] by kind
const WIDTHS = { run: [230, 6], words: [210, 6], text: [112, 2], metric: [92, 1], value: [88, 0.5], mark: [84, 0.5], date: [100, 0.5], epsilon: [86, 0.5] };

function asColumn(column) {
  const right = ["number", "epsilon", "value", "seconds"].includes(column.kind);
  const [minWidth, widthGrow] = WIDTHS[column.kind] ?? [68, 0.5];
  return {
    field: column.key,
    title: column.title,
    titleFormatter: () => element("span", { textContent: column.title }),
    visible: Boolean(phone ? column.narrow : column.wide),
    sorter: compare,
    formatter: cellOf(column),
    formatterPrint: cellOf(column),
    accessorDownload: plain,
    hozAlign: right ? "right" : "left",
    headerHozAlign: right ? "right" : "left",
    widthGrow,
    minWidth: phone && column.kind === "run" ? 150 : column.key === "epsilon_claimed" ? 112 : minWidth,
  };
}

const numeric = (key) => ROWS.every((row) => ["number", "undefined"].includes(typeof row[key]) || row[key] === null);
const settings = PAGE.settings.map((key) => ({ key: SETTING + key, title: key, kind: numeric(SETTING + key) ? "number" : "text" }));
const pick = { field: "pick", title: "", formatter: "rowSelection", headerSort: false, print: false, download: false, width: 36, minWidth: 36, hozAlign: "center" };

const table = new Tabulator("#runs-table", {
  data: ROWS,
  index: "place",
  columns: [pick, ...[...PAGE.columns, ...settings].map(asColumn)],
  nestedFieldSeparator: false,
  layout: "fitColumns",
  renderVertical: "basic",
  initialSort: [{ column: "started_utc", dir: "desc" }],
  persistence: { sort: true, columns: ["visible"], page: { size: true } },
  persistenceID: location.pathname,
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
    const choice = element("select", { ariaLabel: column.title, name: column.key });
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
  writeAddress();
}

// The filter in the page's address: #search=mnist&algorithm=DP-SGD&limit=3

function writeAddress() {
  const set = new URLSearchParams([...new FormData($("tools"))].filter(([, value]) => value !== ""));
  history.replaceState(null, "", set.size ? `#${set}` : location.pathname + location.search);
}

function readAddress() {
  if (!location.hash.includes("=")) return;
  const set = new URLSearchParams(location.hash.slice(1));
  for (const field of $("tools").elements) if (field.name) field.value = set.get(field.name) ?? "";
  refilter();
}

// Columns

function addChoices(heading, columns) {
  if (!columns.length) return;
  $("columns").append(element("b", { textContent: heading }));
  for (const { key, title } of columns) {
    const box = element("input", { type: "checkbox", checked: table.getColumn(key).isVisible() });
    box.addEventListener("change", () => {
      table[box.checked ? "showColumn" : "hideColumn"](key);
      table.redraw(true);
    });
    $("columns").append(element("label", {}, box, ` ${title}`));
  }
}

// The scatter

function choose(select, values, titles) {
  select.append(...values.map((value) => element("option", { value, textContent: titles(value) })));
}

const often = (metric) => ROWS.filter((row) => row.metric === metric).length;
const metrics = [...new Set(ROWS.map((row) => row.metric))].sort((a, b) => often(b) - often(a));
choose($("scatter-metric"), metrics, titleOf);
choose($("scatter-colour"), ["algorithm", "dataset", "model", "recipe"], (key) => PAGE.columns.find((c) => c.key === key).title);
let shown = ROWS;
let wanted = metrics[0]; // of the scatter, while a run that is shown has it

function redrawScatter() {
  if (!metrics.length) return;
  const there = metrics.filter((metric) => shown.some((row) => row.metric === metric));
  for (const option of $("scatter-metric").options) option.hidden = option.disabled = !there.includes(option.value);
  const count = (metric) => shown.filter((row) => row.metric === metric).length;
  const most = [...there].sort((a, b) => count(b) - count(a))[0];
  $("scatter-metric").value = there.includes(wanted) ? wanted : (most ?? wanted);
  drawScatter(shown, $("scatter-metric").value, $("scatter-colour").value, goTo);
}

table.on("dataFiltered", (_, rows) => {
  shown = rows.map((row) => row.getData());
  $("count").textContent = `${shown.length} of ${ROWS.length} runs`;
  redrawScatter();
});
table.on("tableBuilt", () => {
  addChoices("Records", PAGE.columns);
  addChoices("Configuration, what differs", settings);
  $("tools").addEventListener("input", (event) => event.target.closest(".choose") || refilter());
  $("tools").addEventListener("reset", () => setTimeout(refilter));
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", readAddress);
  readAddress();
});
table.on("rowSelectionChanged", (rows) => {
  $("compare").disabled = rows.length < 2 || rows.length > COLOURS.length;
  $("compare").textContent = rows.length < 2 ? "Compare" : `Compare ${rows.length}`;
  $("compare").title = rows.length > COLOURS.length ? `${COLOURS.length} at most` : "";
});
$("compare").addEventListener("click", () => compareRuns(table.getSelectedData().map((row) => PAGE.runs[row.place])));
$("download").addEventListener("click", () => table.download("csv", "runs.csv"));
$("scatter-metric").addEventListener("change", () => {
  wanted = $("scatter-metric").value;
  redrawScatter();
});
$("scatter-colour").addEventListener("change", redrawScatter);
$("scatter-figure").hidden = !metrics.length;
document.addEventListener("click", (event) => event.target.closest(".choose") || ($("columns").parentElement.open = false));
