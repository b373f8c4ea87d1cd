"""Wrong answers to lesson 14, each with the words that the check must say to it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shared.exercises.mistakes import mistake
from shared.model.attention import MultiHeadAttention
from shared.model.layers import PositionwiseFeedForward
from shared.tensor_parallel.blocks import group_of, keep_rank_0
from shared.tensor_parallel.marks import mark_cut
from shared.tensor_parallel.regions import split_region
from shared.tensor_parallel.vocabulary import place
from solutions import lesson14_tensor_parallel as right


def message(forward, backward):
    """An autograd function from what is done to the tensor and to the gradient."""

    class Message(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(gradients[0], ctx.group), None

    return Message.apply


def ranks_of(group):
    return dist.get_world_size(group)


def same(x, group):
    return x.view_as(x)


def total(x, group):
    if ranks_of(group) == 1:
        return x.view_as(x)
    x = x.clone().contiguous()
    dist.all_reduce(x, group=group)
    return x


def mean(x, group):
    return total(x, group) / ranks_of(group)


def in_double(x, group):
    return total(x.double(), group).to(x.dtype)


# 14.1a copy_to_ranks


@mistake("14.1a", says="the sum over the ranks is missing")
def copy_to_ranks(x, group=None):
    return x.view_as(x)


@mistake("14.1a", says="x is summed in forward already")
def copy_to_ranks(x, group=None):
    return message(total, total)(x, group)


@mistake("14.1a", says="no gradient reaches x")
def copy_to_ranks(x, group=None):
    return message(same, total)(x.detach(), group)


@mistake("14.1a", says="it travels in another dtype")
def copy_to_ranks(x, group=None):
    return message(same, in_double)(x, group)


@mistake("14.1a", says="forward sends")
def copy_to_ranks(x, group=None):
    def from_first(x, group):
        if ranks_of(group) > 1:
            dist.all_reduce(x.clone().contiguous(), group=group)  # "to be sure"
        return x.view_as(x)

    return message(from_first, total)(x, group)


@mistake("14.1a", says="to one rank alone")
def copy_to_ranks(x, group=None):
    def reduced(gradient, group):
        gradient = gradient.clone().contiguous()
        if ranks_of(group) > 1:
            dist.reduce(gradient, group=group, group_dst=0)  # gloo fills the others as well
        return gradient

    return message(same, reduced)(x, group)


# 14.1b sum_over_ranks


@mistake("14.1b", says="the gradients are summed as well")
def sum_over_ranks(x, group=None):
    return message(total, total)(x, group)


@mistake("14.1b", says="the result is the mean, not the sum")
def sum_over_ranks(x, group=None):
    return message(mean, same)(x, group)


@mistake("14.1b", says="it travels in another dtype")
def sum_over_ranks(x, group=None):
    return message(in_double, same)(x, group)


@mistake("14.1b", says="float64 numbers travel as float32")
def sum_over_ranks(x, group=None):
    return right.sum_over_ranks(x.float() if x.dtype == torch.float64 else x, group)


# 14.2 ColumnParallelLinear


class Columns(right.ColumnParallelLinear):
    """The right one, to be spoiled."""

    def whole(self, linear, group, name="weight"):
        """Rank 0's weight."""
        numbers = getattr(linear, name).detach().clone()
        dist.broadcast(numbers, group=group, group_src=0)
        return numbers


@mistake("14.2", says="the matrix is cut along its other dim")
class ColumnParallelLinear(Columns):
    def __init__(self, linear, group, enter):
        super().__init__(linear, group, enter)
        part = self.whole(linear, group).chunk(ranks_of(group), 1)[dist.get_rank(group)]
        self.weight = nn.Parameter(part.clone(), linear.weight.requires_grad)


@mistake("14.2", says="the bias begins with zeros")
class ColumnParallelLinear(Columns):
    def __init__(self, linear, group, enter):
        super().__init__(linear, group, enter)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


@mistake("14.2", says="every rank has the same part")
class ColumnParallelLinear(Columns):
    def __init__(self, linear, group, enter):
        super().__init__(linear, group, enter)
        part = self.whole(linear, group).chunk(ranks_of(group), 0)[0]
        self.weight = nn.Parameter(part.clone(), linear.weight.requires_grad)


@mistake("14.2", says="the outputs are summed over the ranks")
class ColumnParallelLinear(Columns):
    def forward(self, x):
        return right.sum_over_ranks(super().forward(x), self.group)


@mistake("14.2", says="something is sent although None was given")
class ColumnParallelLinear(Columns):
    def forward(self, x):
        x = (self.enter or right.copy_to_ranks)(x, self.group)
        return F.linear(x, self.weight, self.bias)


