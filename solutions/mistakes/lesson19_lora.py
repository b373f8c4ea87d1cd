"""Wrong answers to lesson 19, each with the words that the check must say to it."""

import torch
import torch.nn.functional as F
from torch import nn

from shared.errors import InputError
from shared.exercises.mistakes import mistake
from shared.lora.adapter import Adapter, check_rank, start_factors
from shared.lora.layers import LoRALinear as Right
from shared.lora.layers import places_meant
from shared.lora.levels import NF4_LEVELS
from shared.lora.nf4 import DTYPES
from shared.lora.qlora import NF4Weight, _Product
from shared.lora.qlora import QLoRALinear as RightQ
from solutions import lesson19_lora as right

# 19.1 LoRALinear


@mistake("19.1", says="A and B both begin at zero")
class LoRALinear(Right):
    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        nn.init.zeros_(self.lora_a)


@mistake("19.1", says="the frozen layer is trained as well")
class LoRALinear(Right):
    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        self.base.requires_grad_(True)


@mistake("19.1", says="the update lacks its scale")
class LoRALinear(Right):
    def forward(self, x):
        update = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return (self.base(x) + update).to(x.dtype)


@mistake("19.1", says="B A is made whole")
class LoRALinear(Right):
    def forward(self, x):
        whole = self.base.weight + self.scale * self.lora_b @ self.lora_a
        y = x.to(whole.dtype) @ whole.T
        return (y if self.base.bias is None else y + self.base.bias).to(x.dtype)


@mistake("19.1", says="B does not begin at zero")
class LoRALinear(Right):
    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        nn.init.normal_(self.lora_b, std=0.02)


@mistake("19.1", says="a rank of 0 on a layer")
class LoRALinear(Right):
    def __init__(self, linear, rank, alpha):
        Adapter.__init__(self)
        self.base = linear.requires_grad_(False)
        self.lora_a, self.lora_b = start_factors(linear.weight, rank)
        self.scale = alpha / max(rank, 1)


# 19.2a add_lora


def adapt(model, places, rank, alpha, kind):
    model.requires_grad_(False)
    made = {m: kind(m, rank, alpha) for m in dict.fromkeys(m for _, m in places)}
    for name, m in places:
        model.set_submodule(name, made[m])
    return [name for name, _ in places]


@mistake("19.2a", says="a part of a name counts")
def add_lora(model, names, rank, alpha, kind=Right):
    every = model.named_modules(remove_duplicate=False)
    places = [(n, m) for n, m in every if isinstance(m, nn.Linear) and any(w in n for w in names)]
    return adapt(model, places, rank, alpha, kind)


@mistake("19.2a", says="what is not adapted is trained still")
def add_lora(model, names, rank, alpha, kind=Right):
    places = places_meant(model, names)
    made = {m: kind(m, rank, alpha) for m in dict.fromkeys(m for _, m in places)}
    for name, m in places:
        model.set_submodule(name, made[m])
    return [name for name, _ in places]


@mistake("19.2a", says="a layer at two places gets an adapter at one alone")
def add_lora(model, names, rank, alpha, kind=Right):
    places_meant(model, names)
    every = list(model.named_modules())
    meant = [
        (n, m)
        for n, m in every
        if isinstance(m, nn.Linear) and any(n == w or n.endswith(f".{w}") for w in names)
    ]
    return adapt(model, meant, rank, alpha, kind)


@mistake("19.2a", says="a layer at the top of the model is passed over")
def add_lora(model, names, rank, alpha, kind=Right):
    places = [(n, m) for n, m in places_meant(model, names) if "." in n]
    return adapt(model, places, rank, alpha, kind)


@mistake("19.2a", says="in the order of the names")
def add_lora(model, names, rank, alpha, kind=Right):
    each = [places_meant(model, [name]) for name in names]
    return adapt(model, [place for places in each for place in places], rank, alpha, kind)


@mistake("19.2a", says="the model is changed before the refusal")
def add_lora(model, names, rank, alpha, kind=Right):
    model.requires_grad_(False)
    return right.add_lora(model, names, rank, alpha, kind)


# 19.2b merge


def merging(weight_of, model):
    """The right merge, but for the weights."""
    every = model.named_modules(remove_duplicate=False)
    places = [(n, m) for n, m in every if n and isinstance(m, Adapter)]
    with torch.no_grad():
        weights = {m: nn.Parameter(weight_of(m), requires_grad=False) for _, m in places}
    right.merge(model)
    for name, m in places:
        model.get_submodule(name).weight = weights[m]
    return model


@mistake("19.2b", says="the update is added without its scale")
def merge(model):
    return merging(lambda m: m.base.weight + m.lora_b @ m.lora_a, model)


@mistake("19.2b", says="changed in place: the tied embedding")
def merge(model):
    for each in {m for m in model.modules() if isinstance(m, Adapter)}:
        with torch.no_grad():
            each.base.weight += (each.scale * each.lora_b @ each.lora_a).to(each.base.weight.dtype)
    for name, m in list(model.named_modules(remove_duplicate=False)):
        if isinstance(m, Adapter):
            model.set_submodule(name, m.base)
    return model


@mistake("19.2b", says="rounded to 16 bits before it is added")
def merge(model):
    def weight_of(m):
        update = m.scale * (m.lora_b @ m.lora_a)
        return m.base.weight + update.to(m.base.weight.dtype)

    return merging(weight_of, model)


@mistake("19.2b", says="the merged weight has another dtype")
def merge(model):
    return merging(lambda m: m.base.weight + m.scale * (m.lora_b @ m.lora_a), model)


