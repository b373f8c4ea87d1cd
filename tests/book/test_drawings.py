"""What the pictures draw: each tile, bar and card as Python has it, and pieces that arrive."""

import itertools
import json
import re
from typing import Any

import pytest

from shared.book.explore import HERE as BOOK
from shared.book.moved import film, ring
from shared.book.nodes import WIDEST, mesh, sent_along
from shared.book.offloading import offload
from shared.book.planned import State
from shared.book.recorded import ddp_step
from shared.book.recorded_accelerate import accelerate_step
from shared.book.recorded_fsdp import fsdp_step
from shared.book.recorded_pipeline import senders
from shared.pipeline.schedules import interleaved_schedule
from tests.book import test_book
from tests.book.test_book import as_rgb, expected, in_this_course, named, written

AXIS, WIDE = 64, 420 - 64 - 4  # of a drawing's time, in its own units

# Goes through all choices and moments, and writes down what is drawn: [choice, step, [text, colour,
# fills] of tiles and slots, [from, to, colour, name] of bars along time, where now is, [width,
# colour] of what is kept, [rank, its group, tabindex] of cards, widths of
# lit links].
WATCH = """
let root = document.querySelector("[data-explorable]");
const seen = [], all = (what) => [...root.querySelectorAll(what)];
const of = (element, ...names) => names.map((name) => element.getAttribute(name));
const fields = all(".explorable-controls select");
const look = (step) => seen.push([fields.map((field) => field.value), step,
  all("[data-text]").filter(({ style }) => style.display !== "none").map((tile) => [
    tile.dataset.text, tile.dataset.colour,
    [...tile.querySelectorAll("rect")].map((part) => part.getAttribute("fill")),
    tile.querySelector("title")?.textContent ?? tile.dataset.part]),
  all(".explorable-work").filter((work) => !work.closest("[data-text]")).map((work) =>
    [...of(work, "x", "width").map(Number), ...of(work, "fill"), work.parentNode.dataset.part]),
  all(".explorable-veil rect").map((veil) => +veil.getAttribute("x")),
  all(".explorable-fill").map((bar) => [+bar.getAttribute("width"), bar.getAttribute("fill")]),
  all(".explorable-gpu").map((card) => [card.dataset.rank, card.dataset.group, card.tabIndex]),
  all(".lit path").map((path) => +path.getAttribute("stroke-width"))]);
const go = (at) => {
  if (at < fields.length) {
    for (const option of fields[at].options) {
      fields[at].value = option.value;
      fields[at].dispatchEvent(new Event("change"));
      go(at + 1);
    }
    return;
  }
  const slider = root.querySelector(".explorable-time input");
  const last = root.querySelector(".explorable-time[hidden]") ? 0 : +slider.max;
  const few = root.querySelector("circle, [data-text]:not([data-place])"); // a schedule's slots
  for (let step = 0; step <= last; step += few ? Math.max(1, last / 2) : 1) {
    slider.value = step;
    slider.dispatchEvent(new Event("input"));
    look(+slider.value);
  }
};
go(0);
"""

# Looks at both views at the end of time.
BESIDE = (
    WATCH.split("const go")[0]
    + """
for (root of document.querySelectorAll(".explorable-view")) {
  fields.splice(0, Infinity, ...all("select"));
  look(+root.querySelector(".explorable-time input").value);
}
"""
)

