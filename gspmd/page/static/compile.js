// The compilation of the page of a layout: progress, the ledger beside the plan, and a timeline that zooms.

import {byId, follow, make, place} from "./shared.js";

/** Make the compilation answer to its buttons; `question` is what the page asks now. */
export function compiling(question) {
  const start = byId("compile-start"), stop = byId("compile-stop"), said = byId("compile-said");
  let stopping, fault = "";

  start.addEventListener("click", async () => {
    stopping = new AbortController();
    start.disabled = true;
    stop.disabled = false;
    byId("compile-fault").replaceChildren();
    byId("compile").dataset.compiled = "";
    said.textContent = "Starting…";
    const given = {...question(), topology: byId("topology").value};
    const answer = await follow("compile", given, stopping.signal, (note) => { if (note.said) said.textContent = `${note.said}…`; });
    stopping = undefined;
    start.disabled = fault !== "";
    stop.disabled = true;
    said.textContent = answer.stopped ? "Stopped." : answer.figures ? `Compiled for ${answer.topology}.` : "";
    if (answer.refused || answer.fault) byId("compile-fault").replaceChildren(make("pre", {}, answer.fault?.message ?? answer.refused));
    else if (answer.figures) draw(answer);
    byId("compile").dataset.compiled = answer.topology ?? "";
  });
  stop.addEventListener("click", () => stopping?.abort());
  const zoom = zooming(byId("timeline"));
  byId("zoom-in").addEventListener("click", () => zoom.by(0.5));
  byId("zoom-out").addEventListener("click", () => zoom.by(2));
  byId("zoom-all").addEventListener("click", () => zoom.all());

  function draw(answer) {
    byId("compiled").hidden = false;
    byId("compile-summary").tBodies[0].replaceChildren(...answer.summary.map(([name, text]) => make("tr", {}, make("th", {scope: "row"}, name), make("td", {}, text))));
    const {comparison, timeline} = answer;
    byId("comparison").replaceChildren(...(comparison ? [sheet(comparison.totals), ...(comparison.steps ? [sheet(comparison.steps)] : [])] : [make("div", {class: "fault"}, make("pre", {}, answer.reason))]));
    byId("timeline").replaceChildren();
    if (timeline) {
      place(byId("timeline"), timeline.figure, 1.2);
      zoom.all();
    }
    byId("timeline-table").replaceChildren(...(timeline ? [sheet(timeline.table)] : []));
    byId("compile-notes").replaceChildren(...answer.warnings.map((text) => make("li", {}, `warning: ${text}`)), ...answer.notes.map((text) => make("li", {}, text)));
  }

  return {
    /** Offer to compile, or say why that is not possible. */
    offer(reason) {
      fault = reason;
      start.disabled = stopping !== undefined || fault !== "";
      if (!stopping && fault) said.textContent = fault;
      else if (!stopping && !said.textContent.startsWith("Compiled")) said.textContent = "";
    },
  };
}

/** A table of gspmd as an element. */
function sheet({title, columns, rows}) {
  const head = make("thead", {}, make("tr", {}, ...columns.map((each) => make("th", {scope: "col", class: each.number ? "number" : ""}, each.name))));
  const body = rows.map(({cells, total}) => make("tr", total ? {class: "total"} : {}, ...cells.map((text, at) =>
    make("td", {class: columns[at].number ? "number" : "", "data-label": columns[at].name}, text))));
  return make("div", {class: "sheet"}, make("h3", {}, title), make("table", {}, head, make("tbody", {}, ...body)));
}

/** Let the drawing in a box be enlarged within the box, up to 64 times. */
export function zooming(box) {
  const whole = () => box.querySelector("svg")?.dataset.whole?.split(" ").map(Number);
  const seen = () => box.querySelector("svg").getAttribute("viewBox").split(" ").map(Number);

  function show(left, top, wide, high) {
    const [x, y, w, h] = whole();
    const fitted = [Math.min(Math.max(left, x), x + w - wide), Math.min(Math.max(top, y), y + h - high), wide, high];
    box.querySelector("svg").setAttribute("viewBox", fitted.map((each) => Number(each.toFixed(3))).join(" "));
  }

  /** Show a part that is larger by a factor, around a place in the drawing from 0 to 1. */
  function by(factor, across = 0.5, down = 0.5) {
    if (!whole()) return;
    const [left, top, wide, high] = seen(), most = whole()[2];
    const scale = Math.min(Math.max(wide * factor, most / 64), most) / wide;
    show(left + across * wide * (1 - scale), top + down * high * (1 - scale), wide * scale, high * scale);
  }

  function move(across, down) {
    const [left, top, wide, high] = seen();
    show(left + across * wide, top + down * high, wide, high);
  }

  function all() {
    const svg = box.querySelector("svg");
    if (!svg) return;
    svg.dataset.whole ??= svg.getAttribute("viewBox");
    svg.setAttribute("viewBox", svg.dataset.whole);
  }

  box.addEventListener("wheel", (event) => {
    if (!whole() || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    const place = box.querySelector("svg").getBoundingClientRect();
    by(event.deltaY < 0 ? 0.8 : 1.25, (event.clientX - place.left) / place.width, (event.clientY - place.top) / place.height);
  }, {passive: false});
  box.addEventListener("keydown", (event) => {
    if (!whole() || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = {"+": () => by(0.5), "=": () => by(0.5), "-": () => by(2), "0": all, ArrowLeft: () => move(-0.2, 0),
      ArrowRight: () => move(0.2, 0), ArrowUp: () => move(0, -0.2), ArrowDown: () => move(0, 0.2)};
    if (!steps[event.key]) return;
    event.preventDefault();
    steps[event.key]();
  });
  let from;
  box.addEventListener("pointerdown", (event) => { if (whole() && event.pointerType === "mouse") from = [event.clientX, event.clientY]; });
  box.addEventListener("pointermove", (event) => {
    if (!from) return;
    const place = box.querySelector("svg").getBoundingClientRect();
    move((from[0] - event.clientX) / place.width, (from[1] - event.clientY) / place.height);
    from = [event.clientX, event.clientY];
  });
  for (const kind of ["pointerup", "pointerleave"]) box.addEventListener(kind, () => { from = undefined; });
  return {by, all};
}
