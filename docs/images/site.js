// What the theme leaves without a name for screen readers, or out of reach of the keys.
document.querySelector(".md-search").setAttribute("aria-label", "Search");
for (const part of document.querySelectorAll(".md-nav[aria-labelledby]")) {
  part.setAttribute("aria-label", "Pages: " + part.querySelector(".md-nav__title").textContent.trim());
  part.removeAttribute("aria-labelledby");
}
new MutationObserver(() => {
  for (const part of document.querySelectorAll(".md-code__nav")) part.setAttribute("role", "presentation");
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth && box.tabIndex) box.tabIndex = 0;
  }
}).observe(document.querySelector(".md-content"), { childList: true, subtree: true, attributeFilter: ["tabindex"] });
