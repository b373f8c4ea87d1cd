"""The book: all lessons have their page, nothing is fetched from elsewhere, and faults are seen."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from decimal import ROUND_HALF_UP, Context, Decimal
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest
import torch
import torch.distributed as dist

from shared.book.build import build, lay_out, lesson_folders, with_note
from shared.book.chinese import translated
from shared.book.explorables import EXPLORABLES, Explorable
from shared.book.explore import explore_pages, viewer
from shared.book.film import kib
from shared.book.glossary import Term, anchor, link_first_uses, read_glossary
from shared.book.inline import show_explorable
from shared.book.landing import parts
from shared.book.moved import ring
from shared.book.planned import State
from shared.book.recorded import ddp_step, tensor_parallel_step
from shared.book.recorded_fsdp import fsdp_step
from shared.book.recorded_pipeline import pipeline_picture
from shared.errors import InputError
from shared.measuring.traffic import count_traffic
from shared.ranks.forked import run_ranks

ROOT = Path(__file__).resolve().parents[2]
LESSONS = [folder.name for folder in lesson_folders(ROOT)]
RANK = Term("rank", "A process.", "05", "进程", ("rank", "ranks"))


def notebook(*lines: str) -> str:
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "\n".join(lines)}]})


def linked(*lines: str, folder: str = "lesson06_ddp") -> list[str]:
    content = json.loads(link_first_uses(notebook(*lines), folder, [RANK]))
    return content["cells"][0]["source"].split("\n")


def test_a_lesson_s_first_use_of_a_term_is_linked_and_no_other():
    seen = linked(
        "## A rank", "`rank`, $rank$, **rank** and [a rank](x).", "one rank, two ranks", "rank"
    )
    assert seen[:2] == ["## A rank", "`rank`, $rank$, **rank** and [a rank](x)."]
    assert seen[2:] == ["one [rank](#term-rank), two ranks", "rank"]


def test_the_lesson_that_builds_a_term_and_words_that_only_hold_it_are_left_alone():
    assert linked("a rank", folder="lesson05_collectives") == ["a rank"]
    assert linked("cranky, rank-one and low_rank") == ["cranky, rank-one and low_rank"]


def test_every_term_is_whole_has_a_lesson_and_an_anchor_of_its_own(tmp_path):
    terms = read_glossary(ROOT / "shared" / "book" / "glossary.toml")
    numbers = {folder.name.removeprefix("lesson")[:2] for folder in lesson_folders(ROOT)}
    assert {term.lesson for term in terms} <= numbers
    assert len({anchor(term) for term in terms}) == len(terms)
    (tmp_path / "glossary.toml").write_text('["x"]\nsays = "y"\n', encoding="utf-8")
    with pytest.raises(InputError, match="'x' lacks lesson, section, zh"):
        read_glossary(tmp_path / "glossary.toml")


def test_every_lesson_of_readme_has_its_page():
    rows = [row for each in parts((ROOT / "README.md").read_text("utf-8")).values() for row in each]
    assert [row[1] for row in rows] == [folder.name for folder in lesson_folders(ROOT)]


def test_the_chinese_page_has_every_lesson():
    page = (ROOT / "shared" / "book" / "zh.md").read_text("utf-8")
    linked_to = re.findall(r"\(lessons/([^/]+)/lesson\.ipynb\)", page)
    assert linked_to == [folder.name for folder in lesson_folders(ROOT)]


def leads_to_the_word(html: Path) -> None:
    """Assert what a search shows first: a term of the glossary, a heading, and no mere picture."""
    first = {
        "RDMA": "glossary.html#index-",
        "CUDA out of memory": "when_something_does_not_work.html#cuda-out-of-memory",
        "what is a mesh": "glossary.html",
    }
    for words, link in first.items() if CHROMIUM is not None else ():
        found, _ = in_a_browser(html / "search.html", {"q": words}, html.parent / "search")
        assert re.findall(r'<li[^>]*><a href="lessons/([^"]+)', found)[0].startswith(link), words


@pytest.mark.full
@pytest.mark.timeout(280)
def test_the_book_builds_without_a_warning_and_needs_no_network(tmp_path, capfd):
    pytest.importorskip("sphinx_book_theme", reason="./run_all.sh book installs what builds it")
    assert build(ROOT, tmp_path) == 0, capfd.readouterr().err
    html = tmp_path / "html"
    for folder in lesson_folders(ROOT):
        page = (html / "lessons" / folder.name / "lesson.html").read_text("utf-8")
        assert "When would I use this?" in page or folder.name < "lesson05"
        fetched = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"', page)
        assert fetched == []
        assert "_static/mathjax/" in page or "math notranslate" not in page
    assert (html / "_static" / "mathjax").is_dir()
    assert not list(html.rglob("*solutions*"))
    options = (html / "_static" / "documentation_options.js").read_text("utf-8")
    assert "NAVIGATION_WITH_KEYS: false" in options  # the pictures' keys
    assert "ChineseStemmer" not in (html / "zh/_static/language_data.js").read_text("utf-8")
    ring = (html / "lessons" / "lesson05_collectives" / "lesson.html").read_text("utf-8")
    assert "data-explorable='ring'" in ring
    assert "../../_static/explorable.js" in ring
    for lesson in translated(ROOT):
        there = html / "zh" / "lessons" / lesson
        page = (there / "lesson.html").read_text("utf-8")
        assert "<summary>提示</summary>" in page
        links = {link for link in re.findall(r'(?:href|src)="([^"#?]+)', page) if ":" not in link}
        assert [link for link in links if not (there / link).exists()] == []
        english = (html / "lessons" / lesson / "lesson.html").read_text("utf-8")
        assert f'href="../../zh/lessons/{lesson}/lesson.html"' in english
        chinese = (html / "zh" / "index.html").read_text("utf-8")
        assert f'href="lessons/{lesson}/lesson.html"' in chinese
    first = (html / "index.html").read_text("utf-8")
    assert re.search(r'toctree-l1"><a [^>]*lesson23_capstone/lesson\.html">23 Capstone<', first)
    leads_to_the_word(html)
    stays_in_chinese(html)
    fits_a_phone(html)


# The pages that were once wider than 400 pixels, each in a frame as wide.
NARROW = """
const frame = document.body.appendChild(document.createElement("iframe")), wide = [];
frame.style.cssText = "width: 400px; height: 800px; border: 0";
const out = document.createElement("pre");
const next = (pages) => {
  if (!pages.length) {
    out.id = "seen";
    out.textContent = wide.join(" ");
    return document.body.append(out);
  }
  frame.onload = () => setTimeout(() => {
    const page = frame.contentDocument.documentElement;
    if (page.scrollWidth > page.clientWidth) wide.push(pages[0]);
    next(pages.slice(1));
  }, 300);
  frame.src = pages[0];
};
next(PAGES);
"""


def fits_a_phone(html: Path) -> None:
    """Assert that pages with long names and long formulas do not scroll sideways."""
    if CHROMIUM is None:
        return
    numbers = ("01", "10", "16", "17", "20", "21")
    pages = [f"lessons/{name}/lesson.html" for name in LESSONS if name[6:8] in numbers]
    pages += ["lessons/when_something_does_not_work.html", "zh/lessons/lesson10_zero/lesson.html"]
    pages += ["explore/strategies.html?beside=x"]
    script = NARROW.replace("PAGES", json.dumps(pages))
    (html / "narrow.html").write_text(f"<!doctype html><body><script>{script}</script></body>")
    found, _ = in_a_browser(html / "narrow.html", {}, html.parent / "narrow")
    assert re.findall(r'<pre id="seen">(.*?)</pre>', found) == [""]


def stays_in_chinese(html: Path) -> None:
    """Assert that pages in Chinese say so, lead to each other where they can, and are found."""
    made = [path for path in (html / "zh").rglob("*.html") if "_static" not in path.parts]
    pages = [path for path in made if path.name not in ("genindex.html", "search.html")]
    for page in [html / "zh.html", *pages]:
        text = page.read_text("utf-8")
        assert '<html lang="zh-CN"' in text, page
        original = html / page.relative_to(html / "zh") if page in pages else None
        links = {link for link in re.findall(r'href="([^"#?]+\.html)', text) if ":" not in link}
        for target in ((page.parent / link).resolve() for link in links):
            assert target.exists(), (page, target)
            stays = html / "zh" in target.parents or target == original
            assert stays or not (html / "zh" / target.relative_to(html)).exists(), (page, target)
    assert "url=zh/index.html" in (html / "zh.html").read_text("utf-8")
    if CHROMIUM is not None:
        for words in ("优化器状态", "分片", "ZeRO"):
            search = html / "zh" / "search.html"
            found, _ = in_a_browser(search, {"q": words}, html.parent / "search")
            assert 'href="lessons/lesson10_zero/lesson.html"' in found, words


@pytest.mark.full
@pytest.mark.parametrize("lesson", ["lesson05_collectives", "lesson10_zero"])
def test_a_page_of_the_book_does_not_send_its_reader_to_the_book(lesson):
    before = (ROOT / "lessons" / lesson / "lesson.ipynb").read_text("utf-8")
    texts = [
        ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        for text in (before, with_note(before, "a note"))
    ]
    there, left = ("\n".join(each) for each in texts)
    assert "run_all.sh book" in there and "run_all.sh book" not in left
    assert "controls" not in left
    assert len(there.split()) - len(left.split()) < 30


@pytest.mark.full
def test_a_broken_link_fails_the_build(tmp_path):
    pytest.importorskip("sphinx_book_theme", reason="./run_all.sh book installs what builds it")
    lay_out(ROOT, tmp_path / "source")
    for folder in (tmp_path / "source" / "lessons").glob("lesson*/"):
        shutil.rmtree(folder)
    (tmp_path / "source" / "index.md").write_text("# x\n\n[gone](nowhere.md)\n", "utf-8")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html"]
    command += [str(tmp_path / "source"), str(tmp_path / "html")]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode != 0
    assert "nowhere.md" in outcome.stderr


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
QUIET += " --disable-background-networking --disable-component-update --virtual-time-budget=10000"


# Moves every control of a page by hand, goes to the end of time, steps back by the arrow key, and
# writes down what is seen: [choice, where it began, step, how that is said, sentence, numbers,
# texts and colours of the grid, texts and widths of the bars]. Then opens a second view beside the
# first one, goes through its choices, and writes down the same of both, with the marks of the
# numbers that differ.
DRIVER = """
const root = document.querySelector("[data-explorable]"), alone = [], beside = [];
const look = (view, began) => {
  const all = (what) => [...view.querySelectorAll(what)];
  const texts = (what) => all(what).map((element) => element.textContent);
  const untimed = view.querySelector(".explorable-time[hidden]");
  const slider = view.querySelector("input");
  return [all("select").map((field) => field.value), began, untimed ? null : +slider.value,
    view.querySelector("output").textContent,
    view.querySelector(".explorable-says").textContent, texts("dd"), texts("td"),
    all("td").map((cell) => cell.style.background),
    texts(".explorable-bars > span:not([class])").filter(Boolean),
    all(".explorable-bar").map((bar) => parseFloat(bar.style.width))];
};
const drive = (view, seen, steps) => {
  const fields = [...view.querySelectorAll("select")];
  const move = (at) => {
    if (at === fields.length) {
      const slider = view.querySelector("input"), began = +slider.value;
      slider.value = slider.max;
      slider.dispatchEvent(new Event("input"));
      const last = +slider.value, key = { key: "ArrowLeft", bubbles: true };
      seen(view, began);
      const timed = steps && !view.querySelector(".explorable-time[hidden]");
      for (let step = timed ? last : 0; step > 0; step--) {
        document.body.dispatchEvent(new KeyboardEvent("keydown", key));
        seen(view, began);
      }
      return;
    }
    for (const option of fields[at].options) {
      fields[at].value = option.value;
      fields[at].dispatchEvent(new Event("change"));
      move(at + 1);
    }
  };
  move(0);
};
const first = root.querySelector(".explorable-view");
drive(first, (view, began) => alone.push(look(view, began)), true);
root.querySelector(":scope > button").click();
drive(root.querySelectorAll(".explorable-view")[1], (view, began) => {
  const marked = [...root.querySelectorAll("[data-other]")].map((element) => element.textContent);
  beside.push([look(first, began), look(view, began), marked]);
}, false);
const seen = [alone, beside];
"""
# What a driver has `seen`, for `written`.
WRITE = """
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify(seen);
document.body.append(out);
"""
NEEDED = "no Chromium here: what the pages show in a browser is not tried"


def in_a_browser(page: Path, choice: dict[str, Any], profile: Path) -> tuple[str, str]:
    """The page's document after its scripts ran, and what the browser's console says."""
    command = [str(CHROMIUM), *QUIET.split(), "--allow-file-access-from-files", "--dump-dom"]
    command += ["--enable-logging=stderr", f"--user-data-dir={profile}"]
    command += [f"{page.as_uri()}?{urlencode(choice)}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    console = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    return found.stdout, "\n".join(console)


def page_of(each: Explorable, folder: Path, driver: str = "", make: Any = explore_pages) -> Path:
    """The explorable's page alone, without the book around it."""
    text = make(LESSONS)[f"{each.name}.md"]
    html = text.split("```{raw} html\n")[1].split("\n```")[0].replace("../_static/", "")
    html += f"<script type='module'>{driver}</script>"
    (folder / "page.html").write_text(f"<!doctype html><body>{html}</body>", "utf-8")
    (folder / "explorable.js").write_text(viewer(), "utf-8")
    return folder / "page.html"


