"""Write report.html: the tables and pictures of one run, on one page that needs no other file."""

import base64
import functools
import html
import json
import os
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.cli.command import ROOT
from shared.cli.display import OPEN
from shared.cli.machine import describe_machine
from shared.ranks.logs import last_words

# Shown in the lesson's head or in the machine's line, not among its numbers.
SETTINGS = ("preset", "seed", "commit")
HEAD_KEYS = {"lesson", "run", "when", "world_size", "device", "backend", "torch", "seconds"}
HEAD_KEYS |= {"headline", "table", "figures", *SETTINGS}
MAX_ROWS = 60
NOISE = (
    "≈: a time of this one run on this machine, or made of times, to two digits. Another run gives"
    " others; where other programs ran beside it, a factor of two can be noise."
)
SECONDS = (
    "Seconds are those of the whole program, its start included; a lesson's own line has those"
    " since the script began."
)


def write_report(out: Path, results: Sequence[Mapping[str, Any]], run: str) -> Path:
    """Write the page from how each lesson of a run went and the numbers it left; return its path.

    `out` holds a folder for each lesson. Numbers of another run than `run` are not shown.
    """
    records = [(result, _read(out / result["lesson"] / "metrics.json", run)) for result in results]
    page = _PAGE.format(
        style=_STYLE,
        machine=_definitions(describe_runs([metrics for _, metrics in records])),
        overview=_overview(records, out),
        lessons="\n".join(_section(out / record["lesson"], m, record) for record, m in records),
        when=time.strftime("%Y-%m-%d %H:%M"),
    )
    path = out / "report.html"
    aside = path.with_suffix(".part")
    aside.write_text(page, encoding="utf-8")
    aside.replace(path)
    return path


def describe_runs(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return devices and torch as the scripts saw them, then what describes the machine."""
    seen = {
        key: sorted({str(r[key]) for r in records if r.get(key)}) for key in ("device", "torch")
    }
    return {
        **{key: ", ".join(found) or "no run yet" for key, found in seen.items()},
        **describe_machine(),
    }


def _read(path: Path, run: str) -> dict[str, Any]:
    """Return the numbers; none if they are of another run, which a script by hand is as well."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("run") == run else {}


def _lesson_link(name: str, out: Path) -> str:
    """A link to a lesson: its page of the book where that is built, else its notebook; or ""."""
    pages = {"page": "runs/book/html/lessons/{}/lesson.html", "notebook": "lessons/{}/lesson.ipynb"}
    for what, where in pages.items():
        if (target := ROOT / where.format(name)).exists():
            return (
                f'<a href="{html.escape(Path(os.path.relpath(target, out)).as_posix())}">{what}</a>'
            )
    return ""


@functools.cache
def _columns() -> dict[str, tuple[str, bool]]:
    """Column, a # for each number in it, to what it is, and whether it is a time."""
    table = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
    return {
        name: (says, kind == "timed") for kind, part in table.items() for name, says in part.items()
    }


def _column(name: str) -> tuple[str, bool]:
    table = _columns()
    return table.get(name) or table.get(re.sub(r"\d+(\.\d+)?", "#", name), ("", False))


def _overview(records: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], out: Path) -> str:
    rows = []
    for run, metrics in records:
        name, seconds = run["lesson"], run["seconds"]
        what = run["problem"] or metrics.get("headline", "")
        what = f"{what} (warning: {run['warning']})" if run.get("warning") else what
        rows.append(
            f'<tr><td><a href="#{html.escape(name)}">{_title(name)}</a></td>'
            f"<td>{_lesson_link(name, out)}</td><td>{_chip(run)}</td>"
            f'<td class="number">{_text(seconds)}</td><td>{html.escape(str(what))}</td></tr>'
        )
    head = (
        "<tr><th>lesson</th><th></th><th>last run</th><th>seconds</th>"
        "<th>the figure that matters</th></tr>"
    )
    note = f'<p class="facts">{SECONDS}</p>'
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>{note}'


