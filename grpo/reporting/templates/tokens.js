"use strict";
/* The tokens of a completion, coloured by one of their values. */
const Tokens = (() => {
  const select = document.getElementById("overlay"), scale = document.getElementById("scale"), MOST = 50;
  const mix = (colour, part) => `color-mix(in srgb, var(--colour-${colour}) ${Math.round(MOST * part)}%, transparent)`;
  const bounded = (value, end) => (end ? Math.min(1, Math.abs(value) / end) : 0);
  const growing = (value, end) => mix(1, bounded(value, end));
  const around = (middle) => (value, end) => mix(value < middle ? 1 : 0, bounded(value - middle, end));
  const category = (colours) => (value) => (colours[value] === undefined ? "" : mix(colours[value], 1));
  const OVERLAYS = {  // name, colour of a value, and the value without one
    logp: { name: "log-probability", paint: growing, middle: 0 },
    entropy: { name: "entropy", paint: growing, middle: 0 },
    advantage: { name: "advantage", paint: around(0), middle: 0 },
    ratio: { name: "importance ratio", paint: around(1), middle: 1 },
    correction: { name: "vLLM's correction", paint: around(1), middle: 1 },
    clipped: { name: "clipped", paint: category({ true: 1 }), names: { true: "clipped" } },
    kind: { name: "outside the loss", paint: category({ tool: 2, image: 3 }), names: { tool: "tool", image: "image" } },
  };
  const ends = {};
  let rows = [];

  const at = (values, name, place) => (Array.isArray(values[name]) ? values[name][place] : values[name]);
  const end = (name) => {  // of the colours: that of the 98th of 100 tokens of this page
    if (ends[name] === undefined) {
      const distances = rows.flatMap(({ values }) => values.token.map((_, place) => {
        const value = at(values, name, place);
        return typeof value === "number" ? Math.abs(value - OVERLAYS[name].middle) : 0;
      })).sort((one, other) => one - other);
      ends[name] = distances[Math.floor(0.98 * (distances.length - 1))] || 0;
    }
    return ends[name];
  };
  const described = (values, place) => {
    const parts = Object.entries(OVERLAYS).filter(([name]) => values[name] !== undefined).map(([name, overlay]) => {
      const value = at(values, name, place);
      if (name === "clipped") return value ? "clipped" : "not clipped";
      if (name === "kind") return value === "loss" ? "in the loss" : `outside the loss (${value})`;
      return `${overlay.name} ${value ?? "not finite"}`;
    });
    return `${JSON.stringify(values.token[place])}: ${parts.join(", ")}`;
  };
  const painted = ({ values }) => {  // a token under the pointer, or at the arrow keys, says its values
    const made = Show.node("div"), text = Show.node("pre", undefined, "tokens"), line = Show.node("p", " ", "soft");
    const { paint } = OVERLAYS[select.value], spans = values.token.map((token) => Show.node("span", token));
    let here = -1;
    const name = (place) => {
      spans[here]?.classList.remove("here");
      here = Math.max(0, Math.min(spans.length - 1, place));
      spans[here].classList.add("here");
      line.textContent = described(values, here);
    };
    spans.forEach((span, place) => {
      const value = at(values, select.value, place);
      span.style.background = value === null || value === undefined ? "" : paint(value, end(select.value));
      if (value === true) span.classList.add("marked");
      for (const event of ["pointerover", "click"]) span.addEventListener(event, () => name(place));
    });
    Object.assign(text, { tabIndex: 0, dir: "auto" });
    text.setAttribute("aria-label", "tokens; the arrow keys go from one to the next");
    text.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) { name(here + by); event.preventDefault(); }
    });
    line.setAttribute("aria-live", "polite");
    text.append(...spans);
    made.append(text, line);
    return made;
  };
  const swatch = (background, text) => {
    const made = Show.node("span"), colour = Show.node("i");
    colour.style.background = background;
    made.append(colour, text);
    return made;
  };
  const legend = () => {
    const overlay = OVERLAYS[select.value];
    scale.replaceChildren();
    if (!overlay) return;
    scale.append(note());
    if (overlay.names) {
      scale.append(...Object.entries(overlay.names).map(([value, text]) => swatch(overlay.paint(value), text)));
      return;
    }
    const { middle, paint } = overlay, last = end(select.value), most = Number(last.toPrecision(2));
    const sides = !last ? [] : paint === growing ? [select.value === "logp" ? -1 : 1] : [-1, 1];
    scale.append(swatch("", sides.length ? String(middle) : `${middle} for all tokens`));
    for (const side of sides) {
      const value = Number((middle + side * most).toPrecision(3));
      scale.append(swatch(paint(middle + side * last, last), side < 0 ? `${value} or less` : `${value} or more`));
    }
  };
  const note = () => Show.node("span", `${rows.length} completions of this page have values: choose “with values per token”`, "note");
  const next = () => {
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    select.dispatchEvent(new Event("change"));
  };
  const button = () => {  // of a completion: colours on and off
    const made = Show.node("button", select.value ? "plain text" : "colour tokens");
    made.addEventListener("click", () => {
      select.value = select.value ? "" : select.options[1].value;
      select.dispatchEvent(new Event("change"));
    });
    return made;
  };
  const take = (steps) => {
    rows = steps.flatMap(({ groups }) => groups.flatMap(({ completions }) => completions)).filter(({ values }) => values);
    for (const [value, { name }] of select ? Object.entries(OVERLAYS) : []) {
      if (rows.some(({ values }) => values[value] !== undefined)) select.append(new Option(name, value));
    }
  };
  const wanted = (row) => Boolean(row.values && select?.value);

  return { take, wanted, painted, legend, next, button, select };
})();
