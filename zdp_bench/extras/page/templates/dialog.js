"use strict";
// One run, opened by a click or by the page's address (#run-ID); several, compared; sections that
// open; printing.

const dialog = $("run");
let curve = null;

const tile = (title, value) => element("div", {}, element("span", { textContent: title }), element("b", { textContent: value }));

function pairsTable(places) {
  const rows = places.map((place) => PAGE.pairs[place]).map(([key, value]) =>
    element("tr", {}, element("td", { textContent: key }), element("td", { textContent: value === null ? "null" : String(value) })),
  );
  return element("table", { className: "pairs" }, element("tbody", {}, ...rows));
}

function folded(title, open, ...children) {
  return element("details", { className: "section", open }, element("summary", {}, element("h3", { textContent: title })), ...children);
}

function showCurves(runs) {
  const metrics = Object.keys(PAGE.metrics).filter((key) => runs.some((run) => run.curve[key]));
  if (!metrics.length) return null;
  const select = element("select", { ariaLabel: "metric of the curve" });
  choose(select, metrics, titleOf);
  select.value = runs.map((run) => run.cells.metric).find((metric) => metrics.includes(metric)) ?? metrics[0];
  const canvas = element("canvas", { id: "curve" });
  const redraw = () => {
    forget(curve);
    curve = drawCurves(canvas, runs.filter((run) => run.curve[select.value]), select.value);
  };
  select.addEventListener("change", redraw);
  requestAnimationFrame(redraw);
  const caption = element("figcaption", {}, "After each epoch: ", select);
  return element("figure", { className: "chart" }, caption, element("div", { className: "canvas" }, canvas));
}

function openDialog(title, under, ...body) {
  const close = element("button", { type: "button", textContent: "Close", onclick: () => dialog.close() });
  const name = element("h2", { id: "run-name", textContent: title });
  const head = element("div", { id: "run-head" }, element("div", {}, name, element("div", { className: "soft", textContent: under })), close);
  $("run-body").replaceChildren(head, ...body.filter((one) => one !== null));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

function show(run) {
  const { cells } = run;
  const tiles = [
    tile(axisOf(cells.metric).replace(/, .*/, ""), WRITE.value(cells.value, cells.metric)),
    tile("ε tight", WRITE.epsilon(cells.epsilon_tight)),
    tile("ε claimed", WRITE.epsilon(cells.epsilon_claimed)),
    cells.epsilon_patient === undefined ? null : tile("ε per unit", WRITE.epsilon(cells.epsilon_patient)),
    tile("δ", WRITE.number(cells.delta)),
    cells.train_seconds === undefined ? null : tile("time", WRITE.seconds(cells.train_seconds)),
  ];
  const file = element("p", { className: "soft" }, "Its record: ", element("a", { href: run.record, textContent: run.record }));
  const card = element("div", { className: "card" });
  card.innerHTML = run.card.map((line) => PAGE.lines[line]).join("\n"); // made by Python, raw HTML escaped
  const halves = element(
    "div",
    { className: "halves" },
    element("div", {}, folded("Privacy and ledger", true, pairsTable(run.privacy)), folded("The run", true, pairsTable(run.facts))),
    element("div", {}, folded("Configuration", true, pairsTable(run.config))),
  );
  const none = element("p", { className: "soft", textContent: "Records of older versions lack what a model card states." });
  const model = folded("Model card", false, run.card.length ? card : none);
  const numbers = element("div", { className: "tiles" }, ...tiles.filter((one) => one !== null));
  openDialog(cells.name, [cells.what, cells.algorithm].join(" · "), numbers, showCurves([run]), halves, model, file);
}

// Several runs: their curves over one another, what differs, and the tests of `zdp-bench compare`.

function differences(runs) {
  const said = (value) => (value === undefined || value === null || value === false ? "" : String(value));
  const settings = runs.map((run) => new Map(run.config.map((place) => PAGE.pairs[place])));
  const keys = [...new Set(settings.flatMap((of) => [...of.keys()]))].filter((key) => PAGE.settings.includes(key) && !key.endsWith(".name"));
  const columns = PAGE.columns.filter(({ key }) => !["name", "differs", "run", "recipe", "started_utc"].includes(key));
  const written = ({ key, kind }) => runs.map(({ cells }) => (cells[key] === undefined ? "" : WRITE[kind](cells[key], cells.metric)));
  const rows = [...columns.map((column) => [column.title, ...written(column)]), ...keys.map((key) => [key, ...settings.map((of) => said(of.get(key)))])];
  const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
  const line = (kind, row) => element("tr", {}, ...row.map((textContent) => element(kind, { textContent })));
  const heads = element("thead", {}, line("th", ["", ...runs.map((run) => run.cells.name)]));
  return element("div", { className: "wide" }, element("table", { className: "against" }, heads, element("tbody", {}, ...differing.map((row) => line("td", row)))));
}

function tests(runs) {
  const experiments = [...new Map(runs.map((run) => [run.experiment, run])).values()];
  const pairs = experiments.flatMap((one, n) => experiments.slice(n + 1).map((other) => [one, other]));
  const sentence = ([one, other]) => {
    const [p, seeds] = PAGE.tests[[one.experiment, other.experiment].sort((a, b) => a - b).join(" ")] ?? [];
    const whose = [one, other].map(({ cells }) => cells.name.replace(/, seed -?\d+( \(\w+\))?$/, ""));
    if (p === undefined) return `${whose.join(" against ")}: no test. It takes one data set and metric, and two seeds on each side or, for ROC AUC, one seed of both with its scores.`;
    const verdict = p < 0.05 / pairs.length ? "different" : "not shown to be different";
    const name = one.cells.metric === "roc_auc" ? "DeLong" : "Student's t";
    return `${whose.join(" against ")}: ${verdict}, ${name} p ${p < 0.001 ? "< 0.001" : `= ${p}`} (seeds ${seeds.join(", ")}; threshold ${+(0.05 / pairs.length).toPrecision(3)} for ${pairs.length} comparison${pairs.length > 1 ? "s" : ""}).`;
  };
  return element("div", { id: "tests" }, ...pairs.map((pair) => element("p", { textContent: sentence(pair) })));
}

function compareRuns(runs) {
  openDialog(`${runs.length} runs compared`, "Tests are over all seeds of each experiment, as zdp-bench compare makes them.", showCurves(runs), tests(runs), differences(runs));
}

function followAddress() {
  const run = PAGE.runs.find((one) => `#run-${one.cells.run}` === location.hash);
  if (run) return show(run);
  const target = location.hash.length > 1 && $(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
}

dialog.addEventListener("close", () => {
  forget(curve);
  writeAddress();
});
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
table.on("rowClick", (event, row) => event.target.closest("a, [tabulator-field=pick]") || goTo(row.getData().run));
addEventListener("hashchange", followAddress);
followAddress();

// A table's curves are drawn when their section is first opened.
const drawOpened = (section) =>
  section.querySelectorAll(":scope > figure canvas[data-runs]").forEach((canvas) => {
    if (!Chart.getChart(canvas)) drawTable(canvas);
  });
const sections = [...document.querySelectorAll("details.section")];
sections.forEach((section) => section.addEventListener("toggle", () => section.open && drawOpened(section)));

// On paper charts are dark on white.
addEventListener("beforeprint", () => paint(false));
addEventListener("afterprint", () => paint(dark.matches));