def _section(folder: Path, metrics: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    anchor = html.escape(folder.name)
    link = _lesson_link(folder.name, folder.parent)
    parts = [f'<section id="{anchor}"><h2>{_title(folder.name)} {_chip(run)} {link}</h2>']
    if metrics.get("headline"):
        parts.append(f'<p class="headline">{html.escape(str(metrics["headline"]))}</p>')
    facts = [f"{metrics['world_size']} ranks"] if "world_size" in metrics else []
    facts += [str(metrics[key]) for key in ("backend", "device") if key in metrics]
    facts += [f"torch {metrics['torch']}"] if "torch" in metrics else []
    facts += [f"{key} {metrics[key]}" for key in SETTINGS if metrics.get(key) not in (None, "")]
    facts += [f"{_text(metrics['seconds'])} s in the script"] if "seconds" in metrics else []
    facts += [f"run on {run['when']}"]
    parts.append(f'<p class="facts">{html.escape(" · ".join(facts))}</p>')
    if run["problem"]:
        parts.append(f'<p class="problem">{html.escape(run["problem"])}</p>')
    if _verdict(run) == "failed":
        parts.append(f"<pre>{html.escape(_log_tail(folder / 'run.log'))}</pre>")
    if run.get("warning"):
        parts.append(f'<p class="problem">Warning: {html.escape(run["warning"])}</p>')
    parts.append(_table(metrics.get("table")))
    parts.append(_pictures(folder, metrics))
    parts.append(_more(metrics))
    return "\n".join([*parts, "</section>"])


def _title(name: str) -> str:
    number, _, topic = name.removeprefix("lesson").partition("_")
    return html.escape(f"{number} {topic.replace('_', ' ')}")


def _chip(run: Mapping[str, Any]) -> str:
    verdict = _verdict(run)
    return f'<span class="chip {verdict[:4]}">{verdict}</span>'  # pass, fail, open


def _verdict(run: Mapping[str, Any]) -> str:
    if run["problem"].endswith(OPEN):
        return "open"
    return "failed" if run["problem"] else "passed"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _table(rows: Any) -> str:
    """Return a list of rows as a table, and "" for anything else."""
    if not _is_table(rows):
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {c for c in columns if all(_is_number(row.get(c, 0)) for row in rows)}
    kinds = {column: ' class="number"' if column in numeric else "" for column in columns}
    says = {column: _column(str(column)) for column in columns}
    head = "".join(f"<th{kinds[c]}>{'≈ ' * says[c][1]}{html.escape(str(c))}</th>" for c in columns)
    body = []
    for row in rows[:MAX_ROWS]:
        texts = {c: (_rough if says[c][1] else _text)(row.get(c, "")) for c in columns}
        cells = (f"<td{kinds[c]}>{html.escape(texts[c])}</td>" for c in columns)
        body.append(f"<tr>{''.join(cells)}</tr>")
    left = len(rows) - MAX_ROWS
    note = f'<p class="facts">{left} more rows in metrics.json</p>' if left > 0 else ""
    note += f'<p class="facts">{NOISE}</p>' if any(timed for _, timed in says.values()) else ""
    if told := {str(c): what for c, (what, _) in says.items() if what}:
        summary = "<summary>What the columns are</summary>"
        note += f'<details>{summary}<div class="columns">{_definitions(told)}</div></details>'
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>{note}'


def _rough(value: Any) -> str:
    """A time by the two digits that a second run has a chance to repeat."""
    if not _is_number(value) or not value:
        return _text(value)
    rounded = float(f"{value:.1e}")
    return _text(int(rounded) if abs(rounded) >= 10 else rounded)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pictures(folder: Path, metrics: Mapping[str, Any]) -> str:
    """Return the figures that the run drew."""
    figures = []
    for picture in (folder / name for name in metrics.get("figures", [])):
        data = base64.b64encode(picture.read_bytes()).decode("ascii")
        name = html.escape(picture.stem.replace("_", " "))
        figures.append(
            f'<figure><img alt="{name}" src="data:image/png;base64,{data}">'
            f"<figcaption>{name}</figcaption></figure>"
        )
    return f'<div class="figures">{"".join(figures)}</div>' if figures else ""


def _more(metrics: Mapping[str, Any]) -> str:
    """Return what else the script recorded, folded away: further tables, then single values."""
    rest = {key: value for key, value in metrics.items() if key not in HEAD_KEYS}
    tables = {key: value for key, value in rest.items() if _is_table(value)}
    single = {k: _text(v) for k, v in rest.items() if isinstance(v, str | int | float)}
    parts = [f"<h3>{html.escape(key)}</h3>{_table(value)}" for key, value in tables.items()]
    if single:
        parts.append(_definitions(single))
    if not parts:
        return ""
    return f"<details><summary>More of metrics.json</summary>{''.join(parts)}</details>"


def _definitions(entries: Mapping[str, str]) -> str:
    pairs = (
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
        for key, value in entries.items()
    )
    return f"<dl>{''.join(pairs)}</dl>"


def _log_tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else "no log"
    return "\n".join(last_words(text))


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #dde3e9; --page: #f5f7f9;
  --card: #fff; --accent: #0072b2; --good: #006b4c; --good-bg: #d9f2e8; --bad: #9c3000;
  --bad-bg: #fde3d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa7b4; --line: #333d47;
  --page: #14191f; --card: #1c232b; --accent: #56b4e9; --good: #8fe3c4; --good-bg: #12392d;
  --bad: #ffb692; --bad-bg: #4a2413; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 0; }
h3 { font-size: 1rem; margin: 1rem 0 .4rem; } a { color: var(--accent); text-decoration: none; }
section, header { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.25rem 1.5rem; margin-bottom: 1.25rem; }
.facts, figcaption, dt { color: var(--soft); font-size: .86rem; } .facts { margin: .2rem 0 1rem; }
.headline { font-size: 1.1rem; font-weight: 600; margin: .5rem 0 0; }
.chip { font-size: .74rem; font-weight: 600; border-radius: 99px; padding: .12rem .6rem;
  vertical-align: middle; white-space: nowrap; }
.pass { color: var(--good); background: var(--good-bg); }
.fail { color: var(--bad); background: var(--bad-bg); }
.problem { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; } th { color: var(--soft); font-weight: 600; }
.number { text-align: right; } header table { width: 100%; }
dl { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: 1rem 0; } dd { margin: 0; }
.figures { display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); }
figure { margin: 0; }
figure img { max-width: 100%; height: auto; border-radius: 6px; background: #fff; }
.columns dl { display: block; margin: .4rem 0; } .columns div { margin-bottom: .2rem; }
.columns dt, .columns dd { display: inline; }
.columns dt { font-weight: 600; padding-right: .5rem; }
@media (max-width: 600px) { section, header { padding: 1rem; }
  header tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--line); }
  header td, header th { border: 0; padding: .1rem .9rem .1rem 0; }
  header td:last-child, header th:last-child { flex-basis: 100%; } }
pre { overflow-x: auto; background: var(--page); padding: .8rem; font-size: .82rem; }
summary { cursor: pointer; color: var(--soft); margin-top: 1rem; font-size: .9rem; }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Torch-Handle: what the runs measured</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>
<body><main><header><h1>What the runs measured</h1>
<p class="facts">Written on {when} from the metrics.json and figures in runs/.</p>
{machine}
{overview}</header>
{lessons}
</main></body></html>
"""
