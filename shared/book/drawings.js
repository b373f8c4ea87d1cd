// Draws what moves: tiles that travel from rank to rank and add up, work along time, cards in nodes.
// At rest a picture is whole; motion only shows how it came about. Places, lengths and bytes are
// the page's.

const WIDE = 420; // of a drawing, in its own units: it grows and shrinks with the page
const NAMESPACE = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
const AXIS = 64; // where a drawing's time begins, behind the names of its lanes

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const rect = (x, y, width, height, more) => svg("rect", { x, y, width, height, ...more });
const note = (x, y, text, more) => svg("text", { x, y, ...more }, text);
const at = (x, y, ...children) => svg("g", { transform: `translate(${x} ${y})` }, ...children);
const named = (part, ...children) => svg("g", { "data-part": part }, svg("title", {}, part), ...children);
const canvas = (high, name, ...children) =>
  svg(
    "svg",
    { viewBox: `0 0 ${WIDE} ${high}`, class: "explorable-drawing", role: "group", "aria-label": name },
    ...children,
  );

// Motion that ends at rest; what flies is then gone, at once where the reader's system asks for less.
function move(element, frames) {
  const gone = () => element.classList.contains("explorable-flies") && element.remove();
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return gone();
  element.animate(frames, { duration: 650, easing: "ease-in-out" }).onfinish = gone;
}

// Everything that a state draws at a step; one step on from what was there, it moves. The table of
// the same cells stays for who hears the page.
const last = new WeakMap(); // by the stage
function drawings(stage, data, state, step, tables, twin) {
  const [was, place] = last.get(stage) ?? [];
  const before = was === state && place === step - 1 ? place : undefined;
  last.set(stage, [state, step]);
  const found = [];
  if (state.grid) found.push(schedule(stage, state, step, before));
  else if (state.groups) found.push(nodes(data, state));
  else if (state.places) found.push(board(data, state, step, before));
  if (state.lanes) found.push(lanes(data, state, step, before, twin));
  if (state.fills) found.push(fills(state, step, before, twin));
  if (!found.length) return [];
  tables.forEach((table) => table.classList.add("explorable-unseen"));
  const part = make("p", { class: "explorable-part" }, state.legend ?? ""); // what is pointed at
  const box = make("div", {}, ...found.map(([picture]) => picture), part);
  for (const event of ["pointerover", "focusin"]) {
    box.addEventListener(event, ({ target }) => {
      part.textContent = target.closest("[data-part]")?.dataset.part ?? state.legend ?? "";
    });
  }
  if (before !== undefined) queueMicrotask(() => found.forEach(([, begin]) => begin()));
  return [box];
}
