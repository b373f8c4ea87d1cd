// Shows a picture whose every state came with the page: nothing is computed here, only shown.
// Arrow keys step through time, anywhere on a page with one picture; the address carries the choice.

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

function select(name, values, chosen, onChange) {
  const field = make("select", { "aria-label": name });
  for (const value of values) field.append(make("option", { value }, value));
  field.value = chosen;
  field.addEventListener("change", () => onChange(field.value));
  return make("label", {}, `${name} `, field);
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

const amount = (value, unit) => `${value.toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;

// Stacked bars: a row's parts in the colours of the panel's kinds, or the reason why it has none.
function panel({ title, unit, kinds, rows, line }) {
  const wholes = rows.map(([, parts]) => (Array.isArray(parts) ? parts.reduce((sum, part) => sum + part, 0) : 0));
  const most = 1.05 * Math.max(line ?? 0, ...wholes) || 1;
  const box = make("div", { class: "explorable-bars" }, make("b", {}, title));
  const legend = make("span", { class: "explorable-legend" });
  kinds.forEach(([kind, colour], at) => {
    const chip = make("span", { class: "explorable-chip" });
    chip.style.background = colour;
    const alone = rows.length === 1 ? ` ${amount(rows[0][1][at], unit)}` : "";
    legend.append(make("span", {}, chip, kind + alone));
  });
  if (line) legend.append(make("span", {}, `dashed: ${amount(line, unit)}`));
  box.append(legend);
  rows.forEach(([label, parts], row) => {
    const drawn = Array.isArray(parts);
    const track = make("span", { class: drawn ? "explorable-track" : "explorable-note" }, ...(drawn ? [] : [parts]));
    for (const [at, part] of drawn ? parts.entries() : []) {
      const body = make("span", { class: "explorable-bar", title: `${kinds[at][0]}: ${amount(part, unit)}` });
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

function start(root) {
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const alone = document.querySelectorAll("[data-explorable]").length === 1; // its keys, its address
  const asked = new URLSearchParams(alone ? location.search : "");
  const choice = {};
  Object.entries(data.controls).forEach(([name, values], at) => {
    choice[name] = values.includes(asked.get(name)) ? asked.get(name) : data.first[at];
  });
  const given = asked.has("step") ? Number(asked.get("step")) : NaN;
  let step = Number.isInteger(given) ? given : undefined; // where the film begins to say something
  const stage = make("div", { class: "explorable-stage" });
  const says = make("p", { class: "explorable-says", "aria-live": "polite" });
  const slider = make("input", { type: "range", min: 0, "aria-label": "step in time" });
  let written, playing;
  const counted = make("output");
  const play = make("button", { type: "button" }, "play");
  const time = make("span", { class: "explorable-time" }, play, slider, counted);

  const show = (moved) => {
    const state = data.states[Object.values(choice).join("|")];
    const length = state.frames ? state.frames.length : state.grid ? state.grid[0].length : 0;
    const at = Math.max(0, Math.min(step ?? state.begins ?? length - 1, length - 1));
    step = length ? at : step;
    slider.max = Math.max(0, length - 1);
    slider.value = at;
    counted.textContent = state.frames ? ` step ${at} of ${length - 1}` : ` step ${at + 1} of ${length}`;
    time.hidden = length < 2;
    const picture = [...(state.panels ?? []).map(panel), ...(length ? [grid(data, state, at)] : [])];
    stage.replaceChildren(...picture, numbers(state));
    says.textContent = Array.isArray(state.says) ? state.says[at] : state.says;
    if (!moved || !alone || location.protocol === "about:") return; // a notebook's frame has none
    clearTimeout(written); // browsers refuse many changes of the address in a row
    written = setTimeout(() => {
      const address = new URLSearchParams({ ...choice, ...(length ? { step: at } : {}) });
      history.replaceState(null, "", `?${address}${location.hash}`);
    }, 300);
  };
  const pause = () => {
    clearInterval(playing);
    playing = undefined;
    play.textContent = "play";
  };
  const move = (to) => ((step = to), show(true));
  play.addEventListener("click", () => {
    if (playing) return pause();
    if (slider.value === slider.max) move(0);
    play.textContent = "pause";
    playing = setInterval(() => {
      move(Number(slider.value) + 1);
      if (slider.value === slider.max) pause();
    }, 900);
  });
  slider.addEventListener("input", () => (pause(), move(Number(slider.value))));
  (alone ? document : root).addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || time.hidden || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (["SELECT", "INPUT", "TEXTAREA"].includes(event.target.tagName)) return;
    pause();
    move(Number(slider.value) + by);
    event.preventDefault();
  });
  const fields = Object.entries(data.controls).map(([name, values]) =>
    select(name, values, choice[name], (value) => (pause(), (choice[name] = value), move(undefined))),
  );
  root.replaceChildren(make("div", { class: "explorable-controls" }, ...fields, time), stage, says);
  root.tabIndex = 0;
  show(false);
}

document.querySelectorAll("[data-explorable]").forEach(start);