# Steps on by a key and writes down: where pieces are half-way and how far they have to go, in
# pixels, and where the sender's tile is; how many parts the tiles that they fly to have, by text,
# before and after; what is left.
FLY = """
const seen = [], root = document.querySelector("[data-explorable]");
const centre = (element) => {
  const { x, y, width, height } = element.getBoundingClientRect();
  return [x + width / 2, y + height / 2];
};
const tile = (place) => root.querySelector(`.explorable-tile[data-place="${place}"]`);
const slot = ([rank, column]) =>
  root.querySelector(`[data-part^="rank ${rank}, slot ${+column + 1}:"]`);
const tiles = [...root.querySelectorAll("[data-place]")];
const old = new Map(tiles.map((each) => [each.dataset.place, each.dataset.text]));
const key = { key: "ArrowRight", bubbles: true };
document.body.dispatchEvent(new KeyboardEvent("keydown", key));
await Promise.resolve();
const pieces = [...root.querySelectorAll(".piece")], motions = document.getAnimations();
for (const motion of motions) motion.pause();
const put = (time) => motions.forEach((motion) => (motion.currentTime = time));
const at = (time) => (put(time), pieces.map(centre));
const [first, half, end] = [at(0), at(325), at(649.9)];
const shown = (place) => getComputedStyle(tile(place)).opacity;
const hidden = pieces.map((piece) => piece.dataset.to && shown(piece.dataset.to));
motions.forEach((motion) => motion.finish());
await Promise.all(motions.map((motion) => motion.finished));
await new Promise((done) => setTimeout(done, 50));
pieces.forEach((piece, n) => {
  const there = piece.dataset.to && tile(piece.dataset.to);
  const { from } = piece.dataset;
  seen.push([from, centre(tile(from) ?? slot(from.split(" "))), first[n], half[n], end[n],
    there ? centre(there) : null, piece.dataset.to ?? null,
    there ? old.get(piece.dataset.to) : null, there ? there.dataset.text : null, hidden[n]]);
});
seen.push(root.querySelectorAll(".explorable-flies").length);
"""

DRAWN = ("ring", "collectives", "pipeline", "mesh", "ddp_step", "fsdp_step", "tensor_parallel")


@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "each", [in_this_course(named(name)) for name in (*DRAWN, "offload", "accelerate")]
)
def test_all_that_is_drawn_is_what_python_has_for_every_choice_and_moment(each, tmp_path):
    moments = 0
    for choice, step, *drawn in written(each, WATCH, tmp_path, {}):
        state = each.states["|".join(choice)]
        _tiles_agree(state, step, drawn[0])
        _lanes_and_bars_agree(state, step, *drawn[1:4])
        _cards_agree(state, *drawn[4:])
        moments += 1
    lengths = [
        len(s["frames"]) if "frames" in s else min(3, len(s.get("grid", [[0]])[0]))
        for s in each.states.values()
    ]
    assert moments == sum(lengths)


def _tiles_agree(state: State, step: int, tiles: list[Any]) -> None:
    """A tile for each of Python's cells, with a band for each rank that its text names."""
    if "places" not in state and "grid" not in state:
        assert tiles == []
        return
    _, _, texts, colours = expected(state, step)
    if "grid" in state:  # what comes is not drawn
        seen = [colour != "transparent" for colour in colours]
        texts, colours = (list(itertools.compress(each, seen)) for each in (texts, colours))
    assert [text for text, *_ in tiles] == texts
    assert [as_rgb(colour) for _, colour, *_ in tiles] == colours
    for text, _, fills, title in tiles:
        assert f": {text}" in title
        if "places" in state:
            bands = len(re.findall(r"\d", text)) if "shapes" not in state else bool(text)
            assert len(fills) == bands + 1, (text, fills)  # and the frame
            assert f": {text or 'nothing'}" in title
            assert not text or title.endswith(state.get("piece", text))


def _lanes_and_bars_agree(
    state: State, step: int, bars: Any, now: Any, kept: Any, beside: State | None = None
) -> None:
    """Bars along time begin and end when Python says, and what is kept is as wide.

    A state `beside` it has the same scale.
    """
    both = (state, beside or state)
    if "lanes" in state:
        lanes = state["lanes"]
        ordered = sorted(lanes["bars"], key=lambda bar: bar[0])
        scale = WIDE / max(each["lanes"]["end"] for each in both)
        for (x, width, colour, part), (_, begin, end, _, cell) in zip(bars, ordered, strict=True):
            assert x == pytest.approx(AXIS + begin * scale)
            assert width == pytest.approx((end - begin) * scale - 0.5)
            assert (part, colour) == tuple(cell)
        assert now == [pytest.approx(AXIS + lanes["times"][step] * scale)]
    if "fills" in state:
        fills = state["fills"]
        wanted = [part for parts in fills["steps"][step] for part in parts]
        assert [width for width, _ in kept] == pytest.approx(
            [WIDE * p / max(each["fills"]["most"] for each in both) for p in wanted]
        )
        assert [colour for _, colour in kept] == [c for _, c in fills["kinds"]] * len(
            fills["labels"]
        )
        assert max(map(sum, fills["steps"][step])) < fills["most"]


