"use strict";
(() => {
  const source = document.getElementById("data");
  if (!source || !document.getElementById("step")) return;
  const { steps, images } = JSON.parse(source.textContent);
  const at = (id) => document.getElementById(id);
  const [slider, order, all, list, more, search, only] =
    ["step", "order", "all", "completions", "more", "search", "only"].map(at);
  const PAGE = 20;
  let shown = PAGE, compared = [];
  Show.take(images);
  Tokens.take(steps);

  const once = (completions) => {  // equal completions are a single one, with the places of all
    const known = new Map();
    for (const row of completions) {
      const key = JSON.stringify([row.text, row.turns, row.rewards, row.truncated]), first = known.get(key);
      const valued = (first?.valued || 0) + (row.values ? 1 : 0);
      if (first) Object.assign(first, { rows: [...first.rows, row.row], values: first.values || row.values, valued });
      else known.set(key, { ...row, rows: [row.row], valued });
    }
    return [...known.values()];
  };
  for (const group of steps.flatMap(({ groups }) => groups)) group.completions = once(group.completions);
  if (!steps.some(({ groups }) => groups.some(({ completions }) => completions.some((row) => row.correct !== null)))) {
    only.querySelectorAll("[value$=correct]").forEach((option) => option.remove());  // no grader
  }
  const count = (rows) => rows.reduce((sum, row) => sum + row.rows.length, 0);
  const textOf = (row) => (row.turns ? row.turns.map(({ text }) => text).join("\n") : row.text);
  const FILTERS = {
    all: () => true,
    correct: (row) => row.correct === true,
    incorrect: (row) => row.correct === false,
    positive: (row) => row.advantage > 0,
    negative: (row) => row.advantage < 0,
    truncated: (row) => row.truncated === true,
    unscored: (row) => row.reward === null,
    tools: (row) => row.failed,
    values: (row) => row.values,
  };
  const length = (row) => row.completion_tokens ?? textOf(row).length;
  const ORDERS = {
    highest: (one, other) => other.row.reward - one.row.reward,
    lowest: (one, other) => one.row.reward - other.row.reward,
    longest: (one, other) => length(other.row) - length(one.row),
    shortest: (one, other) => length(one.row) - length(other.row),
  };
  const spread = ({ group }) => {
    const rewards = group.completions.filter(Show.known).map((row) => row.reward);
    return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
  };
  const chosen = () => (all.checked ? steps : [steps[Number(slider.value)]]);
  const wanted = () => {  // whole groups, or the completions that pass the filters, in their order
    const groups = chosen().flatMap(({ step, groups }) => groups.map((group) => ({ step, group })));
    const words = search.value.toLowerCase(), single = ORDERS[order.value] || only.value !== "all" || words;
    if (!single) {
      return { make: Show.ofGroup, cards: order.value === "difference" ? groups.sort((a, b) => spread(b) - spread(a)) : groups };
    }
    const passes = (group, row) => FILTERS[only.value](row)
      && (!words || textOf(row).toLowerCase().includes(words) || group.prompt.toLowerCase().includes(words));
    const cards = groups.flatMap(({ step, group }) =>
      group.completions.filter((row) => passes(group, row)).map((row) => ({ step, group, row })));
    const rewarded = /est$/.test(order.value) && !/^(long|short)/.test(order.value);
    const kept = rewarded ? cards.filter(({ row }) => Show.known(row)) : cards;
    return { make: Show.ofCompletion, cards: ORDERS[order.value] ? kept.sort(ORDERS[order.value]) : kept };
  };

  const compare = (one) => {
    compared = [...compared.filter(({ row, step }) => row !== one.row || step !== one.step), one].slice(-2);
    at("compared").replaceChildren(...compared.map((each) => Show.ofCompletion(each, compare)));
    at("compare").hidden = false;
    at("compare").scrollIntoView();
  };
  const draw = () => {
    const { make, cards } = wanted(), total = chosen().reduce((sum, { rows }) => sum + rows, 0);
    const here = count(chosen().flatMap(({ groups }) => groups).flatMap(({ completions }) => completions));
    const passed = (sum, { row }) => sum + (only.value === "values" ? row.valued : row.rows.length);
    const found = only.value !== "all" || search.value ? `${cards.reduce(passed, 0)} found; ` : "";
    at("number").textContent = all.checked ? "all" : chosen()[0].step;
    at("count").textContent =
      found + (here < total ? `${here} of the ${total} completions are on this page` : `${total} completions`);
    list.replaceChildren(...cards.slice(0, shown).map((each) => make(each, compare)));
    more.hidden = cards.length <= shown;
  };
  const begin = () => { shown = PAGE; draw(); };

  const follow = () => {  // #step=120&row=3
    const named = new URLSearchParams(location.hash.slice(1)), step = Number(named.get("step"));
    if (!named.has("step")) return;
    const distance = steps.map((one) => Math.abs(one.step - step)), nearest = distance.indexOf(Math.min(...distance));
    slider.value = nearest;
    at("nearest").textContent = distance[nearest]
      ? `No completions of step ${step} are on this page; step ${steps[nearest].step} is the nearest.` : "";
    all.checked = false;
    order.value = "groups";
    only.value = "all";
    search.value = "";
    shown = Infinity;
    draw();
    const is = ({ rows }) => rows.some((row) => String(row) === named.get("row")), { groups } = chosen()[0];
    const group = groups.findIndex(({ completions }) => completions.some(is));
    const id = `step=${step}&row=${groups[group]?.completions.find(is).row}`;
    const details = document.getElementById(id) ? null : list.children[group]?.querySelector("details");
    if (details) {
      details.open = true;
      details.dispatchEvent(new Event("toggle"));
    }
    const target = document.getElementById(id);
    target?.classList.add("named");
    (target ? target.closest(".group") : at("browse")).scrollIntoView();
  };
  const move = (by) => {  // to the next card, or the one before
    const cards = [...list.children], here = cards.findIndex((card) => card.contains(document.activeElement));
    const next = cards[Math.max(0, Math.min(cards.length - 1, here + by))];
    next?.focus();
    next?.scrollIntoView({ block: "start" });
  };
  const KEYS = {
    j: () => move(1),
    k: () => move(-1),
    "/": () => { search.focus(); search.scrollIntoView({ block: "center" }); },
    "?": () => at("help").showModal(),
    t: () => Tokens.select && Tokens.next(),
  };
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName) && document.activeElement.type !== "range";
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  slider.addEventListener("input", () => { all.checked = false; at("nearest").textContent = ""; begin(); });
  search.addEventListener("input", begin);
  for (const control of [order, all, only]) control.addEventListener("change", begin);
  Tokens.select?.addEventListener("change", () => {  // what was read and opened stays where it was
    const cards = [...list.children], here = cards.findIndex((card) => card.contains(document.activeElement));
    const top = cards[here]?.getBoundingClientRect().top, opened = cards.map((card) => card.querySelector("details")?.open);
    Tokens.legend();
    draw();
    [...list.children].forEach((card, place) => {
      if (!opened[place]) return;
      card.querySelector("details").open = true;
      card.querySelector("details").dispatchEvent(new Event("toggle"));
    });
    list.children[here]?.focus({ preventScroll: true });
    if (here >= 0) window.scrollBy({ top: list.children[here].getBoundingClientRect().top - top, behavior: "instant" });
    at("compared").replaceChildren(...compared.map((each) => Show.ofCompletion(each, compare)));
  });
  more.addEventListener("click", () => { shown += PAGE; draw(); });
  at("separate")?.addEventListener("click", () => { compared = []; at("compare").hidden = true; });
  window.addEventListener("hashchange", follow);
  draw();
  follow();
})();
