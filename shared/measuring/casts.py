"""Which operators ran in which dtype: what autocast did, read off the operators themselves."""

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[tuple[str, str, str]] = collections.Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, the default, imports the compiler at the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.seen[name, _dtypes((args, kwargs)), _dtypes(result)] += 1
        return result


def operators_by_dtype(
    run: Callable[[], Any],
) -> tuple[Any, collections.Counter[tuple[str, str, str]]]:
    """The result of `run()`, and how often each (operator, dtypes read, dtypes written) ran.

    Recorded below autocast, so that its casts are operators like all others ("_to_copy"). Only
    floating-point tensors count. A backward inside of `run` is recorded as well.
    """
    with _Recorder() as recorder:
        result = run()
    return result, recorder.seen


def _dtypes(tree: Any) -> str:
    """The floating-point dtypes in a tree of arguments, "bf16 + fp32" say."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    floats = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
    return " + ".join(sorted({short.get(x.dtype, str(x.dtype)) for x in floats}))
