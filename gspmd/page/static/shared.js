// What both pages need: questions to the server, fields with carets, and small helpers.

export const byId = (id) => document.getElementById(id);

/** Make an element: make("a", {href: "/"}, "text", child). Texts are never read as HTML. */
export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Ask the server; an answer that is no JSON, or none at all, is a refusal too. */
export async function ask(task, given, signal) {
  try {
    const response = await fetch(`/api/${task}`, {
      method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(given), signal,
    });
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return {refused: "gspmd page does not answer; it may have been ended in its terminal."};
  }
}

/** Ask for an answer that comes part by part: each note goes to a function, and the last part is returned. */
export async function follow(task, given, signal, tell) {
  try {
    const response = await fetch(`/api/${task}`, {
      method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(given), signal,
    });
    if (!response.ok) return await response.json();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const {value, done} = await reader.read();
      if (done) return {refused: "the connection ended before the whole answer had arrived."};
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (const note of lines.map((line) => JSON.parse(line))) {
        if (note.answer) return note.answer;
        tell(note);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") return {stopped: true};
    return {refused: "gspmd page does not answer; it may have been ended in its terminal."};
  }
}

/** Ask for the latest question only: while one is under way, later ones replace one another. */
export class Latest {
  constructor(task, show) {
    this.task = task;
    this.show = show;
    this.asking = false;
    this.next = undefined;
  }

  async ask(given, since = performance.now()) {
    this.next = {given, since};
    if (this.asking) return;
    this.asking = true;
    while (this.next) {
      const {given, since} = this.next;
      this.next = undefined;
      const answer = await ask(this.task, given);
      if (!this.next) this.show(answer, given, since);
    }
    this.asking = false;
  }
}

/** Return a text as pieces for `make` in which no line ends inside "->", "--mesh" or "all-reduce". */
export function unbroken(text) {
  return text.split(/(\S*-\S*)/).map((piece, at) => at % 2 ? make("span", {class: "unbroken"}, piece) : piece);
}

/** A figure of the server as an element. It is parsed as XML, which runs nothing. */
export function figure(svg) {
  const parsed = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  return document.importNode(parsed, true);
}

/** Put a figure into its box, as wide as the box: larger by up to a factor, or somewhat smaller; else it scrolls. */
export function place(box, svg, most = 1) {
  const left = box.scrollLeft, drawn = figure(svg);
  const wide = Number(drawn.getAttribute("width")), high = Number(drawn.getAttribute("height"));
  const fits = box.clientWidth / wide, scale = fits < 0.7 ? 1 : Math.min(most, fits);
  drawn.setAttribute("width", wide * scale);
  drawn.setAttribute("height", high * scale);
  box.replaceChildren(drawn);
  box.scrollLeft = left;
  const fade = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  box.onscroll = fade;
  fade();
}

/** Make a field of notation: one line, which wraps, with marks behind it. */
export function notation(area, changed) {
  const marks = area.parentElement.querySelector(".marks");
  const reset = () => { marks.textContent = `${area.value}\u200b`; };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter") event.preventDefault();
  });
  area.addEventListener("input", (event) => {
    if (/[\r\n]/.test(area.value)) area.value = area.value.replace(/\s*[\r\n]+\s*/g, " ");
    unmark(area);
    changed(event);
  });
  reset();
}

/** Take the marks of a field away, and make room for its text. */
export function unmark(area) {
  area.removeAttribute("aria-invalid");
  area.parentElement.querySelector(".marks").textContent = `${area.value}\u200b`;
}

/** Put a caret under every character of some spans of a field. */
export function mark(area, spans) {
  const text = area.value, marked = new Set();
  for (const [start, end] of spans) {
    for (let at = start; at < Math.max(end, start + 1); at++) marked.add(at);
  }
  const box = area.parentElement.querySelector(".marks");
  box.replaceChildren();
  for (let at = 0; at <= text.length; at++) {
    const letter = text[at] ?? "\u00a0";
    box.append(marked.has(at) ? make("span", {class: "at"}, letter) : letter);
  }
  area.setAttribute("aria-invalid", "true");
}

/** Show the faults of an answer: carets in their fields, and the message once, for eyes and screen readers. */
export function showFaults(box, fault, areas) {
  const spans = new Map();
  for (const each of fault.faults) {
    const area = areas[each.field];
    if (area && area.value === each.text) spans.set(area, [...(spans.get(area) ?? []), [each.start, each.end]]);
  }
  for (const [area, marks] of spans) mark(area, marks);
  const pre = make("pre", {}, fault.message);
  if (box.textContent !== fault.message) box.replaceChildren(pre);
}

/** Copy a text, and say so. */
export function copying(button, text, said) {
  button.addEventListener("click", async () => {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
      said.textContent = "Copied.";
    } catch {
      button.textContent = "Cannot copy";
      said.textContent = "The browser does not allow copying.";
    }
    setTimeout(() => { button.textContent = before; said.textContent = ""; }, 1600);
  });
}