def written(
    each: Explorable, driver: str, folder: Path, choice: dict[str, Any], make: Any = explore_pages
) -> Any:
    """What a driver has seen on an explorable's page, on which the console is silent."""
    if CHROMIUM is None:
        pytest.skip(NEEDED)
    page = page_of(each, folder, driver + WRITE, make)
    found, console = in_a_browser(page, choice, folder / "profile")
    assert console == ""
    return json.loads(unescape(re.findall(r'<pre id="seen">(.*?)</pre>', found, re.DOTALL)[0]))


def named(name: str) -> Explorable:
    (each,) = (one for one in EXPLORABLES if one.name == name)
    return each


def expected(state: State, step: int | None) -> list[Any]:
    """What a page has to show of a state at a step: sentence, numbers, texts, colours."""
    says = state["says"] if isinstance(state["says"], str) else state["says"][step or 0]
    numbers = [str(value) for value in state.get("numbers", {}).values()]
    cells: list[tuple[str, str]] = []
    if "frames" in state:
        wide = max(len(row) for row in state["frames"][step or 0])
        for row in state["frames"][step or 0]:
            cells += [tuple(map(str, cell)) for cell in row]
            cells += [("", "transparent")] * (wide - len(row))
    elif "grid" in state:
        for row in state["grid"]:
            now = [(cell, state["colours"][cell[:1]]) for cell in row[: step + 1]]
            cells += now + [("", "transparent")] * (len(row) - len(now))
    return [says, numbers, [text for text, _ in cells], [as_rgb(colour) for _, colour in cells]]


