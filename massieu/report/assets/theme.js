document.documentElement.dataset.ready = "true";
document.getElementById("theme").addEventListener("click", function () {
  var root = document.documentElement, theme = root.dataset.theme === "dark" ? "light" : "dark";
  root.dataset.theme = theme;
  try { localStorage.setItem("massieu-theme", theme); } catch (error) { /* files may not have storage */ }
});
