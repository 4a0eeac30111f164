"use strict";
// The page of `esper-alloc view`. All text of the recording goes through textContent.

const facts = JSON.parse(document.getElementById("facts").textContent);
const $ = id => document.getElementById(id);
const PAGE = 512, MOST_POINTS = 2000;
const FILE = facts.path.split("/").pop();

// Palettes that colour-blind people can tell apart: Okabe and Ito's, and Tol's "muted".
const CATEGORY_COLOURS = ["#0072b2", "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#9aa3ad"];
const LINE_COLOURS = ["#cc6677", "#44aa99", "#ddcc77", "#6f63c8", "#88ccee", "#999933", "#aa4499", "#117733", "#882255"];
const OTHER_LINES = "#9aa3ad", PENDING = "#d55e00";

const state = {
  device: null, stream: "", pool: "", group: "category",
  range: [0, 1], moment: 0, from: 0, to: 0, theme: "light",
};

// ---- numbers and words ----------------------------------------------------------

function bytes(value) {
  const size = Math.abs(value);
  if (size >= 2 ** 30) return (value / 2 ** 30).toFixed(2) + " GiB";
  if (size >= 2 ** 20) return (value / 2 ** 20).toFixed(1) + " MiB";
  if (size >= 2 ** 10) return (value / 2 ** 10).toFixed(1) + " KiB";
  return value + " B";
}
function seconds(value, span = 0) {
  if (!facts.clock) return "entry " + count(Math.round(value));
  const digits = span > 100 ? 1 : span > 1 || !span ? 3 : span > 1e-3 ? 6 : 9;
  return value.toFixed(digits) + " s";
}
const count = value => value.toLocaleString("en-US");
const percent = share => (100 * share).toFixed(1) + "%";
function microseconds(us) {
  return us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1e3 ? (us / 1e3).toFixed(1) + " ms" : us + " µs";
}
// "/long/way/to/model.py:12 (f)" -> "to/model.py:12 (f)"
function short(frame) {
  const at = frame.indexOf(" ("), path = at < 0 ? frame : frame.slice(0, at);
  return path.split("/").slice(-2).join("/") + (at < 0 ? "" : frame.slice(at));
}
function make(tag, text, parent, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
}
function swatch(parent, colour, kind = "") {
  const one = make("span", "", parent, "swatch " + kind);
  one.style[kind ? "borderTopColor" : "background"] = colour;
}
function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// ---- the columns ------------------------------------------------------------------

let buffer;
const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };
const column = where => new KINDS[where.kind](buffer, where.at, where.count);

