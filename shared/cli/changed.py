"""`./run_all.sh test --changed [REVISION]`: test what imports, runs, shows or reads what changed.

`python -m shared.cli.changed REVISION ARGUMENT ...` says what it selects and why, and becomes
pytest with these arguments, and with proven.py, which keeps the cases of the selected lessons.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shared.errors import InputError
from shared.exercises.cells import code_of

ROOT = Path(__file__).resolve().parents[2]
NUM_LINES = 10  # so many changed files have their line
# What every test and notebook starts with, or reads.
EVERYTHING = ("shared/ranks/*", "shared/exercises/quick_nbformat.py", "tests/warm/*")
EVERYTHING += ("tests/conftest.py", "pyproject.toml", "run_all.sh", "datasets/*/*.[!m]*")
# Tests (patterns, too) of what no import and no name in their text leads to. `file[NN]` are a
# test's cases of the changed file's lesson, and `file[]` its cases of no lesson.
JUDGES = "class_edition student_edition guide known lesson made_class nbgrader grade_command"
REAL_LESSONS = " ".join(f"tests/grading/test_{name}.py" for name in JUDGES.split())
RULES = "tests/frame/test_links.py tests/frame/test_style.py"
NAMES = "tests/frame/test_torch_names.py"
READERS = {
    "*.py": f"tests/frame/test_style.py tests/frame/test_layers.py {NAMES}",
    "*.md": RULES,
    "*.ipynb": f"{RULES} tests/frame/test_layers.py tests/frame/test_translation.py"
    " tests/frame/test_notebooks.py[] tests/frame/test_checks.py[] tests/book/test_chinese.py[NN]"
    " tests/book/test_glossary.py tests/frame/test_one_execution.py",
    "*.po": "tests/book/test_chinese.py",
    "lessons/*.md": "tests/book/test_[bfg]*.py",
    "lessons/*/plain*.py": "tests/frame/test_first_lines.py tests/book/test_first_lines.py",
    "tests/*": "tests/frame/test_promises.py",
    "tests/pretend_gpu/*": "tests/pretend_gpu/test_*.py",
    "shared/book/*": "tests/book/*",
    "shared/cli/*": "tests/frame/test_run_all.py",
    # By these, or of these, answers are judged in folders that are made for it.
    "shared/exercises/*": "tests/grading/*",
    "solutions/grading/*": "tests/grading/*",
    "solutions/*lesson*": REAL_LESSONS,
    "lessons/*/checks.py": REAL_LESSONS,
}
CODE_READERS = f"tests/frame/test_signatures.py tests/book/test_book.py {NAMES}"  # of a notebook

Graph = defaultdict[str, set[str]]  # from a file to those that depend on it


def changed_files(root: Path, revision: str) -> list[str]:
    """Return what differs from a revision, or is new; InputError where git cannot say."""
    if git(root, "rev-parse", "--git-dir") is None:
        raise InputError("--changed compares with git, and this is no git checkout")
    if git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        raise InputError(f"--changed {revision}: git knows no such revision")
    differ = git(root, "diff", "-z", "--name-only", "--no-renames", "--relative", revision)
    new = git(root, "ls-files", "-z", "--others", "--exclude-standard")
    return sorted({*f"{differ}{new}".split("\0")} - {""})


def only_prose_changed(root: Path, revision: str, path: str) -> bool:
    """Return whether all code cells of a notebook are those of the revision, outputs and tags too.

    False of anything else.
    """
    if not path.endswith(".ipynb") or not (root / path).exists():
        return False
    now, then = (root / path).read_text("utf-8"), git(root, "show", f"{revision}:./{path}")
    return then is not None and _code_cells(now) == _code_cells(then)


def _code_cells(notebook: str) -> list[dict[str, Any]]:
    try:
        cells = json.loads(notebook)["cells"]
    except (ValueError, KeyError):  # halves of a merge: pytest says what is wrong with it
        return []
    return [cell for cell in cells if cell["cell_type"] == "code"]


def git(root: Path, *words: str, errors: str = "surrogateescape") -> str | None:
    """Return what git says; None where it fails, is not installed, or `errors` refuses it."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
        return done.stdout.decode("utf-8", errors) if done.returncode == 0 else None
    except (OSError, UnicodeDecodeError):
        return None


