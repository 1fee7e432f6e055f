// The page of an equation: ask as you type, show the answer, keep the address up to date.

import {ask, byId, copying, Latest, make, notation, place, showFaults, unbroken, unmark} from "./shared.js";
import {lightUp} from "./mesh.js";

const FIELDS = ["equation", "sizes", "mesh", "chip", "dtype", "lowering", "via"];
const USUAL = {chip: "tpu-v4", dtype: "bfloat16", lowering: "auto", via: ""};
const PALM = "B=512,L=1,E=18432,F=73728,H=64,D=256", CUBE = "x=4,y=4,z=4";
const EXAMPLES = [
  ["weight-stationary 2D", {equation: "BLE_xyz, E_xF_yz -> BLF_yzx", sizes: PALM, mesh: CUBE}],
  ["gated feed-forward", {equation: "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", sizes: PALM, mesh: CUBE}],
  ["parallel block", {equation: "BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz", sizes: PALM, mesh: CUBE}],
  ["Megatron", {equation: "B_xLE, EF_yz -> B_xLF_yz", sizes: "B=64,L=2048,E=8192,F=28672", mesh: "x=4,y=4,z=2", chip: "tpu-v5p"}],
  ["weights gathered", {equation: "B_xyzLE, E_xF_yz -> B_xyzLF", sizes: "B=512,L=2048,E=18432,F=73728", mesh: CUBE}],
  ["a move", {equation: "BE_z -> B_zxE", sizes: "B=4096,E=4096", mesh: CUBE}],
];

const fields = Object.fromEntries(FIELDS.map((name) => [name, byId(name)]));
const areas = Object.fromEntries(FIELDS.filter((name) => fields[name].tagName === "TEXTAREA").map((name) => [name, fields[name]]));
const latest = new Latest("plan", show), compared = new Latest("compare", compare);

function question() {
  return Object.fromEntries(FIELDS.map((name) => [name, fields[name].value]));
}

function address(given) {
  const query = new URLSearchParams();
  for (const name of FIELDS) {
    if (given[name] !== (USUAL[name] ?? "")) query.set(name, given[name]);
  }
  // Commas, equals signs and slashes stay legible, as every browser leaves them.
  return `/?${query.toString().replaceAll("%2C", ",").replaceAll("%3D", "=").replaceAll("%3E", ">")}`;
}

let writing;
function typed(event) {
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", address(question())), 200);
  latest.ask(question(), event?.timeStamp);
}

/** A choice is an entry of the history; what is typed changes the latest one. */
function chosen(event) {
  clearTimeout(writing);
  history.pushState(null, "", address(question()));
  latest.ask(question(), event?.timeStamp);
}

function fill(given) {
  for (const name of FIELDS) {
    const value = given[name] ?? USUAL[name] ?? "";
    if (fields[name].tagName === "SELECT" && ![...fields[name].options].some((each) => each.value === value)) {
      fields[name].append(make("option", {}, value)); // The answer says that there is none of this name.
    }
    fields[name].value = value;
  }
  for (const area of Object.values(areas)) unmark(area);
}

function fromAddress() {
  const query = new URLSearchParams(location.search);
  fill(query.has("equation") ? Object.fromEntries(query) : EXAMPLES[0][1]);
  latest.ask(question());
}

function show(answer, given, since) {
  for (const area of Object.values(areas)) unmark(area);
  const faults = byId("fault"), box = byId("answer");
  if (answer.refused || answer.fault) {
    showFaults(faults, answer.fault ?? {message: answer.refused, faults: []}, areas);
    box.classList.add("stale");
    byId("spoken").textContent = "";
  } else {
    faults.replaceChildren();
    box.classList.remove("stale");
    box.hidden = false;
    draw(answer);
    compared.ask(given, since);
  }
  box.dataset.equation = given.equation;
  document.title = `${given.equation} · gspmd`;
  performance.measure("answer", {start: since, end: performance.now()});
}

