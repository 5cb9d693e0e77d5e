// The page's parts as the server sends them, charts, and the token of actions. Everything else is
// htmx.
"use strict";

const charts = new Map();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function stacked(columns) {
  const [times, ...series] = columns;
  const sums = times.map(() => 0);
  const isGap = times.map((_, i) => series.every((values) => values[i] === null));
  const added = (value, i) => (isGap[i] ? null : (sums[i] += value ?? 0));
  return [times, ...series.map((values) => values.map(added))];
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hourCycle: "h23" });
}

function figure(value) {
  return value.toLocaleString([], { maximumSignificantDigits: 4 });
}

function axis(unit) {
  const line = { stroke: colour("--line"), width: 1 };
  return {
    stroke: colour("--quiet"), grid: line, ticks: line, size: 64,
    values: (_, splits) => splits.map((value) => figure(value) + (unit ? ` ${unit}` : "")),
  };
}

function seriesOf(labels, isStacked, columns) {
  return labels.map((label, i) => ({
    label,
    stroke: colour(`--series-${i + 1}`),
    fill: isStacked ? `${colour(`--series-${i + 1}`)}55` : undefined,
    width: 2,
    points: { show: false },
    value: (_, __, ___, index) => {
      const value = index === null ? null : columns[i + 1][index];
      return value === null || value === undefined ? "-" : figure(value);
    },
  }));
}

function draw(element) {
  const columns = JSON.parse(element.dataset.columns);
  const labels = JSON.parse(element.dataset.series);
  const isStacked = element.dataset.stacked === "1";
  const options = {
    width: Math.max(200, element.clientWidth),
    height: 220,
    axes: [
      { ...axis(""), values: (_, splits) => splits.map(clock), size: 36, space: 90 },
      axis(element.dataset.unit),
    ],
    scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 0, 1e-3)] } },
    series: [{ value: (_, seconds) => (seconds === null ? "-" : clock(seconds)) }, ...seriesOf(labels, isStacked, columns)],
    bands: isStacked ? labels.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
  };
  charts.set(element, new uPlot(options, isStacked ? stacked(columns) : columns, element));
}

function redraw() {
  for (const [element, chart] of charts) {
    if (!element.isConnected) {
      chart.destroy();
      charts.delete(element);
    }
  }
  for (const element of document.querySelectorAll(".chart[data-columns]")) {
    if (!charts.has(element)) draw(element);
  }
}

function redrawAll() {
  for (const [element, chart] of charts) {
    chart.destroy();
    charts.delete(element);
    element.replaceChildren();
  }
  redraw();
}

const open = new Set();

document.addEventListener("toggle", (event) => {
  const { id, open: isOpen } = event.target;
  if (isOpen && !open.has(id)) {
    for (const log of event.target.querySelectorAll("pre")) log.scrollTop = log.scrollHeight;
  }
  if (id) isOpen ? open.add(id) : open.delete(id);
}, true);

document.addEventListener("htmx:configRequest", (event) => {
  event.detail.headers["X-Dashboard-Token"] = document.getElementById("token")?.dataset.token ?? "";
});

document.addEventListener("htmx:xhr:progress", (event) => {
  const bar = document.getElementById("sent");
  if (!bar || event.target.id !== "upload") return;
  bar.hidden = false;
  bar.max = event.detail.total || 1;
  bar.value = event.detail.loaded;
});

document.addEventListener("htmx:afterRequest", (event) => {
  if (event.target.id === "upload") document.getElementById("sent").hidden = true;
});

document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr } = event.detail;
  if (!xhr || (xhr.getResponseHeader("Content-Type") ?? "").startsWith("text/html")) return;
  event.detail.shouldSwap = false;
  const line = document.createElement("p");
  line.className = "bad";
  line.setAttribute("role", "alert");
  try {
    line.textContent = JSON.parse(xhr.responseText).error.message;
  } catch {
    line.textContent = xhr.responseText.slice(0, 500);
  }
  document.getElementById("notice").replaceChildren(line);
});

const LOST_MS = 2000;
const AGAIN_MS = 1000;
const LONGEST_AGAIN_MS = 10000;
const SCROLLED = "pre, .wide";
const FOCUSABLE = "a, button, summary, input, select, [tabindex]";
let source = null;
let lostTimer = null;
let againMs = AGAIN_MS;

// What a person did to a part, so that the new one can be shown in the same way.
function stateOf(part) {
  return {
    scrolls: [...part.querySelectorAll(SCROLLED)].map((each) => ({
      top: each.scrollTop,
      left: each.scrollLeft,
      isAtEnd: each.scrollTop + each.clientHeight >= each.scrollHeight - 2,
    })),
    focus: document.activeElement?.id ? -1 : [...part.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement),
    id: document.activeElement?.id,
  };
}

function restore(part, before) {
  [...part.querySelectorAll(SCROLLED)].forEach((each, i) => {
    const was = before.scrolls[i];
    each.scrollLeft = was?.left ?? 0;
    each.scrollTop = !was || was.isAtEnd ? each.scrollHeight : was.top;
  });
  const focused = before.id ? document.getElementById(before.id) : part.querySelectorAll(FOCUSABLE)[before.focus];
  if (focused && focused !== document.activeElement && part.contains(focused)) focused.focus({ preventScroll: true });
}

function show(part, text) {
  const before = stateOf(part);
  htmx.swap(part, text, { swapStyle: "innerHTML", swapDelay: 0, settleDelay: 0 });
  for (const id of open) {
    const element = document.getElementById(id);
    if (element) element.open = true;
  }
  restore(part, before);
  redraw();
}

function connect() {
  if (source || document.hidden) return;
  source = new EventSource(document.body.dataset.events);
  source.onopen = () => {
    clearTimeout(lostTimer);
    lostTimer = null;
    againMs = AGAIN_MS;
    document.getElementById("lost").hidden = true;
  };
  source.onerror = onLost;
  for (const part of document.querySelectorAll("[data-part]")) {
    source.addEventListener(part.dataset.part, (event) => show(part, event.data));
  }
}

// A browser opens six connections to a host: pages that nobody sees leave theirs.
function disconnect() {
  clearTimeout(lostTimer);
  lostTimer = null;
  source?.close();
  source = null;
}

async function onLost() {
  lostTimer ??= setTimeout(() => { document.getElementById("lost").hidden = false; }, LOST_MS);
  // The browser itself tries again, unless it was refused.
  if (source?.readyState !== EventSource.CLOSED) return;
  source = null;
  setTimeout(connect, againMs);
  againMs = Math.min(2 * againMs, LONGEST_AGAIN_MS);
  try {
    const reply = await fetch(location.href, { redirect: "manual" });
    if (reply.type === "opaqueredirect") location.reload();
  } catch {
    // The gateway is away; the page goes on trying.
  }
}

document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
addEventListener("pagehide", disconnect);
addEventListener("pageshow", connect);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("resize", redrawAll);
document.addEventListener("DOMContentLoaded", () => {
  redraw();
  connect();
});
