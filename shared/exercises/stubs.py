"""Whether an exercise cell is solved, and whether it has the signature that was asked for."""

import dis
import inspect
from types import CodeType, FunctionType
from typing import Any


def is_stub(answer: Any) -> bool:
    """Whether a function, or every method of a class, only raises NotImplementedError.

    A class may beside these have methods that the contract wants empty.
    """
    is_class = inspect.isclass(answer)
    functions = _own_methods(answer).values() if is_class else [answer]
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    codes = [code for code in codes if code is None or not (is_class and _is_empty(code))]
    return bool(codes) and all(code is not None and _only_raises(code) for code in codes)


def signature_difference(own: Any, reference: Any) -> str:
    """Where names, kinds or defaults of parameters differ, method by method; "" if nowhere."""
    if inspect.isclass(own) != inspect.isclass(reference):
        return "one of stub and reference is a class, the other is not"
    if inspect.isclass(own):
        pairs = {
            name: (value, getattr(reference, name)) for name, value in _own_methods(own).items()
        }
    else:
        pairs = {own.__name__: (own, reference)}
    for name, (stub, answer) in pairs.items():
        if _parameters(stub) != _parameters(answer):
            return (
                f"the notebook has {name}{inspect.signature(stub)}, "
                f"the solution has {name}{inspect.signature(answer)}"
            )
    return ""


def _own_methods(cls: type) -> dict[str, Any]:
    return {
        name: getattr(value, "__func__", value)
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType | staticmethod | classmethod)
    }


def _essence(code: CodeType) -> list[tuple[str, Any]]:
    """The instructions, to be compared with others: no source text is needed for that."""
    skip = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "MAKE_CELL"}
    return [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in skip]


def _only_raises(code: CodeType) -> bool:
    def bare() -> None:
        raise NotImplementedError

    def called() -> None:
        raise NotImplementedError()

    return _essence(code) in (_essence(bare.__code__), _essence(called.__code__))


def _is_empty(code: CodeType) -> bool:
    def empty() -> None:
        pass

    return _essence(code) == _essence(empty.__code__)


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]
