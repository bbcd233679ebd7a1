"use strict";
(() => {
  const root = document.documentElement;

  // Theme: follows the system until somebody decides.
  const toggle = document.getElementById("theme");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  if (toggle) {
    toggle.hidden = false;
    label();
    toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
  }

  // Charts: the values at the step under the mouse.
  const short = (v) => v === 0 ? "0" : Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6 ? v.toExponential(2) : String(+v.toPrecision(4));
  for (const figure of document.querySelectorAll(".chart")) {
    const data = JSON.parse(figure.dataset.chart);
    const svg = figure.querySelector("svg");
    const cursor = svg.querySelector(".cursor");
    const [low, high, start, end] = data.x;
    const steps = [...new Set(data.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    figure.append(tip);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * data.width;
      const wanted = low + (at - start) / (end - start) * (high - low);
      const step = steps.reduce((best, s) => Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best);
      const x = start + (step - low) / (high - low) * (end - start);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", "visible");
      tip.replaceChildren(`step ${step}`);
      for (const series of data.series) {
        const point = series.points.find((p) => p[0] === step);
        if (!point) continue;
        const value = document.createElement("b");
        value.textContent = short(point[1]);
        const line = document.createElement("div");
        line.append(data.series.length > 1 ? `${series.name} ` : "", value);
        tip.append(line);
      }
      tip.hidden = false;
      const left = box.left - figure.getBoundingClientRect().left + x / data.width * box.width;
      const flip = left > figure.clientWidth / 2;
      tip.style.left = flip ? "" : `${left + 10}px`;
      tip.style.right = flip ? `${figure.clientWidth - left + 10}px` : "";
      tip.style.top = `${svg.getBoundingClientRect().top - figure.getBoundingClientRect().top + 6}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  }

  // Completions: one step at a time.
  const section = document.getElementById("completions");
  if (!section) return;
  const tables = [...section.querySelectorAll(".step")];
  const picker = section.querySelector(".picker");
  const range = picker.querySelector("input[type=range]");
  const show = (index) => {
    const to = Math.min(Math.max(index, 0), tables.length - 1);
    range.value = to;
    tables.forEach((table, i) => { table.hidden = i !== to; });
    picker.querySelector("output").textContent = `step ${tables[to].dataset.step} of ${tables[tables.length - 1].dataset.step}`;
  };
  range.addEventListener("input", () => show(+range.value));
  for (const button of picker.querySelectorAll("[data-move]")) {
    button.addEventListener("click", () => show(+range.value + +button.dataset.move));
  }
  picker.querySelector("[data-filter]").addEventListener("change", (event) => {
    section.classList.toggle("only-worse", event.target.checked);
  });
  picker.hidden = false;
  show(tables.length - 1);
})();
