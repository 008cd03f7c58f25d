"use strict";
// Sort tables by their headings, with the mouse or the keyboard. Without this script the tables are complete, unsorted.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const numeric = heading.classList.contains("number");
      const key = (row) => {
        const cell = row.cells[column];
        if (cell.dataset.order !== undefined) return Number(cell.dataset.order);
        return numeric ? null : cell.textContent.trim();
      };
      const compare = (a, b) => {
        // Rows without a value come last in both directions.
        if (a === null || b === null) return (a === null) - (b === null);
        const order = typeof a === "number" && typeof b === "number"
          ? a - b
          : String(a).localeCompare(String(b), undefined, { numeric: true });
        return up ? order : -order;
      };
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort((a, b) => compare(a[0], b[0]));
      body.append(...rows.map(([, row]) => row));
    });
  });
}
// A pointer over a chart reads its curves at the nearest step.
for (const figure of document.querySelectorAll("[data-chart]")) {
  const { by, range: [first, last], box: [left, right], curves } = JSON.parse(figure.dataset.chart);
  const [svg, pointer, readout] = ["svg", ".pointer", ".readout"].map((selector) => figure.querySelector(selector));
  const [width, height] = [svg.viewBox.baseVal.width, svg.viewBox.baseVal.height];
  const rounded = (value) => Math.abs(value) >= 1e-3 ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(value);
  svg.addEventListener("pointermove", (event) => {
    const across = (event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width;
    const step = first + Math.min(1, Math.max(0, (across - left) / (right - left))) * (last - first);
    const nearest = curves.map(([name, points]) => [name, ...points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a)]);
    const at = nearest.reduce((a, b) => Math.abs(b[1] - step) < Math.abs(a[1] - step) ? b : a)[1];
    const x = (left + (right - left) * (last > first ? (at - first) / (last - first) : 0)) * width;
    pointer.setAttribute("d", `M${x} 10V${height - 26}`);
    readout.textContent = nearest.map(([name, place, value]) => `${name} ${rounded(value)} at ${by} ${place.toLocaleString("en")}`).join("; ");
  });
  svg.addEventListener("pointerleave", () => { pointer.setAttribute("d", ""); readout.textContent = ""; });
}
