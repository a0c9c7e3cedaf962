"use strict";
/* The page of a run that is not over loads itself again, while nobody is busy with it, and is then where it was. */
(() => {
  const SECOND = 1000, SOONEST = 30 * SECOND, LATEST = 300 * SECOND, FORGOTTEN = 24 * 3600 * SECOND, QUIET = 5 * SECOND;
  const at = (id) => document.getElementById(id), written = Number(document.body.dataset.written);
  const controls = () => [...document.querySelectorAll(".controls input[id], .controls select[id]")];
  const cards = () => [...(at("completions")?.children || [])];
  const headings = () => [...document.querySelectorAll("main > h1, main > h2")];
  const top = (element) => element.getBoundingClientRect().top;
  const steps = () => JSON.parse(at("data").textContent).steps.map(({ step }) => step);
  const nameOf = (details) => details.closest(".group").querySelector(".completion").id;
  const touched = (control) => ["input", "change"].forEach((name) => control.dispatchEvent(new Event(name)));

  const place = () => {  // of what is read: by the heading above it, as what is above that may grow
    const heading = headings().findLast((each) => top(each) < window.innerHeight / 2) || headings()[0], active = document.activeElement;
    const values = controls().filter(({ id }) => id !== "step").map(({ id, type, checked, value }) => [id, type === "checkbox" ? checked : value]);
    const slider = at("step"), reads = slider && top(at("browse")) < window.innerHeight;
    return {
      heading: heading.textContent,
      top: top(heading),
      values,
      step: slider && (reads || /^#step=/.test(location.hash) || slider.value !== slider.max) ? steps()[slider.value] : null,  // else the newest one
      zoom: document.body.dataset.zoom,
      metrics: JSON.parse(document.body.dataset.metrics || "[]"),
      cards: cards().length,
      opened: [...document.querySelectorAll("#completions details[open]")].map(nameOf),
      focus: active.id,
      card: cards().indexOf(active),
      selection: active.id === "search" ? [active.selectionStart, active.selectionEnd] : null,
    };
  };

  const set = (control, value) => {
    const key = control.type === "checkbox" ? "checked" : "value";
    if (control[key] === value) return;
    control[key] = value;
    if (!["smoothing", "log", "axis"].includes(control.id)) touched(control);  // these are read when the charts are drawn
  };
  const choose = (step) => {  // the step, or the nearest one on the page
    const distances = steps().map((each) => Math.abs(each - step)), slider = at("step");
    set(slider, String(distances.indexOf(Math.min(...distances))));
  };
  const scroll = ({ heading, top: before }) => {
    const found = headings().find((each) => each.textContent === heading);
    if (found) window.scrollBy({ top: top(found) - before, behavior: "instant" });
  };
  const restore = (kept) => {
    if (at("step")) kept.step === null ? set(at("step"), at("step").max) : choose(kept.step);
    for (const [id, value] of kept.values) if (at(id)) set(at(id), value);
    window.dispatchEvent(new CustomEvent("metrics", { detail: kept.metrics }));
    if (kept.zoom) window.dispatchEvent(new CustomEvent("zoom", { detail: kept.zoom.split(",").map(Number) }));
    while (at("more") && !at("more").hidden && cards().length < kept.cards) at("more").click();
    for (const details of document.querySelectorAll("#completions details")) {
      details.open = kept.opened.includes(nameOf(details));
      details.dispatchEvent(new Event("toggle"));
    }
    (at(kept.focus) || cards()[kept.card])?.focus({ preventScroll: true });
    if (kept.selection) at("search")?.setSelectionRange(...kept.selection);
    scroll(kept);
  };

  const age = () => Date.now() - written;
  let active = 0;  // when the reader did something
  if (written) {
    const note = document.createElement("p");
    note.className = "soft";
    note.id = "live";
    note.textContent = `Written at ${new Date(written).toLocaleTimeString()}. The page reloads by itself while the run runs.`;
    document.querySelector(".about").after(note);
  }
  if (history.state?.place) {
    const kept = history.state.place;
    history.replaceState(null, "");
    restore(kept);
    window.addEventListener("drawn", () => { if (!active) scroll(kept); }, { once: true });  // charts change their heights
    window.addEventListener("load", () => setTimeout(() => { history.scrollRestoration = "auto"; }));
  }
  if (!written || age() > FORGOTTEN) return;

  for (const name of ["pointerdown", "pointermove", "keydown", "wheel", "touchmove", "input"]) {
    window.addEventListener(name, () => { active = Date.now(); }, { passive: true });
  }
  const busy = () => document.hidden || Date.now() - active < QUIET || document.querySelector("dialog[open]")
    || at("compare")?.hidden === false || !getSelection().isCollapsed;
  const due = Date.now() + Math.min(LATEST, Math.max(SOONEST, age() / 2));  // later where pages come seldom
  setInterval(() => {
    if (Date.now() < due || busy()) return;
    history.scrollRestoration = "manual";
    history.replaceState({ place: place() }, "");
    location.reload();
  }, SECOND);
})();