async function inflate() {
  const packed = Uint8Array.from(atob($("numbers").textContent), one => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  buffer = await new Response(stream).arrayBuffer();
}
function rising(differences) {
  let sum = 0;
  return Uint32Array.from(differences, one => sum += one);
}
// Spans: memory from a moment to before another.
function spans(told) {
  const begin = rising(column(told.begin)), moments = column(told.moments);
  const sizes = column(told.sizes), size = column(told.size), above = column(told.above), page = column(told.page);
  return {
    length: begin.length, begin, end: begin.map((at, i) => at + moments[i]),
    address: Float64Array.from(page, (at, i) => (at + above[i] * 2 ** 32) * PAGE),
    size: Float64Array.from(size, one => sizes[one]),
    place: column(told.place), owner: column(told.owner),
  };
}
// Rows of `groups` series, told as differences in KiB.
function stacks(where, steps) {
  const told = column(where), rows = [];
  for (let at = 0; at < told.length; at += steps) {
    const row = new Float64Array(steps);
    for (let i = 0, sum = 0; i < steps; i++) row[i] = (sum += told[at + i]) * 1024;
    rows.push(row);
  }
  return rows;
}
function split(values, steps) {
  const rows = [];
  for (let at = 0; at < values.length; at += steps) rows.push(values.subarray(at, at + steps));
  return rows;
}
// Decodes a device once.
function decode(told) {
  if (told.ready) return told.ready;
  const steps = column(told.steps), n = steps.length;
  return told.ready = {
    ...told, steps,
    momentReserved: split(column(told.moment_reserved), told.moments.count),
    moments: column(told.moments), momentLive: column(told.moment_live),
    blocks: spans(told.blocks), pending: spans(told.pending), pieces: spans(told.pieces),
    highest: column(told.highest), lowest: column(told.lowest),
    reserved: split(column(told.reserved), n), waiting: split(column(told.waiting), n),
    category: stacks(told.by_category, n), line: stacks(told.by_line, n),
    oomTime: column(told.oom_time), oomFree: column(told.oom_free), oomAsked: column(told.oom_asked),
    heldTime: column(told.held_time), heldUs: column(told.held_us), heldAsked: column(told.held_asked), heldPending: column(told.held_pending),
  };
}

// ---- what is chosen ----------------------------------------------------------------

const shown = owner => {
  const one = state.device.owners[owner];
  return (!state.stream || one.stream === state.stream) && (!state.pool || one.pool === state.pool);
};
const has = row => row.some(one => one > 0);
const isFiltered = () => Boolean(state.stream || state.pool);
function groupNames() {
  if (state.group === "category") return facts.categories;
  return [...state.device.top_lines.map(line => facts.lines[line]), "other lines"];
}
function groupColour(group) {
  if (state.group === "category") return CATEGORY_COLOURS[group];
  return group < state.device.top_lines.length ? LINE_COLOURS[group] : OTHER_LINES;
}
function groupOfPlace(place) {
  if (state.group === "category") return facts.category[place];
  const rank = state.device.top_lines.indexOf(facts.line[place]);
  return rank < 0 ? state.device.top_lines.length : rank;
}
// Those that ever hold anything, whatever is filtered.
function presentGroups() {
  const d = state.device, names = groupNames();
  return [...names.keys()].filter(g => d.owners.some((_, owner) => has(d[state.group][owner * names.length + g])));
}
function sum(rows, n) {
  if (rows.length === 1) return rows[0];
  const total = new Float64Array(n);
  for (const row of rows) for (let i = 0; i < n; i++) total[i] += row[i];
  return total;
}
// The series of the timeline under the filters, at full detail.
function series() {
  const d = state.device, n = d.steps.length, groups = groupNames().length;
  const owners = d.owners.map((_, i) => i).filter(shown);
  const stack = [];
  for (let g = 0; g < groups; g++) stack.push(sum(owners.map(one => d[state.group][one * groups + g]), n));
  const live = isFiltered() ? sum(stack, n) : d.highest;
  return {
    times: d.steps, stack, live,
    lowest: isFiltered() || d.exact ? null : d.lowest,
    reserved: sum(owners.map(one => d.reserved[one]), n), waiting: sum(owners.map(one => d.waiting[one]), n),
  };
}
// First index whose time is not before; the index of the last is n - 1.
function lowerBound(times, time) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}
function nearest(times, time) {
  const at = Math.min(lowerBound(times, time), times.length - 1);
  return at > 0 && time - times[at - 1] < times[at] - time ? at - 1 : at;
}
// At most MOST_POINTS of a range: each stands for as many steps, by the one where most was live;
// the first and the last stand alone, so that the picture reaches from edge to edge.
// Returns points of [time, ...cumulated groups from the top, reserved, pending, lowest].
function reduce(all, [from, to]) {
  const begin = Math.max(lowerBound(all.times, from) - 1, 0);
  const end = Math.min(lowerBound(all.times, to) + 1, all.times.length);
  const each = Math.max(1, Math.ceil((end - begin) / MOST_POINTS));
  const points = Math.min(end - begin, 2 + Math.ceil((end - begin - 2) / each));
  reduced = each > 1;
  tops = new Uint32Array(points);
  const rows = Array.from({ length: all.stack.length + 4 }, () => new Array(points));
  const [times, reserved, waiting, lowest] = [rows[0], ...rows.slice(-3)];
  for (let point = 0; point < points; point++) {
    const first = point === points - 1 ? end - 1 : point ? begin + 1 + (point - 1) * each : begin;
    const last = point === points - 1 ? end : point ? Math.min(first + each, end - 1) : begin + 1;
    let top = first, most = -1, pending = -1, least = Infinity;
    for (let i = first; i < last; i++) {
      if (all.live[i] > all.live[top]) top = i;
      if (all.reserved[i] > most) most = all.reserved[i];
      if (all.waiting[i] > pending) pending = all.waiting[i];
      if (all.lowest && all.lowest[i] < least) least = all.lowest[i];
    }
    if (!all.lowest) for (let i = first; i < last; i++) if (all.live[i] < least) least = all.live[i];
    tops[point] = top;
    times[point] = all.times[top];
    for (let g = 0, height = 0; g < all.stack.length; g++) {
      height += all.stack[g][top];
      rows[all.stack.length - g][point] = height;
    }
    reserved[point] = most;
    waiting[point] = pending;
    lowest[point] = least;
  }
  // All of a pixel have the lowest of it: a line up and down a narrow spike would hide its colour.
  const own = [...lowest], pixel = (to - from) / Math.max(plot.over.clientWidth, 1);
  for (let point = 0, end = 0; point < points; point = end) {
    let least = own[Math.max(point - 1, 0)];
    for (const at = Math.floor(times[point] / pixel); end < points && Math.floor(times[end] / pixel) === at; end++) least = Math.min(least, own[end]);
    lowest.fill(least, point, end);
  }
  return rows;
}

// ---- the timeline --------------------------------------------------------------------

let plot, all, beforeClick = 0; // beforeClick: the moment that was chosen then
let reduced = false; // reduced: a point of the picture stands for several steps
let tops = []; // tops: of each point of the picture, the step whose live memory it shows

