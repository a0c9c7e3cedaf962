"use strict";
(() => {
  const source = document.getElementById("data");
  if (!source || !document.getElementById("step")) return;
  const { steps, images } = JSON.parse(source.textContent);
  const at = (id) => document.getElementById(id);
  const [slider, order, all, list, more] = ["step", "order", "all", "completions", "more"].map(at);
  const WHO = { policy: "policy", call: "calls", tool: "tool" };
  const PAGE = 20, SVG = "http://www.w3.org/2000/svg";
  let shown = PAGE;

  const node = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;  // never as markup
    if (name) made.className = name;
    return made;
  };
  const figure = (value) => (value === null ? "none" : String(value));

  const known = (row) => row.reward !== null;

  const picture = (place, label) => {
    if (place === null) return node("p", `${label}: not on this page`, "soft");
    const made = node("img"), { data, width, height } = images[place];
    Object.assign(made, { src: `data:image/jpeg;base64,${data}`, alt: label, width, height });
    return made;
  };
  const pictures = (group) => {
    const made = node("div", undefined, "pictures");
    made.append(...group.images.map((place, one) => picture(place, `image ${one + 1} of ${group.images.length}`)));
    return made;
  };
  const outline = ([x, y, width, height], name) => {
    const made = document.createElementNS(SVG, "rect");
    for (const [key, value] of Object.entries({ class: name, x, y, width, height })) made.setAttribute(key, value);
    return made;
  };
  const boxed = (group, row) => {
    const made = node("div"), drawn = node("div", undefined, "boxed"), layer = document.createElementNS(SVG, "svg");
    const named = row.named === 1 ? "1 box" : `${row.named} boxes`;
    const text = row.boxes.length < row.named ? `${named}, ${row.boxes.length} drawn` : named;
    layer.setAttribute("viewBox", "0 0 1 1");
    layer.setAttribute("preserveAspectRatio", "none");
    layer.append(...group.boxes.map((box) => outline(box, "correct")), ...row.boxes.map((box) => outline(box, "named")));
    drawn.append(picture(group.images[0], `image 1 with ${text} of the completion and ${group.boxes.length} correct`));
    if (group.images[0] !== null) drawn.append(layer);
    made.append(drawn, node("p", text, "soft"));
    return made;
  };

  const completion = (group, row, label) => {
    const made = node("div", undefined, "completion");
    const given = Object.entries(row.rewards).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    made.append(node("h4", `${label}reward ${figure(row.reward)} (${given}), advantage ${figure(row.advantage)}`));
    for (const { who, text } of row.turns || [{ who: "policy", text: row.text }]) {
      if (row.turns) made.append(node("h5", WHO[who]));
      const shown = node("pre", text, who);
      shown.dir = "auto";
      made.append(shown);
    }
    if (row.boxes) made.append(boxed(group, row));
    return made;
  };
  const prompt = (step, group) => {
    const made = node("div");
    made.append(node("p", `step ${step}, ${group.size} completions of the prompt`, "soft"));
    const text = node("pre", group.prompt, "prompt");
    text.dir = "auto";
    made.append(text);
    return made;
  };
  const card = (group, ...parts) => {
    const made = node("div", undefined, group.images ? "group seen" : "group"), text = node("div");
    text.append(...parts);
    if (group.images) made.append(pictures(group));
    made.append(text);
    return made;
  };
  const groupCard = ({ step, group }) => {
    const rows = group.completions, pair = node("div", undefined, "pair");
    const worst = rows.filter(known).length - 1;
    const rest = rows.filter((row, place) => place !== 0 && place !== worst);
    pair.append(completion(group, rows[0], "best: "));
    if (worst > 0) pair.append(completion(group, rows[worst], "worst: "));
    if (!rest.length) return card(group, prompt(step, group), pair);
    const others = node("details");
    others.append(node("summary", `${rest.length} more`));
    others.addEventListener("toggle", () => {
      if (others.open && others.children.length === 1) others.append(...rest.map((row) => completion(group, row, "")));
    });
    return card(group, prompt(step, group), pair, others);
  };
  const completionCard = ({ step, group, row }) => card(group, prompt(step, group), completion(group, row, ""));

  const spread = ({ group }) => {
    const rewards = group.completions.filter(known).map((row) => row.reward);
    return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
  };
  const draw = () => {
    const chosen = all.checked ? steps : [steps[Number(slider.value)]];
    let cards = chosen.flatMap(({ step, groups }) => groups.map((group) => ({ step, group })));
    const total = chosen.reduce((sum, { rows }) => sum + rows, 0);
    const here = cards.reduce((sum, { group }) => sum + group.completions.length, 0);
    let make = groupCard;
    if (order.value === "difference") cards.sort((one, other) => spread(other) - spread(one));
    if (order.value === "highest" || order.value === "lowest") {
      const sign = order.value === "highest" ? -1 : 1;
      cards = cards.flatMap(({ step, group }) => group.completions.filter(known).map((row) => ({ step, group, row })));
      cards.sort((one, other) => sign * (one.row.reward - other.row.reward));
      make = completionCard;
    }
    at("number").textContent = all.checked ? "all" : chosen[0].step;
    at("count").textContent = here < total ? `${here} of the ${total} completions are on this page` : `${total} completions`;
    list.replaceChildren(...cards.slice(0, shown).map(make));
    more.hidden = cards.length <= shown;
  };
  const begin = () => { shown = PAGE; draw(); };
  slider.addEventListener("input", () => { all.checked = false; begin(); });
  order.addEventListener("change", begin);
  all.addEventListener("change", begin);
  more.addEventListener("click", () => { shown += PAGE; draw(); });
  draw();
})();
