"""The page of the plain scripts shows them as they are."""

import re

from shared.book.first_lines import FIRST, OTHERS, PAGE, filled, script_of


def test_the_page_shows_the_scripts_as_they_are():
    page = PAGE.read_text("utf-8")
    assert page == filled(page), "python -m shared.book.first_lines puts them in again"
    _, head, *rows = (line for line in page.split("\n## ")[1].splitlines() if line[:1] == "|")
    scripts = re.findall(r"\((\w+)/plain\.py\)", page.split("## Side by side")[1])
    assert scripts == [FIRST, *OTHERS]
    assert head == "|" + "---|" * 7
    for row in rows[: rows.index("|---|---|") - 1]:
        for script, cell in zip(scripts, row.split("|")[2:-1], strict=True):
            for code in re.findall(r"`([^`]+)`", cell):
                assert code.replace("(...)", "(") in script_of(script), (script, code)