def as_rgb(colour: str) -> str:
    """A colour as browsers write it."""
    if not colour.startswith("#"):
        return colour
    return f"rgb({', '.join(str(int(colour[n : n + 2], 16)) for n in (1, 3, 5))})"


def number(value: float) -> str:
    """A number as the page writes it: three digits that count, 26.25 as 26.3."""
    rounded = f"{Context(prec=3, rounding=ROUND_HALF_UP).create_decimal(Decimal(str(value))):,f}"
    return rounded.rstrip("0").removesuffix(".") if "." in rounded else rounded


def sums_of(panel: State) -> dict[str, float]:
    """The lengths of a panel's bars."""
    return {row: sum(parts) for row, parts in panel["rows"] if not isinstance(parts, str)}


def bars_of(panel: State, beside: State | None = None) -> tuple[list[str], list[float]]:
    """The texts beside a panel's bars, and how wide each part is, in percent.

    The bars in the same place of a state `beside` it have the same scale.
    """
    sums, peers = sums_of(panel), [panel, beside or panel]
    most = 1.05 * max(max(p["line"] or 0, *sums_of(p).values(), 0) for p in peers) or 1
    labels = [
        f"{row} {number(sums[row])} {panel['unit']}" if row in sums else row
        for row, _ in panel["rows"]
    ]
    parts = [part for _, each in panel["rows"] if not isinstance(each, str) for part in each]
    return labels, [100 * part / most for part in parts]


