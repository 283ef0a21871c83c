(() => {
  "use strict";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const finePointer = matchMedia("(pointer: fine)").matches;
  const figures = [...document.querySelectorAll("figure.chart")].map((figure) => ({
    plot: figure.querySelector(".plot"),
    source: JSON.parse(figure.querySelector("script").textContent),
  }));
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    showTips: false,
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

  function draw() {
    const style = getComputedStyle(root);
    for (const { plot, source } of figures) {
      const { data, layout } = colored(source, style);
      layout.dragmode = finePointer ? "zoom" : false;
      Plotly.react(plot, data, layout, config);
    }
  }

  function drawForPaper() {
    root.dataset.print = "";
    const style = getComputedStyle(root);
    for (const { plot, source } of figures) {
      const { data, layout } = colored(source, style);
      const half = plot.closest(".half") !== null;
      Plotly.react(plot, data, { ...layout, autosize: false, width: half ? 330 : 680 }, config);
    }
  }

  function drawForScreen() {
    delete root.dataset.print;
    draw();
  }

  // Rows stay where all words of the search and all choices fit; without script every row is shown.
  function makeBrowsable(browser) {
    const rows = [...browser.querySelectorAll("tbody tr")].map((row) => ({
      row,
      text: row.textContent.toLowerCase(),
      choices: row.dataset.choices.trim().split(" "),
    }));
    const bar = browser.querySelector(".filters");
    const search = bar.querySelector("input");
    const selects = [...bar.querySelectorAll("select")];
    const told = bar.querySelector("output");

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
      told.textContent = `${shown} of ${rows.length} shown`;
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
  draw();
  dark.addEventListener("change", draw);
  addEventListener("beforeprint", drawForPaper);
  addEventListener("afterprint", drawForScreen);
})();
