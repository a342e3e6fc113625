// Shows one page of a report at a time: the one that the address names behind its #, by itself or by
// something in it. Without this script, and on paper, all stand below one another.
"use strict";
(() => {
  const pages = [...document.querySelectorAll("section.page")];
  const links = [...document.querySelectorAll("nav a")];

  function show() {
    const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const chosen = named?.closest("section.page") ?? pages[0];
    pages.forEach((page) => (page.hidden = page !== chosen));
    links.forEach((link) => {
      if (link.hash === `#${chosen.id}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
    if (named === chosen) scrollTo(0, 0);
    else named?.scrollIntoView();
  }

  addEventListener("hashchange", show);
  show();
})();