def legend_of(panel: State) -> list[str]:
    """The texts above a panel's bars: its kinds, with their size where there is one bar."""
    sizes = panel["rows"][0][1] if len(panel["rows"]) == 1 else ()
    unit = panel["unit"]
    texts = [kind for kind, _ in panel["kinds"]]
    if sizes:
        texts = [f"{kind} {number(size)} {unit}" for kind, size in zip(texts, sizes, strict=True)]
    return [*texts, f"dashed: {number(panel['line'])} {unit}"] if panel["line"] else texts


def in_this_course(each: Explorable) -> Any:
    """The explorables of lessons that stand."""
    there = any(name.startswith(f"lesson{each.lesson}") for name in LESSONS)
    return pytest.param(each, id=each.name, marks=[] if there else pytest.mark.skip(each.lesson))


@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.parametrize("each", [in_this_course(each) for each in EXPLORABLES])
def test_a_browser_shows_what_python_computes_for_every_choice_and_moment(each, tmp_path):
    states = each.states
    alone, beside = written(each, DRIVER, tmp_path, {})
    for row in alone:
        shows_what_python_has(row, states, {})
        began, state = row[1], states["|".join(row[0])]
        assert row[2] is None or began == state.get("begins", last_moment(state))
    for first, second, marked in beside:
        one, other = (states["|".join(row[0])] for row in (first, second))
        shows_what_python_has(first, states, other)
        shows_what_python_has(second, states, one)
        assert marked == [*not_said(one, other), *not_said(other, one)], (first, second)
    for rows in (alone, [second for _, second, _ in beside]):
        assert {"|".join(row[0]) for row in rows} == set(states)
    lengths = [last_moment(state) + 1 for state in states.values()]
    assert len(alone) == sum(lengths)


