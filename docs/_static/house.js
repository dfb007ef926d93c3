// A table with long words becomes a list on a phone (house.css), where each cell tells its heading. Long names break at their
// dots and underscores, and numbers do not.
window.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.docutils").forEach((table) => {
    if (table.matches(".results") && !table.querySelector("td.prose")) return;
    table.classList.add("words");
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    table.querySelectorAll("tbody tr").forEach((row) => [...row.cells].forEach((cell, k) => (cell.dataset.heading = headings[k] ?? "")));
  });
  document.querySelectorAll("h1, h2, h3, td").forEach((place) => {
    const texts = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    for (const text of [...(function* () { while (texts.nextNode()) yield texts.currentNode; })()]) {
      const parts = text.textContent.split(/(?<=[A-Za-z]\w*[._])(?=\w{2})/);
      if (parts.length > 1) text.replaceWith(...parts.flatMap((part, k) => (k ? [document.createElement("wbr"), part] : [part])));
    }
  });
});

// Tables and figures that are wider than their place are marked, so that they can say that they scroll (house.css).
window.addEventListener("DOMContentLoaded", () => {
  const mark = (place) => {
    const scrolls = place.scrollWidth > place.clientWidth + 1;
    place.classList.toggle("scrolls", scrolls);
    if (scrolls) place.tabIndex = 0; // arrow keys scroll it, too
    else place.removeAttribute("tabindex");
  };
  const observer = new ResizeObserver((entries) => entries.forEach((entry) => mark(entry.target)));
  document.querySelectorAll(".table-wrapper, .drawing-frame, figure.measured, .text_html, .highlight-text pre").forEach((place) => observer.observe(place));
});
