// Time as an axis, and bytes along it.

// Work along time: all that comes lies behind a veil whose edge is now.
function lanes(data, state, step, before, twin) {
  const { names, bars, times } = state.lanes;
  const end = Math.max(state.lanes.end, twin?.lanes?.end ?? 0);
  const x = (time) => AXIS + ((WIDE - AXIS - 4) * time) / end;
  const lines = names.map((name, lane) => {
    const y = lane * 26 + 3;
    const box = rect(AXIS, y, WIDE - AXIS - 4, 20, { class: "explorable-box" });
    const row = svg("g", { tabindex: 0 }, box, note(0, y + 14, name, { class: "explorable-small" }));
    const own = bars.filter(([of]) => of === lane);
    for (const [, from, to, text, place] of own) {
      const [part, fill] = data.cells[place];
      const width = x(to) - x(from);
      const work = named(part, rect(x(from), y, width - 0.5, 20, { fill, class: "explorable-work" }));
      const middle = { class: "explorable-on", "text-anchor": "middle" };
      if (width > 6 * text.length + 2) work.append(note(x(from) + width / 2, y + 14, text, middle));
      row.append(work);
    }
    row.dataset.part = [name, ...own.map((bar) => data.cells[bar[4]][0])].join("; ");
    return row;
  });
  const high = names.length * 26;
  const now = x(times[step]);
  const edge = svg("line", { x1: now, x2: now, y1: 0, y2: high });
  const veil = svg("g", { class: "explorable-veil" }, rect(now, 0, WIDE, high), edge);
  const says = note(WIDE - 4, high + 13, state.lanes.says, { class: "explorable-small", "text-anchor": "end" });
  const whole = canvas(high + 18, say("time"), ...lines, veil, says);
  return [whole, () => move(veil, [{ transform: `translate(${x(times[before]) - now}px)` }, { transform: "none" }])];
}

// A schedule: a column is a slot of time, seen up to now; messages come from the stage before. It is
// drawn once for a stage and a state: a film has up to a hundred slots.
const schedules = new WeakMap();
function schedule(stage, state, step, before) {
  if (schedules.get(stage)?.state !== state) schedules.set(stage, { state, ...timetable(state) });
  const { whole, slots, wide } = schedules.get(stage);
  whole.querySelectorAll(".explorable-flies").forEach((late) => late.remove());
  slots.forEach((column, slot) => {
    if (column.seen === slot <= step) return;
    column.seen = slot <= step;
    for (const work of column.works) work.style.display = column.seen ? "" : "none";
  });
  const begin = () => {
    [...(state.moves?.[step] ?? "")].forEach((from, rank) => {
      if (from === ".") return;
      const start = state.grid[from].slice(0, step).lastIndexOf(state.grid[rank][step]);
      const away = `translate(${(start + 0.5 - step) * wide}px, ${(from - rank) * 28}px)`;
      const place = { cx: AXIS + step * wide, cy: rank * 28 + 14, r: 5 };
      const dot = svg("circle", { ...place, class: "explorable-piece explorable-flies piece" });
      dot.dataset.from = `${from} ${start}`;
      whole.append(dot);
      move(dot, [{ transform: away }, { transform: "none" }]);
    });
  };
  return [whole, begin];
}

function timetable({ rows, grid, colours }) {
  const wide = (WIDE - AXIS) / grid[0].length;
  const slots = grid[0].map(() => ({ seen: true, works: [] }));
  const lines = rows.map((name, rank) => {
    const box = rect(AXIS, rank * 28 + 2, WIDE - AXIS, 24, { class: "explorable-box" });
    const row = svg("g", { tabindex: 0 }, box, note(0, rank * 28 + 18, name));
    row.dataset.part = `${name}: ${grid[rank].filter(Boolean).join(" ")}`;
    grid[rank].forEach((text, slot) => {
      const x = AXIS + slot * wide;
      const fill = colours[text.slice(0, 1)];
      const work = rect(x, rank * 28 + 2, wide, 24, { fill, class: "explorable-work" });
      Object.assign(work.dataset, { text, colour: fill, part: `${name}, slot ${slot + 1}: ${text || "waits"}` });
      const middle = { class: "explorable-on", "text-anchor": "middle" };
      const drawn = wide > 13 && text ? [work, note(x + wide / 2, rank * 28 + 18, text, middle)] : [work];
      slots[slot].works.push(...drawn);
      row.append(...drawn);
    });
    return row;
  });
  return { whole: canvas(rows.length * 28, "a schedule", ...lines), slots, wide };
}

// What is kept, in bars that fill and empty: as wide as before, then as now.
function fills(state, step, before, twin) {
  const { title, unit, kinds, labels, steps, line } = state.fills,
    most = Math.max(state.fills.most, twin?.fills?.most ?? 0),
    x = (value) => ((WIDE - AXIS - 4) * value) / most;
  const whole = canvas(labels.length * 26 + 42, title, note(0, 12, title, { "font-weight": "bold" })),
    flying = [];
  let along = 0;
  for (const [kind, colour] of kinds) {
    whole.append(at(along, 20, rect(0, 0, 12, 8, { fill: colour }), note(16, 8, kind, { class: "explorable-small" })));
    along += 34 + 4.4 * kind.length;
  }
  labels.forEach((label, n) => {
    const y = 34 + n * 26,
      row = svg("g", { tabindex: 0 }),
      sizes = steps[step][n],
      said = [];
    row.append(
      rect(AXIS, y, WIDE - AXIS - 4, 20, { class: "explorable-box" }),
      note(0, y + 14, label, { class: "explorable-small" }),
    );
    let start = 0,
      old = 0;
    sizes.forEach((size, kind) => {
      const place = { x: AXIS + x(start), width: x(size) },
        part = `${label}, ${kinds[kind][0]}: ${amount(size, unit)}`;
      const drawn = rect(place.x, y, place.width, 20, { fill: kinds[kind][1], class: "explorable-fill" });
      row.append(named(part, drawn));
      said.push(part);
      if (before !== undefined) {
        const was = { x: `${AXIS + x(old)}px`, width: `${x(steps[before][n][kind])}px` };
        flying.push(() => move(drawn, [was, { x: `${place.x}px`, width: `${place.width}px` }]));
        old += steps[before][n][kind];
      }
      start += size;
    });
    row.dataset.part = said.join("; ");
    const limit = AXIS + x(line);
    row.append(note(AXIS + x(start) + 4, y + 14, amount(start, unit), { class: "explorable-small" }));
    row.append(svg("line", { x1: limit, x2: limit, y1: y - 3, y2: y + 23, class: "explorable-line" }));
    whole.append(row);
  });
  return [whole, () => flying.forEach((begin) => begin())];
}
