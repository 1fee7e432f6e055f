// The page of a layout: a training step of a model, its costs by line, and what a change of a spec changes.

import {ask, byId, copying, Latest, make, mark, notation, place, unbroken, unmark} from "./shared.js";
import {compiling} from "./compile.js";
import {searching} from "./search.js";

const FIELDS = ["config", "layout", "mesh", "chip", "batch", "length", "microbatches", "remat", "lowering", "beside"];
const USUAL = {config: "llama-2-70b", layout: "megatron-1d", mesh: "", chip: "tpu-v5p", batch: "256", length: "2048", microbatches: "1", remat: "", lowering: "", beside: ""};
const TOTALS = [["seconds", "time"], ["hidden_seconds", "hidden in loops"], ["wire_bytes", "sent"], ["flops", "work"], ["held_bytes", "state and gradients"]];

const APART = ["moe", "cross", "encoder", "prefill", "decode", "cache", "pipeline"];

const fields = Object.fromEntries(FIELDS.map((name) => [name, byId(name)]));
const latest = new Latest("layout", show), other = new Latest("layout", showBeside), kept = new Latest("kept", showKept);
let changes = {}, before, shelf, base = {};
/** The lines of a layout that a search found, which is in the list of layouts while it is used. */
let own = "";
const FOUND = "found by search";

function values() {
  return Object.fromEntries(FIELDS.map((name) => [name, fields[name].value]));
}

function question() {
  const {beside, ...given} = values();
  if (own) given.layout = "";
  return {...given, own, lines: Object.entries(changes).map(([key, spec]) => `${key} = ${spec}`).join("\n")};
}

function address() {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values())) if (value !== USUAL[name]) query.set(name, value);
  for (const [key, spec] of Object.entries(changes)) query.append("set", `${key}=${spec}`);
  if (own) query.set("own", own);
  return `/layout?${query.toString().replaceAll("%2C", ",").replaceAll("%3D", "=")}`;
}

let waiting, resting;
function changed(how) {
  clearTimeout(waiting);
  clearTimeout(resting);
  waiting = setTimeout(() => {
    history[how](null, "", address());
    send();
  }, how === "pushState" ? 0 : 350);
}

function send() {
  byId("working").textContent = "Planning the training step…";
  latest.ask(question());
}

function fromAddress() {
  const query = new URLSearchParams(location.search);
  changes = Object.fromEntries(query.getAll("set").map((text) => [text.slice(0, text.indexOf("=")), text.slice(text.indexOf("=") + 1)]));
  const given = {...USUAL, ...Object.fromEntries(query)};
  own = given.own ?? "";
  if (own) given.layout = FOUND;
  given.mesh ||= shelf.layouts[given.layout] ?? "x=4";
  for (const name of FIELDS) {
    const field = fields[name];
    if (field.tagName === "SELECT" && ![...field.options].some((each) => each.value === given[name])) field.append(make("option", {}, given[name]));
    field.value = given[name];
  }
  before = undefined;
  send();
}

function show(answer, given, since) {
  byId("working").textContent = "";
  const box = byId("answer");
  for (const each of document.querySelectorAll("#lines [aria-invalid]")) unmark(each);
  for (const each of document.querySelectorAll("#lines .reason")) each.remove();
  if (answer.refused || answer.fault) {
    byId("fault").replaceChildren(make("pre", {}, answer.fault?.message ?? answer.refused));
    markLines(answer.fault?.faults ?? []);
    box.classList.add("stale");
    for (const asked of document.querySelectorAll("#kept .number, #all-kinds .number")) {
      if (asked.textContent === "…") asked.textContent = "not known";  // The change came before it was asked for.
    }
    return;
  }
  byId("fault").replaceChildren();
  box.classList.remove("stale");
  box.hidden = false;
  draw(answer);
  clearTimeout(resting);  // One process plans: the next change comes before the memory of this one.
  resting = setTimeout(() => kept.ask(given), 700);
  before = {...answer.totals, name: given.layout};
  search.offer(answer.slice);
  compiler.offer(answer.uncompiled);
  if (fields.beside.value) other.ask({...given, own: "", layout: fields.beside.value, mesh: shelf.layouts[fields.beside.value] && meshFor(fields.beside.value), lines: ""});
  document.title = `${given.config} in ${fields.layout.value} · gspmd`;
  box.dataset.answered = JSON.stringify(given);
  performance.measure("answer", {start: since, end: performance.now()});
}