function whole() {
  const times = state.device.steps, first = times[0], last = times[times.length - 1];
  return last > first ? [first, last] : [first - 0.5, last + 0.5];
}
function zoom(from, to) {
  const [first, last] = whole(), least = Math.max((last - first) * 1e-7, 1e-8);
  const width = Math.min(Math.max(to - from, least), last - first);
  const begin = Math.min(Math.max(from, first), last - width);
  state.range = [begin, begin + width];
  fillPlot();
}
function zoomAt(centre, factor) {
  const [from, to] = state.range;
  zoom(centre - (centre - from) * factor, centre + (to - centre) * factor);
}
function fillPlot() {
  const data = reduce(all, state.range);
  data.splice(-2, 0, data[data.length - 2]); // pending lies on a seam, or no colour could be told from it
  if (!hasLowest()) data[data.length - 1].fill(null);
  plot.batch(() => {
    plot.setData(data, false);
    plot.setScale("x", { min: state.range[0], max: state.range[1] });
    let top = 0;
    for (const row of [data[1], data[data.length - 4], data[data.length - 2]]) for (const one of row) if (one > top) top = one;
    plot.setScale("y", { min: 0, max: (top || 1) * 1.08 });
  });
}
const hasLowest = () => Boolean(all.lowest) || reduced;
const unitOf = top => [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]].find(([unit]) => top >= unit) || [1, " B"];
function byteSplits(u, axis, min, max) {
  const [unit] = unitOf(max), rough = max / unit / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(one => one * power >= rough) * power;
  return Array.from({ length: Math.floor(max / unit / step) + 1 }, (_, i) => i * step * unit);
}
function tickLabels(u, ticks) {
  const [unit, name] = unitOf(u.scales.y.max);
  return ticks.map(one => one ? +(one / unit).toFixed(3) + name : "0");
}
function drawMarks(u) {
  const { ctx, bbox } = u, d = state.device, scale = devicePixelRatio;
  const visible = time => time >= state.range[0] && time <= state.range[1];
  // ticks: only at the top and the bottom, so that what is drawn there can be seen.
  const line = (time, colour, dash, label, ticks) => {
    if (!visible(time)) return;
    const x = Math.round(u.valToPos(time, "x", true));
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = 1.5 * scale;
    ctx.setLineDash(dash.map(one => one * scale));
    ctx.beginPath();
    const end = bbox.top + bbox.height, length = ticks ? 12 * scale : bbox.height;
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + length);
    ctx.moveTo(x, end);
    if (ticks) ctx.lineTo(x, end - length);
    ctx.stroke();
    ctx.setLineDash([]);
    if (!label) return;
    ctx.font = `600 ${12 * scale}px system-ui, sans-serif`;
    ctx.textAlign = x > bbox.left + bbox.width / 2 ? "right" : "left";
    ctx.fillText(label, x + (ctx.textAlign === "right" ? -4 : 4) * scale, bbox.top - 5 * scale);
  };
  ctx.save();
  ctx.fillStyle = ink("ink");
  let free = -1; // no two marks on one place
  d.heldTime.forEach(time => {
    const x = Math.round(u.valToPos(time, "x", true));
    if (!visible(time) || x < free) return;
    free = x + 5 * scale;
    ctx.beginPath();
    ctx.moveTo(x - 5 * scale, bbox.top + 1);
    ctx.lineTo(x + 5 * scale, bbox.top + 1);
    ctx.lineTo(x, bbox.top + 9 * scale);
    ctx.fill();
  });
  if (facts.has_stacks) for (const moment of [state.from, state.to]) line(d.moments[moment], ink("faint"), [2, 2], "", true);
  line(d.moments[state.moment], ink("accent"), [], "", true);
  d.oomTime.forEach((time, i) => line(time, ink("alarm"), [6, 3], i === d.oomTime.length - 1 ? "out of memory" : ""));
  ctx.restore();
}
function chartHeight() {
  return Math.max(240, Math.min(440, innerHeight * 0.5));
}
function makePlot() {
  all = series();
  if (plot) plot.destroy();
  const names = groupNames(), present = presentGroups(), stepped = uPlot.paths.stepped({ align: 1 });
  const stroke = (label, colour, dash, width) => ({ label, stroke: colour, dash, width, points: { show: false }, paths: stepped });
  const areas = names.map((label, i) => ({
    // A line of its own, for a spike may be narrower than a pixel.
    label, fill: groupColour(i), stroke: groupColour(i), width: 1, points: { show: false }, paths: stepped, show: present.includes(i),
  })).reverse();
  const axis = { stroke: ink("faint"), grid: { stroke: ink("rule"), width: 1 }, ticks: { stroke: ink("rule"), width: 1 }, font: "12px system-ui, sans-serif" };
  plot = new uPlot({
    width: $("chart").clientWidth, height: chartHeight(), padding: [22, 12, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false }, y: false, bind: { dblclick: () => () => { zoom(...whole()); choose(beforeClick); } } },
    scales: { x: { time: false, auto: false }, y: { auto: false } },
    axes: [
      { ...axis, space: 80, values: (u, ticks) => ticks.map(one => facts.clock ? +one.toFixed(9) + " s" : count(one)) },
      { ...axis, size: 74, splits: byteSplits, values: tickLabels },
    ],
    series: [{}, ...areas,
      stroke("reserved", ink("ink"), [], 2),
      { ...stroke("seam", ink("paper"), [], 6), show: has(all.waiting) },
      { ...stroke("pending", PENDING, [7, 4], 3), show: has(all.waiting) },
      stroke("lowest live", ink("faint"), [], 1)],
    hooks: { draw: [drawMarks], setCursor: [u => legend(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)], setSelect: [select] },
  }, [[], ...Array(names.length + 4).fill([])], $("chart"));
  touch(plot.over);
  fillPlot();
  legend(null);
}
// Arrows go from moment to moment, with Shift by ten; + and - zoom about it; 0 is all.
function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own
  const [from, to] = state.range, { moments } = state.device, factor = { "+": 0.5, "-": 2 }[event.key];
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) choose(Math.min(Math.max(state.moment + by * (event.shiftKey ? 10 : 1), 0), moments.length - 1));
  else if (event.key === "0") zoom(...whole());
  else if (!factor) return;
  event.preventDefault();
  const at = moments[state.moment];
  if (factor) zoomAt(at, factor);
  else if (by && (at < from || at > to)) zoom(at - (to - from) / 2, at + (to - from) / 2);
}
function select(u) {
  if (u.select.width < 4) return;
  const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  zoom(from, to);
}
// Wheel, panning, two fingers, and clicks that are no drags.
function touch(over) {
  const fingers = new Map();
  let start = null, moved = false;
  const timeAt = x => plot.posToVal(x - over.getBoundingClientRect().left, "x");
  over.addEventListener("wheel", event => {
    const [from, to] = state.range, [first, last] = whole(), sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // Nothing more to see: the page scrolls.
    if (!sideways && !event.ctrlKey && event.deltaY > 0 && to - from >= last - first) return;
    event.preventDefault();
    if (sideways) {
      const by = (to - from) * event.deltaX / over.clientWidth;
      zoom(from + by, to + by);
    } else zoomAt(timeAt(event.clientX), Math.exp(event.deltaY * 0.002));
  }, { passive: false });
  const panning = event => event.shiftKey || event.pointerType === "touch";
  over.addEventListener("mousedown", event => {
    if (event.detail < 2) beforeClick = state.moment; // not at the second press of a double click
    if (event.shiftKey) event.stopImmediatePropagation();
  }, true);
  over.addEventListener("pointerdown", event => {
    fingers.set(event.pointerId, event.clientX);
    if (fingers.size === 1) moved = false;
    start = { x: event.clientX, range: state.range };
    if (panning(event)) over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", event => {
    if (!fingers.has(event.pointerId)) return;
    const before = [...fingers.values()];
    fingers.set(event.pointerId, event.clientX);
    if (Math.abs(event.clientX - start.x) > 4) moved = true;
    const [from, to] = state.range;
    if (fingers.size === 2) {
      const now = [...fingers.values()], gap = values => Math.max(Math.abs(values[0] - values[1]), 20);
      const mid = values => (values[0] + values[1]) / 2;
      zoomAt(timeAt(mid(before)), gap(before) / gap(now));
      const [begin, end] = state.range, by = (mid(before) - mid(now)) / over.clientWidth * (end - begin);
      zoom(begin + by, end + by);
      moved = true;
    } else if (panning(event) && moved) {
      const by = (before[0] - event.clientX) / over.clientWidth * (to - from);
      zoom(from + by, to + by);
    }
  });
  for (const name of ["pointerup", "pointercancel"]) over.addEventListener(name, event => fingers.delete(event.pointerId));
  over.addEventListener("click", event => {
    if (!moved) choose(nearest(state.device.moments, timeAt(event.clientX)));
  });
}
// `time`: below the mouse, where the picture is read out; null: of the moment that is chosen.
function legend(time) {
  const d = state.device, point = time === null ? -1 : Math.max(lowerBound(plot.data[0], time + 1e-12) - 1, 0);
  const at = point < 0 ? nearest(d.steps, d.moments[state.moment]) : tops[point];
  const drawn = back => point < 0 ? null : plot.data[plot.data.length - back][point]; // from the last series
  const span = state.range[1] - state.range[0], box = $("legend");
  box.replaceChildren();
  make("h3", `at ${seconds(d.steps[at], span)}: ${bytes(all.live[at])} live`, box);
  const entry = (name, value, colour, kind) => {
    const one = make("div", null, box, "entry");
    swatch(one, colour, kind);
    make("span", short(name), one, "name").title = name;
    make("span", bytes(value), one, "number");
  };
  const mark = (sign, name, colour) => {
    const one = make("div", null, box, "entry");
    make("span", sign, one).style.color = colour;
    make("span", name, one, "name");
  };
  for (const g of presentGroups()) entry(groupNames()[g], all.stack[g][at], groupColour(g));
  entry("reserved from the device", drawn(4) ?? all.reserved[at], ink("ink"), "stroke");
  if (has(all.waiting)) entry("pending: freed, waiting for " + (facts.snapshot ? "other streams" : "marked uses"), drawn(2) ?? all.waiting[at], PENDING, "stroke dashed");
  if (all.lowest) entry("lowest live nearby", drawn(1) ?? all.lowest[at], ink("faint"), "stroke");
  else if (reduced) mark("─", "lowest live nearby", ink("faint"));
  mark("│", "the moment that is explained below", ink("accent"));
  if (facts.has_stacks) mark("┊", "compared under “Which lines grew”", ink("faint"));
  if (d.held_count) mark("▼", "the host was held back", ink("ink"));
}
function savePng() {
  const scale = devicePixelRatio, names = presentGroups().map(g => [short(groupNames()[g]), groupColour(g)]), from = plot.ctx.canvas, line = 20 * scale;
  const canvas = document.createElement("canvas");
  canvas.width = from.width;
  canvas.height = from.height + line * (names.length + 4);
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = ink("paper");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.font = `${13 * scale}px system-ui, sans-serif`;
  ctx.fillStyle = ink("ink");
  ctx.fillText(`${FILE}, device ${state.device.device}`, 10 * scale, line * 0.8);
  ctx.drawImage(from, 0, line);
  const entries = [...names, ["reserved (line)", ink("ink")], ...(has(all.waiting) ? [["pending (dashed)", PENDING]] : [])];
  entries.forEach(([name, colour], i) => {
    const y = from.height + line * (i + 1.6);
    ctx.fillStyle = colour;
    ctx.fillRect(14 * scale, y, 14 * scale, 11 * scale);
    ctx.fillStyle = ink("ink");
    ctx.fillText(name, 36 * scale, y + 10 * scale);
  });
  canvas.toBlob(blob => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${FILE}${facts.devices.length > 1 ? `-device${state.device.device}` : ""}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

// ---- the state at a moment -------------------------------------------------------------

// The spans that are there at a moment, under the filters: their indices.
function there(of, moment) {
  const out = [];
  for (let i = 0; i < of.length && of.begin[i] <= moment; i++) if (of.end[i] > moment && shown(of.owner[i])) out.push(i);
  return out;
}
function total(of, indices) {
  let all = 0;
  for (const i of indices) all += of.size[i];
  return all;
}
// Bytes and blocks by line, and by place within it: the largest first.
function byLine(moment) {
  const { blocks } = state.device, lines = new Map();
  for (const i of there(blocks, moment)) {
    const place = blocks.place[i], number = facts.line[place];
    let line = lines.get(number);
    if (!line) lines.set(number, line = { line: number, bytes: 0, count: 0, places: new Map() });
    line.bytes += blocks.size[i];
    line.count++;
    const one = line.places.get(place) || { place, bytes: 0, count: 0 };
    one.bytes += blocks.size[i];
    one.count++;
    line.places.set(place, one);
  }
  return [...lines.values()].sort((a, b) => b.bytes - a.bytes);
}
// Bytes by stream and pool, under the filters: the largest first.
function byOwner(moment) {
  const d = state.device, sums = of => {
    const found = d.owners.map(() => 0);
    for (const i of there(of, moment)) found[of.owner[i]] += of.size[i];
    return found;
  };
  const live = sums(d.blocks), waiting = sums(d.pending);
  return d.owners.map((one, i) => ({ ...one, live: live[i], waiting: waiting[i], reserved: d.momentReserved[i][moment] }))
    .filter((one, i) => shown(i) && (one.live || one.waiting || one.reserved)).sort((a, b) => b.live - a.live || b.reserved - a.reserved);
}
// heads: [text, class]. rows: functions that fill a row. The first 25, then all on demand.
function table(box, heads, rows) {
  box.replaceChildren();
  if (!rows.length) return void make("p", isFiltered() ? "Nothing. The filters go by the stream and pool that memory was allocated for." : "Nothing.", box, "hint");
  const one = make("table", null, box), head = make("tr", null, make("thead", null, one)), body = make("tbody", null, one);
  for (const [text, name] of heads) make("th", text, head, name);
  const add = some => some.forEach(fill => fill(make("tr", null, body)));
  add(rows.slice(0, 25));
  if (rows.length <= 25) return;
  const more = make("button", `Show all ${count(rows.length)}`, box);
  more.onclick = () => { more.remove(); add(rows.slice(25)); };
}
function lineCell(row, line, places) {
  const details = make("details", null, make("td", null, row)), summary = make("summary", short(facts.lines[line]), details);
  summary.title = facts.lines[line];
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    for (const one of places) {
      const text = facts.stacks[one.place].map(frame => facts.frames[frame]).join("\n");
      const share = `${bytes(one.bytes)} in ${count(one.count)} ${one.count === 1 ? "block" : "blocks"}, ${facts.categories[facts.category[one.place]]}:\n`;
      make("div", share + text, details, "stack");
    }
  });
}
function explain() {
  const d = state.device, at = state.moment, rows = byLine(at);
  const live = rows.reduce((sum, one) => sum + one.bytes, 0);
  const waiting = total(d.pending, there(d.pending, at));
  const reserved = d.momentReserved.reduce((sum, row, owner) => sum + (shown(owner) ? row[at] : 0), 0);
  $("owners").hidden = d.owners.length < 2;
  const pool = d.owners.every(one => one.pool === "default pool") ? "few" : "";
  table($("owners"), [["Stream"], ["Pool", pool], ["Live", "number"], ["Pending", "number"], ["Reserved", "number"]], byOwner(at).map(one => row => {
    make("td", one.stream, row);
    make("td", one.pool, row, pool);
    make("td", bytes(one.live), row, "number");
    make("td", bytes(one.waiting), row, "number");
    make("td", bytes(one.reserved), row, "number");
  }));
  $("when").textContent = `${nameOf(at)} ${seconds(d.moments[at])}`;
  $("state").textContent = `${bytes(live)} live (${count(live)} bytes), ${waiting ? bytes(waiting) + " pending, " : ""}${bytes(reserved)} reserved`
    + (isFiltered() ? `; only ${[state.stream, state.pool].filter(Boolean).join(", ")}` : "") + ".";
  table($("live"), [["Line of code"], ["Bytes", "number"], ["Share", "number"], ["Blocks", "number few"]], rows.map(one => row => {
    lineCell(row, one.line, [...one.places.values()].sort((a, b) => b.bytes - a.bytes));
    make("td", bytes(one.bytes), row, "number");
    const width = percent(0.9 * one.bytes / rows[0].bytes);
    make("td", percent(one.bytes / live), row, "number share").style.backgroundSize = `${width} 100%`;
    make("td", count(one.count), row, "number few");
  }));
}
function nameOf(moment) {
  const d = state.device, time = d.moments[moment];
  if (d.oomTime.includes(time)) return "when memory ran out,";
  if (moment === d.peak) return "at the peak,";
  return moment === d.moments.length - 1 ? "at the end," : "at";
}
function choose(moment) {
  state.moment = moment;
  for (const button of $("jumps").children) button.setAttribute("aria-pressed", Number(button.value) === moment);
  explain();
  drawMap();
  plot.redraw(false);
  legend(null);
}
function makeJumps() {
  const d = state.device, box = $("jumps");
  box.replaceChildren();
  const names = new Map(); // those of one moment share a button
  const jump = (name, moment) => names.set(moment, names.has(moment) ? `${names.get(moment)}, ${name.toLowerCase()}` : name);
  if (d.oomTime.length) jump("Out of memory", nearest(d.moments, d.oomTime[d.oomTime.length - 1]));
  jump("The peak", d.peak);
  jump("The end", d.moments.length - 1);
  for (const [moment, name] of names) {
    const button = make("button", name, box);
    button.type = "button";
    button.value = moment;
    button.onclick = () => choose(moment);
  }
}

