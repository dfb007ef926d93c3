// Tables and figures that are wider than their place are marked, so that they can say that they scroll (house.css).
window.addEventListener("DOMContentLoaded", () => {
  const mark = (place) => {
    const scrolls = place.scrollWidth > place.clientWidth + 1;
    place.classList.toggle("scrolls", scrolls);
    if (scrolls) place.tabIndex = 0; // arrow keys scroll it, too
    else place.removeAttribute("tabindex");
  };
  const observer = new ResizeObserver((entries) => entries.forEach((entry) => mark(entry.target)));
  document.querySelectorAll(".table-wrapper, .drawing-frame, figure.measured, .text_html").forEach((place) => observer.observe(place));
});
