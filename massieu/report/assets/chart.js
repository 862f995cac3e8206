// The legend of a chart: a press switches a line off or on, and the line of the button that is pointed at stands out.
document.querySelectorAll(".chart").forEach(function (chart) {
  chart.querySelectorAll(".key button").forEach(function (button) {
    var line = chart.querySelector('g[data-line="' + button.dataset.line + '"]');
    function lift(lit) {
      chart.classList.toggle("dimmed", lit);
      line.classList.toggle("lit", lit);
    }
    button.addEventListener("click", function () {
      var on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      line.classList.toggle("off", !on);
    });
    button.addEventListener("pointerenter", function () { lift(true); });
    button.addEventListener("pointerleave", function () { lift(false); });
  });
});
