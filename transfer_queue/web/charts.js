"use strict";
// Draws /api/history: one figure for each question, with the answer in words above the plot and the numbers in a table
// below it. The plots are uPlot's (vendor/uplot). Colours come from the style sheet, and change with its scheme.

const LINES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5"];
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3]];
const PLOT_HEIGHT = 120;
const RECENT_S = 10;
const figures = new Map();
let past = null;

const known = (values) => (values || []).filter((value) => value !== null);
const last = (values) => known(values).at(-1) ?? 0;
const most = (values) => known(values).reduce((one, other) => Math.max(one, other), 0);
const total = (values) => known(values).reduce((one, other) => one + other, 0);
const brief = (value) => (value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(2));
const seconds = (value) => (value >= 5400 ? `${(value / 3600).toFixed(1)} h` : value >= 90 ? `${(value / 60).toFixed(1)} min` : `${brief(value)} s`);
const percent = (value) => `${Math.round(100 * value)} %`;

// The mean of the newest seconds.
function recent(values, step) {
  const newest = known(values).slice(-Math.max(1, Math.round(RECENT_S / step)));
  return newest.length ? total(newest) / newest.length : 0;
}

// A request has waited through the newest seconds, and nothing was taken.
const stuck = (data, of) => recent(of.waited, data.step_s) >= 0.9 && !recent(of.rows_out, data.step_s);

function reason(item) {
  if (item.kind === "partition") return "a partition that does not exist yet";
  const by = item.producer ? `, by ${item.producer}` : item.kind === "field" ? ", never written" : "";
  return `${item.kind === "rows" ? "new rows" : item.field}${by}`;
}

// Each question: its series, [name, values], and the verdict: what is bad and why, or else what is there.
const QUESTIONS = [
  { name: "reasons", title: "What is waited for", unit: "requests waiting", format: brief, queueOnly: true,
    series: (data) => longest(data.reasons, reason), verdict(data) {
      // A stage that waits itself is not to blame for what it does not write.
      const waits = (task) => data.tasks.some((item) => item.task === task && recent(item.waited, data.step_s) > 0.5);
      const roots = data.reasons.filter((item) => !waits(item.producer));
      const [worst] = [...longest(roots, reason), ...longest(data.reasons, reason)];
      if (!worst) return [false, "Nothing was waited for."];
      const all = total(data.reasons.flatMap((item) => item.waited)) || 1;
      const behind = roots.length && roots.length < data.reasons.length ? "; other stages wait behind it" : "";
      const share = `${percent(total(worst[1]) / all)} of the time that requests waited was for ${worst[0]}${behind}`;
      const wait = last(data.queue.oldest_wait);
      return wait >= LATE_S ? [true, `The oldest request has waited ${seconds(wait)}; ${share}.`] : [false, `${share}.`];
    } },
  { name: "tasks", title: "Who waits", unit: "requests waiting", format: brief, queueOnly: true,
    series: (data) => longest(data.tasks, (item) => item.task), verdict(data) {
      const [worst] = longest(data.tasks, (item) => item.task);
      if (!worst) return [false, "No task has waited."];
      const waited = total(worst[1]) * data.step_s;
      return [last(data.queue.oldest_wait) >= LATE_S && last(worst[1]) > 0.5, `${worst[0]} waited longest: ${seconds(waited)} in this time, all its requests together.`];
    } },
  { name: "waited", title: "Requests that wait for this partition", unit: "requests waiting", format: brief, partitionOnly: true,
    series: (data, of) => [["waiting", of.waited]], verdict(data, of) {
      return [stuck(data, of), `${seconds(total(of.waited) * data.step_s)} waited in this time.`];
    } },
  { name: "flow", title: "Rows in and out", unit: "rows per second", format: brief,
    series: (data, of) => [["in", of.rows_in], ["out", of.rows_out]], verdict(data, of) {
      const [into, out] = [recent(of.rows_in, data.step_s), recent(of.rows_out, data.step_s)];
      const words = `Now ${brief(into)} rows/s in, ${brief(out)} out.`;
      return stuck(data, of) && !into ? [true, `Nothing moves, and ${brief(last(of.waiting_rows))} rows are asked for.`] : [false, words];
    } },
  { name: "bytes", title: "Bytes in and out", unit: "bytes per second", format: (value) => bytes(Math.round(value)),
    series: (data, of) => [["in", of.bytes_in], ["out, at most", of.bytes_out]], verdict(data, of) {
      return [false, `Now ${bytes(Math.round(recent(of.bytes_in, data.step_s)))}/s in, at most ${bytes(Math.round(recent(of.bytes_out, data.step_s)))}/s out.`];
    } },
  { name: "rows", title: "Rows that exist, are ready, are asked for", unit: "rows", format: brief,
    series: (data, of) => [["exist", of.rows], ["ready, summed over tasks", of.ready], ["asked for", of.waiting_rows]], verdict(data, of) {
      const [ready, wanted] = [last(of.ready), last(of.waiting_rows)];
      const words = `${brief(last(of.rows))} exist, ${brief(ready)} are ready for all tasks together, ${brief(wanted)} are asked for`;
      const short = wanted > ready && stuck(data, of);
      return [short, short ? `${words}: too few are ready.` : `${words}.`];
    } },
  { name: "age", title: "Age of rows when they are taken", unit: "seconds", format: seconds,
    series: (data, of) => [["oldest row of a batch", of.age]], verdict(data, of) {
      const all = known(of.age);
      return [false, all.length ? `Oldest ${seconds(most(all))}, mean ${seconds(total(all) / all.length)}.` : "No age was recorded in this time."];
    } },
  { name: "fill", title: "Storage in use", unit: "share of the capacity", format: percent, queueOnly: true, range: [0, 1],
    series: (data, of) => [["all units", of.fill], ["fullest unit", of.fullest]], verdict(data, of) {
      const fullest = last(of.fullest);
      return fullest >= 0.9 ? [true, `The fullest unit is ${percent(fullest)} full: puts soon wait for space. Clear rows or add units.`] : [false, `${percent(last(of.fill))} of all units, ${percent(fullest)} of the fullest.`];
    } },
  { name: "clients", title: "Clients", unit: "connected clients", format: brief, queueOnly: true,
    series: (data, of) => [["connected", of.clients]], verdict(data, of) {
      const [there, high] = [last(of.clients), most(of.clients)];
      const gone = high - there;
      return [false, gone > 0 ? `${brief(there)} connected, ${brief(gone)} fewer than at most in this time.` : `${brief(there)} connected.`];
    } },
];

