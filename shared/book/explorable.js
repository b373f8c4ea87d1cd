// Shows a picture whose every state came with the page: nothing is computed here, only shown.
// Arrow keys step through time, anywhere on a page with one picture; `beside.js` opens the views.

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

function select(name, values, chosen, onChange) {
  const field = make("select", { "aria-label": say(name) });
  for (const value of values) field.append(make("option", { value }, say(value)));
  field.value = chosen;
  field.addEventListener("change", () => onChange(field.value));
  return make("label", {}, `${say(name)} `, field);
}

// A cell is its text, coloured by its first letter, or a place in the list of [text, colour].
function shown(data, state, cell) {
  if (cell === undefined) return ["", "transparent"];
  return typeof cell === "number" ? data.cells[cell] : [cell, state.colours[cell.slice(0, 1)]];
}

// A grid: one column of `grid` after the other, or one of `frames` after the other.
function grid(data, state, step) {
  const cells = state.frames ? state.frames[step] : state.grid.map((row) => row.slice(0, step + 1));
  const columns = state.frames ? Math.max(...cells.map((row) => row.length)) : state.grid[0].length;
  const table = make("table", { class: "explorable-grid" });
  if (state.columns) {
    const head = state.columns.map((name) => make("th", { scope: "col" }, name));
    table.append(make("tr", {}, make("th"), ...head));
  }
  cells.forEach((row, rank) => {
    const line = make("tr", {}, make("th", { scope: "row" }, state.rows[rank]));
    for (let column = 0; column < columns; column++) {
      const [text, background] = shown(data, state, row[column]);
      const cell = make("td", {}, text);
      cell.style.background = background;
      line.append(cell);
    }
    table.append(line);
  });
  return table;
}

// A page tells of a frame what changed, by its cells' places in the frame, and of a sentence or
// a longer part its place in the list of all: here a state gets whole.
function unfold(data, state) {
  if (Array.isArray(state.says)) state.says = state.says.map((place) => data.once[place]);
  for (const name of data.named) if (name in state) state[name] = data.once[state[name]];
  state.grid = state.grid?.map((row) => row.split(","));
  inNodes(data, state);
  state.frames?.forEach((changed, step, frames) => {
    if (!step || Array.isArray(changed[0])) return;
    frames[step] = frames[step - 1].map((row) => [...row]);
    const wide = frames[0][0].length;
    for (let n = 0; n < changed.length; n += 2) {
      frames[step][Math.floor(changed[n] / wide)][changed[n] % wide] = changed[n + 1];
    }
  });
}

