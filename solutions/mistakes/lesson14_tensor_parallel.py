"""Wrong answers to lesson 14, each with the words that the check must say to it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shared.exercises.mistakes import mistake
from shared.model.attention import MultiHeadAttention
from shared.tensor_parallel.blocks import _check, _cut, group_of, keep_rank_0
from shared.tensor_parallel.marks import mark_cut
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


def in_double(x, group):
    return total(x.double(), group).to(x.dtype)


# 14.1a copy_to_ranks


@mistake("14.1a", says="the sum over the ranks is missing")
def copy_to_ranks(x, group=None):
    return x.view_as(x)


@mistake("14.1a", says="no gradient reaches x")
def copy_to_ranks(x, group=None):
    return right.copy_to_ranks(x.detach(), group)


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


@mistake("14.1b", says="it travels in another dtype")
def sum_over_ranks(x, group=None):
    return message(in_double, same)(x, group)


@mistake("14.1b", says="float64 numbers travel as float32")
def sum_over_ranks(x, group=None):
    return right.sum_over_ranks(x.float() if x.dtype == torch.float64 else x, group)


# 14.2 ColumnParallelLinear


def whole(linear, group):
    """Rank 0's weight."""
    numbers = linear.weight.detach().clone()
    dist.broadcast(numbers, group=group, group_src=0)
    return numbers


@mistake("14.2", says="the matrix is cut along its other dim")
class ColumnParallelLinear(right.ColumnParallelLinear):
    def __init__(self, linear, group, enter):
        super().__init__(linear, group, enter)
        part = whole(linear, group).chunk(ranks_of(group), 1)[dist.get_rank(group)]
        self.weight = nn.Parameter(part.clone(), linear.weight.requires_grad)


@mistake("14.2", says="the bias begins with zeros")
class ColumnParallelLinear(right.ColumnParallelLinear):
    def __init__(self, linear, group, enter):
        super().__init__(linear, group, enter)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


@mistake("14.2", says="the outputs are summed over the ranks")
class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        return right.sum_over_ranks(super().forward(x), self.group)


@mistake("14.2", says="something is sent although None was given")
class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        x = (self.enter or right.copy_to_ranks)(x, self.group)
        return F.linear(x, self.weight, self.bias)


@mistake("14.2", says="7 outputs on 2 ranks: accepted")
class ColumnParallelLinear(right.ColumnParallelLinear):
    def __init__(self, linear, group, enter):
        n = ranks_of(group)
        kept, biased = linear.out_features // n * n, linear.bias is not None
        even = nn.Linear(linear.in_features, kept, bias=biased, dtype=linear.weight.dtype)
        for own, given in zip(even.parameters(), linear.parameters(), strict=True):
            own.data.copy_(given.data[:kept])
            own.requires_grad_(given.requires_grad)
        super().__init__(even, group, enter)


@mistake("14.2", says="a part does not say along which dim it is cut")
class ColumnParallelLinear(right.ColumnParallelLinear):
    def __init__(self, linear, group, enter):
        super().__init__(linear, group, enter)
        for part in self.parameters():
            delattr(part, "cut_dim")


# 14.3 RowParallelLinear


@mistake("14.3", says="it then counts once for each rank")
class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        return self.leave(F.linear(x, self.weight, self.bias), self.group)


@mistake("14.3", says="one rank alone adds the bias")
class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        bias = self.bias if dist.get_rank(self.group) == 0 else None
        return self.leave(F.linear(x, self.weight, bias), self.group)


@mistake("14.3", says="other ranks than the first have a bias of zeros")
class RowParallelLinear(right.RowParallelLinear):
    def __init__(self, linear, group, leave):
        super().__init__(linear, group, leave)
        if self.bias is not None and dist.get_rank(group):
            self.bias.data.zero_()


@mistake("14.3", says="7 inputs on 2 ranks: accepted")
class RowParallelLinear(right.RowParallelLinear):
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


def cut(block, mesh, enter):
    """The block cut as it should be, but for what enters its parts."""
    group = group_of(mesh)
    _check(block, group)
    _cut(block, group, enter, right.sum_over_ranks)
    return block


@mistake("14.4", says="num_heads is still that of the whole layer")
def parallel_block(block, mesh):
    right.parallel_block(block, mesh)
    for each in block.modules():
        if isinstance(each, MultiHeadAttention):
            each.num_heads *= ranks_of(group_of(mesh))
    return block


@mistake("14.4", says="cross-attention is left whole")
def parallel_block(block, mesh):
    whole = getattr(block, "cross_attention", None)
    if whole is None or whole.num_heads % ranks_of(group_of(mesh)):
        return right.parallel_block(block, mesh)
    block.cross_attention = nn.Identity()
    right.parallel_block(block, mesh).cross_attention = whole
    keep_rank_0(whole, group_of(mesh))
    return block


@mistake("14.4", says="what enters comes through no copy_to_ranks")
def parallel_block(block, mesh):
    return cut(block, mesh, None)


@mistake("14.4", says="messages that nobody needs in forward")
def parallel_block(block, mesh):
    def from_first(x, group):
        if ranks_of(group) > 1:
            dist.broadcast(x.detach().clone(), group=group, group_src=0)
        return right.copy_to_ranks(x, group)

    return cut(block, mesh, from_first)


@mistake("14.4", says="the common ones are lost")
def parallel_block(block, mesh):
    group = group_of(mesh)

    def common(module, args, output):
        if module.training:
            torch.rand(dist.get_rank(group))  # another number of draws on each rank

    for each in right.parallel_block(block, mesh).modules():
        if isinstance(each, MultiHeadAttention):
            each.register_forward_hook(common)
    return block


@mistake("14.4", says="a mesh of two axes: another error than ValueError")
def parallel_block(block, mesh):
    mesh.get_group()
    return right.parallel_block(block, mesh)


# 14.5 vocab_parallel_cross_entropy


def outside(logits, targets, group, ignore_index):
    """What the right answer refuses."""
    size = logits.shape[-1] * ranks_of(group)
    if (((targets < 0) | (targets >= size)) & (targets != ignore_index)).any():
        raise ValueError("no such token")


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


@mistake("14.5", says="logits in 16 bits are summed in 16 bits")
def vocab_parallel_cross_entropy(logits, targets, group=None, ignore_index=-100):
    outside(logits, targets, group, ignore_index)
    largest = logits.detach().amax(-1)
    if ranks_of(group) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    z, (own, mine) = logits - largest[..., None], place(targets, logits.shape[-1], group)
    sums = right.sum_over_ranks(z.exp().sum(-1), group)
    chosen = right.sum_over_ranks(z.gather(-1, own[..., None])[..., 0] * mine, group)
    return (sums.log() - chosen).masked_fill(targets == ignore_index, 0.0)


@mistake("14.5", says="a target outside of the whole vocabulary is no error")
def vocab_parallel_cross_entropy(logits, targets, group=None, ignore_index=-100):
    beyond = (targets < 0) | (targets >= logits.shape[-1] * ranks_of(group))
    kept = targets.masked_fill(beyond & (targets != ignore_index), 0)
    return right.vocab_parallel_cross_entropy(logits, kept, group, ignore_index)