/** Put carets into the lines that faults name, and the facts below: "[decode] ffn.hidden = B_qLF" has its section. */
function markLines(faults) {
  const spans = new Map();
  for (const {text, start, end, fact, remedy} of faults) {
    const [, section, name, spec = ""] = /^(?:\[(\w+)\] )?([\w.]+)(?: = (.*))?$/.exec(text) ?? [];
    const area = name && byId("lines").querySelector(`[data-key="${CSS.escape(section ? `${section}.${name}` : name)}"]`);
    if (!area || area.value.trim() !== spec) continue;
    const before = text.length - spec.length - area.value.indexOf(spec);
    const span = start < before ? [0, area.value.length] : [start - before, end - before];
    if (!spans.has(area)) area.closest(".line").append(make("span", {class: "reason"}, `${sentence(fact)} ${remedy}`));
    spans.set(area, [...(spans.get(area) ?? []), span]);
  }
  for (const [area, marks] of spans) {
    area.closest("details").open = true;
    mark(area, marks);
  }
}

const sentence = (fact) => fact.replace(/^[a-z]+ /, (word) => word[0].toUpperCase() + word.slice(1));

/** The typed mesh, if the other layout has its axes; otherwise a mesh of its own. */
function meshFor(layout) {
  const names = (text) => text.split(",").map((pair) => pair.split("=")[0].trim());
  const own = shelf.layouts[layout];
  return names(fields.mesh.value).every((name) => names(own).includes(name)) ? fields.mesh.value : own;
}

function draw(answer) {
  drawTotals(answer, before);
  byId("rows").tBodies[0].replaceChildren(...answer.rows.map((row) => {
    const lines = row.lines.length ? [make("div", {class: "reads"}, row.lines.join(", "))] : [];
    return make("tr", {},
      make("td", {class: "notation-cell"}, ...unbroken(row.equation), ...lines),
      make("td", {class: "number", "data-label": "time"}, row.said_seconds, share(row.seconds / answer.rows.reduce((sum, each) => sum + each.seconds, 0))),
      make("td", {class: "number", "data-label": "sent"}, row.said_wire_bytes),
      make("td", {class: "steps"}, ...unbroken(`${row.trips} × ${row.steps.join(" · ")}`)));
  }));
  byId("kinds").tBodies[0].replaceChildren(...answer.kinds.map((row) => make("tr", {},
    make("td", {}, row.name), make("td", {class: "number", "data-label": "time"}, row.said_seconds), make("td", {class: "number", "data-label": "sent"}, row.said_wire_bytes))));
  byId("memory").tBodies[0].replaceChildren(...answer.memory.map((row) => make("tr", {},
    make("th", {scope: "row"}, row.what), make("td", {class: "number"}, row.said_bytes, share(row.bytes / answer.capacity.bytes)))),
    make("tr", {id: "kept"}, make("th", {scope: "row"}, "activations that blocks keep"), make("td", {class: "number"}, "…")),
    make("tr", {id: "all-kinds", class: "total"}, make("th", {scope: "row"}, "all of these"), make("td", {class: "number"}, "…")),
    make("tr", {}, make("th", {scope: "row"}, "the chip has"), make("td", {class: "number"}, answer.capacity.said_bytes)));
  drawLines(answer.lines);
  place(byId("layout-figure"), answer.figure, 1.2);
  byId("command").replaceChildren(...unbroken(answer.command));
  byId("download").href = `data:application/toml;charset=utf-8,${encodeURIComponent(answer.toml)}`;
  byId("spoken").textContent = `${answer.totals.said_seconds}, ${answer.totals.said_wire_bytes} sent.`;
}

/** Add what the blocks keep for the backward pass to the memory of the layout that is shown, and the sum of all kinds. */
function showKept(answer, given) {
  const cell = document.querySelector("#kept .number"), sum = document.querySelector("#all-kinds .number");
  if (!cell || byId("answer").dataset.answered !== JSON.stringify(given)) return;
  const {kept, all, over, capacity} = answer;
  cell.replaceChildren(...(kept ? [kept.said_bytes, share(kept.bytes / capacity)] : [answer.reason ?? "not known"]));
  cell.classList.toggle("note", !kept);
  sum.replaceChildren(...(all ? [kept ? all.said_bytes : `at least ${all.said_bytes}`, share(all.bytes / capacity)] : ["not known"]),
    ...(over ? [make("div", {class: "excess"}, `${over} more than the chip has`)] : []));
}

/** A bar as wide as a share, below a number. */
function share(fraction) {
  const bar = make("span", {class: "share", "aria-hidden": "true"}, make("span"));
  bar.firstChild.style.width = `${Math.min(100, 100 * fraction)}%`;
  if (fraction > 1) bar.classList.add("over");
  return bar;
}

