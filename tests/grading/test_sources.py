"""Sources as trees: threads that read at the same time get whole trees; what imports bind."""

import ast
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from solutions.grading.intake.sources import Module, Renamed, parsed

SOURCE = Path(ast.__file__).read_text(encoding="utf-8")[:30_000].rpartition("\n\n\n")[0]


class Garbage:
    """Runs Python whenever the collector comes by, so that another thread takes over there."""

    def __init__(self):
        self.me = self

    def __del__(self):
        for _ in range(200):
            pass


@pytest.fixture
def restless_threads():
    """Threads that change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_do_not_disturb_each_other(restless_threads):
    def read(_: int) -> str:
        garbage = [Garbage() for _ in range(20)]
        del garbage
        return ast.dump(parsed(SOURCE))

    with ThreadPoolExecutor(4) as pool:
        trees = set(pool.map(read, range(100)))
    assert trees == {ast.dump(ast.parse(SOURCE))}


def test_an_odd_escape_is_not_told_and_the_filters_stay():
    before = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parsed(r'"\d"').body
    assert warnings.filters == before
    with pytest.raises(SyntaxError):
        parsed("1 +")


def test_an_import_of_a_module_in_a_package_binds_the_package():
    """`import torch` and then `import torch.utils.checkpoint` gave cells with one name for both."""
    source = "import torch\nimport torch.utils.checkpoint\nimport torch.nn.functional as F\n"
    imports = Module.read("", source).imports
    assert imports == {"torch": ("torch", ""), "F": ("torch.nn.functional", "")}


def test_a_modules_name_that_a_function_gives_a_value_is_global():
    tree = parsed("def f(self):\n    limits.most, before = 1, limits.most\n    return before")
    renamed = Renamed({}, lambda owner, name: f"_{owner}_{name}").visit(tree)
    names = {"_limits_most": 5}
    exec(compile(ast.fix_missing_locations(renamed), "cell", "exec"), names)
    assert (names["f"](None), names["_limits_most"]) == (5, 1)