@pytest.mark.full
def test_two_views_have_one_scale_of_time_and_of_bytes(tmp_path):
    choice = ["2", "2", "freed", "no", "fast"]
    beside = {"beside": "2|4|freed|yes|slow"}
    each = named("fsdp_step")
    asked = dict(zip(each.controls, choice, strict=True)) | beside
    seen = written(each, BESIDE, tmp_path, asked)
    states = [each.states["|".join(view[0])] for view in seen]
    assert states[0]["lanes"]["end"] < states[1]["lanes"]["end"]
    for (_, step, _, *drawn), state, other in zip(seen, states, states[::-1], strict=True):
        _lanes_and_bars_agree(state, step, *drawn[:3], other)


def _cards_agree(state: State, cards: Any, links: list[float]) -> None:
    if "groups" in state:
        found = {int(rank): [int(each) for each in group.split()] for rank, group, _ in cards}
        assert [int(rank) for rank, _, tab in cards if tab == 0] == [g[0] for g in state["groups"]]
        assert found == {rank: group for group in state["groups"] for rank in group}
        first, node = state["groups"][0], state["node"]
        pairs = list(itertools.pairwise(first))
        pairs += [(first[-1], first[0])] * (len(first) > 2)
        widths = [state["links"][one // node != other // node][1] for one, other in pairs]
        assert links == pytest.approx(widths)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "choice", "arrives"),
    [
        (
            "ring",
            {"ranks": 4, "step": 1},
            {f"{r} {(r + 1) % 4}": (f"{(r - 1) % 4} {(r + 1) % 4}", 1, 3) for r in range(4)},
        ),
        ("ddp_step", {"ranks": 2, "step": 2}, {"0 3": ("1 3", 1, 2), "1 3": ("0 3", 1, 2)}),
        ("pipeline", {"ranks": 4, "step": 0}, {None: ("0 0",)}),
    ],
)
def test_a_piece_flies_from_the_sender_to_its_place_and_is_added_there(
    name, choice, arrives, tmp_path
):
    *pieces, left = written(named(name), FLY, tmp_path, choice)
    assert pieces and left == 0
    found = {}
    for source, begins, first, half, end, place, to, before, after, opacity in pieces:
        assert first == pytest.approx(begins, abs=25)
        found[to] = (source,)
        assert half == pytest.approx([(a + b) / 2 for a, b in zip(first, end, strict=True)], abs=1)
        assert max(abs(a - b) for a, b in zip(first, end, strict=True)) > 20
        if to is not None:
            assert end == pytest.approx(place, abs=25)  # a band of its tile
            assert opacity == "0", "the sum is not shown before it is there"
            found[to] += tuple(len(re.findall(r"\d", text)) for text in (before, after))
    assert found == arrives


@pytest.mark.full
def test_nothing_flies_for_who_asks_for_less_motion(tmp_path, monkeypatch):
    quiet = f"{test_book.QUIET} --force-prefers-reduced-motion"
    monkeypatch.setattr(test_book, "QUIET", quiet)
    driver = (
        FLY.split("const pieces")[0]
        + """
const of = (what) => [...root.querySelectorAll(what)];
const texts = of("[data-text]").map((tile) => tile.dataset.text);
seen.push(document.getAnimations().length, of(".explorable-flies").length, texts);
"""
    )
    *motions, texts = written(named("ring"), driver, tmp_path, {"ranks": 4, "step": 1})
    assert motions == [0, 0]
    assert texts == [text for row in ring(4)["frames"][2] for text, _ in row]


