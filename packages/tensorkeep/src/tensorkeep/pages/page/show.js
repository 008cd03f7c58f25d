// Tables from the data of the page: search, sorting, pages of rows, and the details of a row. Texts are never HTML.
{
  const ROWS = 50;
  const LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  const NUMERIC = new Set(["count", "bytes", "number", "percent", "ratio"]);
  const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const drawing = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };

  const number = (value) => {
    if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
    if (size >= 1e-3 && size < 1e6) return String(Number(value.toPrecision(4)));
    return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  };
  const bytes = (value) => {
    let unit = 0;
    while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
    return `${unit ? value.toPrecision(3) : value} ${UNITS[unit]}`;
  };
  const percent = (value) => value === 0 ? "0%" : value < 1e-4 ? "<0.01%" : `${Number((value * 100).toPrecision(3))}%`;
  const FORMATS = {
    count: (value) => value.toLocaleString("en"), bytes, number, percent, ratio: (value) => `${value.toFixed(2)}x`,
  };

  const bars = (histogram, className) => {
    const heights = [...histogram[4]].map((letter) => LEVELS.indexOf(letter) / (LEVELS.length - 1));
    const svg = drawing("svg", { viewBox: `0 0 ${heights.length} 1`, preserveAspectRatio: "none", class: className, "aria-hidden": "true" });
    const shape = heights.map((height, i) => height ? `M${i + .06} 1V${(1 - Math.max(height, .03)).toFixed(3)}H${i + .94}V1Z` : "").join("");
    svg.append(drawing("path", { d: shape }));
    return svg;
  };

  class DrawnTable {
    constructor(box, data) {
      this.columns = data.columns;
      this.rows = data.rows;
      this.leftOut = data.left_out;
      this.noun = `${this.leftOut ? "listed " : ""}${data.noun}`;
      this.title = box.dataset.title;
      this.texts = null;
      this.order = data.rows.map((_, i) => i);
      this.shown = this.order;
      this.first = 0;
      this.sorted = null;
      this.open = null;
      this.input = make("input", { type: "search", placeholder: "Search names, dtypes, ..." });
      this.input.setAttribute("aria-label", `Search: ${this.title}`);
      this.input.addEventListener("input", () => this.search());
      this.count = make("span", { className: "count" });
      this.count.setAttribute("role", "status");
      this.back = make("button", { type: "button", textContent: "Previous" });
      this.next = make("button", { type: "button", textContent: "Next" });
      this.back.addEventListener("click", () => this.turn(-ROWS));
      this.next.addEventListener("click", () => this.turn(ROWS));
      const pager = make("div", { className: "pager" }, this.back, this.next);
      this.body = make("tbody");
      const table = make("table", {}, make("thead", {}, make("tr", {}, ...this.headings())), this.body);
      const scroll = make("div", { className: "scroll", tabIndex: 0 }, table);
      scroll.setAttribute("role", "region");
      scroll.setAttribute("aria-label", this.title);
      box.replaceChildren(make("div", { className: "tools" }, this.input, this.count, pager), scroll);
      this.draw();
    }

    headings() {
      return this.columns.map((column, place) => {
        const button = make("button", { type: "button", textContent: column.title });
        const heading = make("th", { scope: "col" }, column.kind === "histogram" ? column.title : button);
        if (NUMERIC.has(column.kind)) heading.classList.add("number");
        if (column.about) heading.title = column.about;
        if (column.kind !== "histogram") {
          heading.setAttribute("aria-sort", "none");
          button.addEventListener("click", () => this.sort(place, heading));
        }
        return heading;
      });
    }

    value(row, place) {
      const value = row[place];
      if (value === null) return null;
      const { kind, words } = this.columns[place];
      if (kind === "word") return words[value];
      return NUMERIC.has(kind) && typeof value === "string" ? (value === "inf" ? Infinity : -Infinity) : value;
    }

    text(row, place) {
      const value = this.value(row, place);
      if (value === null) return "-";
      const format = FORMATS[this.columns[place].kind];
      return format ? format(value) : String(value);
    }

    search() {
      if (this.texts === null) {
        const places = this.columns.flatMap(({ kind }, i) => ["name", "text", "word"].includes(kind) ? [i] : []);
        this.texts = this.rows.map((row) => places.map((i) => row[i] === null ? "" : this.value(row, i)).join("\n").toLowerCase());
      }
      const terms = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.shown = terms.length ? this.order.filter((i) => terms.every((term) => this.texts[i].includes(term))) : this.order;
      this.first = 0;
      this.draw();
    }

    sort(place, heading) {
      // Numbers begin with the largest, texts with the first.
      const numeric = NUMERIC.has(this.columns[place].kind);
      const now = heading.getAttribute("aria-sort");
      const up = now === "none" ? !numeric : now === "descending";
      for (const other of heading.parentNode.children) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const collator = new Intl.Collator("en", { numeric: true });
      const values = this.rows.map((row) => this.value(row, place));
      this.order = this.rows.map((_, i) => i).sort((i, j) => {
        const [a, b] = [values[i], values[j]];
        // Rows without a value come last in both directions.
        if (a === null || b === null) return (a === null) - (b === null);
        const order = numeric ? a - b : collator.compare(a, b);
        return (up ? order : -order) || 0;
      });
      this.search();
    }

    turn(by) {
      this.first = Math.max(0, Math.min(this.first + by, this.shown.length - 1));
      this.draw();
    }

    draw() {
      this.open = null;
      const page = this.shown.slice(this.first, this.first + ROWS);
      const all = this.rows.length;
      const found = this.shown.length;
      const part = found > ROWS ? `${(this.first + 1).toLocaleString("en")} to ${(this.first + page.length).toLocaleString("en")} of ` : "";
      const noun = `${this.noun}${found === 1 ? "" : "s"}`;
      this.count.textContent = `${part}${found.toLocaleString("en")} ${noun}${found < all ? `, of ${all.toLocaleString("en")}` : ""}${this.leftOut ? `; ${this.leftOut.toLocaleString("en")} more are not listed` : ""}`;
      this.back.parentNode.hidden = found <= ROWS;
      this.back.disabled = this.first === 0;
      this.next.disabled = this.first + ROWS >= found;
      this.body.replaceChildren(...page.map((i) => this.row(i)));
      if (!page.length) this.body.append(make("tr", {}, make("td", { colSpan: this.columns.length, textContent: `No ${this.noun} matches.` })));
    }

    row(index) {
      const row = this.rows[index];
      const line = make("tr");
      this.columns.forEach(({ kind }, place) => {
        if (kind === "name") {
          const button = make("button", { type: "button", textContent: row[place] });
          button.setAttribute("aria-expanded", "false");
          button.addEventListener("click", () => this.toggle(line, button, row));
          line.append(make("th", { scope: "row" }, button));
        } else if (kind === "histogram") {
          line.append(make("td", {}, row[place] === null ? "-" : bars(row[place], "mini")));
        } else {
          const cell = make("td", { textContent: this.text(row, place) });
          if (NUMERIC.has(kind)) cell.className = "number";
          line.append(cell);
        }
      });
      return line;
    }

    toggle(line, button, row) {
      const wasOpen = this.open && this.open.line === line;
      if (this.open) {
        this.open.more.remove();
        this.open.button.setAttribute("aria-expanded", "false");
        this.open = null;
      }
      if (wasOpen) return;
      const more = make("tr", { className: "more" }, make("td", { colSpan: this.columns.length }, this.details(row)));
      line.after(more);
      button.setAttribute("aria-expanded", "true");
      this.open = { line, button, more };
    }

    details(row) {
      const body = make("div", { className: "more-body" });
      const place = this.columns.findIndex(({ kind }) => kind === "histogram");
      if (place >= 0 && row[place] !== null) {
        const [low, high, log, beyond] = row[place];
        const scale = log ? "logarithmic scale" : "";
        const outside = beyond ? `${beyond.toLocaleString("en")} elements are outside` : "";
        body.append(
          bars(row[place], "big"),
          make("div", { className: "ends" }, make("span", { textContent: number(low) }),
            make("span", { textContent: [scale, outside].filter(Boolean).join("; ") }), make("span", { textContent: number(high) })),
        );
      }
      const list = make("dl", { className: "facts" });
      this.columns.forEach((column, i) => {
        if (column.kind === "histogram" || row[i] === null) return;
        list.append(make("div", {}, make("dt", { textContent: column.title }), make("dd", { textContent: this.text(row, i) })));
      });
      body.append(list);
      return body;
    }
  }

  const data = JSON.parse(document.getElementById("data").textContent);
  const tables = {};
  for (const box of document.querySelectorAll("[data-table]")) tables[box.dataset.table] = new DrawnTable(box, data[box.dataset.table]);

  for (const cell of document.querySelectorAll("[data-search]")) {
    cell.addEventListener("click", () => {
      tables.tensors.input.value = cell.dataset.search;
      tables.tensors.search();
      document.getElementById("tensors").scrollIntoView();
      tables.tensors.input.focus({ preventScroll: true });
    });
  }
  const choices = document.querySelectorAll("[data-map]");
  for (const choice of choices) {
    choice.addEventListener("click", () => {
      for (const other of choices) {
        other.setAttribute("aria-pressed", String(other === choice));
        document.getElementById(`map-${other.dataset.map}`).hidden = other !== choice;
      }
    });
  }
}
