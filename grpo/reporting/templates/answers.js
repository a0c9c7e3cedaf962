"use strict";
/* The answers of several runs to the same problems, side by side. */
(() => {
  const at = (id) => document.getElementById(id), source = at("answers-data");
  if (!source) return;
  const problems = JSON.parse(source.textContent), { node } = Show, PAGE = 20;
  const [search, which, list, more] = ["find-answer", "which", "answers", "more-answers"].map(at);
  let shown = PAGE;

  const differ = ({ answers }) => new Set(answers.map(({ correct }) => correct)).size > 1;
  const only = (place) => ({ answers }) => answers.every(({ correct }, run) => correct === (run === place));
  const passes = { all: () => true, differ };
  const answer = ({ run, text, correct }) => {
    const made = node("div", undefined, `completion ${Show.grade(correct)}`), head = node("h4", `${run}: `);
    head.append(node("span", Show.grade(correct), correct ? "completed" : "failed"));
    made.append(head, Show.words(text));
    return made;
  };
  const card = ({ problem, prompt, answers }) => {
    const made = node("div", undefined, "group"), pair = node("div", undefined, "pair");
    pair.append(...answers.map(answer));
    made.append(node("p", `problem ${problem}`, "soft"), Show.words(prompt, "prompt"), pair);
    return made;
  };
  const draw = () => {
    const words = search.value.toLowerCase(), chosen = passes[which.value] || only(Number(which.value));
    const found = problems.filter((one) => chosen(one)
      && [one.prompt, ...one.answers.map(({ text }) => text)].some((text) => text.toLowerCase().includes(words)));
    at("number-of-answers").textContent = `${found.length} of ${problems.length} problems`;
    list.replaceChildren(...found.slice(0, shown).map(card));
    more.hidden = found.length <= shown;
  };
  for (const control of [search, which]) control.addEventListener("input", () => { shown = PAGE; draw(); });
  more.addEventListener("click", () => { shown += PAGE; draw(); });
  draw();
})();
