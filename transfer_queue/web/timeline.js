"use strict";
// Draws /api/timeline while its section is open: a lane for each stage, bars for waits, marks for puts and gets, and a
// line from the put that ended a wait to its end. The table below has the same in numbers.

const LANE = 30;
const BAR = 12;
const MOST_LANES = 20;
let newest = null;

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function told(event) {
  const fields = event.fields.join(", ") || "all fields";
  const lasted = event.kind === "wait" ? ` ${seconds(event.end - event.start)}${event.number ? "" : " by now"} for` : "";
  return `${event.stage}: ${event.kind}${lasted} ${fields}, ${event.rows} rows of ${event.partition}`;
}

// The puts by their numbers. Events that no put ended name the number 0, which waits that go on have.
function putsOf(events) {
  return new Map(events.filter((event) => event.kind === "put").map((event) => [event.number, event]));
}

function drawLanes(events, stages, start, end) {
  const width = Math.max(200, document.getElementById("lanes").clientWidth);
  const at = (time) => Math.max(0, Math.min(width, ((time - start) / (end - start)) * width));
  const lanes = new Map(stages.map((stage, place) => [stage, place * LANE]));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${stages.length * LANE}`, height: stages.length * LANE, role: "img", "aria-label": `Timeline of ${stages.length} stages; the table below has its numbers.` });
  const top = (event) => lanes.get(event.stage) + LANE - BAR - 2;
  const puts = putsOf(events);
  for (const [stage, y] of lanes) {
    drawing.append(svg("rect", { class: "lane", x: 0, y: y + LANE - BAR - 2, width, height: BAR }), svg("text", { x: 2, y: y + 12 }, stage.length > 60 ? `${stage.slice(0, 60)}…` : stage));
  }
  for (const kind of ["wait", "get", "put"]) {
    for (const event of events) {
      if (event.kind !== kind || !lanes.has(event.stage)) continue;
      const bar = svg("rect", { class: kind, x: at(event.start), y: top(event), width: Math.max(2, at(event.end) - at(event.start)), height: BAR }, svg("title", {}, told(event)));
      drawing.append(bar);
      const put = puts.get(event.ended_by);
      if (put && lanes.has(put.stage) && put.stage !== event.stage) {
        drawing.append(svg("line", { class: "arrow", x1: at(put.end), y1: top(put) + BAR / 2, x2: at(event.end), y2: top(event) + BAR / 2 }));
      }
    }
  }
  document.getElementById("lanes").replaceChildren(drawing);
}

function drawTimeline() {
  if (!newest) return;
  const { time, events, left_out: leftOut } = newest;
  const start = time - Number(document.getElementById("timeline-span").value);
  const shown = events.filter((event) => event.end >= start);
  const there = new Set(shown.map((event) => event.stage));
  const all = [...new Set(events.map((event) => event.stage))].filter((stage) => there.has(stage));
  const stages = all.slice(0, MOST_LANES);
  drawLanes(shown, stages, start, time);
  const section = document.getElementById("timeline");
  const note = [shown.length ? "" : "No put, wait or get in this time.", all.length > stages.length ? `${all.length - stages.length} more stages are not shown.` : "", leftOut ? `At high rates a part is shown: ${leftOut.toLocaleString("en")} events were left out since the controller started.` : ""];
  write(section.querySelector("p"), note.filter(Boolean).join(" "));
  const puts = putsOf(events);
  keep(section.querySelector("tbody"), stages, (stage) => stage, () => element("tr", {}, element("th", { scope: "row" }), ...["puts", "gets", "waits", "waited", "longest wait, and who ended it"].map((label) => element("td", { "data-label": label }))), (row, stage) => {
    const own = shown.filter((event) => event.stage === stage);
    const waits = own.filter((event) => event.kind === "wait").sort((one, other) => other.end - other.start - (one.end - one.start));
    const [longest] = waits;
    named(row.cells[0], stage);
    number(row.cells[1], own.filter((event) => event.kind === "put").length);
    number(row.cells[2], own.filter((event) => event.kind === "get").length);
    number(row.cells[3], waits.length);
    number(row.cells[4], seconds(waits.reduce((sum, event) => sum + event.end - event.start, 0)));
    const put = longest && puts.get(longest.ended_by);
    const by = longest && !longest.number ? ", and goes on" : put ? `, ended by ${put.stage} with ${put.fields.join(", ")}` : "";
    write(row.cells[5], longest ? `${seconds(longest.end - longest.start)} for ${longest.fields.join(", ")}${by}` : "–");
  });
  section.dataset.drawn = "true";
}

async function askTimeline() {
  const section = document.getElementById("timeline");
  const held = document.getElementById("timeline-hold").getAttribute("aria-pressed") === "true";
  if (section.open && !held && !document.hidden) {
    const partition = chosenPartition();
    try {
      const answer = await fetch(`/api/timeline?${new URLSearchParams(partition === null ? {} : { partition })}`, { cache: "no-store" });
      newest = answer.ok ? await answer.json() : newest;
    } catch { /* the request for the present says so */ }
    drawTimeline();
  }
}

async function askTimelineForever() {
  await askTimeline();
  setTimeout(askTimelineForever, 2000);
}

document.getElementById("timeline").addEventListener("toggle", askTimeline);
document.getElementById("timeline-span").addEventListener("input", drawTimeline);
document.getElementById("timeline-hold").addEventListener("click", (event) => mark(event.target, "aria-pressed", String(event.target.getAttribute("aria-pressed") !== "true")));
addEventListener("resize", drawTimeline);
askTimelineForever();