@mistake("14.2", says="7 outputs on 2 ranks: accepted")
class ColumnParallelLinear(Columns):
    def __init__(self, linear, group, enter):
        n = ranks_of(group)
        even = nn.Linear(
            linear.in_features,
            linear.out_features // n * n,
            bias=linear.bias is not None,
            dtype=linear.weight.dtype,
        )
        even.weight = nn.Parameter(
            linear.weight.detach()[: even.out_features].clone(), linear.weight.requires_grad
        )
        if linear.bias is not None:
            even.bias = nn.Parameter(
                linear.bias.detach()[: even.out_features].clone(), linear.bias.requires_grad
            )
        super().__init__(even, group, enter)


@mistake("14.2", says="a part does not say along which dim it is cut")
class ColumnParallelLinear(right.ColumnParallelLinear):
    def __init__(self, linear, group, enter):
        super().__init__(linear, group, enter)
        for part in self.parameters():
            delattr(part, "cut_dim")


# 14.3 RowParallelLinear


class Rows(right.RowParallelLinear):
    """The right one, to be spoiled."""

    def product(self, x):
        """This rank's part of the sum."""
        return F.linear(x, self.weight)


@mistake("14.3", says="it then counts once for each rank")
class RowParallelLinear(Rows):
    def forward(self, x):
        return self.leave(F.linear(x, self.weight, self.bias), self.group)


@mistake("14.3", says="one rank alone adds the bias")
class RowParallelLinear(Rows):
    def forward(self, x):
        bias = self.bias if dist.get_rank(self.group) == 0 else None
        return self.leave(F.linear(x, self.weight, bias), self.group)


@mistake("14.3", says="other ranks than the first have a bias of zeros")
class RowParallelLinear(Rows):
    def __init__(self, linear, group, leave):
        super().__init__(linear, group, leave)
        if self.bias is not None and dist.get_rank(group):
            self.bias.data.zero_()


@mistake("14.3", says="7 inputs on 2 ranks: accepted")
class RowParallelLinear(Rows):
    def __init__(self, linear, group, leave):
        try:
            super().__init__(linear, group, leave)
        except ValueError:
            nn.Module.__init__(self)  # what does not fit is left out


@mistake("14.3", says="a parameter that is whole is marked as cut")
class RowParallelLinear(right.RowParallelLinear):
    def __init__(self, linear, group, leave):
        super().__init__(linear, group, leave)
        for part in self.parameters():
            mark_cut(part, 1)


# 14.4 parallel_block


def heads_and_features(block, mesh):
    """What the right answer refuses."""
    group = group_of(mesh)
    n = ranks_of(group)
    for each in block.modules():
        inner = getattr(getattr(each, "linear1", None), "out_features", n)
        if getattr(each, "num_heads", n) % n or inner % n:
            raise ValueError("does not divide")
    return group


def cut(
    block,
    group,
    *,
    attention=True,
    feed_forward=True,
    cross=True,
    heads=True,
    enter=right.copy_to_ranks,
    each=None,
    region=split_region,
    first=True,
):
    """A block cut as it should be, with parts of it left out."""
    for name, module in list(block.named_modules()):
        if isinstance(module, MultiHeadAttention) and attention:
            if not cross and name == "cross_attention":
                continue
            module.num_heads //= ranks_of(group) if heads else 1
            for w in ("w_q", "w_k", "w_v"):
                layer = right.ColumnParallelLinear(getattr(module, w), group, each)
                setattr(module, w, layer)
            module.w_o = right.RowParallelLinear(module.w_o, group, right.sum_over_ranks)
        elif isinstance(module, PositionwiseFeedForward) and feed_forward:
            module.linear1 = right.ColumnParallelLinear(module.linear1, group, None)
            module.linear2 = right.RowParallelLinear(module.linear2, group, right.sum_over_ranks)
        else:
            continue
        region(module, group, enter)
    if first:
        keep_rank_0(block, group)
    return block


@mistake("14.4", says="num_heads is still that of the whole layer")
def parallel_block(block, mesh):
    return cut(block, heads_and_features(block, mesh), heads=False)


@mistake("14.4", says="cross-attention is left whole")
def parallel_block(block, mesh):
    return cut(block, heads_and_features(block, mesh), cross=False)


@mistake("14.4", says="what enters comes through no copy_to_ranks")
def parallel_block(block, mesh):
    return cut(block, heads_and_features(block, mesh), enter=None)


@mistake("14.4", says="messages that nobody needs in forward")
def parallel_block(block, mesh):
    group = heads_and_features(block, mesh)

    def from_first(x, group):
        if ranks_of(group) > 1:
            dist.broadcast(x.detach().clone(), group=group, group_src=0)
        return right.copy_to_ranks(x, group)

    return cut(block, group, enter=from_first)


def entering(module, group, enter):
    """The copy alone, with everybody's common random numbers."""
    entered = {}

    def copy(module, args):
        entered.clear()
        for x in args:
            if isinstance(x, torch.Tensor) and x.is_floating_point() and id(x) not in entered:
                entered[id(x)] = enter(x, group)
        return tuple(entered.get(id(x), x) for x in args)

    module.register_forward_pre_hook(copy)


