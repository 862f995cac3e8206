(function () {
  "use strict";
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const [LEFT, RIGHT] = DATA.edges;
  const brief = (value) => String(Number(value.toPrecision(3))).replace("-", "−");

  function nearest(share) {
    const [first, last] = [DATA.steps[0], DATA.steps[DATA.steps.length - 1]];
    const step = first + Math.min(1, Math.max(0, share)) * (last - first);
    let best = 0;
    DATA.steps.forEach((each, index) => { if (Math.abs(each - step) < Math.abs(DATA.steps[best] - step)) best = index; });
    return best;
  }

  function leave(picture) {
    tip.hidden = true;
    const line = picture.querySelector(".cursor");
    if (line) line.remove();
  }

  document.querySelectorAll("svg[data-curve]").forEach((picture) => {
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const index = nearest(((event.clientX - box.left) * 300 / box.width - LEFT) / (RIGHT - LEFT));
      const curve = DATA.curves[picture.dataset.curve];
      const parts = ["min", "median", "max", "value"].filter((key) => curve[key] && curve[key][index] !== null)
        .map((key) => (key === "value" ? "" : key + " ") + brief(curve[key][index]));
      leave(picture);
      const span = DATA.steps[DATA.steps.length - 1] - DATA.steps[0];
      const x = LEFT + (RIGHT - LEFT) * (span ? (DATA.steps[index] - DATA.steps[0]) / span : 0.5);
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      Object.entries({ class: "cursor", x1: x, x2: x, y1: 10, y2: 118 }).forEach(([name, value]) => line.setAttribute(name, value));
      picture.append(line);
      const title = document.createElement("b");
      title.textContent = "step " + DATA.steps[index];
      tip.replaceChildren(title, parts.join(", ") || "not known");
      tip.hidden = false;
      tip.style.left = Math.max(8, Math.min(innerWidth - tip.offsetWidth - 8, event.clientX + 14)) + "px";
      tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
    });
    picture.addEventListener("pointerleave", () => leave(picture));
  });

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement, theme = root.dataset.theme === "dark" ? "light" : "dark";
    root.dataset.theme = theme;
    try { localStorage.setItem("massieu-theme", theme); } catch (error) { /* files may not have storage */ }
  });
  document.documentElement.dataset.ready = "true";
})();