function drawTotals(answer, last) {
  const table = byId("totals"), beside = fields.beside.value;
  table.tHead.replaceChildren(make("tr", {}, make("td", {}), make("th", {scope: "col", class: "number"}, fields.layout.value),
    make("th", {scope: "col", class: "number"}, "against the version before"), ...(beside ? [make("th", {scope: "col", class: "number"}, beside)] : [])));
  table.tBodies[0].replaceChildren(...TOTALS.map(([key, name]) => make("tr", {"data-total": key},
    make("th", {scope: "row"}, name),
    make("td", {class: "number strong"}, answer.totals[`said_${key}`]),
    make("td", {class: `number difference${last ? "" : " none"}`, "data-label": "against the version before"}, difference(answer.totals[key], last?.[key])),
    ...(beside ? [make("td", {class: "number other", "data-label": beside}, "…")] : []))));
}

function difference(now, then) {
  if (then === undefined) return "–";
  if (now === then) return "as before";
  if (!then) return "new";
  const percent = 100 * (now / then - 1);
  return `${percent > 0 ? "+" : "−"}${Math.abs(percent) < 10 ? Math.abs(percent).toFixed(1) : Math.abs(percent).toFixed(0)}%`;
}

function showBeside(answer) {
  for (const [key] of TOTALS) {
    const cell = document.querySelector(`#totals [data-total="${key}"] .other`);
    if (cell) cell.textContent = answer.totals ? answer.totals[`said_${key}`] : "does not fit";
  }
  if (answer.fault) byId("working").textContent = `${fields.beside.value}: ${answer.fault.message.split("\n")[0]}`;
}

/** Draw the lines once for a layout: a field that is being typed in is not replaced. */
function drawLines(lines) {
  base = Object.fromEntries(lines.map((each) => [each.key, each.base]));
  const box = byId("lines"), keys = lines.map((each) => each.key).join(" ");
  if (box.dataset.keys !== keys) {
    box.dataset.keys = keys;
    const sections = Map.groupBy(lines.map((each) => each.key), (key) => key.split(".")[0]);
    box.replaceChildren(...[...sections].map(([name, keys]) => make("details", {open: !APART.includes(name)}, make("summary", {}, name),
      ...keys.map((key) => make("label", {class: "line"}, make("span", {}, key.slice(name.length + 1)),
        make("span", {class: "notation"}, make("span", {class: "marks", "aria-hidden": "true"}),
          make("textarea", {rows: "1", "data-key": key, "aria-label": key, "aria-describedby": "fault", spellcheck: "false", autocapitalize: "off", maxlength: "200"})))))));
    for (const area of box.querySelectorAll("textarea")) notation(area, typed);
  }
  for (const {key, spec} of lines) {
    const area = box.querySelector(`[data-key="${CSS.escape(key)}"]`);
    if (area !== document.activeElement) {
      area.value = spec;
      unmark(area);
    }
    area.closest(".line").classList.toggle("changed", spec !== base[key]);
    if (spec !== base[key]) area.closest("details").open = true;
  }
}

function typed(event) {
  const {value, dataset: {key}} = event.target;
  if (value.trim() === base[key]) delete changes[key];
  else changes[key] = value.trim();
  changed("replaceState");
}

/** Put a layout that was found into the editor: its lines, its mesh, and what it recomputes. */
function use(found) {
  own = Object.entries(found.lines).map(([key, spec]) => `${key} = ${spec}`).join("\n");
  changes = {};
  for (const [name, value] of [["mesh", found.mesh], ["microbatches", String(found.microbatches)], ["lowering", ""]]) fields[name].value = value;
  if (found.remat) fields.remat.value = found.remat;
  if (![...fields.layout.options].some((each) => each.value === FOUND)) fields.layout.append(make("option", {}, FOUND));
  fields.layout.value = FOUND;
  changed("pushState");
}

const search = searching(question, use), compiler = compiling(question);
shelf = await ask("shelf", {});
const options = {config: Object.keys(shelf.configs), layout: Object.keys(shelf.layouts), chip: shelf.chips, remat: ["", ...shelf.remats], lowering: ["", ...shelf.lowerings], beside: ["", ...Object.keys(shelf.layouts)]};
const empty = {remat: "the model's", lowering: "its own", beside: "nothing"};
for (const [name, names] of Object.entries(options)) {
  fields[name].replaceChildren(...names.map((value) => make("option", {value}, value || empty[name])));
  fields[name].addEventListener("change", () => {
    if (name === "layout" && fields.layout.value !== FOUND) {
      changes = {};
      own = "";
      fields.mesh.value = meshFor(fields.layout.value);
    }
    changed("pushState");
  });
}
for (const name of ["mesh", "batch", "length", "microbatches"]) fields[name].addEventListener("input", () => changed("replaceState"));
byId("question").addEventListener("submit", (event) => event.preventDefault());
byId("reset").addEventListener("click", () => { changes = {}; changed("pushState"); });
addEventListener("popstate", fromAddress);
copying(byId("copy-command"), () => byId("command").textContent, byId("copied"));
copying(byId("copy-link"), () => location.href, byId("copied"));
fromAddress();