const amount = (value, unit) => `${value.toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;

const sums = (rows) => rows.map(([, parts]) => (Array.isArray(parts) ? parts.reduce((sum, part) => sum + part, 0) : 0));
const peak = ({ rows, line }) => 1.05 * Math.max(line ?? 0, ...sums(rows)) || 1;

// Stacked bars: a row's parts in the colours of the panel's kinds, or the reason why it has none.
function panel({ title, unit, kinds, rows, line }, most) {
  const wholes = sums(rows);
  const box = make("div", { class: "explorable-bars" }, make("b", {}, title));
  const legend = make("span", { class: "explorable-legend" });
  kinds.forEach(([kind, colour], at) => {
    const chip = make("span", { class: "explorable-chip" });
    chip.style.background = colour;
    const alone = rows.length === 1 ? ` ${amount(rows[0][1][at], unit)}` : "";
    legend.append(make("span", {}, chip, kind + alone));
  });
  if (line) legend.append(make("span", {}, say("dashed: #", amount(line, unit))));
  box.append(legend);
  rows.forEach(([label, parts], row) => {
    const drawn = Array.isArray(parts);
    const track = make("span", { class: drawn ? "explorable-track" : "explorable-note" }, ...(drawn ? [] : [parts]));
    for (const [at, part] of drawn ? parts.entries() : []) {
      const body = make("span", { class: "explorable-bar", tabindex: 0, title: `${kinds[at][0]}: ${amount(part, unit)}` });
      body.style.width = `${(100 * part) / most}%`;
      body.style.background = kinds[at][1];
      track.append(body);
    }
    if (drawn && line) {
      const limit = make("span", { class: "explorable-limit" });
      limit.style.left = `${(100 * line) / most}%`;
      track.append(limit);
    }
    box.append(make("span", {}, drawn ? `${label} ${amount(wholes[row], unit)}` : label), track);
  });
  return box;
}

function numbers(state) {
  const list = make("dl", { class: "explorable-numbers" });
  for (const [name, value] of Object.entries(state.numbers ?? {})) {
    list.append(make("dt", {}, name), make("dd", {}, String(value)));
  }
  return list;
}

// One view of the data, at a choice and a moment. `twin` is the state that is shown beside it, whose
// bars and time have the same scale; `moved` hears of every move that a reader makes, and if it is a choice.
function view(root, data, choice, step, twin, moved) {
  const stage = make("div", { class: "explorable-stage" });
  const says = make("p", { class: "explorable-says", "aria-live": "polite" });
  const slider = make("input", { type: "range", min: 0, "aria-label": say("step in time") });
  let playing;
  const counted = make("output");
  const play = make("button", { type: "button" }, say("play"));
  const time = make("span", { class: "explorable-time" }, play, slider, counted);

  const state = () => data.states[Object.values(choice).join("|")];
  const draw = () => {
    const now = state();
    const length = now.frames ? now.frames.length : now.grid ? now.grid[0].length : 0;
    const at = Math.max(0, Math.min(step ?? now.begins ?? length - 1, length - 1));
    step = length ? at : step;
    slider.max = Math.max(0, length - 1);
    slider.value = at;
    counted.textContent = now.frames ? say(" step # of #", at, length - 1) : say(" step # of #", at + 1, length);
    time.hidden = length < 2;
    const beside = twin();
    const bars = (now.panels ?? []).map((each, n) => panel(each, Math.max(peak(each), peak(beside?.panels?.[n] ?? each))));
    const cells = length ? [grid(data, now, at)] : [];
    const held = stage.contains(document.activeElement); // what has the focus goes: its keys stay
    stage.replaceChildren(...bars, ...drawings(stage, data, now, at, cells, beside), ...cells, numbers(now));
    if (held) root.focus({ preventScroll: true });
    says.textContent = Array.isArray(now.says) ? now.says[at] : now.says;
  };
  const pause = () => {
    clearInterval(playing);
    playing = undefined;
    play.textContent = say("play");
  };
  // A choice draws all views, this one too.
  const move = (to) => ((step = to), to !== undefined && draw(), moved(to === undefined));
  play.addEventListener("click", () => {
    if (playing) return pause();
    if (slider.value === slider.max) move(0);
    play.textContent = say("pause");
    playing = setInterval(() => {
      if (!root.isConnected) return pause();
      move(Number(slider.value) + 1);
      if (slider.value === slider.max) pause();
    }, 900);
  });
  slider.addEventListener("input", () => (pause(), move(Number(slider.value))));
  const hears = alone() ? document : root;
  const onKey = (event) => {
    if (!root.isConnected) return hears.removeEventListener("keydown", onKey);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || time.hidden || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (["SELECT", "INPUT", "TEXTAREA"].includes(event.target.tagName)) return;
    pause();
    move(Number(slider.value) + by);
    event.preventDefault();
  };
  hears.addEventListener("keydown", onKey);
  const fields = Object.entries(data.controls).map(([name, values]) =>
    select(name, values, choice[name], (value) => (pause(), (choice[name] = value), move(undefined))),
  );
  const go = (to) => {
    fields.forEach((field, at) => (field.querySelector("select").value = to[at]));
    pause();
    Object.keys(choice).forEach((name, at) => (choice[name] = to[at]));
    move(undefined);
  };
  root.replaceChildren(make("div", { class: "explorable-controls" }, ...fields, time), stage, says);
  root.tabIndex = 0;
  draw();
  return { root, choice, state, draw, go, moment: () => step };
}
