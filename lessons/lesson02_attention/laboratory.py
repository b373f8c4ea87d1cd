"""What the checks compare an attention with: random inputs, torch's twin, mistakes."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shared.exercises.expecting import recognise, wrong
from shared.exercises.properties import functions_called
from shared.exercises.seeds import fresh_generator, fresh_seed, seed_all


def vectors(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random tensor, float64 unless said otherwise."""
    return torch.randn(*shape, generator=fresh_generator(), dtype=torch.float64).to(dtype)


def query_key_value(
    b: int, h: int, t: int, s: int, k: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Random query (B, H, T, K), key and value (B, H, S, K)."""
    return [vectors(b, h, length, k, dtype=dtype) for length in (t, s, s)]


def random_mask(b: int, t: int, s: int) -> Tensor:
    """A random mask (B, 1, T, S) with at least one key in each row, and at least one hidden."""
    mask = torch.rand(b, 1, t, s, generator=fresh_generator()) < 0.5
    mask[..., 0], mask[..., -1] = True, False
    return mask


def padded_tokens(pad_id: int, other: int) -> Tensor:
    """Tokens (5, 5): two rows end in padding, one begins with it, and the last is nothing else.

    The first token is `other`.
    """
    tokens = torch.randint(1, 9, (5, 5), generator=fresh_generator())
    tokens[tokens == pad_id] = 8
    tokens[0, 0], tokens[1, 3:], tokens[2, 1:], tokens[3, :2] = other, pad_id, pad_id, pad_id
    tokens[4] = pad_id
    return tokens


def formula(query: Tensor, key: Tensor, value: Tensor, scale: float, dim: int = -1) -> Tensor:
    """The formula with another scale, or a softmax over another dim."""
    return (query @ key.mT * scale).softmax(dim) @ value


def nearly(got: Any, want: Tensor) -> Tensor:
    """What an answer gave where that has the first three digits of what is wanted, else the latter.

    A row that looks like it is a row for lost digits.
    """
    near = isinstance(got, Tensor) and got.shape == want.shape
    return got if near and torch.allclose(got.to(want.dtype), want, rtol=1e-3, atol=1e-3) else want


def kept_weights(module: Any, rate: float) -> Tensor:
    """How many of 50 equal weights dropout kept, for each query and head, if it scaled the rest.

    The parameters are set so that the output is the sum of each head's weights.
    """
    d_model = module.w_o.in_features
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.w_v.bias.fill_(1.0)
        module.w_o.weight.copy_(torch.eye(d_model))
        x = vectors(2, 50, d_model)
        return module(x, x, x) * 50 * (1 - rate)


def twin_output(
    module: Any,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """What nn.MultiheadAttention returns with an answer's weights; True in `mask` shows a key."""
    d_model = query.shape[-1]
    twin = nn.MultiheadAttention(d_model, heads, batch_first=True, dtype=torch.float64)
    parts = [module.w_q, module.w_k, module.w_v]
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        twin.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        twin.out_proj.load_state_dict(module.w_o.state_dict())
        hidden = None
        if mask is not None:  # torch's module marks with True what is hidden
            shape = (len(query), heads, query.shape[1], key.shape[1])
            hidden = ~mask.expand(shape).flatten(0, 1)
        return twin(query, key, value, attn_mask=hidden)[0]


def mistaken_output(
    module: Any,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    cut: bool = True,
    joined: bool = True,
    last: bool = True,
) -> Tensor:
    """An answer's projections, with another scale or mask, or without w_o.

    Not `cut`, not `joined`: there without its transpose.
    """
    head_dim = query.shape[-1] // heads

    def split(x: Tensor) -> Tensor:
        if not cut:
            return x.reshape(len(x), heads, -1, head_dim)
        return x.unflatten(-1, (heads, head_dim)).transpose(1, 2)

    q, k, v = split(module.w_q(query)), split(module.w_k(key)), split(module.w_v(value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    whole = out.transpose(1, 2).flatten(2) if joined else out.reshape(query.shape)
    return module.w_o(whole) if last else whole


def exchanged(module: Any, heads: int, x: Tensor) -> dict[str, Tensor]:
    """Self-attention in which one projection does the work of another, by the words for it."""
    mistakes = {
        "the values go through w_k: w_v is theirs": {"w_v": module.w_k},
        "the keys go through w_q: w_k is theirs": {"w_k": module.w_q},
        "queries, keys and values all go through w_q": {"w_k": module.w_q, "w_v": module.w_q},
        "queries and keys are exchanged: each word asks with its key": {
            "w_q": module.w_k,
            "w_k": module.w_q,
        },
        "keys and values are exchanged: what is weighted is w_v": {
            "w_k": module.w_v,
            "w_v": module.w_k,
        },
    }
    return {
        words: mistaken_output(SimpleNamespace(**{**projections(module), **other}), heads, x, x, x)
        for words, other in mistakes.items()
    }


def projections(module: Any) -> dict[str, nn.Linear]:
    """The four projections by name."""
    return {name: getattr(module, name) for name in ("w_q", "w_k", "w_v", "w_o")}


def built(module_class, d_model: int, heads: int, **options) -> Any:
    """An answer's module in float64, with the four projections that the contract names."""
    seed_all(fresh_seed())
    module = module_class(d_model, heads, **options)
    mistakes = {
        f"the projection {name} is missing": not isinstance(getattr(module, name, None), nn.Linear)
        for name in ("w_q", "w_k", "w_v", "w_o")
    }
    found, four = sum(each.numel() for each in module.parameters()), 4 * (d_model**2 + d_model)
    words = "the parameters are not four projections of D x D with a bias each"
    recognise(
        mistakes | {words: found != four},
        expected=f"w_q, w_k, w_v and w_o, each an nn.Linear({d_model}, {d_model}), and so "
        f"{four} parameters",
        seen=f"{', '.join(dict(module.named_children()))} with {found} parameters",
        hint="all heads share one nn.Linear(D, D) for each of w_q, w_k, w_v and w_o",
    )
    return module.double()


def longer(module: Any, x: Tensor) -> Tensor:
    """The causal output for a sentence that is longer than those before; a kept mask breaks it."""
    try:
        return module(x, x, x, causal=True)
    except RuntimeError as error:
        if "size" not in str(error) and "shape" not in str(error):
            raise
        wrong(
            "the causal mask of an earlier call is used again, at a length that is not its own",
            expected=f"a causal sentence of {x.shape[1]} words, after shorter ones",
            seen=f"{type(error).__name__}: {error}",
            hint="make the mask for the length at hand, in each call",
        )


def cut_to(mask: Tensor, got: Any) -> Tensor:
    """The mask's upper left corner, as large as what an answer gave."""
    length = got.shape[-1] if isinstance(got, Tensor) and got.dim() == 4 else 0
    return mask[..., :length, :length]


class _AsksForDevice(TorchFunctionMode):
    """Notes whether any tensor's device is looked at."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked |= func == DEVICE
        return func(*args, **(kwargs or {}))


DEVICE = Tensor.device.__get__
READ = {"cpu", "numpy", "tolist", "item"}
# Torch does not tell of from_numpy; who takes numpy's way has to come back on it.
MAKE = {"numpy", "tensor", "as_tensor", "ones", "zeros", "full", "empty", "arange"}
WRITE, FILLED = {"__setitem__", "copy_"}, {"ones", "zeros", "full", "empty"}
MOVE = {
    *("to", "type_as", "new_tensor", "new_ones", "new_zeros", "new_full", "new_empty"),
    *("ones_like", "zeros_like", "full_like", "empty_like"),
}


def made_on_cpu(answer: Any, tokens: Tensor) -> bool:
    """Whether an answer copies its tokens' values, and makes its result without their device.

    It cannot be asked on the device meta, which has no values, so its calls have to tell.
    """
    names = functions_called(lambda: answer(tokens))
    with _AsksForDevice() as mode:
        answer(tokens)
    made = (names & READ and names & MAKE) or (names & WRITE and names & FILLED)
    return bool(made) and not (mode.asked or names & MOVE)
