"""Answers of the week that checks are built on: in memory, and in no file of the sandbox.

The course's copy is the class's edition of the week, where `withheld` stands for them. The modules
that checks import are executed from the job's texts, before any answer runs; then these are gone.
"""

import importlib.abc
import sys
from importlib import import_module
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any


class KeptBack(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by the texts that it was given, until `forget`."""

    def __init__(self, course: str, texts: dict[str, str]) -> None:
        self.course, self.texts = course, texts
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname in self.texts:
            return spec_from_file_location(fullname, self._file(fullname), loader=self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        exec(compile(self.texts[name], self._file(name), "exec"), vars(module))

    def _file(self, name: str) -> str:
        return f"{self.course}/{name.replace('.', '/')}.py"

    def forget(self) -> None:
        """Import what nobody has asked for yet, and leave no text behind."""
        for name in self.texts:
            import_module(name)
        self.texts.clear()
        sys.meta_path.remove(self)
