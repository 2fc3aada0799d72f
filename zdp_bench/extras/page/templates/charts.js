"use strict";
// The page's data, the format of its numbers, and the chart of utility against ε.

// JSON has no ∞ and NaN: {"number": "Infinity"}
const revive = (key, value) => (typeof value?.number === "string" && Object.keys(value).length === 1 ? Number(value.number) : value);
const PAGE = JSON.parse(document.getElementById("runs-data").textContent, revive);
const unitOf = (metric) => PAGE.metrics[metric][1];
const titleOf = (metric) => PAGE.metrics[metric][0];
const inUnit = (value, metric) => (unitOf(metric) === "%" ? 100 * value : value);
const axisOf = (metric) => `test ${titleOf(metric)}${unitOf(metric) ? `, ${unitOf(metric)}` : ""}`;

// Round ε up to three digits, so that it never states less than was spent; see privacy/statement.py.
function roundUp(value) {
  const unit = 10 ** Math.max(0, 2 - Math.floor(Math.log10(value || 1)));
  return +(Math.ceil(+(value * unit).toPrecision(9)) / unit).toPrecision(12);
}

const WRITE = {
  text: (value) => String(value),
  number: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(3))),
  epsilon: (value) =>
    value === Infinity ? "∞" : value > 999 ? roundUp(value).toLocaleString("en") : String(roundUp(value)),
  metric: (value) => titleOf(value),
  value: (value, metric) => {
    if (Number.isNaN(value)) return "undefined";
    const digits = unitOf(metric) ? 2 : 4;
    const number = Number.isFinite(value) ? inUnit(value, metric).toFixed(digits) : value > 0 ? "∞" : "-∞";
    return `${number} ${unitOf(metric)}`.trim();
  },
  date: (value) => String(value).slice(0, 10),
};

// The colours of Okabe and Ito, which colour-blind readers can distinguish. Points also differ in shape.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a8f98", "#B5A300"];
const POINTS = ["circle", "rect", "triangle", "rectRot", "cross", "star", "rectRounded", "crossRot"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let scatter = null;

function paint(isDark) {
  Chart.defaults.color = isDark ? "#9aa5b1" : "#59636e";
  Chart.defaults.borderColor = isDark ? "#333b45" : "#e3e8ed";
  for (const chart of Object.values(Chart.instances)) {
    for (const axis of Object.values(chart.options.scales)) {
      axis.ticks.color = axis.title.color = Chart.defaults.color;
      axis.grid.color = Chart.defaults.borderColor;
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
addEventListener("beforeprint", () => paint(false)); // print on white paper
addEventListener("afterprint", () => paint(dark.matches));

// The look of the point or curve with an index: 64 differ, as each colour gets another shape in the next round.
const MAX_LOOKS = COLOURS.length * POINTS.length;
const colourAt = (index) => COLOURS[index % COLOURS.length];
const pointAt = (index) => POINTS[(index + Math.floor(index / COLOURS.length)) % POINTS.length];

// Return what a run's ε protects, such as "patient at δ = 0.001".
const guaranteeOf = (row) => `${row.epsilon_of ?? "example"} at δ = ${row.delta}`;

const MAX_KINDS = 4;

// Return what the chart of utility against ε leaves out or mixes, in words.
function noteOf(rows, shown) {
  const notes = [];
  const missing = rows.length - shown.length;
  if (missing) notes.push(`Not drawn: ${missing} ${missing === 1 ? "run" : "runs"} with an undefined or infinite metric, or a tight ε of 0.`);
  const kinds = [...new Set(shown.filter((row) => Number.isFinite(row.epsilon_tight)).map(guaranteeOf))].sort();
  const more = kinds.length > MAX_KINDS ? `; and ${kinds.length - MAX_KINDS} more` : "";
  const listed = `${kinds.slice(0, MAX_KINDS).join("; ")}${more}`;
  if (kinds.length > 1) notes.push(`These ε are not comparable: ${listed}. Filter the table.`);
  return notes.join(" ");
}

// Draw utility against ε, and return a note. Runs with an infinite ε are at the right edge, labelled ∞.
function drawScatter(rows, metric, colour, open) {
  scatter?.destroy();
  const withMetric = rows.filter((row) => row.metric === metric);
  const shown = withMetric.filter((row) => row.epsilon_tight > 0 && Number.isFinite(row.value));
  const finite = shown.map((row) => row.epsilon_tight).filter(Number.isFinite);
  const edge = 10 ** Math.ceil(Math.log10(2 * Math.max(1, ...finite)));
  const values = [...new Set(shown.map((row) => row[colour] ?? ""))].sort();
  const named = values.length > MAX_LOOKS ? values.slice(0, MAX_LOOKS - 1) : values;
  const labelOf = (row) => (named.includes(row[colour] ?? "") ? (row[colour] ?? "") : `${values.length - named.length} others`);
  const labels = [...new Set([...named, ...shown.map(labelOf)])];
  const datasets = labels.map((label, index) => ({
    label,
    data: shown
      .filter((row) => labelOf(row) === label)
      .map((row) => ({ x: Math.min(row.epsilon_tight, edge), y: inUnit(row.value, metric), row })),
    backgroundColor: `${colourAt(index)}b0`,
    borderColor: colourAt(index),
    pointStyle: pointAt(index),
    clip: 8,
    radius: 5,
    hoverRadius: 7,
  }));
  const tick = (value) => {
    const digit = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
    if (value === edge) return "∞";
    const isLabelled = [1, 2, 5].some((first) => Math.abs(digit - first) < 1e-6) && value < edge;
    return isLabelled ? WRITE.epsilon(value) : "";
  };
  const about = ({ raw: { row } }) => [
    `${WRITE.value(row.value, metric)} at tight ε ${WRITE.epsilon(row.epsilon_tight)} (${guaranteeOf(row)})`,
    `${row.what}, ${row.algorithm}`,
  ];
  const title = (text) => ({ title: { display: true, text }, grid: {} });
  const ticks = { callback: tick, autoSkip: false, maxRotation: 0 };
  scatter = new Chart(document.getElementById("scatter"), {
    type: "scatter",
    data: { datasets },
    options: {
      scales: {
        x: { ...title("tight ε; ∞: non-private or unbounded"), type: "logarithmic", ticks, max: edge * 1.3 },
        y: { ...title(axisOf(metric)), ticks: {} },
      },
      plugins: { tooltip: { callbacks: { title: (items) => items[0].raw.row.name, label: about } } },
      onClick: (event, found) => found.length && open(datasets[found[0].datasetIndex].data[found[0].index].row.run),
      onHover: (event, found) => (event.native.target.style.cursor = found.length ? "pointer" : "default"),
    },
  });
  return noteOf(withMetric, shown);
}
