"""Right answers to 06.1, 06.2 and 06.2b in another style; wrappers begin with them."""

import collections
import itertools

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

# 06.1


def described(tensor):
    """What has to be equal on all ranks."""
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def one_buffer_a_dtype(module, src=0):
    """Layouts as dictionaries; then everything of one dtype travels in one flat tensor."""
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    everyone = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: described(t) for name, t in tensors.items()})
    for rank, layout in enumerate(everyone):
        for name in {**everyone[src], **layout}:
            if layout.get(name) != everyone[src].get(name):
                here, there = layout.get(name), everyone[src].get(name)
                raise ValueError(f"{name} is {here} on rank {rank}, {there} on rank {src}")
    by_dtype = collections.defaultdict(list)
    for tensor in tensors.values():
        by_dtype[tensor.dtype].append(tensor.detach())
    for group in by_dtype.values():
        flat = _flatten_dense_tensors([each.contiguous() for each in group])
        dist.broadcast(flat, src=src)
        for target, value in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
            target.copy_(value)


def source_speaks_first(module, src=0):
    """Rank src sends its layout; each rank compares, and all hear who found a difference."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    own = [(name, *described(tensor)) for name, tensor in tensors]
    message = [own]
    dist.broadcast_object_list(message, src=src)
    differing = [
        (mine or theirs)[0]
        for mine, theirs in itertools.zip_longest(own, message[0])
        if mine != theirs
    ]
    found = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, differing)
    wrong = next(filter(None, found), None)
    if wrong:
        raise ValueError(f"the ranks' models differ at {wrong[0]}")
    with torch.no_grad():
        for _, tensor in tensors:
            travelling = tensor.clone(memory_format=torch.contiguous_format)
            dist.broadcast(travelling, src)
            tensor.copy_(travelling)


# 06.2


def all_started_then_waited(module):
    """Divided first; all messages start at once and are waited for in a second loop."""
    n = dist.get_world_size()
    started = []
    for parameter in filter(lambda p: p.requires_grad, module.parameters()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        part = parameter.grad.div(n).contiguous()
        started.append((parameter, part, dist.all_reduce(part, async_op=True)))
    for parameter, mean, work in started:
        work.wait()
        parameter.grad.copy_(mean)


@torch.no_grad()
def by_optimizer_groups(module):
    """Through the data_ptr of names; a new tensor becomes the gradient."""
    for _, parameter in module.named_parameters(remove_duplicate=True):
        if not parameter.requires_grad:
            continue
        total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if parameter.grad is not None:
            total += parameter.grad
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        parameter.grad = total / dist.get_world_size()


# 06.2b


def places_in_a_buffer(module):
    """A buffer for each dtype that is filled from an offset on, and read from the same offsets."""
    needing = [p for p in module.parameters() if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in needing):
        mine = [p for p in needing if p.dtype is dtype]
        ends = list(itertools.accumulate(p.numel() for p in mine))
        buffer = torch.zeros(ends[-1], dtype=dtype, device=mine[0].device)
        for p, end in zip(mine, ends, strict=True):
            if p.grad is not None:
                buffer[end - p.numel() : end] = p.grad.reshape(-1)
        work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
        work.wait()
        for p, end in zip(mine, ends, strict=True):
            p.grad = buffer[end - p.numel() : end].view(p.shape)  # a view: nothing is copied


@torch.no_grad()
def by_torchs_flatten(module):
    """torch's own helpers, the last parameter first."""
    by_dtype = collections.defaultdict(list)
    for p in reversed(list(module.parameters())):
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            by_dtype[p.dtype].append(p.grad)
    for dtype in sorted(by_dtype, key=str):
        whole = [grad.contiguous() for grad in by_dtype[dtype]]
        flat = _flatten_dense_tensors(whole)
        dist.all_reduce(flat)
        for grad, total in zip(by_dtype[dtype], _unflatten_dense_tensors(flat, whole), strict=True):
            torch.div(total, dist.get_world_size(), out=grad)