// ---- the map -------------------------------------------------------------------------------

let parts = [], layout = null;

// The parts of all segments in the order of their addresses: {segment, address, size, kind, span}.
function findParts(moment) {
  const d = state.device, segments = [];
  const order = (of, indices) => indices.sort((a, b) => of.address[a] - of.address[b]);
  for (const i of order(d.pieces, there(d.pieces, moment))) {
    const last = segments[segments.length - 1], { address, size, owner } = d.pieces;
    if (last && last.end === address[i] && last.owner === owner[i]) last.end += size[i];
    else segments.push({ begin: address[i], end: address[i] + size[i], owner: owner[i] });
  }
  // Filters choose segments here: all that is in them is shown.
  const blocks = [], add = (of, kind) => {
    for (let i = 0; i < of.length && of.begin[i] <= moment; i++) if (of.end[i] > moment) {
      blocks.push({ address: of.address[i], size: Math.ceil(of.size[i] / PAGE) * PAGE, kind, span: i });
    }
  };
  add(d.blocks, "live");
  add(d.pending, "pending");
  blocks.sort((a, b) => a.address - b.address);
  const found = [];
  let next = 0, placed = 0;
  for (const segment of segments) {
    while (next < blocks.length && blocks[next].address < segment.begin) next++;
    let at = segment.begin;
    for (; next < blocks.length && blocks[next].address < segment.end; next++, placed++) {
      const block = blocks[next];
      if (block.address > at) found.push({ segment, address: at, size: block.address - at, kind: "free" });
      found.push({ ...block, segment });
      at = Math.max(at, block.address + block.size);
    }
    if (at < segment.end) found.push({ segment, address: at, size: segment.end - at, kind: "free" });
  }
  const bytesOf = kind => found.reduce((sum, one) => sum + (one.kind === kind ? one.size : 0), 0);
  const gaps = found.filter(one => one.kind === "free"), free = bytesOf("free");
  const reserved = segments.reduce((sum, one) => sum + one.end - one.begin, 0), largest = gaps.reduce((most, one) => Math.max(most, one.size), 0);
  const live = bytesOf("live"), pending = bytesOf("pending");
  return {
    segments, found, outside: isFiltered() ? 0 : blocks.length - placed, reserved, pending, free, largest,
    text: `${bytes(live)} live, ${pending ? bytes(pending) + " pending, " : ""}`
      + (free ? `${bytes(free)} (${percent(free / reserved)}) free in ${count(gaps.length)} ${gaps.length === 1 ? "gap" : "gaps"}, the largest of ${bytes(largest)}` : "nothing free"),
  };
}
function drawMap() {
  const { segments, found, outside, reserved, text } = findParts(state.moment), canvas = $("map");
  parts = found;
  $("segments").textContent = !segments.length
    ? "No segment is known at this moment" + (facts.urgent ? ": the file was written in haste, and tells only of segments that came later." : ".")
    : `${count(segments.length)} ${segments.length === 1 ? "segment" : "segments"}, ${bytes(reserved)} in all: ${text}.`
      + (outside ? ` ${count(outside)} blocks are outside of the segments that are known.` : "");
  const width = canvas.clientWidth, scale = devicePixelRatio, height = 16, gap = 5;
  const rows = Math.max(1, Math.min(28, Math.ceil(segments.length / 3) + 12));
  // Segments follow one another, through the ends of rows; each begins two pixels after the last,
  // or less where they are many.
  const between = Math.min(2, width * rows / 4 / segments.length);
  const perPixel = reserved / Math.max(1, width * rows - between * segments.length);
  canvas.height = (segments.length ? rows * (height + gap) : 1) * scale;
  canvas.width = width * scale;
  canvas.style.height = canvas.height / scale + "px";
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  const colours = { free: ink("free"), pending: PENDING }, paper = ink("paper");
  layout = { width, height: height + gap, places: [] };
  let x = 0, segment = null;
  for (const part of parts) {
    if (part.segment !== segment) x += segment ? between : 0;
    segment = part.segment;
    const begin = x, end = x + part.size / perPixel;
    layout.places.push(begin);
    const inner = part.kind === "live" ? groupColour(groupOfPlace(state.device.blocks.place[part.span])) : colours[part.kind];
    for (let from = begin; from < end;) {
      const row = Math.floor(from / width + 1e-9), to = Math.min(end, (row + 1) * width), y = row * (height + gap);
      ctx.fillStyle = inner;
      ctx.fillRect(from - row * width, y, to - from, height);
      if (to - from > 3) {
        ctx.fillStyle = paper;
        ctx.fillRect(to - row * width - 0.5, y, 0.5, height);
      }
      if (to <= from) break;
      from = to;
    }
    x = end;
  }
  const key = $("mapkey");
  key.replaceChildren();
  const entry = (name, colour) => {
    const one = make("span", null, key);
    swatch(one, colour);
    make("span", name, one);
  };
  for (const g of presentGroups()) entry(short(groupNames()[g]), groupColour(g));
  if (state.device.pending.length) entry("pending", PENDING);
  entry("free", colours.free);
}
function point(event) {
  if (!layout || !parts.length) return;
  const box = $("map").getBoundingClientRect(), y = event.clientY - box.top;
  const x = Math.floor(y / layout.height) * layout.width + event.clientX - box.left;
  let at = lowerBound(layout.places, x);
  if (at >= parts.length || layout.places[at] > x) at--;
  const part = parts[at];
  if (!part) return;
  const { blocks, pending, owners } = state.device, owner = owners[part.segment.owner];
  const of = part.kind === "live" ? blocks : pending;
  $("pointed").textContent = (part.kind === "free" ? `${bytes(part.size)} free`
    : `${bytes(of.size[part.span])} ${part.kind}, ${short(facts.lines[facts.line[of.place[part.span]]])}`)
    + `, at 0x${part.address.toString(16)}, in a segment of ${bytes(part.segment.end - part.segment.begin)} (${owner.stream}, ${owner.pool})`;
}