// The five items with the longest waits, in a stable order of names and so of colours.
function longest(items, name) {
  return items.map((item) => [name(item), item.waited]).filter(([, values]) => total(values) > 0)
    .sort((one, other) => total(other[1]) - total(one[1])).slice(0, LINES.length);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(question) {
  const id = `chart-${question.name}`;
  const parts = {
    verdict: element("p", { class: "verdict", id: `${id}-verdict` }),
    plot: element("div", { class: "plot", role: "img", tabindex: "0", "aria-describedby": `${id}-verdict` }),
    legend: element("ul", { class: "legend" }),
    readout: element("p", { class: "readout dim", role: "status" }),
    table: element("table", {}, element("thead", {}, element("tr", {}, ...["line", "now", "mean", "highest"].map((text) =>
      element("th", { scope: "col" }, text)))), element("tbody", {})),
  };
  const title = element("h3", {}, question.title);
  const numbers = element("details", {}, element("summary", {}, "Numbers"), parts.table);
  const node = element("figure", { id }, element("figcaption", {}, title, parts.verdict), parts.plot, parts.legend, parts.readout, numbers);
  mark(parts.plot, "aria-label", `Plot: ${question.title}. Arrow keys read its values.`);
  document.getElementById("charts").append(node);
  const figure = { ...parts, node, question, plotted: null, shape: "" };
  parts.plot.addEventListener("keydown", (event) => step(figure, event));
  parts.plot.addEventListener("blur", () => write(parts.readout, ""));
  return figure;
}

// Arrow keys move over the values and say each; Home and End are the ends.
function step(figure, event) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e6, End: 1e6 };
  if (!(event.key in moves) || !figure.plotted) return;
  event.preventDefault();
  const times = figure.plotted.data[0];
  const from = figure.plotted.cursor.idx ?? times.length - 1;
  const place = Math.min(times.length - 1, Math.max(0, from + moves[event.key]));
  figure.plotted.setCursor({ left: figure.plotted.valToPos(times[place], "x"), top: 10 });
}

function read(figure, place) {
  if (place === null || place === undefined || !figure.plotted) return write(figure.readout, "");
  const values = figure.lines.map(([name, list]) => `${name} ${list[place] === null ? "–" : figure.question.format(list[place])}`);
  return write(figure.readout, `${new Date(1000 * figure.plotted.data[0][place]).toLocaleTimeString()}: ${values.join(", ")}`);
}

// Values without neighbours, which a line does not show.
function alone(u, series) {
  const values = u.data[series];
  const there = (place) => values[place] !== null && values[place] !== undefined;
  return values.map((_, place) => place).filter((place) => there(place) && !there(place - 1) && !there(place + 1));
}

