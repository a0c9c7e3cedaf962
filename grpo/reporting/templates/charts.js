"use strict";
(() => {
  const at = (id) => document.getElementById(id), { node } = Show;
  const { axes, plain, metrics } = JSON.parse(at("drawing").textContent), figures = document.querySelectorAll(".chart");
  const drawings = JSON.parse(at("charts").textContent).map((chart, place) => ({ chart, figure: figures[place] }));
  const [smoothing, log, whole, metric] = ["smoothing", "log", "whole", "metric"].map(at), WHOLE = [-Infinity, Infinity];
  const coarse = window.matchMedia("(pointer: coarse)").matches;  // a finger that drags scrolls
  const FORMS = { step: { tickMinStep: 1 }, minutes: {}, tokens: { format: "~s" } };  // of the labels of an axis
  let range = WHOLE, extent = [0, 1];

  const axis = () => at("axis")?.value || "step";
  const isCurve = ({ lines, held_out: ends }) => Object.keys(lines).length > 0 || ends.length > 0;
  const along = (line, step, name) => {  // minutes or tokens at the end of a step
    const { step: steps, [name]: places } = axes[line] || axes[""] || {};
    if (name === "step" || !places) return step;
    const after = Math.max(1, steps.findIndex((each) => each >= step)), before = after - 1;
    if (step > steps.at(-1)) return places.at(-1);
    return places[before] + ((places[after] - places[before]) * (step - steps[before])) / (steps[after] - steps[before]);
  };
  const smoothed = (values, weight) => {  // an exponential moving average, without a bias to its beginning
    let sum = 0, weights = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = weight * sum + (1 - weight) * value;
      weights = weight * weights + (1 - weight);
      return sum / weights;
    });
  };
  const inside = ({ x }) => x >= range[0] && x <= range[1];
  const rows = ({ lines }) => Object.entries(lines).flatMap(([line, points]) => {
    const weight = Number(smoothing.value), columns = [1, 2, 3].map((column) => points.map((point) => point[column]));
    const [smooth, low, high] = columns.map((values) => smoothed(values, weight));
    return points.map(([step, value], place) =>
      ({ step, x: along(line, step, axis()), line, value, smooth: smooth[place], low: low[place], high: high[place] }));
  });
  const heldOut = ({ held_out: ends }) => ends.map(([step, value, low, high]) => ({ step, x: along("", step, axis()), value, low, high }));
  const positive = ({ lines }) => Object.values(lines).every((points) => points.every(([, value]) => value === null || value > 0));

  const number = (value) => (Math.abs(value) >= 10_000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));
  const tooltip = ({ unit, title }) => (row, escaped) => {
    const shown = (value) => (unit === "%" ? `${number(100 * value)} %` : `${number(value)}${unit ? ` ${unit}` : ""}`);
    const { step, line, of, value, smooth, low, high, shown: none } = row, place = axes[line] || axes[""] || {};
    const where = step === undefined ? [] : ["step", "minutes", "tokens"].filter((name) => name === "step" || place[name]).map(
      (name) => (name === "step" ? `step ${step}` : `${number(along(line, step, name))} ${name}`));
    const name = [of, line === "value" ? title : line].filter(Boolean).join(", ") || (low === undefined ? title : "held out");
    return [
      where.join(", "),
      `${name}: ${none === "×" ? "none" : shown(value)}`,
      step !== undefined && smooth !== undefined && Number(smoothing.value) ? `smoothed: ${shown(smooth)}` : "",
      low === undefined ? "" : `${smooth === undefined ? "95 % interval" : "lowest to highest"}: ${shown(low)} to ${shown(high)}`,
    ].filter(Boolean).map(escaped).join("<br>");
  };

  const scaled = (chart) => {
    const spec = structuredClone(chart.spec), over = axis();
    if (!isCurve(chart)) return spec;
    spec.datasets = { ...spec.datasets, points: rows(chart).filter(inside), held_out: heldOut(chart).filter(inside) };
    const values = { smoothing: Number(smoothing.value), ...ends() };
    spec.params = spec.params.filter(({ name }) => !(coarse && name === "zoom"));
    for (const param of spec.params) if (param.name in values) param.value = values[param.name];
    for (const { encoding } of spec.layer) {
      if (encoding.x.axis) Object.assign(encoding.x, { title: over, axis: { ...encoding.x.axis, ...FORMS[over] } });
      if (log.checked && positive(chart) && encoding.y.scale) Object.assign(encoding.y.scale, { type: "log", domain: undefined, zero: undefined });
    }
    return spec;
  };
  const ends = () => ({ first: Math.max(range[0], extent[0]), last: Math.min(range[1], extent[1]) });
  const curves = () => drawings.filter(({ chart, view }) => view && isCurve(chart));
  const redrawn = () => curves().forEach(({ chart, view }) => {
    const { first, last } = ends();
    view.signal("smoothing", Number(smoothing.value)).signal("first", first).signal("last", last);
    view.data("points", rows(chart).filter(inside));
    if (chart.held_out.length) view.data("held_out", heldOut(chart).filter(inside));
    view.runAsync();
  });
  const zoom = (to) => {
    range = to;
    document.body.dataset.zoom = to;
    whole.hidden = to[0] === -Infinity;
    if (!coarse) curves().forEach(({ view }) => view.signal("zoom_x", [0, 0]));
    redrawn();
  };
  const draw = async (drawing) => {
    const { chart, figure: element } = drawing;
    const options = { ast: true, actions: false, renderer: "svg", logLevel: 1, tooltip: { formatTooltip: tooltip(chart) } };
    const { view } = await vegaEmbed(element, scaled(chart), options);
    drawing.view = view;
    element.querySelector("svg").setAttribute("aria-hidden", "true");  // the figure has a label
    if (!isCurve(chart)) return;
    let brushed = null;
    if (!coarse) view.addSignalListener("zoom", (_, { x }) => { brushed = x || null; });
    view.addEventListener("pointerup", () => { if (brushed && brushed[1] - brushed[0] >= (extent[1] - extent[0]) / 200) zoom(brushed); });
    view.addEventListener("click", (_, item) => {
      const step = item?.datum?.datum?.step ?? item?.datum?.step;
      if (step && at("step")) location.hash = `step=${step}`;
    });
  };
  const drawn = async () => {  // one after the other: the page can be read meanwhile
    const places = drawings.flatMap(({ chart }) => [...rows(chart), ...heldOut(chart)].map(({ x }) => x));
    extent = places.length ? [places.reduce((one, other) => Math.min(one, other)), places.reduce((one, other) => Math.max(one, other))] : [0, 1];
    for (const drawing of [...drawings]) {
      await draw(drawing);
      await new Promise((resolve) => setTimeout(resolve));
    }
    window.dispatchEvent(new Event("drawn"));
    document.body.dataset.drawn = "yes";
  };
  const chosen = () => { document.body.dataset.metrics = JSON.stringify(drawings.filter(({ added }) => added).map(({ chart }) => chart.title)); };
  const add = (title) => {  // a chart of any metric, before the others
    const made = node("figure"), caption = node("figcaption", `${title} `), button = node("button", "remove"), element = node("div", undefined, "chart");
    const chart = { title, spec: plain, lines: { value: metrics[title] }, held_out: [], unit: "" }, drawing = { chart, figure: element, added: true };
    for (const [name, value] of [["role", "img"], ["aria-label", title]]) element.setAttribute(name, value);
    button.addEventListener("click", () => {
      drawings.splice(drawings.indexOf(drawing), 1);
      made.remove();
      chosen();
    });
    caption.append(button);
    made.append(caption, node("p", undefined, "legend"), element);
    at("curves").prepend(made);
    drawings.push(drawing);
    chosen();
    if (document.body.dataset.drawn) draw(drawing);
  };
  smoothing?.addEventListener("input", redrawn);
  log?.addEventListener("change", drawn);
  at("axis")?.addEventListener("change", () => { zoom(WHOLE); drawn(); });
  metric?.addEventListener("change", () => {
    if (metric.value) add(metric.value);
    metric.value = "";
  });
  whole?.addEventListener("click", () => zoom(WHOLE));
  window.addEventListener("zoom", ({ detail }) => zoom(detail));
  window.addEventListener("metrics", ({ detail }) => detail.filter((name) => metrics[name]).forEach(add));
  window.addEventListener("load", () => setTimeout(drawn));
})();
