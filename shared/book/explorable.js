// Shows a picture whose every state came with the page: nothing is computed here, only shown.
// Arrow keys step through time; the address carries the choice, so a picture can be sent on.

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

function bars(state) {
  const most = Math.max(state.line.value, ...state.bars.map((bar) => bar.value)) * 1.05;
  const box = make("div", { class: "explorable-bars" });
  for (const bar of state.bars) {
    const body = make("span", { class: "explorable-bar" });
    body.style.width = `${(100 * bar.value) / most}%`;
    body.style.background = bar.colour;
    const track = make("span", { class: "explorable-track" }, body);
    const limit = make("span", { class: "explorable-limit", title: state.line.label });
    limit.style.left = `${(100 * state.line.value) / most}%`;
    track.append(limit);
    const label = `${bar.label} ${bar.value.toLocaleString("en")} ${state.unit}`;
    box.append(make("span", {}, label), track);
  }
  box.append(make("span", {}, ""), make("span", { class: "explorable-note" }, `line: ${state.line.label}`));
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
  const asked = new URLSearchParams(location.search);
  const choice = {};
  Object.entries(data.controls).forEach(([name, values], at) => {
    choice[name] = values.includes(asked.get(name)) ? asked.get(name) : data.first[at];
  });
  const given = asked.has("step") ? Number(asked.get("step")) : NaN;
  let step = Number.isInteger(given) ? given : Infinity; // the last one
  const stage = make("div", { class: "explorable-stage" });
  const says = make("p", { class: "explorable-says", "aria-live": "polite" });
  const slider = make("input", { type: "range", min: 0, "aria-label": "step in time" });
  let written;
  const time = make("label", { class: "explorable-time" }, "step ", slider);

  const show = () => {
    const state = data.states[Object.values(choice).join("|")];
    const length = state.frames ? state.frames.length : state.grid ? state.grid[0].length : 0;
    const at = Math.max(0, Math.min(step, length - 1));
    step = length ? at : step;
    slider.max = Math.max(0, length - 1);
    slider.value = at;
    time.hidden = !length;
    const picture = [...(state.bars ? [bars(state)] : []), ...(length ? [grid(data, state, at)] : [])];
    stage.replaceChildren(...picture, numbers(state));
    says.textContent = Array.isArray(state.says) ? state.says[at] : state.says;
    clearTimeout(written); // browsers refuse many changes of the address in a row
    written = setTimeout(() => {
      if (location.protocol === "about:") return; // a notebook's frame has no address
      const address = new URLSearchParams({ ...choice, ...(length ? { step: at } : {}) });
      history.replaceState(null, "", `?${address}`);
    }, 300);
  };
  slider.addEventListener("input", () => ((step = Number(slider.value)), show()));
  root.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.target.tagName === "SELECT" || event.target === slider) return;
    step = Number(slider.value) + by;
    show();
    event.preventDefault();
  });
  const fields = Object.entries(data.controls).map(([name, values]) =>
    select(name, values, choice[name], (value) => ((choice[name] = value), (step = Infinity), show())),
  );
  root.replaceChildren(make("div", { class: "explorable-controls" }, ...fields, time), stage, says);
  root.tabIndex = 0;
  show();
}

document.querySelectorAll("[data-explorable]").forEach(start);
