"use strict";
// Draws charts with uPlot: of a table in the page, and of gauges since the page was opened.
(() => {
  const MAX_POINTS = 1200;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const shown = (value) => value === null ? "" : value >= 1e6 ? `${+(value / 1e6).toPrecision(3)} M` : value >= 1e4 ? `${+(value / 1e3).toPrecision(3)} k` : String(value);

  function options(box, names, more) {
    const two = (value) => String(value).padStart(2, "0");
    const timeOf = (seconds) => { const at = new Date(seconds * 1000); return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`; };
    const dayOf = (seconds) => new Date(seconds * 1000).toISOString().slice(5, 10);
    const atOf = more.paths ? dayOf : timeOf;
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const colours = [colour("--s-prefill"), colour("--s-queue")];
    return {
      width: box.clientWidth - 22, height: 170, cursor: { drag: { x: false, y: false } },
      scales: { x: { range: (_, least, most) => [Math.min(least, most - 120), most] }, y: { range: (_, least, most) => [0, Math.max(1, most * 1.1)] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map(atOf), space: 80 }, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? shown(tick) : "") }],
      series: [{ label: more.paths ? "Day" : "Time", value: (_, at) => at === null ? "" : atOf(at) }, ...names.map((label, index) => ({
        label, stroke: colours[index], width: 1.5, fill: colours[index] + "22", value: (_, value) => shown(value), points: { show: false }, ...more,
      }))],
    };
  }

  function fitted(box, chart) {
    new ResizeObserver(() => chart.setSize({ width: box.clientWidth - 22, height: 170 })).observe(box);
  }

  function gauges() {
    const box = document.getElementById("gauges");
    if (!box) return;
    const read = () => [...document.querySelectorAll("[data-gauge]")];
    const data = [[], ...read().map(() => [])];
    const chart = new uPlot(options(box, read().map((each) => each.dataset.gauge), {}), data, box);
    const add = () => {
      const found = read();
      if (found.some((each) => each.textContent === "unknown")) return;
      data[0].push(Date.now() / 1000);
      found.forEach((each, index) => data[index + 1].push(Number(each.dataset.value)));
      if (data[0].length > MAX_POINTS) data.forEach((each) => each.shift());
      chart.setData(data);
    };
    add();
    // An unchanged page is a value too.
    setInterval(() => { if (!document.hidden) add(); }, 3000);
    fitted(box, chart);
  }

  function tables() {
    for (const table of document.querySelectorAll("table[data-chart]")) {
      const box = document.getElementById(table.dataset.chart);
      const rows = [...table.tBodies[0].rows];
      const names = [...table.tHead.rows[0].cells].slice(1, 3).map((each) => each.textContent);
      const data = [rows.map((row) => Number(row.cells[0].dataset.x)), ...names.map((_, index) => rows.map((row) => Number(row.cells[index + 1].dataset.y)))];
      const days = { paths: uPlot.paths.bars({ size: [0.7, 40] }) };
      const chosen = options(box, names, days);
      chosen.scales.x = { range: (_, least, most) => [least - 43200, most + 43200] };
      fitted(box, new uPlot(chosen, data, box));
    }
  }

  gauges();
  tables();
})();
