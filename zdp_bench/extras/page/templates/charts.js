"use strict";
// The page's data, how its numbers are written, and its three charts: runs by ε, the curve of one
// run, the curves of a table.

const revive = (key, value) => (value === "inf" ? Infinity : value === "nan" ? NaN : value);
const PAGE = JSON.parse(document.getElementById("runs-data").textContent, revive);
const unitOf = (metric) => PAGE.metrics[metric][1];
const titleOf = (metric) => PAGE.metrics[metric][0];
const inUnit = (value, metric) => (unitOf(metric) === "%" ? 100 * value : value);
const axisOf = (metric) => `test ${titleOf(metric)}${unitOf(metric) ? `, ${unitOf(metric)}` : ""}`;

// Three digits that never say less than was spent, as `privacy/statement.py` writes them.
function roundUp(value) {
  const unit = 10 ** Math.max(0, 2 - Math.floor(Math.log10(value || 1)));
  return +(Math.ceil(+(value * unit).toPrecision(9)) / unit).toPrecision(12);
}

const WRITE = {
  text: (value) => String(value),
  words: (value) => String(value),
  run: (value) => String(value),
  number: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(3))),
  epsilon: (value) =>
    value === Infinity ? "∞" : value > 999 ? roundUp(value).toLocaleString("en") : String(roundUp(value)),
  metric: (value) => titleOf(value),
  mark: (value) => String(value),
  value: (value, metric) =>
    Number.isNaN(value) ? "undefined" : `${inUnit(value, metric).toFixed(unitOf(metric) ? 2 : 4)} ${unitOf(metric)}`.trim(),
  date: (value) => String(value).slice(0, 10),
  seconds: (value) =>
    value < 90 ? `${value.toFixed(0)} s` : value < 5400 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`,
};

// Okabe and Ito's colours, which colour-blind readers tell apart; points and dashes tell them too.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a8f98", "#B5A300"];
const POINTS = ["circle", "rect", "triangle", "rectRot", "cross", "star", "rectRounded", "crossRot"];
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = new Set();

function paint(isDark) {
  Chart.defaults.color = isDark ? "#9aa5b1" : "#59636e";
  Chart.defaults.borderColor = isDark ? "#333b45" : "#e3e8ed";
  for (const chart of charts) {
    for (const scale of Object.values(chart.options.scales)) {
      scale.ticks.color = scale.title.color = Chart.defaults.color;
      scale.grid.color = Chart.defaults.borderColor;
    }
    chart.options.plugins.legend.labels.color = Chart.defaults.color;
    chart.update("none");
  }
}

Chart.defaults.font.family = "system-ui, sans-serif";
Chart.defaults.animation = false;
Chart.defaults.maintainAspectRatio = false;
Chart.defaults.plugins.legend.position = "bottom";
Object.assign(Chart.defaults.plugins.legend.labels, { usePointStyle: true, boxWidth: 8, boxHeight: 8 });
paint(dark.matches);
dark.addEventListener("change", () => paint(dark.matches));

const scale = (title, more = {}) => ({ title: { display: true, text: title }, ticks: {}, grid: {}, ...more });

function epsilonScale(title, edge) {
  const written = (value) => {
    if (value === edge) return "∞";
    const digit = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
    return [1, 2, 5].some((one) => Math.abs(digit - one) < 1e-6) && value < (edge ?? Infinity) ? WRITE.epsilon(value) : "";
  };
  return scale(title, { type: "logarithmic", ticks: { callback: written, autoSkip: false, maxRotation: 0 }, max: edge && edge * 1.3 });
}

function draw(canvas, config) {
  const chart = new Chart(canvas, config);
  charts.add(chart);
  return chart;
}

function forget(chart) {
  charts.delete(chart);
  chart?.destroy();
}

// Runs by ε. A run without protection stands at the right edge, marked ∞.
let scatter = null;

function drawScatter(rows, metric, colour, open) {
  forget(scatter);
  const shown = rows.filter((row) => row.metric === metric && row.epsilon_tight > 0 && !Number.isNaN(row.value));
  const finite = shown.map((row) => row.epsilon_tight).filter(Number.isFinite);
  const edge = 10 ** Math.ceil(Math.log10(2 * Math.max(1, ...finite)));
  const groups = Map.groupBy ? Map.groupBy(shown, (row) => row[colour] ?? "") : group(shown, colour);
  const datasets = [...groups].sort().map(([label, of], place) => ({
    label,
    data: of.map((row) => ({ x: Math.min(row.epsilon_tight, edge), y: inUnit(row.value, metric), row })),
    backgroundColor: `${COLOURS[place % COLOURS.length]}b0`,
    borderColor: COLOURS[place % COLOURS.length],
    pointStyle: POINTS[place % POINTS.length],
    clip: 8,
    radius: 5,
    hoverRadius: 7,
  }));
  const about = ({ raw: { row } }) => [
    `${WRITE.value(row.value, metric)} at tight ε ${WRITE.epsilon(row.epsilon_tight)}`,
    `${row.what}, ${row.algorithm}`,
  ];
  scatter = draw(document.getElementById("scatter"), {
    type: "scatter",
    data: { datasets },
    options: {
      scales: { x: epsilonScale("tight ε; ∞ without protection", edge), y: scale(axisOf(metric)) },
      plugins: { tooltip: { callbacks: { title: (items) => items[0].raw.row.name, label: about } } },
      onClick: (event, found) => found.length && open(datasets[found[0].datasetIndex].data[found[0].index].row.run),
      onHover: (event, found) => (event.native.target.style.cursor = found.length ? "pointer" : "default"),
    },
  });
}

function group(rows, key) {
  const found = new Map();
  for (const row of rows) found.set(row[key] ?? "", [...(found.get(row[key] ?? "") ?? []), row]);
  return found;
}

// The metric of runs after each epoch.
function drawCurves(canvas, runs, metric) {
  const datasets = runs.map((run, place) => ({
    label: shorten(run.cells.name),
    data: run.curve.epoch.map((epoch, n) => ({ x: epoch, y: inUnit(run.curve[metric][n], metric), spent: run.curve.epsilon_tight?.[n] })),
    borderColor: COLOURS[place],
    backgroundColor: COLOURS[place],
    borderDash: DASHES[place % DASHES.length],
    pointStyle: POINTS[place],
    pointRadius: 2.5,
    borderWidth: 2,
  }));
  const said = ({ dataset, parsed, raw }) => {
    const spent = raw.spent === undefined || raw.spent === null ? "" : ` at tight ε ${WRITE.epsilon(raw.spent)}`;
    return `${runs.length > 1 ? dataset.label : axisOf(metric)}: ${+parsed.y.toPrecision(4)}${spent}`;
  };
  return draw(canvas, {
    type: "line",
    data: { datasets },
    options: {
      interaction: { mode: "x", intersect: false },
      scales: { x: scale("epoch", { type: "linear", ticks: { precision: 0 } }), y: scale(axisOf(metric)) },
      plugins: { legend: { display: runs.length > 1 }, tooltip: { callbacks: { title: (items) => `epoch ${items[0].parsed.x}`, label: said } } },
    },
  });
}

const shorten = (words) => (words.length > 70 ? `${words.slice(0, 45)} … ${words.slice(-22)}` : words);

// A table's runs: the metric after each epoch over the ε spent by then; a line for each seed.
function drawTable(canvas) {
  const runs = canvas.dataset.runs.split(" ").map((place) => PAGE.runs[place]);
  const label = labelsOf(runs);
  const labels = [...new Set(label.values())];
  const all = runs.flatMap((run) => run.curve.epsilon_tight ?? []).filter((e) => Number.isFinite(e) && e > 0);
  if (!all.length) return canvas.closest("figure").remove();
  const ends = [Math.min(...all), Math.max(...all)];
  const datasets = runs.map((run) => {
    const metric = run.cells.metric;
    const place = labels.indexOf(label.get(run));
    const points = (run.curve[metric] ?? [])
      .map((y, n) => ({ x: run.curve.epsilon_tight?.[n], y: inUnit(y, metric) }))
      .filter(({ x }) => Number.isFinite(x) && x > 0);
    const last = inUnit(run.cells.value, metric);
    const open = points.length === 0;
    const colour = COLOURS[place % COLOURS.length];
    return {
      label: label.get(run),
      data: open ? ends.map((x) => ({ x, y: last })) : points,
      borderColor: colour,
      backgroundColor: colour,
      borderDash: open ? [6, 4] : DASHES[Math.floor(place / COLOURS.length) % DASHES.length],
      pointStyle: POINTS[place % POINTS.length],
      pointRadius: open ? 0 : 2.5,
      borderWidth: 1.5,
    };
  });
  const first = (item) => datasets.findIndex((set) => set.label === item.text) === item.datasetIndex;
  draw(canvas, {
    type: "line",
    data: { datasets },
    options: {
      scales: { x: epsilonScale("tight ε spent so far"), y: scale(canvas.dataset.axis) },
      plugins: {
        legend: { labels: { filter: first } },
        tooltip: { callbacks: { title: (items) => `tight ε ${WRITE.epsilon(items[0].parsed.x)}`, label: (item) => `${item.dataset.label}: ${+item.parsed.y.toPrecision(4)}` } },
      },
    },
  });
}

// 'LeNet-5 on MNIST, DP-SGD', and the variant or recipe where several experiments have that name.
function labelsOf(runs) {
  const base = ({ cells }) => `${cells.what}, ${cells.algorithm}`;
  const more = ({ cells }) => cells.variant ?? cells.recipe;
  const several = (name) => new Set(runs.filter((run) => base(run) === name).map(more)).size > 1;
  return new Map(runs.map((run) => [run, several(base(run)) ? `${base(run)}, ${more(run)}` : base(run)]));
}
