// Ranks as cards with tiles: what a rank holds, and what has just come and from where.

// Whose numbers a text names, or which parts: "0+2", "mean 0+1".
const digits = (text) => (text.match(/\d/g) ?? []).map(Number);

// Where in a tile lie the parts that its text names: [x, y, width, height, colour], of 1.
function parts(data, state, [text, colour], rank, column) {
  const ranks = state.frames[0].length,
    own = data.palette[rank];
  if (!text) return [];
  if (!state.shapes)
    return digits(text).map((n) => [0, (n % state.slots) / state.slots, 1, 1 / state.slots, data.palette[n]]);
  if (state.cuts[column] === "columns") return [[rank / ranks, 0, 1 / ranks, 1, own]];
  if (state.cuts[column] === "rows") return [[0, rank / ranks, 1, 1 / ranks, own]];
  return [[0, 0, 1, 1, colour === state.sum ? own : colour]];
}

function tile(data, state, cell, rank, column, [wide, high], only = null) {
  const frame = {
    fill: "none",
    stroke: cell[0] ? cell[1] : "var(--pst-color-border)",
    "stroke-width": cell[0] ? 2 : 0.6,
  };
  const mine = parts(data, state, cell, rank, column).filter((_, n) => !only || only.includes(digits(cell[0])[n]));
  const sum = cell[1] === state.sum ? { "fill-opacity": 0.45 } : {};
  const drawn = mine.map(([x, y, w, h, fill]) => rect(x * wide, y * high, w * wide, h * high, { fill, ...sum }));
  return svg("g", {}, ...drawn, rect(0, 0, wide, high, only ? { ...frame, stroke: "none" } : frame));
}

// Who sends to a card in a step: one other, all others, or nobody.
function senders(state, step, card) {
  const from = state.moves?.[step] ?? "";
  if (from === "*") return state.places.map((_, other) => other).filter((other) => other !== card);
  return !from || from[card] === "." ? [] : [Number(from[card])];
}

// Where cards and their tiles lie: columns and rows of cards are the page's, `lines` a card's rows.
function layout(state) {
  const lines = state.lines?.length ?? 1;
  const pitch = WIDE / Math.max(state.shapes ? 1 : 2, 1 + Math.max(...state.places.map(([x]) => x)));
  const left = lines > 1 ? 62 : 5;
  const width = pitch - 18;
  const even = Math.min(40, (width - left - 5) / state.columns.length - 2);
  const sizes = state.shapes ?? state.columns.map(() => [even, lines > 1 ? 22 : 34]);
  const tall = Math.max(...sizes.map(([, high]) => high)) + (state.shapes ? 10 : 4);
  const high = 31 + lines * tall;
  const gap = high + (state.shapes ? 8 : 20);
  const corner = (card) => [state.places[card][0] * pitch + 9, state.places[card][1] * gap + 4];
  const centre = (card) => corner(card).map((place, n) => place + (n ? high : width) / 2);
  const across = (column) =>
    state.shapes ? sizes.slice(0, column).reduce((sum, [wide]) => sum + wide + 20, 14) : column * (even + 2) + left;
  const tileAt = (row, column) => {
    const [x, y] = corner(Math.floor(row / lines));
    return [x + across(column), y + 18 + (row % lines) * tall];
  };
  const whole = (1 + Math.max(...state.places.map(([, y]) => y))) * gap;
  return { lines, width, high, sizes, corner, centre, tileAt, whole };
}

// Who ever sends to whom, and with an arrow who has just sent.
function links(state, step, centre) {
  const pairs = (n) => state.places.flatMap((_, to) => senders(state, n, to).map((from) => [from, to]));
  const line = ([from, to]) => {
    const [[x1, y1], [x2, y2]] = [centre(from), centre(to)];
    return { x1, y1, x2, y2 };
  };
  const ever = new Set(state.moves.flatMap((_, n) => pairs(n)).map((pair) => pair.join()));
  const pale = [...ever].map((pair) => svg("line", { ...line(pair.split(",")), class: "explorable-link" }));
  const now = pairs(step).map((pair) => {
    const { x1, y1, x2, y2 } = line(pair);
    const turn = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
    const middle = `translate(${(x1 + x2) / 2} ${(y1 + y2) / 2}) rotate(${turn})`;
    const head = svg("path", { d: "M-4,-4 L5,0 L-4,4 Z", transform: middle });
    return svg("g", { class: "explorable-link now" }, svg("line", { x1, y1, x2, y2 }), head);
  });
  return [...pale, ...now];
}