# How opaque each rank's number is, of lit groups and of others, under the book's own style.
OPAQUE = """
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
const opaque = (one) => (one ? getComputedStyle(one).opacity * opaque(one.parentElement) : 1);
const seen = ["", ".lit"].map((lit) => [
  ...new Set([...document.querySelectorAll(`.explorable-group${lit} text`)].map(opaque))]);
seen.push(opaque(document.querySelector(".explorable-group:not(.lit) rect")));
"""


@pytest.mark.full
def test_a_group_that_is_not_chosen_is_pale_and_its_numbers_can_be_read(tmp_path):
    style = json.dumps((BOOK / "book.css").read_text("utf-8"))
    *numbers, edge = written(named("mesh"), OPAQUE.replace("STYLE", style), tmp_path, {})
    assert numbers == [[1], [1]] and edge < 1


# Opens a second view, and steps on by a key at a card of the first one: what flies in each view,
# and whether the first one still has the focus, for the next key.
BOTH = """
const seen = [], root = document.querySelector("[data-explorable]");
root.querySelector(":scope > button").click();
const views = [...root.querySelectorAll(".explorable-view")];
views[0].querySelector(".explorable-card").focus();
const key = { key: "ArrowRight", bubbles: true };
document.activeElement.dispatchEvent(new KeyboardEvent("keydown", key));
await Promise.resolve();
for (const view of views) seen.push(view.querySelectorAll(".piece").length);
seen.push(document.activeElement === views[0]);
"""


@pytest.mark.full
def test_a_key_steps_both_views_with_what_flies_and_leaves_the_focus_in_its_view(tmp_path):
    seen = written(named("ring"), BOTH, tmp_path, {"ranks": 4, "step": 1})
    assert seen == [4, 4, True]


def test_who_sends_is_who_sent():
    """The ring's and the pipeline's senders: the film's messages, the stage before or after."""
    for moves, (_, messages) in zip(ring(4)["moves"], film("all_reduce", "ring", 4), strict=True):
        assert {(int(moves[to]), to) for to in range(4) if moves[to] != "."} == {
            (source, to) for source, to, _ in messages
        }
    table = interleaved_schedule(2, 2, 2)
    slots = senders(table)
    for rank, row in enumerate(table):
        for cell, slot in zip(row, slots, strict=True):
            first = cell is None or (cell.kind, cell.stage) in (("F", 0), ("B", 3))
            assert slot[rank] == ("." if first else str(1 - rank))


def test_a_fast_link_hides_more_and_a_gather_ahead_lies_beside_work():
    for layers in (4, 8):
        fast, slow = (ddp_step(2, layers, 4, link) for link in ("fast", "slow"))
        assert fast["lanes"]["end"] < slow["lanes"]["end"]
        assert hidden(fast) > hidden(slow) > 0
    assert hidden(ddp_step(2, 8, 1024, "fast")) == 0
    assert hidden(fsdp_step(2, 4, "freed", "no")) < hidden(fsdp_step(2, 4, "freed", "yes"))
    for after, ahead in itertools.product(("freed", "kept"), ("no", "yes")):
        state = fsdp_step(2, 4, after, ahead, "slow")
        lanes, numbers = state["lanes"], state["numbers"]
        messages = sum(lane for lane, *_ in lanes["bars"])
        assert messages == numbers["all-gathers"] + numbers["reduce-scatters"]
        assert lanes["times"] == sorted(lanes["times"]) and lanes["times"][0] == 0
        work = sum(end - begin for lane, begin, end, *_ in lanes["bars"] if lane == 0)
        assert work == pytest.approx(4 * (1 + 2))


def hidden(state: State) -> int:
    """Percent of the messages' time behind work."""
    return int(next(v for k, v in state["numbers"].items() if "of the messages' time" in k)[:-1])


