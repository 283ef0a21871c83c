(() => {
  "use strict";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const finePointer = matchMedia("(pointer: fine)").matches;
  const figures = [...document.querySelectorAll("figure.chart")].map((figure) => ({
    plot: figure.querySelector(".plot"),
    group: figure.dataset.group,
    block: figure.parentElement,
    source: JSON.parse(figure.querySelector("script").textContent),
  }));
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    showTips: false,
  };

  // What all charts share: no frame, a faint horizontal grid, the legend above the plot.
  const muted = { size: 12, color: "var(--muted)" };
  const ink = { size: 12, color: "var(--ink)" };
  const axis = {
    gridcolor: "var(--grid)",
    linecolor: "var(--grid)",
    zeroline: false,
    ticks: "",
    title: { font: muted, standoff: 8 },
  };
  const look = {
    autosize: true,
    margin: { l: 56, r: 16, t: 34, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", ...muted },
    hovermode: "x unified",
    hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--grid)", font: ink },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: ink },
    showlegend: true,
    // A width that follows the ticks of x changes these ticks: some charts never settle.
    xaxis: { ...axis, automargin: "height", showgrid: false, showline: true },
    yaxis: { ...axis, automargin: true, showline: false },
    annotationdefaults: { showarrow: false, xanchor: "left", yanchor: "bottom", font: { ...muted, size: 11 } },
  };

  // Colours are CSS variables in the figures: one figure serves light, dark and print.
  function colored(value, style) {
    if (typeof value === "string") {
      const match = /^var\((--[\w-]+)\)$/.exec(value);
      return match ? style.getPropertyValue(match[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => colored(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, colored(item, style)]));
  }

  // plotly.js, packed in the page. The policy's hash lets the browser run it, and nothing else.
  async function unpackPlotly() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (byte) => byte.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  function explainMissingCharts() {
    for (const { plot } of figures) {
      plot.textContent = "This browser cannot draw the chart (it is older than 2023); its numbers are in the tables.";
      plot.style.height = "auto";
    }
  }

  const switchedOff = new Set();

  function drawOne({ plot, group, source }, style, size) {
    const { data, layout } = colored(source, style);
    for (const trace of data) if (switchedOff.has(trace.meta)) trace.visible = false;
    layout.template = { layout: colored(look, style) };
    layout.dragmode = finePointer ? "zoom" : false;
    Plotly.react(plot, data, { ...layout, ...size }, config);
    if (group && !plot.dataset.linked) link(plot, group);
  }

  // One after the other, so that the page can be read and scrolled meanwhile; a newer drawing stops an older one.
  let drawing = 0;
  function draw() {
    const mine = ++drawing;
    const style = getComputedStyle(root);
    const waiting = [...figures];
    const next = () => {
      if (mine !== drawing || waiting.length === 0) return;
      drawOne(waiting.shift(), style);
      setTimeout(next);
    };
    next();
  }

  function drawForPaper() {
    drawing++;
    root.dataset.print = "";
    const style = getComputedStyle(root);
    for (const figure of figures) {
      drawOne(figure, style, { autosize: false, width: figure.plot.closest(".half") ? 330 : 680 });
    }
  }

  function drawForScreen() {
    delete root.dataset.print;
    draw();
  }

  // Charts of one group show their values at the same x together, by the pointer or by the arrow keys.
  function link(plot, group) {
    plot.dataset.linked = "";
    plot.tabIndex = 0;
    plot.on("plotly_hover", (event) => showAt(event.xvals[0], group, plot));
    plot.on("plotly_unhover", () => showAt(null, group, plot));
    plot.addEventListener("blur", () => showAt(null, group));
    plot.addEventListener("keydown", (event) => {
      const [low, high] = plot._fullLayout.xaxis.range;
      const steps = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1 };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const from = plot.shownAt ?? low;
      plot.shownAt = Math.min(high, Math.max(low, from + steps[event.key] * (high - low)));
      showAt(plot.shownAt, group);
    });
  }

  function showAt(x, group, source) {
    for (const { plot, group: theirs } of figures) {
      if (theirs !== group || plot === source || !("linked" in plot.dataset)) continue;
      const { top, bottom } = plot.getBoundingClientRect();
      if (x === null) Plotly.Fx.unhover(plot);
      else if (bottom > 0 && top < innerHeight) Plotly.Fx.hover(plot, { xval: x }, "xy", true);
    }
  }

  // The legend of neighbouring charts: switching an entry off hides it in every chart of the page.
  function makeLegend(block) {
    const entries = new Map();
    for (const figure of figures.filter((one) => one.block === block && one.group)) {
      for (const trace of figure.source.data) if (trace.meta && !entries.has(trace.meta)) entries.set(trace.meta, trace);
    }
    if (entries.size < 2 && ![...entries.values()].some((trace) => trace.fill)) return;
    const legend = document.createElement("fieldset");
    legend.className = "legend";
    legend.append(Object.assign(document.createElement("legend"), { textContent: "Shown" }));
    for (const [name, trace] of entries) {
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true, value: name });
      box.addEventListener("change", () => switchEntry(name, box.checked));
      const entry = document.createElement("label");
      entry.append(box, sample(trace), name);
      legend.append(entry);
    }
    block.prepend(legend);
  }

  function sample(trace) {
    const space = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(space, "svg");
    const mark = document.createElementNS(space, trace.fill ? "rect" : "line");
    const dashes = { dash: "7 4", dot: "2 3", dashdot: "7 3 2 3" };
    const shape = trace.fill ? { width: 24, height: 12 } : { x2: 24, y1: 6, y2: 6, "stroke-width": 2.5 };
    picture.setAttribute("aria-hidden", "true");
    for (const [key, value] of Object.entries({ width: 24, height: 12 })) picture.setAttribute(key, value);
    for (const [key, value] of Object.entries(shape)) mark.setAttribute(key, value);
    if (trace.fill) mark.style.fill = trace.fillcolor;
    else Object.assign(mark.style, { stroke: trace.line.color, strokeDasharray: dashes[trace.line.dash] ?? "" });
    picture.append(mark);
    return picture;
  }

  function switchEntry(name, on) {
    switchedOff[on ? "delete" : "add"](name);
    for (const box of document.querySelectorAll(".legend input")) if (box.value === name) box.checked = on;
    for (const { plot, source } of figures) {
      const places = source.data.flatMap((trace, place) => (trace.meta === name ? [place] : []));
      if (places.length && plot.data) Plotly.restyle(plot, { visible: on }, places);
    }
  }

  // A click on a column's name sorts by it: upwards, downwards, as it was. What is not known stays last.
  function makeSortable(table) {
    const body = table.tBodies[0];
    const given = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = Object.assign(document.createElement("button"), { type: "button" });
      button.append(...head.childNodes);
      head.append(button);
      const numeric = given.some((row) => row.cells[column].dataset.value !== undefined);
      const keyOf = (row) => {
        const { dataset, textContent } = row.cells[column];
        return numeric ? Number(dataset.value ?? NaN) : textContent;
      };
      button.addEventListener("click", () => {
        const order = { ascending: "descending", descending: "none" }[head.ariaSort] ?? "ascending";
        for (const other of heads) other.ariaSort = "none";
        head.ariaSort = order;
        const sign = order === "descending" ? -1 : 1;
        const compare = (a, b) => {
          if (!numeric) return sign * keyOf(a).localeCompare(keyOf(b), undefined, { numeric: true });
          const unknown = Number.isNaN(keyOf(a)) - Number.isNaN(keyOf(b));
          return unknown || sign * (keyOf(a) - keyOf(b)) || 0;
        };
        body.append(...(order === "none" ? given : [...given].sort(compare)));
      });
    });
  }

  // Rows stay where all words of the search and all choices fit; without script every row is shown.
  function makeBrowsable(browser) {
    const rows = [...browser.querySelectorAll("tbody tr")].map((row) => ({
      row,
      text: row.textContent.toLowerCase(),
      choices: (row.dataset.choices ?? "").trim().split(" "),
    }));
    const bar = browser.querySelector(".filters");
    const search = bar.querySelector("input");
    const selects = [...bar.querySelectorAll("select")];
    const count = bar.querySelector("output");

    function filter() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const { row, text, choices } of rows) {
        const fits =
          words.every((word) => text.includes(word)) &&
          selects.every((select, i) => select.value === "" || select.value === choices[i]);
        row.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${rows.length} shown`;
    }

    bar.querySelector("button").addEventListener("click", () => {
      for (const field of [search, ...selects]) field.value = "";
      filter();
    });
    bar.addEventListener("input", filter);
    bar.hidden = false;
    filter();
  }

  document.querySelectorAll(".browser").forEach(makeBrowsable);
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll(".charts").forEach(makeLegend);
  if (figures.length) {
    unpackPlotly().then(() => {
      draw();
      dark.addEventListener("change", draw);
      addEventListener("beforeprint", drawForPaper);
      addEventListener("afterprint", drawForScreen);
    }, explainMissingCharts);
  }
})();
