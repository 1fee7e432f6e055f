// The search of the page of a layout: progress, what was found, why not another spec, seconds over memory.

import {ask, byId, follow, make, place} from "./shared.js";

/** Make the search answer to its buttons; `question` is what the page asks now, and `use` takes what was found. */
export function searching(question, use) {
  const start = byId("search-start"), stop = byId("search-stop"), said = byId("search-said"), topology = byId("topology");
  let stopping, found, typed = false, line;

  topology.addEventListener("input", () => { typed = topology.value !== ""; });
  byId("search-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stopping) return;
    stopping = new AbortController();
    start.disabled = true;
    stop.disabled = false;
    byId("search-fault").replaceChildren();
    byId("search").dataset.searched = "";
    said.textContent = "Starting…";
    const given = {...question(), topology: topology.value};
    for (const name of ["meshes", "parts", "recomputed"]) given[name] = byId(name).value;
    const answer = await follow("search", given, stopping.signal, tell);
    stopping = undefined;
    start.disabled = false;
    stop.disabled = true;
    said.textContent = answer.stopped ? "Stopped." : answer.token ? "Searched." : "";
    if (answer.refused || answer.fault) byId("search-fault").replaceChildren(make("pre", {}, answer.fault?.message ?? answer.refused));
    byId("search").dataset.searched = answer.token ?? "";
  });
  stop.addEventListener("click", () => stopping?.abort());
  byId("use").addEventListener("click", () => use(found));
  byId("why-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (line) why(line, byId("why-spec").value);
  });

  function tell(note) {
    if (note.said) said.textContent = `Searching: ${note.said}…`;
    if (note.found) draw(note.found);
    if (note.lines) drawLines(note.lines, note.toml);
    if (note.frontier) drawFrontier(note.frontier);
  }

  function draw(given) {
    found = given;
    line = undefined;
    byId("found").hidden = false;
    byId("found-title").textContent = `${found.topology}, mesh ${found.where}`;
    byId("found-proof").textContent = `${found.proof[0].toUpperCase()}${found.proof.slice(1)}. Up to ${found.said_limit} may be used on each device.`;
    const row = (name, each) => make("tr", {}, make("th", {scope: "row"}, name), ...(each.reason
      ? [make("td", {colspan: "3"}, `is not compared: ${each.reason}`)]
      : [make("td", {class: "number strong", "data-label": "a step"}, each.said_seconds),
        make("td", {class: "number", "data-label": "memory"}, `${each.said_bytes}${each.fits === false ? ", too much" : ""}`),
        make("td", {"data-label": "on"}, each.where)]));
    byId("found-totals").tBodies[0].replaceChildren(row("found", found), row("shown, priced in the same space", found.shown));
    byId("use").disabled = false;
    byId("found-file").hidden = true;
    drawLines(Object.entries(found.lines).map(([key, spec]) => ({key, spec})));
    for (const id of ["why", "frontier", "point"]) byId(id).replaceChildren();
    byId("why-key").textContent = "Choose a line";
    byId("why-spec").value = "";
    byId("why-spec").disabled = byId("why-ask").disabled = true;
  }

  function drawLines(lines, toml) {
    const shown = found.shown.lines ?? {};
    byId("found-lines").tBodies[0].replaceChildren(...lines.map((each) => {
      const differs = found.shown.lines && shown[each.key] !== each.spec;
      const choose = () => chosen(each);
      const name = make("button", {type: "button", class: "key", onclick: choose}, each.key);
      const row = make("tr", {"data-line": each.key, class: differs ? "differs" : undefined},
        make("td", {}, name),
        make("td", {class: "notation-cell"}, each.spec),
        make("td", {class: "notation-cell", "data-label": "shown"}, differs ? shown[each.key] ?? "–" : found.shown.lines ? "the same" : "–"),
        make("td", {class: "steps"}, each.said ?? (each.with ? `with ${each.with}` : "")));
      row.addEventListener("click", (event) => { if (!name.contains(event.target)) choose(); });
      return row;
    }));
    if (toml === undefined) return;
    const file = byId("found-file");
    file.href = `data:application/toml;charset=utf-8,${encodeURIComponent(toml)}`;
    file.hidden = false;
  }

  /** Ask about a line: immediately for its next best spec, or else for a spec that is typed. */
  function chosen(each) {
    line = each.next?.key ?? each.key;
    byId("why-key").textContent = line;
    byId("why-spec").disabled = byId("why-ask").disabled = false;
    byId("why-spec").value = each.next?.spec ?? each.spec;
    if (each.next) why(line, each.next.spec);
    else byId("why").replaceChildren(make("p", {class: "note"}, "Type another spec of this line."));
  }

  async function why(key, spec) {
    const box = byId("why");
    box.replaceChildren(make("p", {class: "note"}, stopping ? "Asked as soon as the search is done…" : "Asking…"));
    const answer = await ask("why", {token: found.token, key, spec});
    if (line !== key) return;
    if (answer.refused || answer.fault) return box.replaceChildren(make("div", {class: "fault"}, make("pre", {}, answer.fault?.message ?? answer.refused)));
    const cells = (texts) => texts.map((text, at) => make("td", {class: "number", "data-label": ["found", "asked", "more"][at]}, text));
    const head = make("thead", {}, make("tr", {}, ...["Part of the cost", "Found", "Asked", "More"].map((text, at) => make("th", {scope: "col", class: at ? "number" : ""}, text))));
    const rows = [...answer.terms.map((each) => make("tr", {}, make("th", {scope: "row"}, each.name), ...cells(each.said))),
      make("tr", {}, make("th", {scope: "row"}, "memory"), ...cells(answer.held.said))];
    const over = answer.over ? [make("p", {class: "note"}, `It needs at least ${answer.said_over} more memory than fits; these seconds ignore the limit.`)] : [];
    const lines = answer.lines.map(([name, ours, theirs]) => make("li", {}, make("code", {}, `${name}: ${ours || "as the weight"} → ${theirs || "as the weight"}`)));
    box.replaceChildren(make("h3", {}, answer.title), ...over, make("table", {}, head, make("tbody", {}, ...rows)),
      ...(lines.length ? [make("p", {class: "note"}, "These lines would change too:"), make("ul", {class: "changes"}, ...lines)] : []));
  }

  function drawFrontier({figure}) {
    const box = byId("frontier");
    place(box, figure, 1.4);
    box.querySelector("svg").setAttribute("role", "group");
    for (const point of box.querySelectorAll(".point")) {
      const text = point.querySelector("title").textContent;
      point.setAttribute("tabindex", "0");
      point.setAttribute("role", "img");
      point.setAttribute("aria-label", text);
      for (const kind of ["pointerenter", "focus"]) point.addEventListener(kind, () => { byId("point").textContent = text; });
      for (const kind of ["pointerleave", "blur"]) point.addEventListener(kind, () => { byId("point").textContent = ""; });
    }
  }

  return {
    /** Offer the slice of the page's mesh, unless a different one has been typed. */
    offer(slice) {
      if (!typed) topology.value = slice;
    },
  };
}
