"use strict";
(() => {
  const source = document.getElementById("charts");
  if (!source) return;
  const charts = JSON.parse(source.textContent), figures = [...document.querySelectorAll(".chart")], views = [];
  const at = (id) => document.getElementById(id);
  const [smoothing, log, whole] = ["smoothing", "log", "whole"].map(at);
  let range = [-Infinity, Infinity];

  const smoothed = (points, weight) => {  // an exponential moving average, without a bias to its beginning
    let sum = 0, weights = 0;
    return points.map(([, value]) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      weights = weight * weights + (1 - weight);
      return sum / weights;
    });
  };
  const inside = ({ step }) => step >= range[0] && step <= range[1];
  const rows = ({ lines }) => Object.entries(lines).flatMap(([line, points]) => {
    const smooth = smoothed(points, smoothing ? Number(smoothing.value) : 0);
    return points.map(([step, value], place) => ({ step, line, value, smooth: smooth[place] })).filter(inside);
  });
  const heldOut = ({ held_out: ends }) => ends.map(([step, value, low, high]) => ({ step, value, low, high })).filter(inside);
  const positive = ({ lines }) => Object.values(lines).every((points) => points.every(([, value]) => value === null || value > 0));

  const formatTooltip = (row, escaped) => Object.entries(row).filter(([name]) => name !== "smooth").map(
    ([name, value]) => escaped(`${name}: ${typeof value === "number" ? Number(value.toPrecision(4)) : value}`),
  ).join("<br>");

  const scaled = (chart) => {
    const spec = structuredClone(chart.spec), curve = Object.keys(chart.lines).length > 0;
    if (curve || chart.held_out.length) spec.datasets = { ...spec.datasets, points: rows(chart), held_out: heldOut(chart) };
    if (curve && log.checked && positive(chart)) {
      for (const { encoding } of spec.layer) {
        if (encoding.y.scale) Object.assign(encoding.y.scale, { type: "log", domain: undefined, zero: undefined });
      }
    }
    return spec;
  };
  const zoom = (to) => {
    range = to;
    document.body.dataset.zoom = to;
    whole.hidden = to[0] === -Infinity;
    views.forEach((view, place) => {
      if (!Object.keys(charts[place].lines).length) return;
      view.signal("zoom_x", [0, 0]).data("points", rows(charts[place]));
      if (charts[place].held_out.length) view.data("held_out", heldOut(charts[place]));
      view.runAsync();
    });
  };
  const draw = async (figure, place) => {
    const options = { ast: true, actions: false, renderer: "svg", logLevel: 1, tooltip: { formatTooltip } };
    const { view } = await vegaEmbed(figure, scaled(charts[place]), options);
    views[place] = view;
    figure.querySelector("svg").setAttribute("aria-hidden", "true");  // the figure has a label
    if (!Object.keys(charts[place].lines).length) return;
    if (smoothing) view.signal("smoothing", Number(smoothing.value)).runAsync();
    let brushed = null;
    view.addSignalListener("zoom", (_, { step }) => { brushed = step || null; });
    view.addEventListener("pointerup", () => { if (brushed && brushed[1] - brushed[0] >= 1) zoom(brushed); });
    view.addEventListener("click", (_, item) => {
      const step = item?.datum?.datum?.step ?? item?.datum?.step;
      if (step && at("step")) location.hash = `step=${step}`;
    });
  };
  const drawn = async () => {  // one after the other: the page can be read meanwhile
    for (const [place, figure] of figures.entries()) {
      await draw(figure, place);
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.body.dataset.drawn = "yes";
  };
  smoothing?.addEventListener("input", () => {
    views.forEach((view, place) => {
      if (Object.keys(charts[place].lines).length) {
        view.signal("smoothing", Number(smoothing.value)).data("points", rows(charts[place])).runAsync();
      }
    });
  });
  log?.addEventListener("change", drawn);
  whole?.addEventListener("click", () => zoom([-Infinity, Infinity]));
  window.addEventListener("zoom", ({ detail }) => zoom(detail));
  window.addEventListener("load", () => setTimeout(drawn));
})();
