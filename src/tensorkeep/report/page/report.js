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
