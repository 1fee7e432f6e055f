// Devices that light up: the block that one holds, wherever it is held, in every tensor of a drawing.

const PLACES = {before: "before", other: "and", after: "after"};

/** Make the devices of a drawing answer to pointer and keyboard, and say below it what one of them holds. */
export function lightUp(box, held) {
  const svg = box.querySelector("svg");
  if (!svg) return;
  svg.setAttribute("role", "group");
  const tensors = [...svg.querySelectorAll("[data-tensor]")].map((group) => ({
    group,
    devices: [...group.querySelectorAll("[data-device]")],
  }));
  let first = true;
  for (const {group, devices} of tensors) {
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", `${stepOf(group)}, ${PLACES[group.dataset.tensor]}: ${group.dataset.spec}`);
    for (const device of devices) {
      device.setAttribute("role", "img");
      device.setAttribute("aria-label", device.querySelector("title")?.textContent ?? "");
      device.setAttribute("tabindex", first ? "0" : "-1");
      first = false;
    }
  }
  const at = (event) => event.target.closest?.("[data-device]");
  svg.addEventListener("pointerover", (event) => { if (at(event)) light(svg, tensors, held, at(event)); });
  svg.addEventListener("focusin", (event) => { if (at(event)) light(svg, tensors, held, at(event)); });
  svg.addEventListener("keydown", (event) => { if (at(event)) move(event, svg, tensors, held, at(event)); });
  svg.addEventListener("pointerleave", () => {
    const focused = document.activeElement?.closest?.("[data-device]");
    if (focused && svg.contains(focused)) light(svg, tensors, held, focused);
    else dark(svg, held);
  });
  svg.addEventListener("focusout", (event) => {
    if (!svg.contains(event.relatedTarget)) dark(svg, held);
  });
}

function stepOf(group) {
  const step = group.closest("[data-step]");
  return step ? `step ${Number(step.dataset.step) + 1}, ${step.dataset.kind}` : "";
}

function blockOf(device) {
  const block = device.querySelector("[data-block]");
  return block ? `${block.dataset.block}/${block.dataset.summand ?? ""}` : "";
}

function light(svg, tensors, held, device) {
  const number = device.dataset.device;
  svg.classList.add("lit");
  const lines = [];
  for (const {group, devices} of tensors) {
    const own = devices.find((each) => each.dataset.device === number);
    const block = own && blockOf(own);
    let copies = 0;
    for (const each of devices) {
      const same = own !== undefined && blockOf(each) === block;
      copies += same;
      each.classList.toggle("same", same);
      each.classList.toggle("here", each === own);
    }
    if (own && group.contains(device)) {
      const [name, part] = split(own);
      const others = copies > 1 ? `; ${copies - 1} other${copies > 2 ? "s" : ""} drawn hold${copies > 2 ? "" : "s"} the same` : "";
      lines.push(document.createElement("b"), " holds ", document.createElement("code"), ` of ${group.dataset.spec}${others}`);
      lines[0].textContent = name;
      lines[2].textContent = part;
    }
  }
  held.replaceChildren(...lines);
}

/** "device 5 (x=0, y=1): B 0:4" in two parts. */
function split(device) {
  const text = device.querySelector("title")?.textContent ?? "";
  const at = text.indexOf("): ");
  return at < 0 ? [text, ""] : [text.slice(0, at + 1), text.slice(at + 3)];
}

function dark(svg, held) {
  svg.classList.remove("lit");
  for (const each of svg.querySelectorAll(".same, .here")) each.classList.remove("same", "here");
  held.replaceChildren();
}

/** Left and right go from device to device, up and down to the same device in the tensor above or below. */
function move(event, svg, tensors, held, device) {
  const row = tensors.findIndex(({group}) => group.contains(device)), column = tensors[row].devices.indexOf(device);
  const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity]};
  if (event.key === "Escape") return dark(svg, held);
  const step = steps[event.key];
  if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const {devices} = tensors[Math.min(Math.max(row + step[0], 0), tensors.length - 1)];
  const to = devices[Math.min(Math.max(column + step[1], 0), devices.length - 1)];
  for (const each of svg.querySelectorAll('[tabindex="0"]')) each.setAttribute("tabindex", "-1");
  to.setAttribute("tabindex", "0");
  to.focus();
}