@mistake("19.2b", says="adapters are left in the model")
def merge(model):
    with torch.no_grad():
        for m in {m for m in model.modules() if isinstance(m, Adapter)}:
            update = m.scale * m.lora_b @ m.lora_a
            m.base.weight = nn.Parameter((m.base.weight + update).to(m.base.weight.dtype))
            m.lora_b.zero_()
    return model


# 19.3a quantize_nf4


MIDDLES = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2


def quantizing(weight, block, scales_of=None, codes_of=None):
    """The reference, with other scales of the blocks, or other codes of what is divided by them."""
    if weight.dtype not in DTYPES:
        raise InputError(f"NF4 takes floats of 16 or 32 bits, not {weight.dtype}")
    row = weight.detach().flatten().float()
    blocks = F.pad(row, (0, -len(row) % block)).unflatten(0, (-1, block))
    scales = blocks.abs().amax(1) if scales_of is None else scales_of(blocks)
    x = blocks * torch.where(scales > 0, 1 / scales, 0)[:, None]
    codes = torch.bucketize(x, MIDDLES) if codes_of is None else codes_of(x)
    codes = F.pad(codes.to(torch.uint8).flatten()[: len(row)], (0, len(row) % 2))
    return codes[::2] << 4 | codes[1::2], scales


@mistake("19.3a", says="the halves of a byte are swapped")
def quantize_nf4(weight, block=64):
    codes, scales = right.quantize_nf4(weight, block)
    return codes << 4 | codes >> 4, scales


@mistake("19.3a", says="one scale serves all blocks")
def quantize_nf4(weight, block=64):
    return right.quantize_nf4(weight, weight.numel())


@mistake("19.3a", says="a block of zeros gets another level")
def quantize_nf4(weight, block=64):
    def codes_of(x):
        return torch.bucketize(x, MIDDLES) * (x != 0).any(1, keepdim=True)

    return quantizing(weight, block, codes_of=codes_of)


@mistake("19.3a", says="levels are taken as evenly spaced")
def quantize_nf4(weight, block=64):
    def even(x):
        zeros = (x == 0).all(1, keepdim=True)
        return torch.where(zeros, 7, ((x + 1) * 7.5).round()).long()

    return quantizing(weight, block, codes_of=even)


@mistake("19.3a", says="the largest weight, whatever its sign")
def quantize_nf4(weight, block=64):
    return quantizing(weight, block, scales_of=lambda blocks: blocks.amax(1))


@mistake("19.3a", says="torch.float64 is accepted")
def quantize_nf4(weight, block=64):
    return right.quantize_nf4(weight.float() if weight.dtype == torch.float64 else weight, block)


# 19.3b double_quantize


def doubling(scales, block=256, mean=None, largest=448.0, clean=True):
    mean = scales.mean().reshape(1) if mean is None else mean
    centred = F.pad(scales - mean, (0, -len(scales) % block)).unflatten(0, (-1, block))
    ranges = centred.abs().amax(1) / largest
    eighths = centred / ranges[:, None]
    if clean:
        eighths = eighths.nan_to_num(0.0).clamp(-448, 448)
    return eighths.to(torch.float8_e4m3fn).flatten()[: len(scales)], ranges, mean


@mistake("19.3b", says="the mean is not subtracted")
def double_quantize(scales, block=256):
    return doubling(scales, block, mean=torch.zeros(1))


@mistake("19.3b", says="one range serves all blocks")
def double_quantize(scales, block=256):
    return right.double_quantize(scales, len(scales))


@mistake("19.3b", says="not divided by 448")
def double_quantize(scales, block=256):
    return doubling(scales, block, largest=1.0)


@mistake("19.3b", says="block is not looked at")
def double_quantize(scales, block=256):
    return right.double_quantize(scales)


@mistake("19.3b", says="0 / 0 is NaN")
def double_quantize(scales, block=256):
    return doubling(scales, block, clean=False)


# 19.4 QLoRALinear


class _KeptInContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, base):
        ctx.weight = base.dequantize(x.dtype)
        return x @ ctx.weight.T

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] @ ctx.weight, None


@mistake("19.4", says="autograd keeps the dequantized weight until backward")
class QLoRALinear(RightQ):
    def forward(self, x):
        y = _KeptInContext.apply(x, self.base)
        y = y if self.base.bias is None else y + self.base.bias
        update = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return (y + self.scale * update).to(y.dtype)


@mistake("19.4", says="A and B compute in 16 bits")
class QLoRALinear(RightQ):
    def forward(self, x):
        y = _Product.apply(x, self.base)
        y = y if self.base.bias is None else y + self.base.bias
        a, b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        return y + self.scale * F.linear(F.linear(x, a), b)


@mistake("19.4", says="the dequantized weight is made once and kept")
class QLoRALinear(RightQ):
    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        self.whole = self.base.weight


@mistake("19.4", says="x gets the adapter's gradient alone")
class QLoRALinear(RightQ):
    def forward(self, x):
        with torch.no_grad():
            y = F.linear(x, self.base.dequantize(x.dtype), self.base.bias)
        update = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return (y + self.scale * update).to(y.dtype)


@mistake("19.4", says="the whole weight is kept beside its codes")
class QLoRALinear(RightQ):
    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        self.linear = linear.requires_grad_(False)


@mistake("19.4", says="a rank of 0 on a layer of 192 x 256")
class QLoRALinear(RightQ):
    def __init__(self, linear, rank, alpha):
        Adapter.__init__(self)
        if rank > min(linear.weight.shape):
            check_rank(rank, linear.in_features, linear.out_features)
        self.base = NF4Weight(linear)
        self.lora_a, self.lora_b = start_factors(linear.weight, rank)
        self.scale = alpha / max(rank, 1)