def last_moment(state: State) -> int:
    """The last step of a state's film, 0 where it has none."""
    return len(state["frames"] if "frames" in state else state.get("grid", [[0]])[0]) - 1


def shows_what_python_has(row: list[Any], states: dict[str, State], beside: State) -> None:
    """Assert that a view shows its choice's state, with bars on one scale with those beside it."""
    choice, _, step, of, *shown, labels, widths = row
    state = states["|".join(choice)]
    assert shown == expected(state, step), (choice, step)
    if step is not None:
        last = last_moment(state)
        at, end = (step, last) if "frames" in state else (step + 1, last + 1)
        assert of == f" step {at} of {end}"
    both = (each.get("panels", ()) for each in (state, beside))
    pairs = [pair for pair in itertools.zip_longest(*both) if pair[0]]
    wanted = [bars_of(*pair) for pair in pairs]
    assert labels == [label for texts, _ in wanted for label in texts], choice
    assert widths == pytest.approx([w for _, wide in wanted for w in wide], rel=1e-3), choice


def not_said(state: State, other: State) -> list[str]:
    """The numbers of a state, as a page writes them, that the state beside it does not have."""

    def told(each: State) -> list[tuple[str, str]]:
        bars = [
            (panel["title"], text)
            for panel in each.get("panels", ())
            for text in (*legend_of(panel), *bars_of(panel)[0])
        ]
        return [*bars, *((name, str(value)) for name, value in each.get("numbers", {}).items())]

    theirs = told(other)
    return [text for name, text in told(state) if theirs and (name, text) not in theirs]


@pytest.mark.full
def test_an_address_with_a_step_that_is_none_shows_where_the_film_begins(tmp_path):
    if CHROMIUM is None:
        pytest.skip(NEEDED)
    each = named("ring")
    page = page_of(each, tmp_path)
    says = each.states["3"]["says"]
    for step, wanted in {"": 3, "x": 3, "1.5": 3, "99": -1, "-2": 0, "1": 1}.items():
        shown, console = in_a_browser(page, {"ranks": 3, "step": step}, tmp_path / step)
        assert f'aria-live="polite">{says[wanted]}</p>' in shown, step
        assert console == ""


