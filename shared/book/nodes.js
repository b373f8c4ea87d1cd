// Cards in their nodes; a link is as wide as it is fast, and the chosen group is lit.
function nodes(data, state) {
  const each = state.node,
    wide = Math.min(each, 4) * 24 + 14,
    high = (each / Math.min(each, 4)) * 24 + 22;
  const across = 30;
  const groups = state.groups,
    of = new Map(groups.flatMap((ranks, group) => ranks.map((rank) => [rank, group])));
  const count = Math.ceil(of.size / each),
    beside = Math.min(count, Math.floor(WIDE / (wide + across)));
  const corner = (node) => [
    (node % beside) * (wide + across) + across / 2,
    Math.floor(node / beside) * (high + 24) + 4,
  ];
  const centre = (rank) => {
    const [x, y] = corner(Math.floor(rank / each)),
      card = rank % each;
    return [x + 19 + (card % 4) * 24, y + 28 + Math.floor(card / 4) * 24];
  };
  const whole = canvas(Math.ceil(count / beside) * (high + 24), "nodes, cards and links");
  const width = Math.max(WIDE / 1.6, beside * (wide + across)); // few nodes are drawn larger
  whole.setAttribute("viewBox", `${(beside * (wide + across) - width) / 2} 0 ${width} ${whole.viewBox.baseVal.height}`);
  for (let node = 0; node < count; node++) {
    const [x, y] = corner(node);
    whole.append(
      rect(x, y, wide, high, { rx: 4, class: "explorable-box" }),
      note(x + 5, y + 11, `node ${node}`, { class: "explorable-small" }),
    );
  }
  const drawn = groups.map((ranks) => svg("g", { class: "explorable-group" }));
  const light = (group) => drawn.forEach((one, n) => one.classList.toggle("lit", n === group));
  groups.forEach((ranks, group) => {
    const colour = data.palette[group % data.palette.length];
    const pairs = ranks.slice(1).map((rank, n) => [ranks[n], rank]);
    if (ranks.length > 2) pairs.push([ranks.at(-1), ranks[0]]);
    for (const [from, to] of pairs) {
      const [[x1, y1], [x2, y2]] = [centre(from), centre(to)],
        inside = Math.floor(from / each) === Math.floor(to / each);
      const [speed, width] = state.links[inside ? 0 : 1],
        bend = y1 === y2 ? -14 : 0,
        aside = x1 === x2 ? 12 : 0;
      const path = {
        d: `M${x1},${y1} Q${(x1 + x2) / 2 + aside},${(y1 + y2) / 2 + bend} ${x2},${y2}`,
        stroke: colour,
        "stroke-width": width,
      };
      drawn[group].append(named(`rank ${from} to rank ${to}: ${speed}`, svg("path", path)));
    }
    for (const rank of ranks) {
      const [x, y] = centre(rank),
        part = `rank ${rank}, node ${Math.floor(rank / each)}, its group: ${ranks.join(", ")}`;
      const card = named(
        part,
        rect(x - 10, y - 10, 20, 20, { rx: 2, stroke: colour }),
        note(x, y + 3.5, rank, { "text-anchor": "middle" }),
      );
      card.setAttribute("class", "explorable-gpu");
      card.setAttribute("tabindex", rank === ranks[0] ? 0 : -1);
      Object.assign(card.dataset, { rank, group: ranks.join(" ") });
      for (const event of ["pointerenter", "focus"]) card.addEventListener(event, () => light(group));
      drawn[group].append(card);
    }
  });
  whole.append(...drawn);
  light(0);
  return [whole, () => {}];
}

// The groups of a state are one text: here they are lists, and a node's ranks the table's row, in the
// pale colour of their group.
function inNodes(data, state) {
  if (!state.groups) return;
  state.groups = state.groups.split("|").map((ranks) => ranks.split(",").map(Number));
  const of = [];
  state.groups.forEach((ranks, group) => ranks.forEach((rank) => (of[rank] = data.pale[group % data.pale.length])));
  const cells = of.map((colour, rank) => data.cells.push([`${rank}`, colour]) - 1);
  state.frames = [state.rows.map((_, node) => cells.slice(node * state.node, (node + 1) * state.node))];
}
