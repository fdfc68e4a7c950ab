"use strict";
// Draws /api/dataflow once a second. Cells are updated in place, so that scrolling, selections and focus stay. Text is
// inserted as text, never as HTML: users choose the names of partitions, tasks and fields.

const PERIOD_MS = 1000;
const MOST_ROWS = 200;
const PART = 50;
const WAITING_S = 2;
const LATE_S = 10;
let before = null;
let now = null;
let flow = null;  // a second, as the plots say; null: there are none
let room = PART;  // partitions that are drawn; more when the end of them comes into view

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function write(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

function mark(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let step = 0;
  while (count >= 1024 && step < units.length - 1) { count /= 1024; step += 1; }
  return `${step ? count.toFixed(1) : count} ${units[step]}`;
}

// The children of `parent` become one node for each item, in order; a node stays with the key of its item.
function keep(parent, items, key, make, update) {
  parent.nodes ||= new Map();
  const seen = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    seen.add(name);
    let node = parent.nodes.get(name);
    if (!node) {
      node = make(item);
      parent.nodes.set(name, node);
    }
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    update(node, item);
  }
  for (const [name, node] of parent.nodes) {
    if (!seen.has(name)) {
      node.remove();
      parent.nodes.delete(name);
    }
  }
}

// Rows out of sight keep what they show until they come near: all of a long table each second is work for nobody.
const sight = new IntersectionObserver((seen) => {
  for (const each of seen) each.target.far = !each.isIntersecting;
  if (seen.some((each) => each.isIntersecting)) draw();
}, { rootMargin: "600px" });

function rows(id, items, empty, key, update, limit = MOST_ROWS) {
  const table = document.getElementById(id);
  const labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const shown = items.slice(0, limit);
  keep(table.tBodies[0], shown, key, () => {
    const row = element("tr", {}, ...labels.map((label, place) =>
      place ? element("td", { "data-label": label }) : element("th", { scope: "row" })));
    sight.observe(row);
    return row;
  }, (row, item) => row.far || update(row.cells, item));
  table.hidden = !items.length;
  const note = table.nextElementSibling;
  const more = items.length - shown.length;
  note.hidden = Boolean(items.length) && !more;
  write(note, items.length ? `${more} more are not shown; filter them by name.` : empty);
}

// The partition that the page's address names: #partition=NAME.
function chosenPartition() {
  return new URLSearchParams(location.hash.slice(1)).get("partition");
}

function linkTo(partition) {
  const chosen = new URLSearchParams(location.hash.slice(1));
  chosen.set("partition", partition);
  return `#${chosen}`;
}

// A long name is cut on the screen; the tooltip has all of it.
function named(cell, name) {
  if (!cell.firstChild) cell.append(element("span", { class: "name" }));
  write(cell.firstChild, name);
  mark(cell.firstChild, "title", name);
}

function number(cell, text, fault = false) {
  mark(cell, "class", fault ? "number fault" : "number");
  write(cell, text);
}

function bar(node, part, whole, text) {
  if (!node.firstChild) node.append(element("div", {}), element("div", { class: "bar", "aria-hidden": "true" }, element("div")));
  const [words, track] = node.children;
  write(words, text);
  mark(track, "class", whole > 0 && part === whole ? "bar full" : "bar");
  track.firstChild.style.width = `${whole > 0 ? (100 * part) / whole : 0}%`;
}

function chips(cell, items, key, update) {
  if (!cell.firstChild) cell.append(element("div", { class: "chips" }));
  keep(cell.firstChild, items, key, () => element("div", { class: "chip" }), update);
}

// A task that has all rows of its partition waits for new rows: nothing is wrong with it.
function hasAll(partition, task) {
  return Boolean(partition && partition.rows && partition.tasks[task] && partition.tasks[task].consumed >= partition.rows);
}

function longestWaits() {
  const waits = new Map();
  for (const waiter of now.waiters) {
    const name = JSON.stringify([waiter.partition, waiter.task]);
    waits.set(name, Math.max(waits.get(name) || 0, waiter.waited_s));
  }
  return waits;
}

function partitions(waits) {
  const wanted = document.getElementById("filter").value.toLowerCase();
  const order = document.getElementById("order").value;
  let list = now.partitions.filter((item) => !wanted || item.name.toLowerCase().includes(wanted) ||
    item.subscriptions.some((each) => each.task.toLowerCase().includes(wanted)));
  if (order === "newest") list = list.reverse();
  if (order === "name") list.sort((one, other) => one.name.localeCompare(other.name, undefined, { numeric: true }));
  if (order === "rows") list.sort((one, other) => other.rows - one.rows);
  const empty = now.partitions.length ? "No partition or task has this text in its name." : "No rows yet: nothing has been put.";
  rows("partitions", list, empty, (item) => item.name, (cells, item) => {
    if (!cells[0].firstChild) cells[0].append(element("a", { class: "name" }));
    named(cells[0], item.name);
    mark(cells[0].firstChild, "href", linkTo(item.name));
    number(cells[1], item.lost ? `${item.rows}, ${item.lost} lost` : item.rows, Boolean(item.lost));
    number(cells[2], bytes(item.bytes));
    chips(cells[3], Object.entries(item.fields), ([name]) => name, (chip, [name, ready]) => {
      mark(chip, "title", name);
      bar(chip, ready, item.rows, `${name.length > 40 ? `${name.slice(0, 40)}…` : name} ${ready}/${item.rows}`);
    });
    chips(cells[4], item.subscriptions, (each) => JSON.stringify([each.task, each.fields]), (chip, each) => {
      const waited = waits.get(JSON.stringify([item.name, each.task])) || 0;
      const late = each.waiting && waited >= LATE_S && !hasAll(item, each.task);
      mark(chip, "class", `chip task${late ? " late" : each.waiting && waited >= WAITING_S ? " waiting" : ""}`);
      mark(chip, "title", `fields: ${each.fields.join(", ")}`);
      const waiting = each.waiting ? `, ${each.waiting} waiting` : "";
      write(chip, `${each.task}: ${each.consumed} consumed, ${each.ready} ready${waiting}`);
    });
  }, room);
  const more = document.getElementById("more");
  more.hidden = list.length <= room;
  write(more, `Show more of the ${list.length} partitions`);
  const note = more.previousElementSibling;
  if (list.length) note.hidden = true;
}

