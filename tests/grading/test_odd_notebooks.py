"""Thirty honest notebooks in odd styles and shapes: their answers are read, none is flagged."""

from dataclasses import replace
from pathlib import Path

import pytest

from solutions.grading.intake.lesson import take_answers
from solutions.grading.results import Answers, Limits
from solutions.grading.sandbox.run import Workspace
from tests.grading.test_lesson import LESSON, PADDING, code, notebook

ROOT = Path(__file__).resolve().parents[2]
DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass A:\n    n: int\n"


def with_lines(*lines):
    """The answer with further lines at its beginning."""
    return PADDING.replace("    return", "".join(f"    {line}\n" for line in lines) + "    return")


STYLES = {
    "async helper": "async def wait():\n    return 1\n\n" + PADDING,
    "decorator of its own": "def same(f):\n    return f\n\n\n@same\n" + PADDING,
    "torch.no_grad": PADDING.replace("def ", "@torch.no_grad()\ndef "),
    "partial": "from functools import partial\nones = partial(torch.ones, 3)\n" + PADDING,
    "lambda": "equal = lambda a, b: a != b\n" + PADDING,
    "import inside": with_lines("import torch as t", "from torch import nn"),
    "dataclass": DATACLASS + PADDING,
    "walrus": PADDING.replace("tokens != pad_id", "(m := tokens != pad_id)"),
    "f-string": PADDING + "x = 3\nprint(f'{x!r:>9} {{x}} {x + 1=}')\n",
    "match": PADDING + "match 3:\n    case int() as n:\n        print(n)\n",
    "imports again": "import math, torch\nfrom torch import nn\nimport numpy as np\n" + PADDING,
    "a line of != more": with_lines("equal = (", "    tokens", "    != pad_id", ")"),
    "a line of % more": PADDING + "n = 3\nprint(\n    7\n    % n\n)\n",
    "future": "# mine\nfrom __future__ import annotations\n" + PADDING,
    "pictures": PADDING + "import matplotlib.pyplot as plt\nplt.show()\n",
    "its check below": PADDING + 'check("02.2", padding_mask)\n',
    "shown": PADDING + "padding_mask(torch.ones(2, 2))\ndisplay(padding_mask)\n",
    "the old one commented": "# " + PADDING.replace("\n", "\n# ") + "\n" + PADDING,
    "emoji": PADDING + 'x = "😀"  # “so”\n',
    "as a script": PADDING + 'if __name__ == "__main__":\n    print(1)\n',
    "a counter": "calls = 0\n" + with_lines("global calls", "calls += 1"),
    "try": with_lines("try:", "    1 / 1", "except Exception as e:", "    print(e)"),
    "annotated": PADDING.replace("(tokens", '(tokens: "Tensor"'),
    "carriage returns": PADDING.replace("\n", "\r"),
    "lines of Windows": PADDING.replace("\n", "\r\n"),
}
METADATA = {
    "Colab": {"accelerator": "GPU", "colab": {"provenance": [], "toc_visible": True}},
    "VS Code": {"language_info": {"name": "python"}, "orig_nbformat": 4},
    "Kaggle": {"kaggle": {"accelerator": "gpu", "dataSources": [], "isInternetEnabled": True}},
}
FORMS = {
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "lines of Windows": lambda text: text.replace(', "', ',\r\n"').encode(),
    "format 4.0": lambda text: text.replace('"nbformat_minor": 5', '"nbformat_minor": 0').encode(),
    "no minor format": lambda text: text.replace('"nbformat_minor": 5, ', "").encode(),
    "not a number": lambda text: text.replace('ta": {}', 'ta": {"x": NaN}').encode(),
}


def is_taken(notebook, cell):
    answers = take_answers("Ada", LESSON, notebook)
    found = answers.cells, answers.flags, answers.notes
    return found == ({"02.2": cell}, {"02.2": ()}, {}) or answers


@pytest.mark.parametrize("case", STYLES)
def test_a_cell_in_an_odd_style(case):
    cells = "!pip install torch", STYLES[case], "%%bash\nls", "n = 3"
    assert is_taken(notebook(*cells), STYLES[case]) is True


@pytest.mark.parametrize("case", STYLES)
def test_the_same_cell_timed(case):
    cell = f"%%time\n{STYLES[case]}"
    assert is_taken(notebook(cell), f"# {cell}") is True


@pytest.mark.parametrize("case", METADATA)
def test_a_notebook_as_other_programs_save_it(case):
    markdown = {"cell_type": "markdown", "source": f"```\n{PADDING}```", "metadata": {}}
    raw, heading = ({**markdown, "cell_type": each} for each in ("raw", "heading"))
    metadata = {"vscode": {"languageId": "python"}, "id": "aB3", "outputId": "x"}
    cells = markdown, raw, heading, code(PADDING, metadata=metadata)
    assert is_taken(notebook(*cells, metadata=METADATA[case]), PADDING) is True


@pytest.mark.parametrize("case", FORMS)
def test_a_file_in_any_form_that_json_has(case):
    cell = PADDING + 'text = "größer, 长"\n'
    assert is_taken(FORMS[case](notebook(cell).decode()), cell) is True


def test_outputs_of_megabytes():
    picture = {"output_type": "display_data", "data": {"image/png": "A" * 15_000_000}}
    printed = {"output_type": "stream", "text": ["step 1: 2.0\n"] * 200_000}
    assert is_taken(notebook(code(PADDING, outputs=[picture, printed])), PADDING) is True


@pytest.mark.full
def test_all_of_them_are_judged_as_right():
    """In one run, as further answers to one exercise."""
    ready = "return tokens != pad_id", "return (tokens != pad_id)[:, None, None]"
    walrus = "return (m := tokens != pad_id)", "return (m := tokens != pad_id)[:, None, None]"
    lines = {"lines of Jupyter": f"%%time\n!ls\n{PADDING}size = %time 3\nif size:\n    %who\n"}
    cells = {}
    for case, source in {**STYLES, **lines}.items():
        source = source.replace(*ready).replace(*walrus)
        cells[f"02.2 {case}"] = take_answers("Ada", LESSON, notebook(source)).cells["02.2"]
    [exercise] = [each for each in LESSON.exercises if each.id == "02.2"]
    exercises = tuple(replace(exercise, id=id, of="02.2") for id in cells)
    stubs = {**dict.fromkeys(cells, ""), **LESSON.stubs}
    lesson = replace(LESSON, exercises=exercises, stubs=stubs)
    with Workspace(ROOT, confined=False) as workspace:
        verdicts = workspace.grade(Answers("Ada", "02", cells, {}), lesson, Limits())
    odd = {each.exercise: (each.message, each.flags) for each in verdicts if not each.points}
    assert odd == {}
