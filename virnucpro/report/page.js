"use strict";
(() => {
  const PRINT_WIDTH_PX = 680;

  // --- plots: made once in light colours, painted anew when the page turns dark, light, or to paper ---
  const { figures, dark } = JSON.parse(document.getElementById("figures").textContent);
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const config = {
    displaylogo: false,
    responsive: true,
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // named, so that none sends the plot anywhere
    toImageButtonOptions: { format: "svg" },
  };

  const painted = (value, colours) => {
    if (typeof value === "string") return colours[value] ?? value;
    if (Array.isArray(value)) return value.map((item) => painted(item, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, colours)]));
  };

  function draw(paper) {
    const colours = wantsDark.matches && !paper ? dark : {};
    for (const place of document.querySelectorAll(".plot")) {
      const figure = figures[place.id];
      const layout = painted(figure.layout, colours);
      if (paper) layout.width = PRINT_WIDTH_PX;
      if (isTouch) layout.dragmode = false; // a finger on a plot scrolls the page
      if (place.dataset.scale) layout.yaxis.type = place.dataset.scale;
      Plotly.react(place, painted(figure.data, colours), layout, config);
      if (!paper) Plotly.Plots.resize(place); // back from the width of the paper
    }
  }

  async function loadPlotly() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script); // runs at once
  }

  function showPlots() {
    draw(false);
    wantsDark.addEventListener("change", () => draw(false));
    addEventListener("beforeprint", () => draw(true));
    addEventListener("afterprint", () => draw(false));
    for (const button of document.querySelectorAll("button[data-plot]")) {
      button.setAttribute("aria-pressed", String(figures[button.dataset.plot].layout.yaxis.type === "log"));
      button.addEventListener("click", () => {
        const isLog = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isLog));
        document.getElementById(button.dataset.plot).dataset.scale = isLog ? "log" : "linear";
        draw(false);
      });
    }
  }

  function doWithoutPlots() {
    document.getElementById("without-plots").hidden = false;
    for (const one of document.querySelectorAll(".plot, button[data-plot]")) one.hidden = true;
  }

  // a browser that cannot unpack them has no DecompressionStream
  if (document.querySelector(".plot")) loadPlotly().then(showPlots, doWithoutPlots);

  // --- the table ---
  const table = document.querySelector("table.contigs");
  if (!table) return;
  const body = table.tBodies[0];
  const headers = [...table.tHead.rows[0].cells];
  const text = document.getElementById("filter-text");
  const call = document.getElementById("filter-call");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const rows = [...body.rows].map((row) => ({
    row,
    call: row.dataset.call,
    text: row.textContent.toLowerCase(),
    keys: [...row.cells].map((cell) => (cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v))),
  }));
  let limit = Number(table.dataset.rowsAtFirst);

  // What is empty comes last either way; equal keys keep the order of before.
  function compare(a, b, way) {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === "number") return way * (a - b);
    return way * a.localeCompare(b, "en", { numeric: true });
  }

  function show() {
    const wanted = text.value.trim().toLowerCase();
    const matching = rows.filter((one) => (!call.value || one.call === call.value) && one.text.includes(wanted));
    const shown = new Set(matching.slice(0, limit));
    for (const one of rows) one.row.hidden = !shown.has(one);
    const number = (value) => value.toLocaleString("en");
    const matches = matching.length === rows.length ? "" : ` that match, of ${number(rows.length)} in the table`;
    const { counted } = count.dataset;
    const all = `${number(matching.length)} ${matching.length === 1 ? counted.slice(0, -1) : counted}${matches}`;
    count.textContent = shown.size < matching.length ? `The first ${number(shown.size)} of ${all}` : all;
    more.hidden = shown.size === matching.length;
    more.textContent = `Show all ${number(matching.length)}`;
  }

  function sort(column) {
    const header = headers[column];
    const first = header.classList.contains("number") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = header.getAttribute("aria-sort") === first ? other : first;
    for (const one of headers) one.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const way = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => compare(a.keys[column], b.keys[column], way));
    body.append(...rows.map((one) => one.row));
    show();
  }

  headers.forEach((header, column) => header.querySelector("button").addEventListener("click", () => sort(column)));
  text.addEventListener("input", show);
  call.addEventListener("change", show);
  more.addEventListener("click", () => {
    limit = rows.length;
    show();
  });
  show();
})();