class Course:
    """Which files of a course depend on which."""

    def __init__(self, root: Path) -> None:
        import grimp.exceptions  # at use: main says where it is missing

        self.root = root
        self.needed_by, self.read_by = Graph(set), Graph(set)  # to run; as a text alone
        tops = (root / top for top in ("shared", "solutions", "lessons", "tests"))
        names = [top.name for top in tops if top.is_dir()]
        try:
            graph = grimp.build_graph(*names, cache_dir=None)
        except grimp.exceptions.SourceSyntaxError as error:
            raise InputError(f"--changed follows imports: {error}") from None
        self.files = {module: path for module in graph.modules if (path := self._file(module))}
        self.texts = {path: (root / path).read_text("utf-8") for path in self.files.values()}
        for module, path in self.files.items():
            started = re.findall(r'"-m", "([\w.]+)"', self.texts[path])
            for name in {module, *graph.find_modules_directly_imported_by(module), *started}:
                self._add(name, path)
        self.notebooks = self._paths("lessons/*/lesson.ipynb")
        self.parts = self._paths("lessons/*/*.*")
        for path in self.notebooks:
            self._add_notebook(path)
        for path in [file for file in self.texts if file.startswith("tests/")]:
            self._add_test(path)

    def _paths(self, pattern: str) -> list[str]:
        return sorted(str(place.relative_to(self.root)) for place in self.root.glob(pattern))

    def _file(self, module: str) -> str:
        """Return the file of a module; "" of a folder without __init__.py."""
        path = module.replace(".", "/")
        both = (f"{path}.py", f"{path}/__init__.py")
        return next((file for file in both if (self.root / file).is_file()), "")

    def _add(self, name: str, path: str) -> None:
        """Note that a file needs what a dotted name begins with, and the packages on the way."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            if file := self.files.get(".".join(parts[:count])):
                self.needed_by[file].add(path)

    def _add_notebook(self, path: str) -> None:
        """Note what a notebook imports, its folder, its answers, and the tests that run both."""
        self.texts[path] = code_of(self.root / path)
        for name in imports_of(self.texts[path]):
            self._add(name, path)
        lesson, number = Path(path).parent.name, _number(path)
        for file in self.files.values():
            if file.startswith(f"lessons/{lesson}/"):
                self.needed_by[file].add(path)
        checks = f"tests/frame/test_checks.py[{number}]"
        self.needed_by[f"solutions/{lesson}.py"] |= {path, checks}
        self.needed_by[f"solutions/mistakes/{lesson}.py"].add(checks)
        self.needed_by[f"solutions/alternatives/{lesson}.py"].add(checks)
        self.needed_by[path].add(f"tests/frame/test_notebooks.py[{number}]")

    def _add_test(self, path: str) -> None:
        """Note what a test or its helper names: modules, files of lessons; and its fixtures."""
        text = self.texts[path].replace('" / "', "/")
        if "all_lessons(" in text:
            text = re.sub(r'" / lesson / "', "/*/", text)
        for name in re.findall(r"\b(?:shared|solutions|lessons|tests)(?:\.\w+)+", text):
            self._add(name, path)
        for name in re.findall(r"[\w/]+\.py\b", text):
            for file in {name, f"{Path(path).parent}/{name}"} & self.texts.keys():
                if not _is_test(file):
                    self.needed_by[file].add(path)
        for file in self.parts:
            _, folder, name = file.split("/")
            if name in text and name != "__init__.py":
                graph = self.read_by if name.endswith(".ipynb") else self.needed_by
                patterns = re.findall(rf"([\w\[\]*-]*\*[\w\[\]*-]*)/{re.escape(name)}", text)
                if folder in text:
                    graph[file].add(path)
                elif any(fnmatch(folder, row) for row in patterns):
                    graph[file].add(f"{path}[{_number(file)}]")
        for folder in Path(path).parents:
            self.needed_by[f"{folder}/conftest.py"].add(path)
        if re.search(r"\b(toy|built_toy)\b", text):
            self.needed_by["tests/frame/toy_course.py"].add(path)

    def affected(self, path: str, prose: bool = False) -> set[str] | None:
        """Return tests, notebooks and cases that a changed file can break; None: all of them."""
        if any(fnmatch(path, row) for row in EVERYTHING):
            return None
        found, ahead = set(), {path, *self._from_table(path)}
        if not prose:
            ahead |= {*self.read_by[path], *self._by_name(path)}
            ahead |= set(CODE_READERS.split()) if path.endswith(".ipynb") else set()
        while ahead:
            found |= ahead
            ahead = set() if prose else {a for file in ahead for a in self.needed_by[file]} - found
        units = {unit for unit in found if _is_test(unit) or unit in self.notebooks}
        return {unit for unit in units if (self.root / unit.split("[")[0]).exists()} or None

    def _from_table(self, path: str) -> Iterator[str]:
        for row in (tests for pattern, tests in READERS.items() if fnmatch(path, pattern)):
            for test in row.replace("NN", _number(path)).split():
                yield from ([t for t in self.texts if fnmatch(t, test)] if "*" in test else [test])

    def _by_name(self, path: str) -> set[str]:
        """Return who names a module that is gone, or a file that is none; of a lesson's, all."""
        place = Path(path)
        if path in self.texts:
            return set()
        name = rf"(?<![\w.-]){re.escape(place.name)}\b"
        if place.suffix == ".py":
            *parent, last = place.with_suffix("").parts
            name = rf"\b{re.escape('.'.join([*parent, last]))}\b"
            name += rf"|from {re.escape('.'.join(parent))} import.*\b{last}\b"
        elif place.suffix == ".md":
            name = rf"(ROOT|COURSE|{place.parent.name or 'ROOT'})\W+{re.escape(place.name)}\b"
        named = {file for file, text in self.texts.items() if re.search(name, text)}
        if place.suffix in (".py", ".md") or (named and place.parts[0] != "lessons"):
            return named
        for folder in [parent for parent in place.parents if parent.name][:-1]:
            if inside := [file for file in self.texts if Path(file).parent == folder]:
                tests = (file for file in self.texts if file.startswith(f"tests/{folder.name}/"))
                return {*named, *inside, *tests}
        return named