// ---- growth, and the host ---------------------------------------------------------------------

function growth() {
  const before = new Map(byLine(state.from).map(one => [one.line, one])), rows = [];
  for (const now of byLine(state.to)) {
    const old = before.get(now.line);
    before.delete(now.line);
    rows.push({ line: now.line, places: now.places, from: old ? old.bytes : 0, to: now.bytes, more: now.count - (old ? old.count : 0) });
  }
  for (const old of before.values()) rows.push({ line: old.line, places: old.places, from: old.bytes, to: 0, more: -old.count });
  return rows.filter(one => one.to !== one.from).sort((a, b) => b.to - b.from - a.to + a.from);
}
function grow() {
  const d = state.device;
  $("between").textContent = `From ${seconds(d.moments[state.from])} to ${seconds(d.moments[state.to])}`;
  const sign = value => (value > 0 ? "+" : "");
  table($("grown"), [["Line of code"], ["From", "number few"], ["To", "number few"], ["Growth", "number"], ["Blocks", "number"]], growth().map(one => row => {
    lineCell(row, one.line, [...one.places.values()].sort((a, b) => b.bytes - a.bytes));
    make("td", bytes(one.from), row, "number few");
    make("td", bytes(one.to), row, "number few");
    make("td", sign(one.to - one.from) + bytes(one.to - one.from), row, "number");
    make("td", sign(one.more) + count(one.more), row, "number");
  }));
}
function thirds() {
  const { moments, momentLive } = state.device, first = moments[0], span = moments[moments.length - 1] - first;
  const highest = (from, to) => {
    let top = from;
    for (let i = from; i < to; i++) if (momentLive[i] > momentLive[top]) top = i;
    return top;
  };
  state.from = highest(0, Math.max(1, lowerBound(moments, first + span / 3)));
  state.to = highest(Math.min(moments.length - 1, lowerBound(moments, first + 2 * span / 3)), moments.length);
}
const heldInAll = d => `${count(d.held_count)} ${d.held_count === 1 ? "time" : "times"}, ${microseconds(d.held_total_us)} in all, between ${seconds(d.held_between[0])} and ${seconds(d.held_between[1])}`;
function waitedFor(d, i) {
  const [line, stream] = d.heldPending[i] && d.held_for[d.held_most[i]] || [];
  return line === undefined ? "" : short(facts.lines[line]) + (stream ? `, used on the ${stream}` : "");
}
function holding() {
  const d = state.device, rows = new Map(); // those for the same line, stream and size are one
  for (const i of [...d.heldTime.keys()].sort((a, b) => d.heldUs[b] - d.heldUs[a])) {
    const what = waitedFor(d, i), key = `${d.heldAsked[i]} ${what}`;
    if (!rows.has(key)) rows.set(key, { longest: i, what, count: 0, us: 0 });
    rows.get(key).count++;
    rows.get(key).us += d.heldUs[i];
  }
  $("held").textContent = d.held_count
    ? `${heldInAll(d)}. The host waited until other streams had passed their marked uses of freed memory, rather than ask the device for more. Waits of one size for the same line and stream are one row; most time first.`
      + (d.held_count > d.heldTime.length ? ` Only the longest ${count(d.heldTime.length)} waits are in the table.` : "")
    : "Never.";
  $("heldrows").replaceChildren();
  if (d.held_count) table($("heldrows"), [["Times", "number"], ["In all", "number"], ["Longest", "number"], ["It began", "number few"], ["Asked for", "number few"], ["Pending then", "number few"], ["Most of it"]], [...rows.values()].sort((a, b) => b.us - a.us).map(({ longest, what, count: times, us }) => row => {
    make("td", count(times), row, "number");
    make("td", microseconds(us), row, "number");
    make("td", microseconds(d.heldUs[longest]), row, "number");
    make("td", seconds(d.heldTime[longest] - d.heldUs[longest] / 1e6), row, "number few");
    make("td", bytes(d.heldAsked[longest]), row, "number few");
    make("td", bytes(d.heldPending[longest]), row, "number few");
    make("td", what, row);
  }));
}