def test_accelerate_moves_a_schedule_as_one_process_would_for_as_many_samples():
    for ranks, split, accumulation in itertools.product((2, 3), ("no", "yes"), (1, 2)):
        state = accelerate_step(ranks, split, accumulation)
        lanes, fills = state["lanes"], state["fills"]
        samples = sorted(bar[1:4] for bar in lanes["bars"] if bar[0] < ranks)
        size = 1 / ranks if split == "yes" else 1.0
        for place, (begin, end, text) in enumerate(samples):  # one after the other
            assert (begin, end) == pytest.approx((place * size, (place + 1) * size))
            first, last = map(int, text.split(" to "))
            assert first == round(12 * begin) % 48 and last - first + 1 == 12 * size
        assert len(samples) == ranks * accumulation
        taken = samples[-1][1]
        assert lanes["times"][:2] == [0, 0] and lanes["times"][-1] == pytest.approx(taken)
        assert len(lanes["times"]) == len(fills["steps"]) == len(state["frames"])
        moved = [sum(parts) for ((parts),) in fills["steps"]]
        assert moved == [0] * (len(moved) - 1) + [taken / accumulation]
        assert fills["line"] == pytest.approx(taken / accumulation)


def test_what_is_offloaded_is_all_there_once_and_gradients_are_where_they_are_used():
    for place in ("all on the GPU", "optimizer", "all states"):
        phases = offload(place, 4, 7, 16)["fills"]["steps"]
        kept = [[sum(states) for *states, _ in phase] for phase in phases]
        if place == "all on the GPU":
            assert max(gpu for gpu, _ in kept) == pytest.approx(28.0)  # as in ZeRO's stages
            assert all(host == 0 for _, host in kept)
        else:
            assert phases[2][1][1] == pytest.approx(3.5), "the processor updates by them"
            assert sum(kept[2]) == pytest.approx(28.0)


def test_the_most_that_a_gpu_keeps_counts_the_unit_that_is_whole_as_deepspeed_does():
    for place, ranks, billions in itertools.product(("optimizer", "all states"), (1, 4), (7, 13)):
        state = offload(place, ranks, billions, 16)
        most, estimate = (
            next(v for k, v in state["numbers"].items() if name in k).split(" ")[0]
            for name in ("at most", "DeepSpeed's estimate")
        )
        assert most == estimate
        phases = state["fills"]["steps"]
        assert most == f"{max(sum(gpu) for gpu, _ in phases):.1f}", "the bar is as long"
    unit = 2 * 7 / 32
    whole = [gpu[3] for gpu, _ in offload("all on the GPU", 4, 7, 16)["fills"]["steps"]]
    assert whole == pytest.approx([unit, 2 * unit, 0, 0], rel=1e-3)


def test_the_mesh_says_of_every_dimension_how_many_groups_reach_across_nodes():
    for tp, node in itertools.product((4, 8), (4, 8)):
        states = {axis: mesh(2, tp, 2, node, axis) for axis in ("pp", "dp", "tp")}
        told = ", ".join(
            f"{axis} {across} of {groups}"
            for axis, state in states.items()
            for groups, across in re.findall(r"(\d+) groups? of .* (\d+) of them", state["says"])
        )
        assert {state["legend"].split("node: ")[1] for state in states.values()} == {f"{told}."}
    assert told == "pp 16 of 16, dp 16 of 16, tp 0 of 4"  # 8 x 2 ranks lie between


def test_what_a_rank_sends_along_an_axis_is_what_lesson_16_prints():
    sent = [round(sent_along(axis, 8, 8, 8) / 1e9, 1) for axis in ("tp", "pp", "dp")]
    assert sent == [135.3, 0.4, 9.5]


def test_a_link_between_nodes_is_as_thin_as_it_is_slow():
    (_, inside), (_, across) = mesh(2, 4, 2, 8, "pp")["links"]
    assert (inside, across) == (WIDEST, pytest.approx(WIDEST * 50 / 450))
