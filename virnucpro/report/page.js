"use strict";
(() => {
  const make = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const say = (text) => { document.getElementById("said").textContent = text; };

  // --- values of plots: by pointer the nearest, by the keys one after the other ---
  const SIZE = 2000, NEAR_PX = 40;
  for (const plot of document.querySelectorAll(".plot")) {
    const tips = JSON.parse(plot.querySelector("script").textContent).sort((a, b) => a[0] - b[0]);
    if (!tips.length) continue;
    const area = plot.querySelector(".area");
    const tip = make("div", { className: "tip", hidden: true });
    const pin = make("div", { className: "pin", hidden: true });
    area.append(pin, tip);
    let at = -1;
    const show = (number) => {
      at = number;
      tip.hidden = pin.hidden = at < 0;
      if (at < 0) return;
      const [x, y, text] = tips[at];
      tip.textContent = text;
      pin.style.left = `${(100 * x) / SIZE}%`;
      pin.style.top = `${(100 * y) / SIZE}%`;
      const left = (x / SIZE) * area.clientWidth - tip.offsetWidth / 2;
      tip.style.left = `${Math.max(-30, Math.min(left, area.clientWidth - tip.offsetWidth + 14))}px`;
      tip.style.bottom = `calc(${100 - (100 * y) / SIZE}% + 12px)`;
    };
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const distance = ([x, y]) => Math.hypot(
        (x / SIZE) * box.width - (event.clientX - box.left), (y / SIZE) * box.height - (event.clientY - box.top));
      let nearest = -1, least = NEAR_PX;
      tips.forEach((one, number) => {
        const px = distance(one);
        if (px < least) [nearest, least] = [number, px];
      });
      show(nearest);
    });
    for (const end of ["pointerleave", "pointercancel"]) area.addEventListener(end, () => show(-1));
    plot.tabIndex = 0;
    plot.setAttribute("role", "application");
    plot.setAttribute("aria-roledescription", "plot");
    plot.setAttribute("aria-label", `${plot.getAttribute("aria-label")}; arrow keys read its ${tips.length} values`);
    plot.addEventListener("blur", () => show(-1));
    plot.addEventListener("keydown", (event) => {
      const last = tips.length - 1;
      const to = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last, Escape: -1 };
      if (to[event.key] === undefined) return;
      event.preventDefault();
      show(to[event.key]);
      say(at < 0 ? "" : tips[at][2]);
    });
  }

  for (const button of document.querySelectorAll("button[data-plot]")) {
    button.addEventListener("click", () => {
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      document.getElementById(button.dataset.plot).hidden = isLog;
      document.getElementById(`${button.dataset.plot}-log`).hidden = !isLog;
    });
  }

  // --- files beside the page: there where a server sent it, not where it was mailed ---
  if (location.protocol.startsWith("http")) {
    for (const named of document.querySelectorAll("[data-file]")) {
      named.replaceWith(make("a", { href: encodeURIComponent(named.dataset.file), textContent: named.dataset.file }));
    }
  }

  // --- the table ---
  const source = document.getElementById("contigs");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const table = document.querySelector("table.contigs");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const save = document.getElementById("export");
  const values = Object.fromEntries(Object.entries(data.columns).map(([name, column]) => {
    const texts = column.texts?.split("\n");
    return [name, texts ? (row) => texts[row] : (row) => column.of[column.at ? column.at[row] : 0]];
  }));
  const numbers = (name) => (row) => (values[name](row) === "" ? NaN : Number(values[name](row)));
  const length = numbers("length"), score = numbers("score");
  const whole = (value) => value.toLocaleString("en-US");
  let order = Array.from({ length: data.total }, (_, row) => row);
  const searched = order.map((row) => `${values.contig(row)}\n${values.why(row)}`.toLowerCase());
  const hasSequences = Object.keys(data.numbers).length > 0;
  let limit = data.rows;
  let matching = order;

  const probability = (p) => (p > 0 && p < 0.001 ? "<0.001" : p > 0.999 && p < 1 ? ">0.999" : p.toFixed(3));
  const nucleotides = (nt) => {
    for (const [unit, size] of [["Gb", 1e9], ["Mb", 1e6], ["kb", 1e3]]) {
      const value = nt / size;
      if (value >= 1) return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)}\u00a0${unit}`;
    }
    return `${nt}\u00a0nt`;
  };
  const inWords = {
    length: (text) => nucleotides(Number(text)),
    probability: (text) => probability(Number(text)),
    percent: (text) => `${(100 * Number(text)).toFixed(0)}%`,
    chunks: (text, row) => (values.open_chunks(row) === "0" ? "" : `${text} of ${values.open_chunks(row)}`),
    count: (text) => text,
  };

  function cell([, key, kind], row) {
    const text = values[key](row);
    if (kind === "name") return make("td", { className: "name" }, make("bdi", { textContent: text }));
    if (kind === "text") return make("td", { className: "reason", textContent: text });
    if (kind === "call") {
      const swatch = make("span", { className: `swatch ${data.classes[values.group(row)]}` });
      swatch.setAttribute("aria-hidden", "true");
      return make("td", { className: "call" }, swatch, text);
    }
    const shown = make("td", { className: "number" });
    if (text && kind === "bar") {
      const bar = make("span", { className: "p", textContent: probability(Number(text)) });
      bar.setAttribute("style", `--p:${Number(text).toFixed(3)}`);
      shown.append(bar);
    } else if (text) shown.textContent = inWords[kind](text, row);
    return shown;
  }

  function sequenceCell(row) {
    const number = data.numbers[row];
    const made = make("td", { className: "sequence" });
    const name = values.contig(row);
    if (data.records[number]) {
      const button = make("button", { type: "button", className: "copy", textContent: "Copy" });
      button.dataset.copy = number;
      button.setAttribute("aria-label", `Copy the sequence of ${name}`);
      made.append(button);
    }
    if (document.getElementById(`track-${number}`)) {
      const link = make("a", { href: `#track-${number}`, textContent: "Map" });
      link.setAttribute("aria-label", `Map of ${name}`);
      made.append(link);
    }
    return made;
  }

  function lineOf(row) {
    const cells = data.shown.map((column) => cell(column, row));
    if (hasSequences) cells.push(sequenceCell(row));
    return make("tr", { className: data.classes[values.group(row)] }, ...cells);
  }

  const field = (name) => document.getElementById(`filter-${name}`);
  const limitOf = (name) => (field(name).value === "" ? null : Number(field(name).value));
  const isWithin = (value, [from, to]) =>
    (from === null && to === null) || (value >= (from ?? -Infinity) && value <= (to ?? Infinity));

  function show() {
    table.tBodies[0].replaceChildren(...matching.slice(0, limit).map(lineOf));
    const all = `${whole(matching.length)} ${data.noun[matching.length === 1 ? 0 : 1]}`;
    const isAll = matching.length === data.total;
    const first = limit < matching.length ? `The first ${whole(limit)} of ` : "";
    const beyond = data.beyond ? `; ${whole(data.beyond)} others are in contigs.tsv only` : "";
    count.textContent = `${first}${all}${isAll ? "" : ` that match, of ${whole(data.total)} in this page${beyond}`}`;
    more.hidden = limit >= matching.length;
    save.textContent = `Save ${isAll ? "all " : ""}${all} as TSV`;
    save.disabled = !matching.length;
  }

  function filter() {
    const wanted = field("text").value.trim().toLowerCase();
    const call = field("call").value;
    const [lengths, scores] = ["length", "score"].map((name) => [limitOf(`${name}-from`), limitOf(`${name}-to`)]);
    matching = order.filter((row) =>
      (!call || values.group(row) === call) && searched[row].includes(wanted) &&
      isWithin(length(row), lengths) && isWithin(score(row), scores));
    limit = data.rows;
    show();
  }

  // What is empty comes last either way; equal keys keep the order of before.
  const { compare } = new Intl.Collator("en", { numeric: true });
  function sort(header, [, key, kind]) {
    const isNumber = header.classList.contains("number");
    const first = isNumber ? "descending" : "ascending";
    const other = isNumber ? "ascending" : "descending";
    const to = header.getAttribute("aria-sort") === first ? other : first;
    for (const one of header.parentElement.cells) one.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", to);
    const way = to === "ascending" ? 1 : -1;
    const isEmpty = (row) => values[key](row) === "" || (kind === "chunks" && values.open_chunks(row) === "0");
    const keys = order.map((row) => (isEmpty(row) ? null : isNumber ? Number(values[key](row)) : values[key](row)));
    const by = new Map(order.map((row, place) => [row, keys[place]]));
    order = [...order].sort((one, another) => {
      const [a, b] = [by.get(one), by.get(another)];
      if (a === null || b === null) return (a === null) - (b === null);
      return way * (isNumber ? a - b : compare(a, b));
    });
    filter();
  }

  function exportTable() {
    const lines = [data.exported, ...matching.map((row) => data.exported.map((name) => values[name](row)))];
    const text = lines.map((line) => `${line.join("\t")}\n`).join("");
    const url = URL.createObjectURL(new Blob([text], { type: "text/tab-separated-values" }));
    make("a", { href: url, download: "contigs_selected.tsv" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }

  // execCommand: the clipboard's own interface is not there for a page by plain HTTP, or in a sandbox
  function copy(text) {
    const put = (event) => {
      event.clipboardData.setData("text/plain", text);
      event.preventDefault();
    };
    document.addEventListener("copy", put);
    const isDone = document.execCommand("copy");
    document.removeEventListener("copy", put);
    return isDone;
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-copy]");
    if (button) {
      const isDone = copy(data.records[button.dataset.copy]);
      button.textContent = isDone ? "Copied" : "Not copied";
      say(isDone ? "The sequence is copied." : "The browser did not copy the sequence.");
    }
    const target = event.target.closest("a[href^='#track-']")?.getAttribute("href").slice(1);
    const folded = target && document.getElementById(target).closest("details");
    if (folded) folded.open = true;
  });

  [...table.tHead.rows[0].cells].forEach((header, place) =>
    header.querySelector("button").addEventListener("click", () => sort(header, data.shown[place])));
  if (hasSequences) {
    table.tHead.rows[0].append(make("th", { className: "sequence", scope: "col", textContent: "Sequence" }));
  }
  for (const name of ["text", "length-from", "length-to", "score-from", "score-to"]) {
    field(name).addEventListener("input", filter);
  }
  field("call").addEventListener("change", filter);
  more.addEventListener("click", () => {
    limit += 500;
    show();
  });
  save.addEventListener("click", exportTable);
  filter();
})();
