"use strict";
// Draws /api/dataflow once a second. Text goes in as text, never as HTML: names of partitions and fields are users'.

const PERIOD_MS = 1000;
let before = null;

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let step = 0;
  while (count >= 1024 && step < units.length - 1) { count /= 1024; step += 1; }
  return `${step ? count.toFixed(1) : count} ${units[step]}`;
}

function table(head, rows, empty) {
  if (!rows.length) return element("p", { class: "dim" }, empty);
  const top = element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, top), element("tbody", {}, ...rows)));
}

function bar(part, whole, label, show = String) {
  const full = whole > 0 && part === whole;
  return element("td", {},
    element("progress", { max: Math.max(whole, 1), value: part, class: full ? "full" : null, "aria-label": label }),
    `${show(part)} of ${show(whole)}`);
}

function task(item) {
  const waiting = item.waiting ? `, ${item.waiting} waiting` : "";
  return element("span", { class: item.waiting ? "task waiting" : "task", title: item.fields.join(", ") },
    `${item.task}: ${item.consumed} consumed, ${item.ready} ready${waiting}`);
}

function partitions(list) {
  const fields = [...new Set(list.flatMap((item) => Object.keys(item.fields)))];
  const rows = list.map((item) => element("tr", {},
    element("th", { scope: "row" }, item.name),
    element("td", { class: "number" }, item.rows, item.lost ? element("div", { class: "fault" }, `${item.lost} lost`) : null),
    element("td", { class: "number" }, bytes(item.bytes)),
    ...fields.map((name) => name in item.fields
      ? bar(item.fields[name], item.rows, `${item.name}, ${name}`) : element("td", { class: "dim" }, "–")),
    element("td", {}, ...item.subscriptions.map(task))));
  return table(["partition", "rows", "bytes", ...fields, "tasks"], rows, "No rows yet: nobody has put anything.");
}

function waiters(list) {
  const rows = list.map((item) => element("tr", {},
    element("td", {}, item.task || "a put"), element("td", {}, item.partition),
    element("td", { class: "number" }, item.rows), element("td", { class: "number" }, `${item.waited_s.toFixed(0)} s`),
    element("td", {}, item.lacks)));
  return table(["who", "partition", "rows wanted", "for", "what is there and what lacks"], rows, "Nobody waits.");
}

function units(list) {
  const rows = list.map((item) => element("tr", {},
    element("th", { scope: "row" }, item.name), element("td", {}, item.address),
    bar(item.used, item.capacity, `use of ${item.name}`, bytes),
    element("td", { class: "number" }, item.blocks),
    element("td", { class: item.connected ? null : "fault" }, item.connected ? "connected" : "away")));
  return table(["unit", "address", "use", "blocks", "state"], rows, "No storage unit has registered.");
}

function rate(now, name) {
  if (!before || before.run !== now.run || now.uptime_s <= before.uptime_s) return null;
  return (now.counters[name] - before.counters[name]) / (now.uptime_s - before.uptime_s);
}

function summary(now) {
  const speed = rate(now, "rows_put");
  const flow = speed === null ? "" : `, ${speed.toFixed(0)} rows/s in (${bytes(Math.round(rate(now, "bytes_put")))}/s), ` +
    `${rate(now, "rows_fetched").toFixed(0)} rows/s out`;
  const most = now.sample_capacity === null ? "" : ` of ${now.sample_capacity}`;
  const there = now.units.filter((unit) => unit.connected).length;
  const storage = now.expected_units ? `, ${there} of ${now.expected_units} storage units` : "";
  return `${now.rows}${most} rows, ${now.clients} clients${storage}, backend ${now.backend}${flow}`;
}

async function refresh() {
  const status = document.getElementById("summary");
  try {
    const answer = await fetch("/api/dataflow", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const now = await answer.json();
    document.getElementById("queue").textContent = now.queue;
    document.getElementById("partitions").replaceChildren(partitions(now.partitions));
    document.getElementById("waiters").replaceChildren(waiters(now.waiters));
    document.getElementById("units").replaceChildren(units(now.units));
    status.textContent = summary(now);
    status.className = "";
    before = now;
    document.body.dataset.drawn = "true";
  } catch (error) {
    status.textContent = `the controller does not answer (${error.message}); trying again`;
    status.className = "fault";
  }
  setTimeout(refresh, PERIOD_MS);
}

refresh();
