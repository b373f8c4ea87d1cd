"""A linear layer with an update of low rank; a model with such layers, and without them again."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from shared.errors import InputError
from shared.lora.adapter import Adapter, check_rank, start_factors


class LoRALinear(Adapter):
    """A frozen linear layer plus scale * B A, of which only A and B are trained."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        """Freeze `linear` and keep it, as it is, as `base`.

        `lora_a` (rank, d_in) and `lora_b` (d_out, rank) come from `start_factors`, `scale` is
        alpha / rank. Raises ValueError, naming the rank, unless it is from 1 to min(d_in, d_out).
        """
        super().__init__()
        check_rank(rank, linear.in_features, linear.out_features)
        self.base = linear.requires_grad_(False)
        self.lora_a, self.lora_b = start_factors(linear.weight, rank)
        self.scale = alpha / rank

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return base(x) + scale * B A x in the dtype of base(x); B A is never made.

        A and B compute in their own dtype.
        """
        y = self.base(x)
        update = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return (y + self.scale * update).to(y.dtype)


Kind = Callable[[nn.Linear, int, float], nn.Module]


def add_lora(
    model: nn.Module,
    names: Sequence[str],
    rank: int,
    alpha: float,
    kind: Kind = LoRALinear,
) -> list[str]:
    """Put kind(linear, rank, alpha) in the place of the linear layers meant; freeze all else.

    A name means each nn.Linear that is called so, or whose whole name ends in a dot and it:
    "w_q" means "layers.0.attention.w_q" and not "layers.0.new_w_q". A layer that the model has at
    two places gets one adapter. Afterwards only what `kind` trains is trained. Returns the whole
    names of the layers, in the model's order.

    Raises ValueError, and leaves the model as it was: for a name that matches no linear layer,
    naming it, for a rank that one of the layers cannot have, and for what `kind` refuses.
    """
    places = places_meant(model, names)
    for _, linear in places:
        check_rank(rank, linear.in_features, linear.out_features)
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        made = {linear: kind(linear, rank, alpha) for linear in dict.fromkeys(m for _, m in places)}
    except Exception:
        for parameter in trained:
            parameter.requires_grad_(True)  # a kind freezes what it takes
        raise
    model.requires_grad_(False)
    for name, linear in places:
        model.set_submodule(name, made[linear])
    return [name for name, _ in places]


def places_meant(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Linear]]:
    """The linear layers that `add_lora` adapts; raises its InputError for a name without one."""
    there = _places(model, nn.Linear)
    for name in names:
        if not any(_meant(place, [name]) for place, _ in there):
            known = dict.fromkeys(place.rpartition(".")[2] for place, _ in there)
            others = {
                type(m).__name__ for place, m in _places(model, nn.Module) if _meant(place, [name])
            }
            kinds = f" ({name!r} is a {', '.join(sorted(others))})" if others else ""
            raise InputError(
                f"no linear layer is called {name!r}{kinds}: there are {', '.join(known)}"
            )
    return [(place, linear) for place, linear in there if _meant(place, names)]


def merge(model: nn.Module) -> nn.Module:
    """Put a plain nn.Linear with W + scale * B A in the place of each `Adapter`; return the model.

    The sum is made in the dtype of A and B and rounded once, to that of W. The weight is a new
    tensor: W may be tied to a matrix elsewhere, or may be adapted again. What was at two places
    stays one layer. Afterwards nothing of an adapter is left; of a model that is one, its nn.Linear
    is returned.
    """
    if isinstance(model, Adapter):
        return _merged(model)
    made = {adapter: _merged(adapter) for _, adapter in _places(model, Adapter)}
    for name, adapter in _places(model, Adapter):
        model.set_submodule(name, made[adapter])
    return model


@torch.no_grad()
def _merged(adapter: Adapter) -> nn.Linear:
    weight, bias = adapter.base.weight, adapter.base.bias
    update = adapter.scale * (adapter.lora_b @ adapter.lora_a)
    whole = (weight.to(update.dtype) + update).to(weight.dtype)
    linear = nn.Linear(*whole.T.shape, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(whole, requires_grad=False)
    linear.bias = bias
    return linear


def _places(model: nn.Module, kind: type[nn.Module]) -> list:
    """Every place in the model where such a module is, with its name."""
    found = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in found if name and isinstance(module, kind)]


def _meant(place: str, names: Sequence[str]) -> bool:
    return any(place == name or place.endswith(f".{name}") for name in names)