# Opens a second view, moves it, and waits until the address says so.
ADDRESS = """
const root = document.querySelector("[data-explorable]");
root.querySelector(":scope > button").click();
const slider = root.querySelectorAll(".explorable-time input")[1];
slider.value = 1;
slider.dispatchEvent(new Event("input"));
await new Promise((done) => setTimeout(done, 500));
document.body.append(location.search);
"""


@pytest.mark.full
def test_an_address_opens_both_views_where_they_were(tmp_path):
    if CHROMIUM is None:
        pytest.skip(NEEDED)
    each = named("ring")
    page, says = page_of(each, tmp_path, ADDRESS), each.states["3"]["says"]
    found, _ = in_a_browser(page, {"ranks": 3, "step": 2}, tmp_path / "profile")
    address = unescape(re.findall(r"\?ranks[^<]*", found)[-1]).strip()
    found, console = in_a_browser(page_of(each, tmp_path), dict(parse_qsl(address[1:])), tmp_path)
    assert re.findall(r'aria-live="polite">(.*?)</p>', found) == [says[2], says[1]]
    assert console == ""


def test_the_ring_of_the_picture_is_the_ring_of_the_lesson():
    lesson = pytest.importorskip("solutions.lesson05_collectives")
    for ranks in (2, 3, 5):
        state = ring(ranks)
        for rank, sent in enumerate(run_ranks(_sent_around_the_ring, ranks, lesson)):
            before = [frame[rank] for frame in state["frames"][:-1]]
            for step, (chunk, names) in enumerate(sent):
                assert before[step][chunk][0] == names, (ranks, rank, step)