function why() {
  keep(document.getElementById("why"), now.why.slice(0, 8).map((text, place) => ({ text, place })), (item) => item.place,
    () => element("li"), (node, item) => {
      const late = now.waiters.some((waiter) => waiter.waited_s >= LATE_S);
      mark(node, "class", late && item.text.includes(" holds up ") ? "fault" : "");
      write(node, `${item.text[0].toUpperCase()}${item.text.slice(1)}.`);
    });
}

function waiters() {
  const byName = new Map(now.partitions.map((item) => [item.name, item]));
  rows("waiters", now.waiters, "No request is waiting.", (item) => JSON.stringify([item.partition, item.task, item.kind, item.number]),
    (cells, item) => {
      named(cells[0], item.task || "a put");
      named(cells[1], item.partition);
      number(cells[2], item.rows);
      number(cells[3], `${item.waited_s.toFixed(0)} s`, item.waited_s >= LATE_S && !hasAll(byName.get(item.partition), item.task));
      write(cells[4], item.lacks);
    });
}

function state(unit) {
  if (!unit.connected) return "away";
  if (!unit.draining) return "connected";
  return unit.blocks ? "draining" : "drained";
}

function units() {
  rows("units", now.units, "No storage unit has registered.", (item) => item.name, (cells, item) => {
    named(cells[0], item.name);
    write(cells[1], item.address);
    bar(cells[2], item.used, item.capacity, `${bytes(item.used)} of ${bytes(item.capacity)}`);
    number(cells[3], item.blocks);
    mark(cells[4], "class", item.connected ? "" : "fault");
    write(cells[4], state(item));
  });
}

function rate(name) {
  if (!before || before.run !== now.run || now.uptime_s <= before.uptime_s) return null;
  return (now.counters[name] - before.counters[name]) / (now.uptime_s - before.uptime_s);
}

function summary() {
  const [into, nbytes, out] = flow ? [brief(flow.rows_in), flow.bytes_in, brief(flow.rows_out)]
    : [rate("rows_put")?.toFixed(0), rate("bytes_put"), rate("rows_fetched")?.toFixed(0)];
  const speed = nbytes === null ? "" : `, ${into} rows/s in (${bytes(Math.round(nbytes))}/s), ${out} rows/s out`;
  const most = now.sample_capacity === null ? "" : ` of ${now.sample_capacity}`;
  const there = now.units.filter((unit) => unit.connected && !unit.on_device).length;
  const storage = now.expected_units ? `, ${there} of ${now.expected_units} storage units` : "";
  return `${now.rows}${most} rows, ${now.clients} client${now.clients === 1 ? "" : "s"}${storage}, backend ${now.backend}${speed}`;
}

// Each of several controllers has a page of its own, at the next port, with its partitions.
function shards() {
  const nav = document.getElementById("shards");
  nav.hidden = !now.shards;
  keep(nav, Array.from({ length: now.shards }, (_, place) => place), (place) => place, () => element("a"), (link, place) => {
    write(link, `controller ${place}`);
    mark(link, "href", `//${location.hostname}:${Number(location.port) - now.shard + place}/`);
    mark(link, "aria-current", place === now.shard ? "page" : "false");
  });
}

function draw() {
  if (!now) return;
  shards();
  // Several requests of one task for one partition are told apart by their order.
  const counts = new Map();
  for (const waiter of now.waiters) {
    const name = JSON.stringify([waiter.partition, waiter.task]);
    waiter.number = counts.get(name) || 0;
    counts.set(name, waiter.number + 1);
  }
  write(document.getElementById("queue"), now.queue);
  write(document.getElementById("summary"), summary());
  why();
  waiters();
  partitions(longestWaits());
  units();
  document.body.dataset.drawn = "true";
}

async function refresh() {
  const trouble = document.getElementById("trouble");
  try {
    const answer = await fetch("/api/dataflow", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const seen = await answer.json();
    before = now;
    now = seen;
    draw();
    trouble.hidden = true;
  } catch (error) {
    write(trouble, `The controller does not answer (${error.message}); trying again. What is shown may be old.`);
    trouble.hidden = false;
  }
  setTimeout(refresh, PERIOD_MS);
}

for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
const more = document.getElementById("more");
const grow = () => { room += PART; draw(); };
more.addEventListener("click", grow);
new IntersectionObserver((seen) => { if (seen.some((each) => each.isIntersecting)) grow(); }, { rootMargin: "600px" }).observe(more);
addEventListener("hashchange", draw);
document.getElementById("past-all").addEventListener("click", (event) => {
  event.preventDefault();
  const chosen = new URLSearchParams(location.hash.slice(1));
  chosen.delete("partition");
  location.hash = chosen;
});
for (const name of ["filter", "order"]) {
  const input = document.getElementById(name);
  const remembered = new URLSearchParams(location.hash.slice(1)).get(name);
  if (remembered !== null) input.value = remembered;
  input.addEventListener("input", () => {
    const chosen = new URLSearchParams(location.hash.slice(1));
    chosen.set(name, input.value);
    history.replaceState(null, "", `#${chosen}`);
    draw();
  });
}
refresh();
