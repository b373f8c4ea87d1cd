"""Right answers to lesson 19 in another style: every check has to let them pass."""

import torch
import torch.nn.functional as F
from torch import nn

from shared.lora.adapter import Adapter, start_factors
from shared.lora.levels import NF4_LEVELS
from shared.lora.qlora import NF4Weight
from solutions import lesson19_lora as right


class ByProducts(Adapter):
    """Matrix products written out; the error is its own."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        if rank < 1 or rank > min(linear.weight.shape):
            raise ValueError(f"no update of rank {rank}")
        for p in linear.parameters():
            p.requires_grad = False
        self.base = linear
        self.lora_a, self.lora_b = start_factors(linear.weight, rank)
        self.scale = alpha / rank

    def forward(self, x):
        """The frozen output plus the update."""
        y = self.base(x)
        thin = x.to(self.lora_a.dtype) @ self.lora_a.mT
        return y + (thin @ self.lora_b.mT * self.scale).to(y.dtype)


class ScaledFirst(right.LoRALinear):
    """The thin product is scaled, not the wide one."""

    def forward(self, x):
        """The frozen output plus the update."""
        thin = self.scale * F.linear(x.to(self.lora_a.dtype), self.lora_a)
        return torch.add(self.base(x), F.linear(thin, self.lora_b)).to(self.base.weight.dtype)


def by_hand(model, names, rank, alpha, kind=right.LoRALinear):
    """Parents and attributes, no set_submodule."""
    linears = {
        n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)
    }
    meant = {}
    for name in names:
        found = [n for n in linears if f".{n}".endswith(f".{name}")]
        if not found:
            raise ValueError(f"{name}: no such linear layer")
        meant |= dict.fromkeys(found)
    for n in meant:
        if not 0 < rank <= min(linears[n].weight.shape):
            raise ValueError(f"rank {rank} does not fit {n}")
    for p in model.parameters():
        p.requires_grad = False
    made = {}
    for n in [n for n in linears if n in meant]:
        parent, _, last = n.rpartition(".")
        adapter = made.setdefault(linears[n], None) or kind(linears[n], rank, alpha)
        made[linears[n]] = adapter
        setattr(model.get_submodule(parent), last, adapter)
    return [n for n in linears if n in meant]


def in_two_passes(model, names, rank, alpha, kind=right.LoRALinear):
    """The course's errors, by asking it about a copy without numbers."""
    import copy

    plan = right.add_lora(copy.deepcopy(model).to("meta"), names, rank, alpha)
    model.requires_grad_(False)
    known = {}
    for name in plan:
        layer = model.get_submodule(name)
        if id(layer) not in known:
            known[id(layer)] = layer, kind(layer, rank, alpha)
        model.set_submodule(name, known[id(layer)][1])
    return plan


def by_children(model, made=None):
    """Down the tree."""
    made = {} if made is None else made
    for name, child in list(model.named_children()) + [
        (n, m) for n, m in model._modules.items() if isinstance(m, Adapter)
    ]:
        if isinstance(child, Adapter):
            if child not in made:
                made[child] = _plain(child)
            setattr(model, name, made[child])
        else:
            by_children(child, made)
    return model


def _plain(adapter):
    with torch.no_grad():
        update = adapter.lora_b @ adapter.lora_a * adapter.scale
        weight = (adapter.base.weight.to(update.dtype) + update).to(adapter.base.weight.dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], adapter.base.bias is not None)
        linear.weight, linear.bias = nn.Parameter(weight), adapter.base.bias
    return linear


def by_places(model):
    """A list of places first."""
    cache = {}
    for name, m in list(model.named_modules(remove_duplicate=False)):
        if isinstance(m, Adapter):
            cache.setdefault(m, _plain(m))
            model.set_submodule(name, cache[m])
    return model


