"use strict";
/* How completions look: elements made of the data of a page. What a model wrote becomes text, never markup. */
const Show = (() => {
  const WHO = { policy: "policy", call: "calls", tool: "tool" }, SVG = "http://www.w3.org/2000/svg";
  let images = [];

  const node = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;  // never as markup
    if (name) made.className = name;
    return made;
  };
  const drawn = (tag, values) => {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
    return made;
  };
  const grade = (correct) => (correct === true ? "correct" : correct === false ? "incorrect" : "");  // null: not graded
  const figure = (value) => (value === null ? "none" : String(value));
  const known = (row) => row.reward !== null;
  const words = (text, name) => {
    const made = node("pre", text, name);
    made.dir = "auto";
    return made;
  };

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
  const outline = ([x, y, width, height], name) => drawn("rect", { class: name, x, y, width, height });
  const boxed = (group, row) => {
    const made = node("div"), frame = node("div", undefined, "boxed");
    const layer = drawn("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none" });
    const named = row.named === 1 ? "1 box" : `${row.named} boxes`;
    const text = row.boxes.length < row.named ? `${named}, ${row.boxes.length} drawn` : named;
    layer.append(...group.boxes.map((box) => outline(box, "correct")), ...row.boxes.map((box) => outline(box, "named")));
    frame.append(picture(group.images[0], `image 1 with ${text} of the completion and ${group.boxes.length} correct`));
    if (group.images[0] !== null) frame.append(layer);
    made.append(frame, node("p", text, "soft"));
    return made;
  };

  const histogram = (group) => {  // of the rewards of a group
    const rewards = group.completions.filter(known).flatMap((row) => row.rows.map(() => row.reward));
    const low = Math.min(...rewards), high = Math.max(...rewards), bins = Array(10).fill(0);
    if (!rewards.length) return node("span");
    for (const reward of rewards) bins[high > low ? Math.min(9, Math.floor((10 * (reward - low)) / (high - low))) : 9] += 1;
    const most = Math.max(...bins), label = `rewards of the group, ${low} to ${high}`;
    const made = drawn("svg", { viewBox: "0 0 100 20", class: "histogram", role: "img", "aria-label": label });
    made.append(...bins.map((count, bin) => {
      const height = (20 * count) / most;
      return drawn("rect", { x: 10 * bin, y: 20 - height, width: 8, height });
    }));
    const title = drawn("title", {});
    title.textContent = label;
    made.append(title);
    return made;
  };

  const completion = (step, group, row, label, compare) => {
    const made = node("div", undefined, `completion ${grade(row.correct)}`), head = node("h4", label), count = row.rows.length;
    const rewards = Object.entries(row.rewards).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    const several = Object.keys(row.rewards).length > 1, length = row.completion_tokens;
    const facts = [count > 1 ? `${count} equal` : "", `reward ${figure(row.reward)}${several ? ` (${rewards})` : ""}`,
      row.advantage === null ? "" : `advantage ${row.advantage}`, length === undefined ? "" : `${length} tokens`, row.truncated ? "truncated" : ""];
    if (grade(row.correct)) head.append(node("span", grade(row.correct), row.correct ? "completed" : "failed"), ", ");
    head.append(`${facts.filter(Boolean).join(", ")} `);
    const link = node("a", "#"), button = node("button", "compare");
    Object.assign(link, { href: `#step=${step}&row=${row.row}`, title: "link to this completion" });
    button.addEventListener("click", () => compare({ step, group, row }));
    head.append(link, " ", button);
    if (row.values) head.append(" ", Tokens.button());
    made.append(head);
    made.id = `step=${step}&row=${row.row}`;
    for (const { who, text } of Tokens.wanted(row) ? [] : row.turns || [{ who: "policy", text: row.text }]) {
      if (row.turns) made.append(node("h5", WHO[who]));
      made.append(words(text, who));
    }
    if (Tokens.wanted(row)) made.append(Tokens.painted(row));
    if (row.boxes) made.append(boxed(group, row));
    return made;
  };
  const prompt = (step, group) => {
    const made = node("div"), line = node("p", `step ${step}, ${group.size} completions of the prompt `, "soft");
    line.append(histogram(group));
    made.append(line, words(group.prompt, "prompt"));
    if (group.answer !== undefined) {
      const reference = node("p", "reference answer: "), answer = node("bdi", group.answer, "answer");
      reference.append(answer);
      made.append(reference);
    }
    return made;
  };
  const card = (group, ...parts) => {
    const made = node("div", undefined, group.images ? "group seen" : "group"), text = node("div");
    made.tabIndex = -1;
    text.append(...parts);
    if (group.images) made.append(pictures(group));
    made.append(text);
    return made;
  };
  const ofGroup = ({ step, group }, compare) => {
    const rows = group.completions, pair = node("div", undefined, "pair");
    const worst = rows.filter(known).length - 1;
    const rest = rows.filter((row, place) => place !== 0 && place !== worst);
    pair.append(completion(step, group, rows[0], worst > 0 ? "best: " : "", compare));
    if (worst > 0) pair.append(completion(step, group, rows[worst], "worst: ", compare));
    if (!rest.length) return card(group, prompt(step, group), pair);
    const others = node("details");
    others.append(node("summary", `${rest.reduce((sum, row) => sum + row.rows.length, 0)} more`));
    others.addEventListener("toggle", () => {
      if (others.open && others.children.length === 1) {
        others.append(...rest.map((row) => completion(step, group, row, "", compare)));
      }
    });
    return card(group, prompt(step, group), pair, others);
  };
  const ofCompletion = ({ step, group, row }, compare) =>
    card(group, prompt(step, group), completion(step, group, row, "", compare));

  return { node, drawn, words, known, grade, ofGroup, ofCompletion, take: (given) => { images = given; } };
})();
