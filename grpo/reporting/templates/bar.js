"use strict";
/* The bar with the sections of a page, which stays in sight; the section that is read is marked. */
(() => {
  const bar = document.getElementById("sections"), headings = [...document.querySelectorAll("main > h2")];
  const links = headings.map((heading, place) => {
    const link = document.createElement("a");
    heading.id ||= `section-${place}`;
    link.href = `#${heading.id}`;
    link.textContent = heading.textContent;
    return link;
  });
  const mark = () => {
    const here = headings.findLastIndex((heading) => heading.getBoundingClientRect().top < Math.min(300, window.innerHeight / 3));
    links.forEach((link, place) => link.setAttribute("aria-current", place === here));
    if (links[here]) bar.scrollLeft = links[here].offsetLeft - bar.offsetLeft - 40;
  };
  bar.append(...links);
  bar.hidden = links.length < 2;
  window.addEventListener("scroll", mark, { passive: true });
  mark();
})();