function summary() {
  const d = state.device, box = $("short"), live = d.momentLive[d.peak], [top] = byLine(d.peak), [grew] = growth();
  const [owner] = byOwner(d.peak), end = findParts(d.moments.length - 1);
  const say = (name, text) => make("li", null, box).append(make("b", name), " " + text);
  box.replaceChildren();
  say("Peak:", `${bytes(live)} live at ${seconds(d.moments[d.peak])}` + (facts.has_stacks && top ? `, the largest part, ${bytes(top.bytes)} (${percent(top.bytes / live)}), from ${short(facts.lines[top.line])}.` : "."));
  if (d.owners.length > 1 && owner) say("Holds most then:", `${owner.stream}, ${owner.pool}, with ${bytes(owner.live)} live${owner.reserved ? ` and ${bytes(owner.reserved)} reserved` : ""}.`);
  if (facts.has_stacks) say("Grew most:", grew && grew.to > grew.from ? `${short(facts.lines[grew.line])}, by ${bytes(grew.to - grew.from)} from ${seconds(d.moments[state.from])} to ${seconds(d.moments[state.to])}. (The moments when most was live in the first third of the time and in the last are compared.)` : "no line.");
  if (d.held_count) {
    const longest = d.heldUs.indexOf(Math.max(...d.heldUs)), what = waitedFor(d, longest);
    say("The host was held back:", `${heldInAll(d)}, ${microseconds(d.heldUs[longest])} at most, while ${bytes(d.heldPending[longest])} were pending` + (what ? `, most of it from ${what}.` : "."));
  }
  const idle = findParts(d.idle);
  if (idle.free || idle.pending) say("Most reserved but not live:", `${bytes(idle.free)} free${idle.pending ? ` and ${bytes(idle.pending)} pending` : ""} at ${seconds(d.moments[d.idle])}.`);
  const pending = total(d.pending, there(d.pending, d.freed));
  if (pending) say("Most pending:", `${bytes(pending)} at ${seconds(d.moments[d.freed])}, freed while ${facts.snapshot ? "other streams" : "marked uses"} had not ended.`);
  if (end.reserved) say("At the end:", `${bytes(end.reserved)} reserved: ${end.text}.`);
}