// A card for each rank with its tiles; in a step, what has come was carried from the sender's tile.
function board(data, state, step, before) {
  const { lines, width, high, sizes, corner, centre, tileAt, whole: tall } = layout(state);
  const whole = canvas(tall, "ranks and what they hold", ...(state.shapes ? [] : links(state, step, centre)));
  const flying = [];
  const seen = (moment, row, column) => shown(data, state, state.frames[moment][row][column]);
  const drawn = (cell, row, column, only) =>
    tile(data, state, cell, Math.floor(row / lines), column, sizes[column], only);

  const arrive = (row, column, there) => {
    const [cell, old] = [seen(step, row, column), seen(before, row, column)];
    const from = old[0] === cell[0] ? [] : senders(state, step, Math.floor(row / lines));
    if (!from.length) return;
    const [x, y] = tileAt(row, column);
    const ghost = svg("g", { class: "explorable-flies" }, drawn(old, row, column));
    whole.append(at(x, y, ghost));
    move(ghost, [{ opacity: 1 }, { opacity: 1 }]); // until its successor is seen
    move(there, [{ opacity: 0 }, { opacity: 0 }]);
    for (const other of from) {
      const source = other * lines + (row % lines);
      const sent = seen(before, source, column);
      const landing = state.shapes ? null : digits(sent[0]).filter((n) => digits(cell[0]).includes(n));
      const piece = svg("g", { class: "explorable-flies piece" }, drawn(sent, source, column, landing));
      Object.assign(piece.dataset, { from: `${source} ${column}`, to: `${row} ${column}` });
      whole.append(at(x, y, piece));
      const [x1, y1] = tileAt(source, column);
      move(piece, [{ transform: `translate(${x1 - x}px, ${y1 - y}px)` }, { transform: "none" }]);
    }
  };

  state.places.forEach((_, card) => {
    const [x, y] = corner(card);
    const box = rect(x, y, width, high, { rx: 4, class: "explorable-box" });
    const name = state.lines ? `rank ${card}` : state.rows[card];
    const group = svg("g", { tabindex: 0, class: "explorable-card" }, box, note(x + 5, y + 13, name));
    const holds = [];
    state.columns.forEach((column, n) => {
      const shape = state.shapes ? ` ${seen(step, card, n)[0].split(" ")[0]}` : "";
      const text = column.match(/\d+$/)?.[0] ?? column + shape;
      const middle = tileAt(card * lines, n)[0] + sizes[n][0] / 2;
      group.append(note(middle, y + high - 3, text, { class: "explorable-small", "text-anchor": "middle" }));
    });
    for (let row = card * lines; row < (card + 1) * lines; row++) {
      const line = state.lines?.[row % lines] ?? "";
      group.append(note(x + 5, tileAt(row, 0)[1] + 14, line, { class: "explorable-small" }));
      state.columns.forEach((column, n) => {
        const [text, colour] = seen(step, row, n);
        const size = text && state.piece ? `, ${state.piece}` : "";
        const what = `${state.rows[row]}, ${column}: ${text || "nothing"}${size}`;
        const there = named(what, drawn([text, colour], row, n));
        there.setAttribute("class", "explorable-tile");
        Object.assign(there.dataset, { text, colour, place: `${row} ${n}` });
        group.append(at(...tileAt(row, n), there));
        holds.push(what);
        flying.push(() => arrive(row, n, there));
      });
    }
    group.dataset.part = holds.join("; ");
    whole.append(group);
  });
  return [whole, () => flying.forEach((begin) => begin())];
}