function draw(answer) {
  const {plan, said, figures} = answer;
  byId("said-seconds").textContent = said.said_seconds;
  byId("said-bytes").textContent = said.said_bytes;
  byId("said-flops").textContent = said.said_flops;
  byId("said-held").textContent = said.said_held;
  byId("said-lowering").textContent = plan.lowering;
  const steps = plan.steps.filter((step) => step.kind !== "einsum").map((step) => `${step.kind} over ${step.axes.join(", ")}`);
  byId("spoken").textContent =
    `${said.said_seconds}, ${said.said_bytes} sent: ${steps.join("; ") || "nothing is sent"}.`;
  place(byId("plan-figure"), figures.plan, 1.15);
  place(byId("steps-figure"), figures.steps, 1.35);
  lightUp(byId("steps-figure"), byId("held"));
  place(byId("roofline-figure"), figures.roofline, 1.15);
  byId("command").replaceChildren(...unbroken(answer.command));
}

/** Show what stands beside the plan, unless there is another question by now. */
function compare(answer, given, since) {
  if (answer.refused || answer.fault || latest.asking && latest.next) return;
  place(byId("lowerings-figure"), answer.figure, 1.25);
  drawAlternatives(answer, given);
  byId("gradients").replaceChildren(...answer.gradients.map((each, number) => {
    const name = `operand ${number + 1}`;
    const box = make("div", {class: "drawing", tabindex: "0", role: "group", "aria-label": `gradient of ${name}`});
    place(box, each.figure);
    return make("div", {}, make("h3", {}, `${name}: ${each.said_seconds}, ${each.said_bytes} sent`), box);
  }));
  byId("answer").dataset.compared = given.equation;
  performance.measure("compared", {start: since, end: performance.now()});
}

function drawAlternatives(answer, given) {
  const rows = answer.alternatives.map((each) => {
    const name = each.pinnable ? each.via : `added as ${each.added}`;
    const cells = [
      make("td", {class: "notation-cell"}, name, ...(each.chosen ? [make("span", {class: "tag"}, given.via.trim() ? "pinned" : "chosen")] : [])),
      make("td", {class: "number", "data-label": "time"}, each.said_seconds),
      make("td", {class: "number", "data-label": "sent"}, each.said_bytes),
      make("td", {class: "steps"}, ...unbroken(each.steps.join(" · ") || "nothing to do")),
      make("td", {}, ...unbroken(each.why)),
      make("td", {}, ...pin(each, given)),
    ];
    return make("tr", each.chosen ? {class: "chosen", tabindex: "-1"} : {}, ...cells);
  });
  const body = byId("alternatives").tBodies[0], focused = body.contains(document.activeElement) && document.activeElement.dataset.via;
  body.replaceChildren(...rows);
  // The rows are new: the focus goes to the button of the same choice, or to the plan's row if no button is left there.
  if (focused) (body.querySelector(`[data-via="${CSS.escape(focused)}"]`) ?? body.querySelector(".chosen"))?.focus();
}

function pin(each, given) {
  if (!each.pinnable) return [];
  const pinned = given.via.trim() !== "" && each.chosen;
  if (each.chosen && !pinned) return [];
  const press = (event) => {
    fields.via.value = pinned ? "" : each.via;
    chosen(event);
  };
  const label = pinned ? "Search again instead of pinning" : `Pin ${each.via}`;
  return [make("button", {type: "button", "aria-label": label, "data-via": each.via, onclick: press}, pinned ? "Unpin" : "Pin")];
}

function examples() {
  const links = EXAMPLES.map(([name, given]) => make("a", {
    href: address({...USUAL, ...given}),
    onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      fill(given);
      chosen(event);
    },
  }, name));
  byId("examples").replaceChildren(make("span", {}, "Examples"), ...links);
}

const choices = await ask("choices", {});
for (const [name, values] of [["chip", choices.chips], ["dtype", choices.dtypes], ["lowering", choices.lowerings]]) {
  fields[name].replaceChildren(...(values ?? []).map((value) => make("option", {}, value)));
  fields[name].addEventListener("change", chosen);
}
for (const area of Object.values(areas)) notation(area, typed);
byId("question").addEventListener("submit", (event) => event.preventDefault());
addEventListener("popstate", fromAddress);
copying(byId("copy-command"), () => byId("command").textContent, byId("copied"));
copying(byId("copy-link"), () => location.href, byId("copied"));
examples();
fromAddress();