// ---- the page -----------------------------------------------------------------------------------

function options(select, values, first) {
  select.replaceChildren();
  for (const value of values) make("option", value || first, select).value = value;
  select.parentElement.hidden = values.length < 3;
}
function useDevice(number) {
  state.device = decode(facts.devices[number]);
  state.stream = state.pool = "";
  for (const name of ["stream", "pool"]) {
    options($(name), ["", ...new Set(state.device.owners.map(one => one[name]))], "all");
    $(name).value = "";
  }
  state.range = whole();
  state.moment = state.device.peak;
  thirds();
  summary();
  makeJumps();
  refresh();
}
function refresh() {
  makePlot();
  choose(state.moment);
  grow();
  holding();
}
// Fills a note about memory that ran out.
function tellOom(d, i, note) {
  const time = d.oomTime[i], free = d.oomFree[i], told = i === d.oomTime.length - 1 && d.last_oom || {};
  const asked = told.requested || d.oomAsked[i], moment = nearest(d.moments, time), why = [];
  if (told.limit) why.push(`the process may have ${bytes(told.limit)}, of which ${bytes(told.reserved)} were reserved`);
  if (!told.limit || free < asked) why.push(`${bytes(free)} of the device were free`);
  const parts = !told.limit && d.moments[moment] === time && findParts(moment);
  if (parts.free) why.push(`${bytes(parts.free)} were free in segments, the largest piece ${bytes(parts.largest)}`);
  note.textContent = `Device ${d.device} ran out of memory at ${seconds(time)}${told.line ? ", at " + short(told.line) : ""}: ${bytes(asked)} were asked for; ${why.join(", and ")}.`;
  if (i < d.oomTime.length - 1) return;
  const file = /^\w[\w.+-]*$/.test(FILE) ? FILE : "FILE";
  note.append(" ", make("code", `python -m esper_alloc explain ${file}`), " says which change would have let it through.");
  if (!told.line) return;
  if (told.stack.length < 2 && told.line.startsWith("autograd (")) return void note.append(" Backward asked for it, in a thread of PyTorch's that runs no Python.");
  const details = make("details", null, note);
  make("summary", "The stack", details);
  make("div", told.stack.join("\n"), details, "stack");
}
function about() {
  $("file").textContent = FILE;
  const began = "began " + new Date(facts.begin * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC", info = Object.entries(facts.info).map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`);
  $("about").textContent = [...(facts.snapshot ? ["A snapshot of PyTorch's"] : [`Written: ${facts.why || "no reason given"}`, `process ${facts.pid}`]),
    ...(facts.clock ? [began, `${seconds(facts.end - facts.begin, 50)} long`] : ["without times"]), `${count(facts.events)} events`, ...info].join(" · ");
  const note = text => make("li", text, $("notes"));
  const categories = new Set(facts.category).size > 1;
  if (!categories) $("group").value = state.group = "line";
  $("group").parentElement.hidden = !facts.has_stacks || !categories;
  $("growing").hidden = $("live").hidden = !facts.has_stacks;
  $("holding").hidden = facts.snapshot;
  if (!facts.has_stacks) note("No Python stacks were recorded, so nothing is told by line of code." + (facts.snapshot ? " torch.cuda.memory._record_memory_history() records them, unless its context is None." : ""));
  if (facts.older && facts.snapshot) note("Of what was allocated before the first entry, the snapshot knows what was still live.");
  else if (facts.older) note("The recording holds the newest events only. Of what happened earlier, it knows what was still live: the timeline begins where it is complete.");
  if (facts.lost) note(`${count(facts.lost)} events could not be recorded.`);
  if (facts.urgent) note("The file tells of no segments at its end. The map shows only segments that came while it recorded, or went.");
  for (const d of facts.devices) {
    const device = decode(d);
    state.device = device;
    device.oomTime.forEach((_, i, all) => (i < 2 || i === all.length - 1) && tellOom(device, i, note("")));
    if (device.moments.length < device.steps.length) $("rules").append(make("p", `Device ${d.device}: the timeline has ${count(device.steps.length)} steps, each shown by its highest moment; what was live is known exactly at ${count(device.moments.length)} moments, and a click goes to the nearest.`));
  }
  if (categories) make("p", facts.rules[0], $("rules"));
  if (facts.has_stacks) make("p", facts.rules[1], $("rules"));
  make("p", facts.rules[2], $("rules"));
}
function useTheme(theme) {
  state.theme = document.documentElement.dataset.theme = theme;
  if (state.device) {
    makePlot();
    drawMap();
  }
}
async function main() {
  useTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (!("DecompressionStream" in window)) {
    make("li", "This browser is too old: the page needs Chrome 80, Firefox 113, Safari 16.4 or newer.", $("notes"));
    return;
  }
  await inflate();
  about();
  if (!facts.devices.length) {
    make("li", "Nothing was allocated while it recorded.", $("notes"));
    return;
  }
  facts.devices.forEach((one, i) => make("option", one.device, $("device")).value = i);
  $("device").onchange = event => useDevice(Number(event.target.value));
  for (const name of ["stream", "pool", "group"]) $(name).onchange = event => {
    state[name] = event.target.value;
    refresh();
  };
  const move = by => () => zoom(state.range[0] + by * (state.range[1] - state.range[0]), state.range[1] + by * (state.range[1] - state.range[0]));
  const middle = factor => () => zoomAt((state.range[0] + state.range[1]) / 2, factor);
  Object.assign($("in"), { onclick: middle(0.5) });
  Object.assign($("out"), { onclick: middle(2) });
  Object.assign($("left"), { onclick: move(-0.3) });
  Object.assign($("right"), { onclick: move(0.3) });
  $("all").onclick = () => zoom(...whole());
  $("png").onclick = savePng;
  $("theme").onclick = () => useTheme(state.theme === "dark" ? "light" : "dark");
  $("from").onclick = () => { state.from = state.moment; grow(); plot.redraw(false); };
  $("to").onclick = () => { state.to = state.moment; grow(); plot.redraw(false); };
  $("chart").addEventListener("keydown", press);
  $("map").addEventListener("pointermove", point);
  $("map").addEventListener("click", point);
  addEventListener("resize", () => {
    plot.setSize({ width: $("chart").clientWidth, height: chartHeight() });
    drawMap();
  });
  useDevice(0);
  if (state.group === "category" && facts.has_stacks && presentGroups().length < 2) {
    $("group").value = state.group = "line"; // one colour would say nothing
    refresh();
  }
  document.documentElement.dataset.ready = "true";
}
main();