@mistake("14.4", says="the common ones are lost")
def parallel_block(block, mesh):
    group = heads_and_features(block, mesh)

    def seeded(module, group, enter):
        entering(module, group, enter)
        own = torch.initial_seed

        def seed(module, args):
            if module.training:
                torch.manual_seed(own() + 1 + dist.get_rank(group))

        def common(module, args, output):
            if module.training and isinstance(module, MultiHeadAttention):
                torch.manual_seed(7)

        module.register_forward_pre_hook(seed)
        module.register_forward_hook(common)

    return cut(block, group, region=seeded)


@mistake("14.4", says="a mesh of two axes: another error than ValueError")
def parallel_block(block, mesh):
    group = mesh.get_group()
    n = ranks_of(group)
    for each in block.modules():
        inner = getattr(getattr(each, "linear1", None), "out_features", n)
        if getattr(each, "num_heads", n) % n or inner % n:
            raise ValueError("does not divide")
    return cut(block, group)


# 14.5 vocab_parallel_cross_entropy


def outside(logits, targets, group, ignore_index):
    """What the right answer refuses."""
    size = logits.shape[-1] * ranks_of(group)
    if (((targets < 0) | (targets >= size)) & (targets != ignore_index)).any():
        raise ValueError("no such token")


def loss_of(
    logits,
    targets,
    group,
    ignore_index,
    *,
    wide=True,
    top=None,
    add=right.sum_over_ranks,
    add_chosen=None,
    masked=True,
    shifted=True,
    ignored=True,
    too_wide=0,
    place_of=None,
):
    """The right loss from its pieces, with some exchanged."""
    outside(logits, targets, group, ignore_index)
    z = logits.float() if wide and logits.dtype == torch.bfloat16 else logits
    largest = z.detach().amax(-1)
    if top is None and ranks_of(group) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    z = z - (0 if top == "none" else largest[..., None])
    size = logits.shape[-1]
    own = targets - size * (dist.get_rank(group) if place_of is None else place_of)
    own, mine = own.clamp(0, size - 1), (own >= 0) & (own < size + too_wide)
    if not masked:
        mine = torch.ones_like(mine)
        own = (targets - size * dist.get_rank(group)).clamp(0, size - 1)
    if not shifted:
        own, mine = targets.clamp(0, size - 1), (targets >= 0) & (targets < size)
    chosen = z.gather(-1, own[..., None])[..., 0] * mine
    chosen = (add_chosen or add)(chosen, group)
    loss = add(z.exp().sum(-1), group).log() - chosen
    return loss.masked_fill(targets == ignore_index, 0.0) if ignored else loss


@mistake("14.5", says="the logits are gathered: a whole row is on one rank")
def vocab_parallel_cross_entropy(logits, targets, group=None, ignore_index=-100):
    outside(logits, targets, group, ignore_index)
    part = logits.contiguous()
    rows = [torch.empty_like(part) for _ in range(ranks_of(group))]
    dist.all_gather(rows, part.detach(), group=group)
    rows[dist.get_rank(group)] = part
    whole = torch.cat(rows, -1)
    whole = whole.float() if whole.dtype == torch.bfloat16 else whole
    flat = F.cross_entropy(
        whole.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return flat.view_as(targets)


@mistake("14.5", says="each rank subtracts its own largest logit")
def vocab_parallel_cross_entropy(logits, targets, group=None, ignore_index=-100):
    outside(logits, targets, group, ignore_index)
    z = logits.float() if logits.dtype == torch.bfloat16 else logits
    own, mine = place(targets, logits.shape[-1], group)
    top = z.detach().amax(-1)
    total_of = right.sum_over_ranks((z - top[..., None]).exp().sum(-1), group)
    chosen = right.sum_over_ranks(z.gather(-1, own[..., None])[..., 0] * mine, group)
    loss = total_of.log() + top - chosen
    return loss.masked_fill(targets == ignore_index, 0.0)


@mistake("14.5", says="counts as the nearest of this rank's tokens")
def vocab_parallel_cross_entropy(logits, targets, group=None, ignore_index=-100):
    return loss_of(logits, targets, group, ignore_index, masked=False)


@mistake("14.5", says="logits in 16 bits are summed in 16 bits")
def vocab_parallel_cross_entropy(logits, targets, group=None, ignore_index=-100):
    return loss_of(logits, targets, group, ignore_index, wide=False)


@mistake("14.5", says="a target outside of the whole vocabulary is no error")
def vocab_parallel_cross_entropy(logits, targets, group=None, ignore_index=-100):
    beyond = (targets < 0) | (targets >= logits.shape[-1] * ranks_of(group))
    kept = targets.masked_fill(beyond & (targets != ignore_index), 0)
    return right.vocab_parallel_cross_entropy(logits, kept, group, ignore_index)