function plot(figure, times, lines) {
  const { question } = figure;
  figure.lines = lines;
  const data = [times, ...lines.map(([, values]) => values)];
  const shape = JSON.stringify([lines.length, figure.plot.clientWidth, colour("--ground")]);
  if (figure.plotted && figure.shape === shape) return figure.plotted.setData(data);
  figure.plotted?.destroy();
  figure.shape = shape;
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--track"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  figure.plotted = new uPlot({
    width: Math.max(120, figure.plot.clientWidth), height: PLOT_HEIGHT, legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
    scales: { y: { range: (u, low, high) => question.range || [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, size: 24, space: 70, values: (u, splits) => splits.map((at) => new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(splits[1] - splits[0] < 60 ? { second: "2-digit" } : {}), hourCycle: "h23" })) },
      { ...axis, size: 62, space: 30, label: question.unit, labelSize: 14, labelGap: 0, labelFont: axis.font, values: (u, splits) => splits.map((value) => question.format(value)) }],
    series: [{}, ...lines.map((_, place) => ({ stroke: colour(LINES[place]), width: 1.6, dash: DASHES[place], points: { show: true, size: 4, fill: colour(LINES[place]), filter: alone } }))],
    hooks: { setCursor: [(u) => read(figure, u.cursor.idx)] },
  }, data, figure.plot);
  return figure.plotted;
}

function drawFigure(figure, data, of, times, young) {
  const { question } = figure;
  const lines = question.series(data, of);
  const [bad, words] = question.verdict(data, of);
  mark(figure.verdict, "class", bad ? "verdict fault" : "verdict");
  write(figure.verdict, bad ? `⚠ ${words}` : words);
  mark(figure.verdict, "title", question.unit);
  keep(figure.legend, lines.map(([name], place) => ({ name, place })), (item) => item.name,
    () => element("li", {}, element("span", { class: "swatch", "aria-hidden": "true" }), element("span", { class: "name" })), (node, item) => {
      mark(node.firstChild, "data-line", String(item.place + 1));
      write(node.lastChild, item.name);
      mark(node.lastChild, "title", item.name);
    });
  keep(figure.table.tBodies[0], lines, ([name]) => name, () => element("tr", {}, element("th", { scope: "row" }), element("td"), element("td"), element("td")), (row, [name, values]) => {
    const all = known(values);
    write(row.cells[0], name);
    write(row.cells[1], question.format(last(values)));
    write(row.cells[2], question.format(all.length ? total(all) / all.length : 0));
    write(row.cells[3], question.format(most(values)));
  });
  const empty = !lines.length;
  for (const part of [figure.plot, figure.legend, figure.readout, figure.table.parentNode]) part.hidden = empty;
  if (!empty) plot(figure, times.slice(young), lines.map(([name, values]) => [name, (values || []).slice(young)]));
}

function drawPast() {
  if (!past) return;
  const wanted = chosenPartition();
  flow = Object.fromEntries(["rows_in", "bytes_in", "rows_out"].map((name) => [name, recent(past.queue[name], past.step_s)]));
  const of = wanted === null ? past.queue : past.partition;
  const times = Array.from({ length: (past.queue.rows || []).length }, (_, place) => past.start + place * past.step_s);
  const young = times.findIndex((time) => time >= past.began - past.step_s);  // what was before the controller is no past
  write(document.getElementById("past-of"), wanted === null ? "" : ` of ${wanted}`);
  document.getElementById("past-all").hidden = wanted === null;
  const note = document.getElementById("past-note");
  note.hidden = Boolean(of) && !past.left_out.partitions && !past.left_out.tasks;
  write(note, of ? `Partitions without a past of their own: ${past.left_out.partitions}. The most active ones have one; the sums count all.`
    : `There is no past of partition ${wanted}: it has had no traffic since the controller started, or others were more active.`);
  for (const question of QUESTIONS) {
    const hidden = !of || (wanted === null ? question.partitionOnly : question.queueOnly);
    if (!hidden && !figures.has(question.name)) figures.set(question.name, make(question));
    const figure = figures.get(question.name);
    if (!figure) continue;
    figure.node.hidden = Boolean(hidden);
    if (!hidden) drawFigure(figure, past, of, times, Math.max(0, young));
  }
  document.body.dataset.plotted = "true";
}

async function recall() {
  const span = document.getElementById("span").value;
  const partition = chosenPartition();
  let answer;
  try {
    answer = await fetch(`/api/history?${new URLSearchParams({ span, ...(partition === null ? {} : { partition }) })}`, { cache: "no-store" });
    if (!answer.ok) return;
    answer = await answer.json();
  } catch {
    return;  // the request for the present says so
  }
  past = answer;
  drawPast();
}

async function recallForever() {
  if (!document.hidden) await recall();
  setTimeout(recallForever, Number(document.getElementById("span").value) <= 300 ? 2000 : 10000);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawPast);
addEventListener("resize", drawPast);
addEventListener("hashchange", recall);
document.getElementById("span").addEventListener("input", recall);
recallForever();
