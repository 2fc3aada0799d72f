"use strict";
// Learning curves: test loss and test metric against epochs or ε, of one run or of several.

const MOST_CURVES = 12;
const ACROSS = { epoch: "epoch", epsilon_tight: "tight ε" };

// What tells runs apart: the parts of their names that not all of them have.
function shortNames(runs) {
  const parts = runs.map((run) => run.cells.name.split(/, |: /));
  const shared = (part) => runs.length > 1 && parts.every((one) => one.includes(part));
  return parts.map((one, place) => one.filter((part) => !shared(part)).join(", ") || runs[place].cells.name);
}

// The metrics that some of the runs have curves of, loss last.
function curveMetrics(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves ?? {})));
  names.delete("epoch");
  names.delete("epsilon_tight");
  return [...names].sort((a, b) => (a === "loss") - (b === "loss"));
}

function curveOf(run, metric, across) {
  const curves = run.curves ?? {};
  if (!(metric in curves)) return [];
  const points = curves[across].map((x, place) => ({
    x,
    y: inUnit(curves[metric][place], metric),
    about: `${WRITE.value(curves[metric][place], metric)} after epoch ${WRITE.number(curves.epoch[place])}, ε ${WRITE.epsilon(curves.epsilon_tight[place])}`,
  }));
  return points.filter((point) => Number.isFinite(point.x));
}

// Draws one metric of runs; returns how many of them have a curve.
function drawCurves(canvas, runs, metric, across) {
  Chart.getChart(canvas)?.destroy();
  const names = shortNames(runs);
  const drawn = runs
    .map((run, place) => ({ run, label: names[place], data: curveOf(run, metric, across) }))
    .filter(({ data }) => data.length);
  const datasets = drawn.map(({ run, label, data }, place) => ({
    label,
    data,
    run,
    borderColor: COLOURS[place % COLOURS.length],
    backgroundColor: COLOURS[place % COLOURS.length],
    borderDash: place < COLOURS.length ? [] : [6, 3],
    borderWidth: 2,
    pointStyle: POINTS[place % POINTS.length],
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
        legend: { display: runs.length > 1 },
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

// The curves of one run, side by side, with a choice of what they are drawn against.
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

// Overlaid: the first runs of the table, as filtered and sorted.
function redrawOverlay(runs) {
  const able = runs.filter((run) => run.curves);
  $("curves-figure").hidden = !PAGE.runs.some((run) => run.curves);
  const metrics = curveMetrics(able);
  const before = $("curves-metric").value;
  $("curves-metric").replaceChildren(...options(metrics, titleOf));
  $("curves-metric").value = metrics.includes(before) ? before : (metrics[0] ?? "");
  const metric = $("curves-metric").value;
  const across = $("curves-across").value;
  const having = able.filter((run) => curveOf(run, metric, across).length);
  const count = metric ? drawCurves($("curves"), having.slice(0, MOST_CURVES), metric, across) : 0;
  if (!metric) Chart.getChart($("curves"))?.destroy();
  const more = having.length > count ? `The first ${count} of ${having.length} runs with curves: filter the table to choose others.` : "";
  $("curves-note").textContent = count ? more : "None of these runs has curves against this.";
}
