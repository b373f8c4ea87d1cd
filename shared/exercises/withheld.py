"""What stands in shared/ for an answer that a class is to write this week: the class's own.

The edition through a lesson (`--through NN`) holds `Name = withheld("NN.1", "Name")` where the
course has the answer. What needs it, an engine of shared/ say, then runs with what the learner
wrote in the notebook, looked up when it is used and not when it is imported.
"""

from typing import Any


class _Withheld(type):
    """The class of the placeholders, and of the course's classes that derive from one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Call the learner's answer, or make an object of a class that derives from it.

        Raises NotSolved while the exercise is open, and when its answer is this placeholder again.
        """
        if "exercise" in vars(cls):
            return _answer(cls)(*args, **kwargs)
        _derive_from_answers(cls)
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "exercise" in vars(cls):
            return getattr(_answer(cls), name)
        if _derive_from_answers(cls):
            return getattr(cls, name)
        raise AttributeError(name)

    def __instancecheck__(cls, instance: Any) -> bool:
        if "exercise" not in vars(cls):
            return super().__instancecheck__(instance)
        answer = _solved(cls)
        return isinstance(answer, type) and isinstance(instance, answer)


def withheld(id: str, name: str) -> Any:
    """The placeholder of an exercise; it can be called, derived from, and asked for attributes."""
    return _Withheld(name, (), {"exercise": id})


def _solved(placeholder: Any) -> Any:
    """What the learner wrote, in this notebook or in the file of it; None while it is open."""
    from shared.exercises import mine, notebook  # at use: they load torch, the planner does not

    id = placeholder.exercise
    if id not in notebook.defined:
        mine.run_cells(id.split(".")[0])
    found = notebook.defined.get(id)
    return found.own if found is not None and found.solved else None


def _answer(placeholder: Any) -> Any:
    from shared.exercises.notebook import NotSolved

    answer, what = _solved(placeholder), f"exercise {placeholder.exercise} ({placeholder.__name__})"
    if answer is None:
        raise NotSolved(f"{what} is not solved yet, and this cell uses it: solve it first")
    if placeholder in getattr(answer, "__mro__", ()):
        raise NotSolved(f"{what} is taken from shared/, which takes it from your cell: write it")
    return answer


def _derive_from_answers(cls: Any) -> bool:
    """Put the answers in the place of the placeholders among the bases; whether there were any."""
    found = False
    for ancestor in cls.__mro__:
        bases = ancestor.__bases__
        if any("exercise" in vars(base) and type(base) is _Withheld for base in bases):
            own = (_answer(b) if "exercise" in vars(b) else b for b in bases)
            ancestor.__bases__ = tuple(own)
            found = True
    return found
