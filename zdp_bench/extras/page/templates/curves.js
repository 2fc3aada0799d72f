"use strict";
// Learning curves: test loss and test metric against epochs or ε, of one run or of several.

const MAX_CURVES = 12;
const ACROSS = { epoch: "epoch", epsilon_tight: "tight ε" };

// Return short names of runs: the parts of their names that they do not all have in common. Keys with
// more values come first, so that the start of a name tells runs apart.
function shortNames(runs) {
  const parts = runs.map((run) => run.cells.name.split(/, |: /));
  const isShared = (part) => runs.length > 1 && parts.every((partsOfRun) => partsOfRun.includes(part));
  const keyOf = (part) => part.replace(/ \S+$/, "");
  const countValues = (part) => new Set(parts.flat().filter((other) => keyOf(other) === keyOf(part))).size;
  return parts.map((partsOfRun, index) => {
    const differing = partsOfRun.filter((part) => !isShared(part));
    differing.sort((one, other) => countValues(other) - countValues(one));
    return differing.join(", ") || runs[index].cells.name;
  });
}

// Return a text that fits a width in a chart, with an ellipsis if it is cut.
function cutToWidth(text, chart, width) {
  chart.ctx.font = Chart.helpers.toFont(Chart.defaults.font).string;
  const fits = (shown) => chart.ctx.measureText(shown).width <= width;
  if (fits(text)) return text;
  let length = text.length - 1;
  while (length && !fits(`${text.slice(0, length)}…`)) length -= 1;
  return `${text.slice(0, length)}…`;
}

// Return the legend's entries, none wider than the chart.
function legendEntries(chart) {
  const entries = Chart.defaults.plugins.legend.labels.generateLabels(chart);
  const room = chart.width - 40; // the rest is for the point and the padding
  return entries.map((entry) => ({ ...entry, text: cutToWidth(entry.text, chart, room) }));
}

// Return the metrics of which some of the runs have a curve, with the loss last.
function curveMetrics(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves ?? {})));
  names.delete("epoch");
  names.delete("epsilon_tight");
  return [...names].sort((a, b) => (a === "loss") - (b === "loss"));
}

function curveOf(run, metric, across) {
  const curves = run.curves ?? {};
  if (!(metric in curves)) return [];
  const points = curves[across].map((x, index) => ({
    x,
    y: inUnit(curves[metric][index], metric),
    about: `${WRITE.value(curves[metric][index], metric)} after epoch ${WRITE.number(curves.epoch[index])}, ε ${WRITE.epsilon(curves.epsilon_tight[index])}`,
  }));
  return points.filter((point) => Number.isFinite(point.x));
}

// Draw the curves of runs for one metric, and return their number.
function drawCurves(canvas, runs, metric, across) {
  Chart.getChart(canvas)?.destroy();
  const names = shortNames(runs);
  const drawn = runs
    .map((run, index) => ({ run, label: names[index], data: curveOf(run, metric, across) }))
    .filter(({ data }) => data.length);
  const datasets = drawn.map(({ run, label, data }, index) => ({
    label,
    data,
    run,
    borderColor: COLOURS[index % COLOURS.length],
    backgroundColor: COLOURS[index % COLOURS.length],
    borderDash: index < COLOURS.length ? [] : [6, 3],
    borderWidth: 2,
    pointStyle: POINTS[index % POINTS.length],
    pointRadius: data.length > 25 ? 0 : 3,
    pointHitRadius: 8,
  }));
  const title = (text) => ({ title: { display: true, text }, grid: {} });
  new Chart(canvas, {
    type: "line",
    data: { datasets },
    options: {
      interaction: { mode: "nearest", intersect: false },
      scales: {
        x: { ...title(ACROSS[across]), type: "linear", min: 0, ticks: { maxRotation: 0 } },
        y: { ...title(axisOf(metric)), ticks: {} },
      },
      plugins: {
        legend: { display: runs.length > 1, labels: { generateLabels: legendEntries } },
        tooltip: {
          callbacks: {
            title: (items) => items[0].dataset.run.cells.name,
            label: (item) => item.raw.about,
          },
        },
      },
    },
  });
  return drawn.length;
}

// Return the figure with all curves of one run side by side, and the function that draws them.
function runCurves(run) {
  const metrics = curveMetrics([run]);
  if (!metrics.length) return null;
  const box = (metric) => {
    const canvas = element("canvas", { role: "img", ariaLabel: `test ${titleOf(metric)} by epoch` });
    return { metric, canvas, frame: element("div", { className: "canvas" }, canvas) };
  };
  const boxes = metrics.map(box);
  const choice = element("select", { ariaLabel: "draw against", name: "across" });
  choice.append(...options(Object.keys(ACROSS), (key) => ACROSS[key]));
  const isPrivate = run.curves.epsilon_tight.every(Number.isFinite);
  const draw = () => boxes.forEach(({ metric, canvas }) => drawCurves(canvas, [run], metric, choice.value));
  choice.addEventListener("change", draw);
  const others = element("button", { type: "button", id: "run-others", textContent: "All runs of this recipe" });
  others.addEventListener("click", () => showRecipe(run.cells.recipe));
  const caption = element("figcaption", {}, element("b", { textContent: "Learning curves." }), " On test examples. ");
  if (isPrivate) caption.append(element("label", {}, "against ", choice), " ");
  caption.append(others);
  const frames = element("div", { className: "halves" }, ...boxes.map(({ frame }) => frame));
  return { figure: element("figure", { className: "chart", id: "run-curves" }, caption, frames), draw };
}

// Draw the curves of the first runs in the table, as filtered and sorted, in one chart.
function redrawOverlay(runs) {
  const runsWithCurves = runs.filter((run) => run.curves);
  $("curves-figure").hidden = !PAGE.runs.some((run) => run.curves);
  const metrics = curveMetrics(runsWithCurves);
  const before = $("curves-metric").value;
  $("curves-metric").replaceChildren(...options(metrics, titleOf));
  $("curves-metric").value = metrics.includes(before) ? before : (metrics[0] ?? "");
  const metric = $("curves-metric").value;
  const across = $("curves-across").value;
  const drawable = runsWithCurves.filter((run) => curveOf(run, metric, across).length);
  const count = metric ? drawCurves($("curves"), drawable.slice(0, MAX_CURVES), metric, across) : 0;
  if (!metric) Chart.getChart($("curves"))?.destroy();
  const note = drawable.length > count ? `The first ${count} of ${drawable.length} runs with curves: filter the table to choose others.` : "";
  $("curves-note").textContent = count ? note : "None of these runs has a curve to draw here.";
}