def imports_of(code: str) -> Iterator[str]:
    """The modules and names that code imports anywhere in it, dotted in full."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a notebook that is being written: it changed, and is selected for that
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _number(path: str) -> str:
    """Return "06" of a file of lesson 06, or ""."""
    found = re.search(r"lesson(\d\d)_", path)
    return found[1] if found else ""


def _is_test(unit: str) -> bool:
    return fnmatch(unit.split("[")[0], "tests/*/test_*.py")


def arguments(selected: Iterable[str]) -> list[str]:
    """Return pytest's arguments; a file that is selected whole has the cases of all lessons."""
    whole = sorted(unit for unit in selected if "[" not in unit)
    cases = defaultdict[str, list[str]](list)
    for file, _, number in (unit.partition("[") for unit in sorted(selected)):
        if file not in whole:
            cases[file].append(number.rstrip("]"))
    return [*whole, *cases, *(f"--cases={file}={','.join(found)}" for file, found in cases.items())]


def summary(selected: Iterable[str], course: Course) -> str:
    """Return "notebooks 06 10, 14 of 173 test files"."""
    files = {unit.split("[")[0] for unit in selected}
    numbers = sorted(_number(file) for file in files if not _is_test(file))
    notebooks = f"notebook{'s' * (len(numbers) > 1)} {' '.join(numbers)}, " if numbers else ""
    tests, total = (sum(map(_is_test, group)) for group in (files, course.texts))
    return f"{notebooks}{tests} of {total} test files"


def select(root: Path, revision: str) -> list[str]:
    """Return what pytest is to run, and print why; [] where nothing changed."""
    paths = changed_files(root, revision)
    if not paths:
        print(f"nothing changed since {revision}: nothing to test")
        return []
    course, selected, lines = Course(root), set[str](), list[str]()
    for number, path in enumerate(paths, 1):
        prose = only_prose_changed(root, revision, path)
        found = course.affected(path, prose)
        if found is None:
            print(f"everything: because {path} changed, which all use, or nothing is known to")
            return [top for top in ("tests", "lessons") if (root / top).is_dir()]
        selected |= found
        if number <= NUM_LINES:
            what = "only prose of " * prose + path
            lines.append(f"{summary(found, course)}: because {what} changed")
    if len(paths) > 1:
        lines.append(f"{summary(selected, course)}: in all, of {len(paths)} changed files")
    print(*lines, sep="\n")
    return arguments(selected)


def main(revision: str, *words: str) -> int:
    """Return the exit status, or become pytest."""
    try:
        selected = select(ROOT, revision)
    except (InputError, ModuleNotFoundError) as error:
        what = "--changed needs grimp: python -m pip install -e '.[dev]'"
        print(f"run_all.sh: {error if isinstance(error, InputError) else what}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    if selected:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *words, *selected])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
