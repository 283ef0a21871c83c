(() => {
  "use strict";
  const root = document.documentElement;
  const figures = [...document.querySelectorAll("figure.chart")].map((figure) => ({
    plot: figure.querySelector(".plot"),
    caption: figure.querySelector("figcaption"),
    group: figure.dataset.group,
    block: figure.parentElement,
    hidden: new Set(), // names of its traces that are switched off
  }));

  // The figures are packed in the page, in the order of their places.
  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("figures").textContent), (byte) => byte.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const sources = await new Response(stream).json();
    figures.forEach((figure, place) => Object.assign(figure, { source: sources[place] }));
  }

  function explainMissingCharts() {
    for (const { plot } of figures) {
      plot.textContent = "This browser cannot draw the chart (it is older than 2023); its numbers are in the tables.";
      plot.style.height = "auto";
    }
  }

  function draw(figure, width = figure.plot.clientWidth) {
    if (!width) return; // in a closed part of the page
    hideLabel(figure);
    figure.width = width;
    figure.chart = charts.draw(figure.source, width, figure.hidden, figure.zoom, () => draw(figure));
    figure.plot.replaceChildren(figure.chart.svg);
    figure.plot.style.height = `${figure.chart.svg.getAttribute("height")}px`;
  }

  // A chart is drawn when it comes near the screen, and anew when its width changes.
  function drawWhenSeen() {
    const near = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          const figure = figures.find(({ plot }) => plot === target);
          if (isIntersecting && !figure.chart) draw(figure);
        }
      },
      { rootMargin: "600px" },
    );
    const sizes = new ResizeObserver((entries) => {
      if ("print" in root.dataset) return;
      for (const { target } of entries) {
        const figure = figures.find(({ plot }) => plot === target);
        if (figure.chart && figure.width !== target.clientWidth) draw(figure);
      }
    });
    for (const figure of figures) {
      near.observe(figure.plot);
      sizes.observe(figure.plot);
      follow(figure);
    }
  }

  function drawForPaper() {
    root.dataset.print = "";
    for (const figure of figures) draw(figure, figure.plot.closest(".half") ? 330 : 680);
  }

  function drawForScreen() {
    delete root.dataset.print;
    for (const figure of figures) draw(figure);
  }

  // --- labels at the pointer ---

  const make = (tag, properties, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };

  function hideLabel({ plot, chart }) {
    plot.querySelector(".label")?.remove();
    chart?.guide.setAttribute("visibility", "hidden");
  }

  function showLabel(figure, x, y) {
    const { plot, chart } = figure;
    hideLabel(figure);
    const found = chart && x >= chart.left - 8 && x <= chart.right + 8 ? charts.find(chart, x, y) : null;
    if (!found) return null;
    if (found.isLine) {
      chart.guide.setAttribute("d", `M${found.x},${chart.top}V${chart.floor}`);
      chart.guide.setAttribute("visibility", "visible");
    }
    const label = make("div", { className: "label", ariaHidden: "true" });
    if (found.title) label.append(make("b", { textContent: found.title }));
    for (const { name, color, words } of found.rows) {
      const mark = make("i", {});
      mark.style.background = color;
      label.append(make("div", {}, mark, make("span", { textContent: name }), make("span", { textContent: words })));
    }
    plot.append(label);
    const place = found.x + 14 + label.offsetWidth > plot.clientWidth ? found.x - 14 - label.offsetWidth : found.x + 14;
    label.style.left = `${Math.max(0, place)}px`;
    label.style.top = `${Math.max(0, Math.min(found.y - 12, plot.clientHeight - label.offsetHeight))}px`;
    return found;
  }

  // A pointer shows values; drawn across, it enlarges, and a double click shows all again.
  function follow(figure) {
    const { plot, group } = figure;
    let from = null;
    const at = (event) => {
      const { left, top } = plot.getBoundingClientRect();
      return [event.clientX - left, event.clientY - top];
    };
    plot.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      const found = showLabel(figure, x, y);
      if (group) showAt(found && charts.toValue(figure.chart, found.x), group, figure);
      if (from === null) return;
      figure.chart.guide.setAttribute("d", [from, x].map((end) => `M${end},${figure.chart.top}V${figure.chart.floor}`).join(""));
      figure.chart.guide.setAttribute("visibility", "visible");
    });
    plot.addEventListener("pointerleave", () => {
      from = null;
      hideLabel(figure);
      if (group) showAt(null, group, figure);
    });
    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0 && figure.chart && !figure.chart.xAxis.names) from = at(event)[0];
    });
    plot.addEventListener("pointerup", (event) => {
      const start = from;
      from = null;
      if (start === null || Math.abs(at(event)[0] - start) < 10) return;
      const { chart } = figure;
      const ends = [start, at(event)[0]].map((x) => Math.min(chart.right, Math.max(chart.left, x)));
      figure.zoom = ends.sort((a, b) => a - b).map((x) => charts.toValue(chart, x));
      draw(figure);
    });
    plot.addEventListener("dblclick", () => {
      delete figure.zoom;
      if (figure.chart) draw(figure);
    });
    if (group) link(figure);
  }

  // Files of a chart, in the colours of paper.
  function offerFiles(figure) {
    const name = `${figure.plot.closest("section").id}-${1 + figures.indexOf(figure)}`;
    const offer = (kind, type, write) => {
      const button = make("button", { type: "button", textContent: kind.toUpperCase(), title: `Save the chart as ${kind.toUpperCase()}` });
      button.addEventListener("click", () => {
        const href = URL.createObjectURL(new Blob([write()], { type }));
        make("a", { href, download: `${name}.${kind}` }).click();
        setTimeout(() => URL.revokeObjectURL(href), 10000);
      });
      return button;
    };
    const drawFile = () => {
      const was = root.dataset.print;
      root.dataset.print = "";
      const text = charts.writeSvg(figure.source, figure.width ?? 680, figure.hidden, figure.zoom, getComputedStyle(root));
      if (was === undefined) delete root.dataset.print;
      return text;
    };
    const files = make("span", { className: "files" });
    files.append(offer("svg", "image/svg+xml", drawFile), offer("csv", "text/csv", () => charts.writeCsv(figure.source)));
    figure.caption.prepend(files);
  }

  // Charts of one group show their values at the same x together, by the pointer or by the arrow keys.
  function link(figure) {
    const { plot, group } = figure;
    let shownAt = null;
    plot.tabIndex = 0;
    plot.addEventListener("blur", () => showAt(null, group));
    plot.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1 };
      if (!(event.key in steps) || !figure.chart) return;
      event.preventDefault();
      const { low, high } = figure.chart.xAxis;
      shownAt = Math.min(high, Math.max(low, (shownAt ?? low) + steps[event.key] * (high - low)));
      showAt(shownAt, group);
    });
  }

  function showAt(value, group, source) {
    for (const figure of figures) {
      if (figure.group !== group || figure === source || !figure.chart) continue;
      const { top, bottom } = figure.plot.getBoundingClientRect();
      if (value === null) hideLabel(figure);
      else if (bottom > 0 && top < innerHeight) showLabel(figure, charts.toPlace(figure.chart, value), figure.chart.top);
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
      entry.append(box, charts.drawPicture(trace), name);
      legend.append(entry);
    }
    block.prepend(legend);
  }

  function switchEntry(name, on) {
    for (const box of document.querySelectorAll(".legend input")) if (box.value === name) box.checked = on;
    for (const figure of figures) {
      figure.hidden[on ? "delete" : "add"](name);
      if (figure.chart && figure.source.data.some((trace) => trace.meta === name)) draw(figure);
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

  document.querySelectorAll(".browser:has(> .filters)").forEach(makeBrowsable);
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  if (figures.length) {
    unpack().then(() => {
      document.querySelectorAll(".charts").forEach(makeLegend);
      figures.forEach(offerFiles);
      drawWhenSeen();
      addEventListener("beforeprint", drawForPaper);
      addEventListener("afterprint", drawForScreen);
    }, explainMissingCharts);
  }
})();
