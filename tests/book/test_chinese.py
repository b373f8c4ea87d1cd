"""The translations: whole, as the notebook is now, and with its code and numbers."""

import json
import re
from pathlib import Path

import pytest

from shared.book.build import lay_out_chinese
from shared.book.chinese import (
    chinese_pictures,
    faults,
    messages,
    po_file,
    read_po_file,
    translated,
)
from shared.book.explorables import EXPLORABLES
from shared.book.explore import explore_pages, viewer
from shared.book.guesses import GUESSES
from shared.book.labels import NUMBER, VIEWER, chinese

pytest.importorskip("myst_nb", reason="./run_all.sh book installs what builds it")
ROOT = Path(__file__).resolve().parents[2]
LESSON = "lesson10_zero"


def notebook_of(lesson: str) -> str:
    return (ROOT / "lessons" / lesson / "lesson.ipynb").read_text("utf-8")


def test_lesson_10_is_translated():
    assert LESSON in translated(ROOT)


@pytest.mark.parametrize("lesson", translated(ROOT))
def test_a_translation_says_what_the_notebook_says_now(lesson):
    out_of_date = list(faults(messages(notebook_of(lesson)), read_po_file(po_file(lesson))))
    assert not out_of_date, "\n".join([f"python -m shared.book.chinese {lesson}:", *out_of_date])


@pytest.mark.full
def test_a_sentence_that_changes_is_named_once_as_it_was_and_once_as_it_is():
    notebook = notebook_of(LESSON).replace("Gradients are reduce-*", "All gradients are reduce-*")
    assert notebook != notebook_of(LESSON)
    old, new = faults(messages(notebook), read_po_file(po_file(LESSON)))
    assert old.startswith("the notebook no longer says: Gradients are reduce-*scattered*.")
    assert new.startswith("not translated: All gradients are reduce-*scattered*.")


@pytest.mark.parametrize(
    ("said", "flags", "fault"),
    [
        ("每个参数 16 字节，`step()`", (), []),
        ("", (), ["not translated"]),
        ("每个参数 16 字节，`step()`", ("fuzzy",), ["marked fuzzy, to be looked at"]),
        ("每个参数 12 字节，`step()`", (), ["other numbers (['16'], ['12'])"]),
        ("每个参数 16 字节，`stop()`", (), ["other code (['`step()`'], ['`stop()`'])"]),
    ],
)
def test_what_is_wrong_with_a_message_is_said(said, flags, fault):
    from babel.messages import Catalog

    now, catalog = Catalog(), Catalog("zh_CN")
    now.add("16 bytes a parameter, `step()`")
    catalog.add("16 bytes a parameter, `step()`", said, flags=flags)
    found = list(faults(now, catalog))
    assert [re.sub(r": 16 bytes.*", "", line) for line in found] == fault


def test_what_is_laid_out_has_its_hints_in_chinese_and_its_code_as_it_was(tmp_path):
    lay_out_chinese(ROOT, tmp_path)
    before = json.loads(notebook_of(LESSON))["cells"]
    after = json.loads((tmp_path / "lessons" / LESSON / "lesson.ipynb").read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in after]
    assert sum("<summary>提示</summary>" in text for text in texts) == 7
    assert not any("<summary>Hint" in text for text in texts)
    named = re.findall(r"\[([^]]+)\]\(\.\./\.\./explore/(\w+)\.md\)", texts[0])
    assert [name for _, name in named] == ["zero_stages", "offload"]
    assert all(re.search("[一-鿿]", title) for title, _ in named)  # as is all around them
    for one, other in zip(before, after, strict=True):
        if one["cell_type"] == "code":
            assert "".join(one["source"]) == "".join(other["source"])
            alive = "<div data-explorable=" in json.dumps(other["outputs"])  # a picture of the book
            assert alive or one["outputs"] == other["outputs"]


NAMES = re.compile(r"\b(?:GPU|GB|GB/s|ZeRO|DeepSpeed|float\d+)\b")


@pytest.mark.parametrize(
    "each", [e for e in EXPLORABLES if any(n[6:8] == e.lesson for n in translated(ROOT))]
)
def test_all_that_a_picture_of_a_chinese_page_says_is_in_chinese(each):
    left = set()

    def looked_at(text: str) -> str:
        made = chinese(text)
        assert sorted(NUMBER.findall(made)) == sorted(NUMBER.findall(text))
        assert not re.search("[一-鿿] [一-鿿]", made)
        if re.search("[A-Za-z]{2}", NAMES.sub("", made)):
            left.add(text)
        return made

    content = json.loads(each.as_json(looked_at))
    looked_at(each.title)
    assert not left
    assert re.match("猜一猜：[^A-Za-z]", content["guess"]["asks"])
    assert content["guess"]["is"] == GUESSES[each.name].as_data(each.states)["is"]
    said = set(re.findall(r'(?:say|button)\(\s*(?:[^"()]*\? )?"([^"]+)"', viewer()))
    assert said <= set(content["words"])
    assert set(VIEWER) <= said | {"one alone", "compare", "the mark"}
    page = chinese_pictures(translated(ROOT))[f"{each.name}.md"]
    english = explore_pages(translated(ROOT))[f"{each.name}.md"]
    assert ("方向键" in page) == ("arrow keys" in english)
    asked, _, _ = page.partition("```")
    assert len(re.findall("[一-鿿]", asked)) > 15 and "Jupyter" not in asked


def test_words_of_a_chinese_search_are_pairs_of_characters_and_latin_words():
    from shared.book.chinese_search import Pairs

    assert Pairs({}).split("优化器 ZeRO-3，梯") == ["优化", "化器", "梯", "ZeRO", "3"]
