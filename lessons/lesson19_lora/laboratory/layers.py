"""Layers and models on which answers to 19.1, 19.2 and 19.4 are observed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.exercises.seeds import fresh_seed, seed_all
from shared.lora.adapter import Adapter, start_factors

F64, BF16 = torch.float64, torch.bfloat16


class Largest(TorchDispatchMode):
    """Notes the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "t.default" not in str(func) and "transpose" not in str(func):
            made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.shapes |= {tuple(x.shape) for x in made}
        return out


def make_linear(d_in: int, d_out: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    """A layer on a fresh seed."""
    seed_all(fresh_seed())
    return nn.Linear(d_in, d_out, bias=bias, dtype=dtype)


def fill(layer: Any) -> tuple[Tensor, Tensor]:
    """Give A and B numbers, as if they had been trained; return them."""
    with torch.no_grad():
        for p in (layer.lora_a, layer.lora_b):
            p.normal_()
    return layer.lora_a, layer.lora_b


class Plain(Adapter):
    """An adapter for the exercises that need one: nothing but its parts."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.lora_a, self.lora_b = start_factors(linear.weight, rank)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """The layer with its update."""
        weight = self.base.weight
        whole = weight.to(self.lora_a.dtype) + self.scale * self.lora_b @ self.lora_a
        y = x.to(whole.dtype) @ whole.T
        return y if self.base.bias is None else y + self.base.bias


class Halved(nn.Module):
    """A base that is no nn.Linear: it keeps half of each weight, as others keep four bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.kept, self.bias = nn.Parameter(linear.weight.detach() / 2, False), linear.bias

    @property
    def weight(self) -> Tensor:
        """The weight, made anew every time."""
        return 2 * self.kept


class Block(nn.Module):
    """A part of a model: names that begin and end alike, a norm, a layer that is used twice."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.w_q = nn.Linear(6, 8)
        self.new_w_q = nn.Linear(6, 8)
        self.w_q2 = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Through all layers."""
        h = self.norm(self.w_q(x) + self.new_w_q(x) + self.w_q2(x))
        return self.shared(h)


class Model(nn.Module):
    """Two blocks that share a layer, a tied output, a buffer, and a Sequential inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        shared = nn.Linear(8, 6)
        self.blocks = nn.ModuleList([Block(shared), Block(shared)])
        self.mlp = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU())
        self.w_q = nn.Linear(6, 6)
        self.output = nn.Linear(6, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(6))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens) + self.shift
        for block in self.blocks:
            x = x + block(x)
        return self.output(self.w_q(self.mlp(x)))


def make_model() -> Model:
    """The model in float64, on a fresh seed."""
    seed_all(fresh_seed())
    return Model().double()


@dataclass
class Made:
    """Which layers were given to `kind`, in order."""

    calls: list[tuple[nn.Linear, int, float]]

    def __call__(self, linear: nn.Linear, rank: int, alpha: float) -> Plain:
        self.calls.append((linear, rank, alpha))
        return Plain(linear, rank, alpha)


def state(model: nn.Module) -> list[tuple[str, type, list[bool]]]:
    """What a model is made of, by name: types, and what is trained."""
    return [
        (name, type(m), [p.requires_grad for p in m.parameters(recurse=False)])
        for name, m in model.named_modules(remove_duplicate=False)
    ]


def refused(act: Callable[[], Any]) -> str:
    """What a ValueError says; "!" and the error for another kind, "" where nothing is raised."""
    try:
        act()
    except NotImplementedError:
        raise
    except ValueError as error:
        return f"{error}" or "a ValueError without words"
    except Exception as error:
        return f"!{type(error).__name__}: {error}"
    return ""


def tuned_by_hand(adapt: Callable[[str], bool]) -> tuple[Model, Model, Tensor]:
    """A model with our own adapters, filled; a copy of it that stays so; what it is asked."""
    model = make_model()
    places = [
        (name, m)
        for name, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, nn.Linear) and adapt(name)
    ]
    model.requires_grad_(False)
    made = {m: Plain(m, 2, 3.0) for m in dict.fromkeys(m for _, m in places)}
    for name, m in places:
        model.set_submodule(name, made[m])
    for each in made.values():
        fill(each)
    return model, copy.deepcopy(model), torch.randint(10, (3, 5))
