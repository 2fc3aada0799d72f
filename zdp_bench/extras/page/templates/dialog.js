"use strict";
// One run, opened by a click or by the page's address (#run-ID); sections that open; printing.

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

function showCurve(run) {
  const metrics = Object.keys(run.curve).filter((key) => PAGE.metrics[key]);
  if (!metrics.length) return null;
  const select = element("select", { ariaLabel: "metric of the curve" });
  choose(select, metrics, titleOf);
  select.value = metrics.includes(run.cells.metric) ? run.cells.metric : metrics[0];
  const canvas = element("canvas", { id: "curve" });
  const redraw = () => {
    forget(curve);
    curve = drawCurve(canvas, run.curve, select.value);
  };
  select.addEventListener("change", redraw);
  requestAnimationFrame(redraw);
  const caption = element("figcaption", {}, "After each epoch: ", select);
  return element("figure", { className: "chart" }, caption, element("div", { className: "canvas" }, canvas));
}

function show(run) {
  const { cells } = run;
  const close = element("button", { type: "button", textContent: "Close", onclick: () => dialog.close() });
  const under = [cells.algorithm, cells.recipe, `seed ${cells.seed}`].join(" · ");
  const name = element("h2", { id: "run-name", textContent: cells.name });
  const head = element("div", { id: "run-head" }, element("div", {}, name, element("div", { className: "soft", textContent: under })), close);
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
  $("run-body").replaceChildren(head, element("div", { className: "tiles" }, ...tiles.filter((one) => one !== null)));
  const drawn = showCurve(run);
  $("run-body").append(...(drawn ? [drawn] : []), halves, model, file);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

function followAddress() {
  const run = PAGE.runs.find((one) => `#run-${one.cells.run}` === location.hash);
  if (run) return show(run);
  const target = location.hash.length > 1 && $(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
}

dialog.addEventListener("close", () => {
  forget(curve);
  history.replaceState(null, "", location.pathname + location.search);
});
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
table.on("rowClick", (event, row) => event.target.closest("a") || goTo(row.getData().run));
addEventListener("hashchange", followAddress);
followAddress();

// A table's curves are drawn when their section is first opened.
const drawOpened = (section) =>
  section.querySelectorAll(":scope > figure canvas[data-runs]").forEach((canvas) => {
    if (!Chart.getChart(canvas)) drawTable(canvas);
  });
const sections = [...document.querySelectorAll("details.section")];
sections.forEach((section) => section.addEventListener("toggle", () => section.open && drawOpened(section)));

// On paper every section but the measurements is open, and everything is dark on white.
let closed = [];
addEventListener("beforeprint", () => {
  closed = sections.filter((section) => !section.open && !section.closest("#measured"));
  closed.forEach((section) => (section.open = true));
  closed.forEach(drawOpened);
  paint(false);
});
addEventListener("afterprint", () => {
  closed.forEach((section) => (section.open = false));
  paint(dark.matches);
});