def _sent_around_the_ring(rank: int, lesson: Any) -> list[tuple[int, str]]:
    """What the lesson's all-reduce sends in each step: the chunk, and whose numbers are in it.

    Rank r gives 2^r in every chunk, and 64 times the chunk's number n times, so that a message
    tells its chunk and whose numbers it holds.
    """
    ranks = dist.get_world_size()
    tensor = torch.tensor([2**rank + (64 * chunk) * 2**10 for chunk in range(ranks)])
    with count_traffic(keep=True) as traffic:
        lesson.ring_all_reduce(tensor)
    found = []
    for call in traffic.calls:
        if call.op == "send":
            number = call.content.view(torch.int64).item()
            whose = [r for r in range(ranks) if number % 64 & 2**r]
            found.append((number // 2**16 // len(whose), "+".join(map(str, whose))))
    return found


def test_recorded_steps_send_what_the_formulas_say():
    for ranks, layers, cap in ((2, 4, 4), (2, 6, 16), (2, 8, 1024)):
        numbers = ddp_step(ranks, layers, cap)["numbers"]
        assert numbers["messages"] == -(-layers * 4 // max(cap, 4))
        there = numbers["gradients that are there when the first is sent"]
        assert there == min(layers, max(cap, 4) // 4)
    for after, gathers in (("freed", 8), ("kept", 4)):
        for ahead in ("no", "yes"):
            numbers = fsdp_step(2, 4, after, ahead)["numbers"]
            assert (numbers["all-gathers"], numbers["reduce-scatters"]) == (gathers, 4)
            assert numbers["units whole at once, at most"] == (
                4 if after == "kept" else 2 if ahead == "yes" else 1
            )
    numbers = tensor_parallel_step(2, 64, 32)["numbers"]
    assert numbers["a rank sends for them, round a ring"] == "16.0 KiB"  # 2 x 64 x 32 x 4 bytes
    assert numbers["data parallel would send, for the same weights"] == "32.0 KiB"
    assert [kib(each) for each in (256, 288, 4096)] == ["0.25 KiB", "0.28 KiB", "4.0 KiB"]


def test_a_pipeline_that_ran_kept_to_its_table_and_waited_about_as_long():
    planned, ran = (pipeline_picture("1F1B", 2, 4, shown) for shown in ("planned", "as it ran"))
    for wanted, seen in zip(planned["grid"], ran["grid"], strict=True):
        assert list(dict.fromkeys(filter(None, seen))) == list(filter(None, wanted))
    numbers = ran["numbers"]
    assert float(numbers["waiting, measured"][:-1]) >= 15  # by the table 1 in 5
    assert numbers["waiting, counted in the table"] == "20.0%"
    assert numbers["micro-batches kept at once, rank 0"] == 2
    kept = [
        pipeline_picture("interleaved, v = 2", 2, 4, shown)["numbers"]
        for shown in ("planned", "as it ran")
    ]
    assert [each["micro-batches kept at once, rank 0"] for each in kept] == [5, 5]
    assert pipeline_picture("1F1B", 8, 4, "as it ran")["refused"]


@pytest.mark.parametrize("each", EXPLORABLES, ids=lambda each: each.name)
def test_an_explorable_is_small_and_refuses_in_words(each):
    assert len(each.as_json().encode()) <= 100_000
    assert all(state["says"] for state in each.states.values())
    units = [[p["unit"] for p in state.get("panels", ())] for state in each.states.values()]
    for place in itertools.zip_longest(*units):  # have one scale, beside each other
        assert len({unit for unit in place if unit}) <= 1
    for state in each.states.values():  # bold letters, 13 high on a phone, of 420
        assert len(state.get("fills", {}).get("title", "")) <= 50


def test_the_viewer_computes_nothing_and_is_short():
    for path in (ROOT / "shared" / "book").glob("*.js"):
        assert len(path.read_text("utf-8").splitlines()) <= 200
    assert "http" not in viewer()


# Moves the first control inside the frame of a notebook's picture, and writes down what it says.
INSIDE = """
const frame = document.querySelector("iframe"), seen = document.createElement("pre");
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
frame.addEventListener("load", async () => {
  await wait(1000);
  const inside = frame.contentDocument, field = inside.querySelector("select");
  const says = () => inside.querySelector(".explorable-says").textContent;
  const first = says();
  field.value = field.options[field.options.length - 1].value;
  field.dispatchEvent(new Event("change", { bubbles: true }));
  await wait(1000);
  const spare = parseFloat(frame.style.height) - inside.body.scrollHeight;
  seen.id = "seen";
  seen.textContent = JSON.stringify([first, says(), spare]);
  document.body.append(seen);
});
"""


@pytest.mark.full
def test_a_notebook_s_picture_answers_in_its_frame_and_is_a_still_elsewhere(tmp_path):
    if CHROMIUM is None:
        pytest.skip(NEEDED)
    each = named("pipeline")
    last = each.controls["schedule"][-1]
    expected = [each.state(*each.first_choice), each.state(last, *each.first_choice[1:])]
    html = show_explorable("pipeline", live=True)._repr_html_()
    page = tmp_path / "notebook.html"
    page.write_text(f"<!doctype html><body>{html}<script>{INSIDE}</script></body>", "utf-8")
    found, console = in_a_browser(page, {}, tmp_path / "profile")
    assert console == ""
    first, moved, spare = json.loads(unescape(re.findall(r'"seen">(.*?)</pre>', found)[0]))
    assert (first, moved) == tuple(state["says"] for state in expected)
    assert 0 <= spare <= 8, "the frame is as high as its picture"
    still = show_explorable("pipeline")._repr_html_()
    assert "<script" not in still
    assert expected[0]["says"] in still


def test_every_picture_stands_in_its_lesson_s_notebook_and_a_wrong_name_is_told():
    for each in map(in_this_course, EXPLORABLES):
        if each.marks:
            continue
        (explorable,) = each.values
        (path,) = ROOT.glob(f"lessons/lesson{explorable.lesson}_*/lesson.ipynb")
        assert f'show_explorable(\\"{explorable.name}\\")' in path.read_text("utf-8"), path
    with pytest.raises(InputError, match=r"no picture 'rings': take one of one_gpu, .*pipeline"):
        show_explorable("rings")
