"use strict";
/* The problems of a run: a table, and the completions of one of them through the steps. */
(() => {
  const at = (id) => document.getElementById(id), source = at("problems-data");
  if (!source) return;
  const { problems, measure } = JSON.parse(source.textContent), { node, drawn } = Show;
  const [body, search, count, followed, title] = ["problems", "find", "found", "followed", "followed-title"].map(at);
  const MOST = 50, percent = (value) => (measure === "accuracy" ? `${Math.round(100 * value)}%` : String(Number(value.toPrecision(3))));
  let order = { key: "asked", down: true }, shown = MOST;

  const KEYS = {
    asked: ({ asked }) => asked,
    last: ({ times }) => times.at(-1).value,
    change: ({ times }) => times.at(-1).value - times[0].value,
    solved: ({ solved }) => solved ?? Infinity,
    forgotten: ({ forgotten }) => forgotten ?? Infinity,
  };
  const [low, high] = problems.flatMap(({ times }) => times.map(({ value }) => value)).reduce(
    ([least, most], value) => [Math.min(least, value), Math.max(most, value)], measure === "accuracy" ? [0, 1] : [Infinity, -Infinity]);
  const sparkline = ({ times }) => {
    const first = times[0].step, span = times.at(-1).step - first || 1, range = high - low || 1;
    const points = times.map(({ step, value }) => [3 + (94 * (step - first)) / span, 21 - (18 * (value - low)) / range]);
    const label = times.map(({ step, value }) => `step ${step}: ${percent(value)}`).join(", ");
    const made = drawn("svg", { viewBox: "0 0 100 24", class: "sparkline", role: "img", "aria-label": label });
    made.append(drawn("polyline", { points: points.map((point) => point.join(",")).join(" ") }));
    made.append(...points.map(([cx, cy]) => drawn("circle", { cx, cy, r: 2 })));
    const hover = drawn("title", {});
    hover.textContent = label;
    made.append(hover);
    return made;
  };
  const row = (problem) => {
    const made = node("tr"), link = node("a", problem.name), name = node("td", undefined, "text");
    link.href = `#problem=${problem.number}`;
    link.dir = "auto";
    name.append(link);
    const line = node("td");
    line.append(sparkline(problem));
    made.append(name, node("td", problem.asked), line, node("td", percent(problem.times.at(-1).value)));
    made.append(node("td", problem.solved ?? "never"), node("td", problem.forgotten ?? ""));
    return made;
  };
  const draw = () => {
    const words = search.value.toLowerCase(), { key, down } = order;
    const found = problems.filter(({ prompt }) => prompt.toLowerCase().includes(words));
    found.sort((one, other) => (down ? KEYS[key](other) - KEYS[key](one) : KEYS[key](one) - KEYS[key](other)) || one.number - other.number);
    body.replaceChildren(...found.slice(0, shown).map(row));
    count.textContent = `${found.length} problems${found.length > shown ? `, ${shown} of them shown` : ""}`;
    at("more-problems").hidden = found.length <= shown;
    for (const button of document.querySelectorAll("[data-key]")) {
      const sorted = button.dataset.key === key ? (down ? "descending" : "ascending") : "none";
      button.closest("th").setAttribute("aria-sort", sorted);
    }
  };

  const completion = (step, label, { row: place, reward, correct, text }) => {
    const made = node("div", undefined, `completion ${Show.grade(correct)}`), head = node("h4", `${label}, reward ${reward ?? "none"} `);
    const link = node("a", "#");
    Object.assign(link, { href: `#step=${step}&row=${place}`, title: "the completion, among those of its step" });
    head.append(link);
    made.append(head, Show.words(text));
    return made;
  };
  const appearance = ({ step, value, size, best, worst }) => {
    const made = node("div", undefined, "group"), pair = node("div", undefined, "pair");
    made.append(node("p", `step ${step}: ${measure} ${percent(value)}, ${size} completions`, "soft"), pair);
    if (best) pair.append(completion(step, "best", best));
    if (worst) pair.append(completion(step, "worst", worst));
    return made;
  };
  const follow = () => {  // #problem=3
    const number = new URLSearchParams(location.hash.slice(1)).get("problem");
    const problem = problems.find((one) => String(one.number) === number);
    at("following").hidden = !problem;
    if (!problem) return;
    title.textContent = `Problem ${problem.number}, asked ${problem.asked} times`;
    followed.replaceChildren(Show.words(problem.prompt, "prompt"), ...problem.times.map(appearance));
    at("following").scrollIntoView();
    at("following").focus({ preventScroll: true });
  };

  for (const button of document.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => {
      const { key } = button.dataset;
      order = { key, down: order.key === key ? !order.down : !["solved", "forgotten"].includes(key) };
      draw();
    });
  }
  search.addEventListener("input", () => { shown = MOST; draw(); });
  at("more-problems").addEventListener("click", () => { shown += MOST; draw(); });
  window.addEventListener("hashchange", follow);
  draw();
  follow();
})();