def by_distances(weight, block=64):
    """The smallest of sixteen distances."""
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{weight.dtype} has no NF4")
    codes, scales = [], []
    for part in weight.reshape(-1).float().split(block):
        scale = part.abs().max()
        x = part / scale if scale > 0 else part
        codes.append((x[:, None] - NF4_LEVELS).abs().argmin(1))
        scales.append(scale)
    row = torch.cat(codes)
    if len(row) % 2:
        row = torch.cat([row, row.new_zeros(1)])
    return (16 * row[::2] + row[1::2]).to(torch.uint8), torch.stack(scales)


def by_search(weight, block=64):
    """searchsorted among the middles."""
    right.quantize_nf4(weight[:0])  # the error
    row = weight.detach().float().ravel()
    scales = torch.stack([part.abs().max() for part in row.split(block)])
    x = row / scales.clamp(min=torch.finfo(torch.float32).tiny).repeat_interleave(block)[: len(row)]
    codes = torch.searchsorted((NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2, x).byte()
    if len(codes) % 2:
        codes = F.pad(codes, (0, 1))
    return codes[0::2] * 16 + codes[1::2], scales


def block_by_block(scales, block=256):
    """A loop over the blocks."""
    mean = scales.mean()
    kept, ranges = [], []
    for part in (scales - mean).split(block):
        largest = part.abs().max() / 448
        ranges.append(largest)
        divided = part / largest if largest > 0 else torch.zeros_like(part)
        kept.append(divided.clamp(-448.0, 448.0).to(torch.float8_e4m3fn))
    kept = torch.cat([k.view(torch.uint8) for k in kept]).view(torch.float8_e4m3fn)
    return kept, torch.stack(ranges), mean[None]


def at_once(scales, block=256):
    """NaN taken out afterwards."""
    mean = torch.mean(scales, 0, keepdim=True)
    ranges = torch.stack([p.abs().amax() for p in (scales - mean).split(block)]) / 448
    divided = (scales - mean) / ranges.repeat_interleave(block)[: len(scales)]
    kept = divided.nan_to_num(0.0).clamp(-448, 448)
    return kept.to(torch.float8_e4m3fn), ranges, mean


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_of, bias):
        ctx.weight_of, ctx.dtype = weight_of, x.dtype
        return F.linear(x, weight_of(x.dtype), bias)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0].to(ctx.dtype).matmul(ctx.weight_of(ctx.dtype)), None, None


class ByMethod(Adapter):
    """The Function is given the method that dequantizes."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        if not 1 <= rank <= min(linear.weight.shape):
            raise ValueError(f"rank {rank}?")
        self.base = NF4Weight(linear)
        self.lora_a, self.lora_b = start_factors(linear.weight, rank)
        self.scale = alpha / rank

    def forward(self, x):
        """The frozen output plus the update."""
        y = _Frozen.apply(x, self.base.dequantize, self.base.bias)
        thin = x.to(self.lora_a.dtype) @ self.lora_a.T
        return (y + self.scale * (thin @ self.lora_b.T)).to(y.dtype)


class ByHooks(right.QLoRALinear):
    """Saved tensors packed: what autograd would keep of the weight is made again."""

    def forward(self, x):
        """The frozen output plus the update."""
        weight = self.base.dequantize(x.dtype)
        address = weight.untyped_storage().data_ptr()  # hooks that knew `weight` would keep it

        def pack(t):
            same = t.untyped_storage().data_ptr() == address
            return (t.shape, t.stride()) if same else t

        def unpack(kept):
            if isinstance(kept, torch.Tensor):
                return kept
            return self.base.dequantize(x.dtype).as_strided(*kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = F.linear(x, weight, self.base.bias)
        thin = F.linear(x.to(self.lora_a.dtype), self.lora_a)
        return (y + self.scale * F.linear(thin, self.lora_b)).to(y.dtype)


ALTERNATIVES = {
    "19.1": [ByProducts, ScaledFirst],
    "19.2a": [by_hand, in_two_passes],
    "19.2b": [by_children, by_places],
    "19.3a": [by_distances, by_search],
    "19.3b": [block_by_block, at_once],
    "19.4": [ByMethod, ByHooks],
}
assert set(ALTERNATIVES) == set(right.NOTES)
