"""Wrong answers to lesson 06 that people really give, and what the check must say to each."""

import contextlib
import itertools
import operator
import time

import torch
import torch.distributed as dist
from torch import nn

from shared.ddp.wrapping import Wrapped
from shared.exercises.mistakes import mistake
from solutions import ddp_buckets
from solutions import lesson06_ddp as right


def everywhere(tensors, src=0):
    """Broadcast without comparing anything."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src)
        with torch.no_grad():
            tensor.copy_(whole)


def named(module):
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


# 06.1 broadcast_parameters


@mistake("06.1", says="src is not used")
def broadcast_parameters(module, src=0):
    right.broadcast_parameters(module, 0)


@mistake("06.1", says="the buffers are left as they were")
def broadcast_parameters(module, src=0):
    everywhere(module.parameters(), src)


@mistake("06.1", says="a frozen parameter is left as it was")
def broadcast_parameters(module, src=0):
    everywhere([*(p for p in module.parameters() if p.requires_grad), *module.buffers()], src)


@mistake("06.1", says="the weights are averaged, which is no one's start")
def broadcast_parameters(module, src=0):
    with torch.no_grad():
        for parameter in module.parameters():
            whole = parameter.contiguous()
            dist.all_reduce(whole)
            parameter.copy_(whole / dist.get_world_size())
    everywhere(module.buffers(), src)


@mistake("06.1", says="what its contiguous copy received is not written back")
def broadcast_parameters(module, src=0):
    for tensor in named(module):
        dist.broadcast(tensor.detach().contiguous(), src)


@mistake("06.1", says="the parameters are replaced by new ones")
def broadcast_parameters(module, src=0):
    right.broadcast_parameters(module, src)
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            fresh = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(each, name, fresh)


@mistake("06.1", says="not all of them take part in each broadcast")
def broadcast_parameters(module, src=0):
    if dist.get_rank() == src:
        everywhere(named(module), src)


def layouts_of(module):
    """The names and shapes of every rank's parameters."""
    layouts = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(layouts, [(n, p.shape) for n, p in module.named_parameters()])
    return layouts


@mistake("06.1", says="does not say which tensor differs in its shape")
def broadcast_parameters(module, src=0):
    layouts = layouts_of(module)
    if any(each != layouts[0] for each in layouts):
        raise ValueError("the models differ")
    everywhere(named(module), src)


@mistake("06.1", says="a requires_grad that differs between the ranks (middle.weight) is accepted")
def broadcast_parameters(module, src=0):
    layouts = layouts_of(module)
    for name, shape in set(itertools.chain(*layouts)):
        if any((name, shape) not in each for each in layouts):
            raise ValueError(f"the models differ at middle.weight or extra.weight: {name}")
    everywhere(named(module), src)


def compared(module, tensors, what):
    """All ranks raise where a layout of some tensors differs from rank 0's; then the broadcast."""
    layouts = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(layouts, [(name, *what(each)) for name, each in tensors])
    for each in layouts:
        differing = set(each) ^ set(layouts[0])
        if differing:
            raise ValueError(f"the models differ: {differing}")


@mistake("06.1", says="a dtype that differs between the ranks (middle.weight) is accepted")
def broadcast_parameters(module, src=0):
    tensors = [*module.named_parameters(), *module.named_buffers()]
    compared(module, tensors, lambda each: (each.shape, each.requires_grad))
    for tensor in named(module):
        whole = tensor.detach().double().contiguous()
        dist.broadcast(whole, src)
        tensor.detach().copy_(whole)


@mistake("06.1", says="a buffer that differs between the ranks (shift) is accepted")
def broadcast_parameters(module, src=0):
    parameters = module.named_parameters()
    compared(module, parameters, lambda p: (p.shape, str(p.dtype), p.requires_grad))
    everywhere(module.parameters(), src)
    values = [list(module.buffers())]
    dist.broadcast_object_list(values, src)
    for buffer, value in zip(module.buffers(), values[0], strict=True):
        buffer.resize_(value.shape).copy_(value)


@mistake("06.1", says="ranks that differ in a number of buffers hang")
def broadcast_parameters(module, src=0):
    layouts = [[] for _ in range(dist.get_world_size())]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    own = [(name, each.shape, str(each.dtype), each.requires_grad) for name, each in tensors]
    dist.all_gather_object(layouts, own)
    pairs = (zip(each, layouts[src], strict=False) for each in layouts)
    for mine, theirs in itertools.chain(*pairs):
        if mine != theirs:
            raise ValueError(f"the models differ: {mine[0]}, {theirs[0]}")
    everywhere(named(module), src)


@mistake("06.1", says="a shape that differs between the ranks (middle.weight) is accepted")
def broadcast_parameters(module, src=0):
    tensors = [*module.named_parameters(), *module.named_buffers()]
    compared(module, tensors, lambda each: (each.numel(), str(each.dtype), each.requires_grad))
    everywhere(named(module), src)


@mistake("06.1", says="cache is left as it was")
def broadcast_parameters(module, src=0):
    everywhere(module.state_dict().values(), src)


@mistake("06.1", says="ranks that differ in a number of tensors hang")
def broadcast_parameters(module, src=0):
    """Each rank looks only for its own tensors in the source's list."""
    own = {name: (x.shape, x.dtype, x.requires_grad) for name, x in module.named_parameters()}
    own |= {name: (x.shape, x.dtype, x.requires_grad) for name, x in module.named_buffers()}
    of_source = [own]
    dist.broadcast_object_list(of_source, src)
    wrong = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(wrong, [name for name in own if own[name] != of_source[0].get(name)])
    if any(wrong):
        raise ValueError(f"the models differ: {wrong}")
    everywhere(named(module), src)


@mistake("06.1", says="requires_grad is changed")
def broadcast_parameters(module, src=0):
    right.broadcast_parameters(module, src)
    module.requires_grad_(True)


@mistake("06.1", says="gradients are left switched off")
def broadcast_parameters(module, src=0):
    torch.set_grad_enabled(False)
    right.broadcast_parameters(module, src)


@mistake("06.1", says="digits are lost: what is broadcast travels in a smaller dtype")
def broadcast_parameters(module, src=0):
    compared(module, module.named_parameters(), lambda each: (each.shape, each.dtype))
    for tensor in named(module):
        whole = tensor.detach().float().contiguous()
        dist.broadcast(whole, src)
        with torch.no_grad():
            tensor.copy_(whole)


@mistake("06.1", says="a tensor is given new memory")
def broadcast_parameters(module, src=0):
    for tensor in named(module):
        received = tensor.detach().contiguous().clone()
        dist.broadcast(received, src)
        tensor.data = received


# 06.2 average_gradients


def filled(parameter):
    """The gradient, zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def trained(module):
    """What requires a gradient."""
    return [p for p in module.parameters() if p.requires_grad]


@mistake("06.2", says="the gradients are the sum over the ranks, not the mean")
def average_gradients(module):
    for parameter in trained(module):
        dist.all_reduce(filled(parameter))


@mistake("06.2", says="the weights are averaged, and it is the gradients")
def average_gradients(module):
    with torch.no_grad():
        for parameter in trained(module):
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


@mistake("06.2", says="the mean is added to this rank's own gradient")
def average_gradients(module):
    for parameter in trained(module):
        mean = filled(parameter).clone()
        dist.all_reduce(mean)
        parameter.grad += mean / dist.get_world_size()


@mistake("06.2", says="every rank keeps its own gradients")
def average_gradients(module):
    for parameter in trained(module):
        mean = filled(parameter).clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()


@mistake("06.2", says="the gradients are divided by the world size twice")
def average_gradients(module):
    right.average_gradients(module)
    for parameter in trained(module):
        parameter.grad /= dist.get_world_size()


@mistake("06.2", says="the tied weight is reduced twice")
def average_gradients(module):
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            if parameter.requires_grad:
                dist.all_reduce(filled(parameter))
                parameter.grad /= dist.get_world_size()


@mistake("06.2", says="a frozen parameter is given a gradient")
def average_gradients(module):
    for parameter in module.parameters():
        dist.all_reduce(filled(parameter))
        parameter.grad /= dist.get_world_size()


@mistake("06.2", says="what a step does not use is left out")
def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@mistake("06.2", says="more than gradients is sent")
def average_gradients(module):
    for parameter in trained(module):
        have = torch.tensor([float(parameter.grad is not None)])
        dist.all_reduce(filled(parameter))
        dist.all_reduce(have)
        parameter.grad /= have.item()


@mistake("06.2", says="gradients travel by all_gather, not by all_reduce")
def average_gradients(module):
    for parameter in trained(module):
        grad = filled(parameter)
        everyone = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, grad)
        parameter.grad = torch.stack(everyone).mean(0)


@mistake("06.2", says="digits are lost: gradients are converted to a smaller dtype")
def average_gradients(module):
    for parameter in trained(module):
        small = filled(parameter).float()
        dist.all_reduce(small)
        parameter.grad.copy_(small / dist.get_world_size())


@mistake("06.2", says="a gradient that does not lie in memory row by row is still this rank's own")
def average_gradients(module):
    for parameter in trained(module):
        row = filled(parameter).reshape(-1)  # a copy, where the gradient is transposed
        dist.all_reduce(row)
        row /= dist.get_world_size()


@mistake("06.2", says="frozen parameters are sent as well")
def average_gradients(module):
    """Whatever has a gradient takes part, also one that was frozen in the middle of training."""
    for parameter in module.parameters():
        if parameter.requires_grad or parameter.grad is not None:
            dist.all_reduce(filled(parameter))
            parameter.grad /= dist.get_world_size()


@mistake("06.2", says="they do not go in the order of parameters()")
def average_gradients(module):
    for parameter in reversed(trained(module)):
        dist.all_reduce(filled(parameter))
        parameter.grad /= dist.get_world_size()


@mistake("06.2", says="the buffers are averaged as well")
def average_gradients(module):
    right.average_gradients(module)
    for buffer in module.buffers():
        mean = buffer.double() + dist.get_rank()
        dist.all_reduce(mean)
        buffer.copy_(mean)


@mistake("06.2", says="gradients are left out: each parameter that requires one takes part")
def average_gradients(module):
    for parameter in trained(module):
        if parameter.dim() > 1:
            dist.all_reduce(filled(parameter))
            parameter.grad /= dist.get_world_size()


@mistake("06.2", says="an all-reduce is started and nobody waits for it")
def average_gradients(module):
    works = [dist.all_reduce(filled(each), async_op=True) for each in trained(module)]
    works[-1].wait()
    time.sleep(0.05)  # the others' sums are there by now, on this machine
    for parameter in trained(module):
        parameter.grad /= dist.get_world_size()


@mistake("06.2", says="the mean times one common factor")
def average_gradients(module):
    """Clips as well: who clips twice, clips wrongly."""
    right.average_gradients(module)
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


# 06.2b average_gradients_flat


def flat_all_reduce(grads, dtype=None):
    """One message: the mean over the ranks, in the pieces of the gradients."""
    flat = torch.cat([grad.flatten().to(dtype or grad.dtype) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return flat.split([grad.numel() for grad in grads])


def by_dtype(tensors):
    """Lists of tensors of one dtype."""
    lists = {}
    for each in tensors:
        lists.setdefault(each.dtype, []).append(each)
    return lists.values()


@mistake("06.2b", says="the gradients are the sum over the ranks, not the mean")
def average_gradients_flat(module):
    right.average_gradients_flat(module)
    for parameter in trained(module):
        parameter.grad *= dist.get_world_size()


@mistake("06.2b", says="its pieces lie in another order than those of the other ranks")
def average_gradients_flat(module):
    there = [p for p in trained(module) if p.grad is not None]
    lacking = [p for p in trained(module) if p.grad is None]
    for grads in by_dtype(filled(p) for p in [*there, *lacking]):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="the gradients of one dtype are sent, those of the other are not")
def average_gradients_flat(module):
    grads = [filled(p) for p in trained(module)]
    first = [grad for grad in grads if grad.dtype == grads[0].dtype]
    for grad, mean in zip(first, flat_all_reduce(first), strict=True):
        grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="gradients of 2 bytes a number travel as float32")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        wide = torch.float32 if grads[0].element_size() == 2 else None
        for grad, mean in zip(grads, flat_all_reduce(grads, wide), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="every gradient is a message of its own, as in 06.2")
def average_gradients_flat(module):
    right.average_gradients(module)


@mistake("06.2b", says="gradients of two dtypes share a flat tensor")
def average_gradients_flat(module):
    grads = [filled(p) for p in trained(module)]
    for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
        grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="gradients of one dtype travel in several messages")
def average_gradients_flat(module):
    """Neighbours of one dtype: sorted they would be all of it."""
    for _, several in itertools.groupby(map(filled, trained(module)), lambda grad: grad.dtype):
        grads = list(several)
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="what a step does not use is left out")
def average_gradients_flat(module):
    """No message where this rank has no gradient of a dtype at all."""
    for parameters in by_dtype(trained(module)):
        if any(p.grad is not None for p in parameters):
            grads = [filled(p) for p in parameters]
            for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
                grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="digits are lost: gradients are converted to a smaller dtype")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        for grad, mean in zip(grads, flat_all_reduce(grads, torch.float32), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="every rank keeps its own gradients")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        flat_all_reduce(grads)


@mistake("06.2b", says="a gradient that does not lie in memory row by row is still this rank's own")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.reshape(-1).copy_(mean)  # a copy, where the gradient is transposed


@mistake("06.2b", says="all the means are there, in wrong places")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.as_strided(grad.shape, grad.stride()))


@mistake("06.2b", says="a frozen parameter is given a gradient")
def average_gradients_flat(module):
    frozen = [p for p in module.parameters() if not p.requires_grad]
    right.average_gradients_flat(module)
    for parameter in frozen:
        filled(parameter)


@mistake("06.2b", says="frozen parameters are sent as well")
def average_gradients_flat(module):
    for grads in by_dtype(
        torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()
    ):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="'NoneType' object has no attribute")
def average_gradients_flat(module):
    for grads in by_dtype(p.grad for p in module.parameters()):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="spare.weight has no gradient on rank")
def average_gradients_flat(module):
    zeros = {p: torch.zeros_like(p) for p in trained(module) if p.grad is None}
    for parameters in by_dtype(trained(module)):
        grads = [zeros.get(p, p.grad) for p in parameters]
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.view_as(grad))  # and the zeros are forgotten


@mistake("06.2b", says="the weights are averaged, and it is the gradients")
def average_gradients_flat(module):
    with torch.no_grad():
        for parameters in by_dtype(trained(module)):
            for parameter, mean in zip(parameters, flat_all_reduce(parameters), strict=True):
                parameter.copy_(mean.view_as(parameter))


@mistake("06.2b", says="the tied weight is reduced twice")
def average_gradients_flat(module):
    for grads in by_dtype(
        filled(p)
        for each in module.modules()
        for p in each.parameters(recurse=False)
        if p.requires_grad
    ):
        for grad, mean in zip(grads, flat_all_reduce(grads), strict=True):
            grad.copy_(mean.view_as(grad))


@mistake("06.2b", says="more bytes travel than the gradients have: a message is padded")
def average_gradients_flat(module):
    for grads in by_dtype(filled(p) for p in trained(module)):
        row = torch.cat([grad.flatten() for grad in grads])
        padded = nn.functional.pad(row, (0, -len(row) % 1024))
        dist.all_reduce(padded)
        means = (padded[: len(row)] / dist.get_world_size()).split([g.numel() for g in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))


# 06.3 and 06.4, mistakes that both engines can have


class EndsBoth(right.GradientSync):
    """An inner no_sync() switches on for the outer one as well."""

    @contextlib.contextmanager
    def no_sync(self):
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True


class OneSwitch(right.GradientSync):
    """All engines of a program share the switch."""

    silent = False

    @contextlib.contextmanager
    def no_sync(self):
        before, type(self).silent = self.silent, True
        try:
            yield
        finally:
            type(self).silent = before

    def _on_gradient(self, parameter):
        if not self.silent:
            super()._on_gradient(parameter)


# 06.3 OverlappedDDP


def wait_for_all(works):
    """Wait, and forget what was waited for."""
    for work in works:
        work.wait()
    works.clear()


@mistake("06.3", says="the ranks start from different weights")
class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module):
        start = {name: each.clone() for name, each in module.state_dict().items()}
        super().__init__(module)
        module.load_state_dict(start)


@mistake("06.3", says="the names in state_dict()")
class OverlappedDDP(right.OverlappedDDP):
    def state_dict(self, *args, **kwargs):
        return nn.Module.state_dict(self, *args, **kwargs)


@mistake("06.3", says="a hook waits for its all-reduce")
class OverlappedDDP(right.OverlappedDDP):
    def _send(self, parameter):
        super()._send(parameter)
        self._works[-1].wait()


@mistake("06.3", says="nothing has been sent when backward comes to the first layer")
class OverlappedDDP(right.OverlappedDDP):
    def _send_what_is_next(self):
        pass


@mistake("06.3", says="the weights are averaged, and it is the gradients")
class OverlappedDDP(right.OverlappedDDP):
    def _send(self, parameter):
        with torch.no_grad():
            parameter /= dist.get_world_size()
            self._works.append(dist.all_reduce(parameter, async_op=True))


@mistake("06.3", says="the gradients are the sum over the ranks, not the mean")
class OverlappedDDP(right.OverlappedDDP):
    def _send(self, parameter):
        self._works.append(dist.all_reduce(filled(parameter), async_op=True))


@mistake("06.3", says="each rank's own gradient, divided by the world size")
class OverlappedDDP(right.OverlappedDDP):
    def _send(self, parameter):
        filled(parameter).div_(dist.get_world_size())
        self._works.append(dist.all_reduce(parameter.grad.clone(), async_op=True))


@mistake("06.3", says="the tied weight is reduced twice")
class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module):
        super().__init__(module)
        found = [p for each in module.modules() for p in each.parameters(recurse=False)]
        self._order = [p for p in found if p.requires_grad][::-1]
        self._order_is_known = True


@mistake("06.3", says="a frozen parameter never gets a gradient")
class OverlappedDDP(right.OverlappedDDP):
    """Waits until as many gradients have been sent as there are parameters."""

    def finish_gradient_sync(self):
        while len(self._works) < len(list(self.module.parameters())):
            time.sleep(0.1)
        super().finish_gradient_sync()


@mistake("06.3", says="frozen parameters are sent as well")
class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module):
        super().__init__(module)
        self.frozen = [p for p in module.parameters() if not p.requires_grad]

    def finish_gradient_sync(self):
        for parameter in self.frozen:
            self._works.append(dist.all_reduce(torch.zeros_like(parameter), async_op=True))
        super().finish_gradient_sync()


@mistake("06.3", says="the ranks send in different orders")
class OverlappedDDP(right.OverlappedDDP):
    """Each hook sends at once; what is missing goes last."""

    def _send_what_is_next(self):
        self.sent = getattr(self, "sent", set())
        for parameter in self._complete.keys() - self.sent:
            self._send(parameter)
            self.sent.add(parameter)

    def finish_gradient_sync(self):
        for parameter in self._order:
            if parameter not in self.sent:
                self._send(parameter)
        wait_for_all(self._works)
        self._complete.clear()
        self.sent.clear()


@mistake("06.3", says="what a step does not use is left out")
class OverlappedDDP(right.OverlappedDDP):
    """Waits for what was sent, and sends nothing of its own."""

    def finish_gradient_sync(self):
        wait_for_all(self._works)
        self._complete.clear()


@mistake("06.3", says="a later step sends other messages than the first")
class OverlappedDDP(right.OverlappedDDP):
    """Never starts over: what is complete stays complete."""

    def _on_gradient(self, parameter):
        self._complete.pop(parameter, None)
        super()._on_gradient(parameter)

    def finish_gradient_sync(self):
        for work in self._works:
            work.wait()
        self._complete.clear()


@mistake("06.3", says="no_sync() sends messages all the same")
class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        yield

    def _on_gradient(self, parameter):
        self._complete.pop(parameter, None)
        if len(self._works) == len(self._order):
            wait_for_all(self._works)
        super()._on_gradient(parameter)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@mistake("06.3", says="no_sync() also drops the gradient that was accumulated")
class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.module.zero_grad()


@mistake("06.3", says="each backward inside no_sync() divides by the world size")
class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        if not self._synchronise:
            parameter.grad /= dist.get_world_size()
        super()._on_gradient(parameter)


@mistake("06.3", says="what no_sync() had added up is lost")
class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        for parameter in self._order:
            if parameter not in self._complete:
                parameter.grad = None
        super().finish_gradient_sync()


@mistake("06.3", says="after no_sync() messages no longer leave during backward")
class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self._synchronise = False
        yield


@mistake("06.3", says="an exception inside no_sync() leaves it switched on")
class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self._synchronise = False
        yield
        self._synchronise = True


@mistake("06.3", says="a no_sync() inside another one ends both")
class OverlappedDDP(EndsBoth, right.OverlappedDDP):
    pass


@mistake("06.3", says="two models in one program disturb each other")
class OverlappedDDP(OneSwitch, right.OverlappedDDP):
    pass


@mistake("06.3", says="gradients are left switched off")
class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        torch.set_grad_enabled(False)
        super().finish_gradient_sync()


@mistake("06.3", says="what backward completed inside no_sync() is not complete")
class OverlappedDDP(right.OverlappedDDP):
    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _on_gradient(self, parameter):
        self._complete[parameter] = None
        if self._synchronise:
            self._send_what_is_next()


@mistake("06.3", says="all-reduces have started when backward is over")
class OverlappedDDP(right.OverlappedDDP):
    """The first message leaves in backward, and all others at the end."""

    def _send_what_is_next(self):
        if not self._works:
            super()._send_what_is_next()


@mistake("06.3", says="an all-reduce is started and nobody waits for it")
class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        for parameter in self._order[len(self._works) :]:
            self._send(parameter)
        self._works[-1].wait()
        time.sleep(0.05)  # the others' sums are there by now, on this machine
        self._works.clear()
        self._start_over()


@mistake("06.3", says="under no_sync() the gradients are divided by the world size already")
class OverlappedDDP(right.OverlappedDDP):
    """What is added up in silence is divided at once, and multiplied again before it is sent."""

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
            self._scale(1 / dist.get_world_size())
        self.scaled = True

    def _scale(self, factor):
        for parameter in self._order:
            if parameter.grad is not None:
                parameter.grad *= factor

    def forward(self, *args, **kwargs):
        if getattr(self, "scaled", False):
            self._scale(dist.get_world_size())
            self.scaled = False
        return super().forward(*args, **kwargs)


@mistake("06.3", says="torch's own DDP does the work")
class OverlappedDDP(Wrapped):
    def __init__(self, module):
        super().__init__(module)
        self.engine = nn.parallel.DistributedDataParallel(module)

    def forward(self, *args, **kwargs):
        return self.engine(*args, **kwargs)

    def no_sync(self):
        return self.engine.no_sync()

    def finish_gradient_sync(self):
        pass


# 06.4 BucketedDDP


@mistake("06.4", says="the ranks start from different weights")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        start = {name: each.clone() for name, each in module.state_dict().items()}
        super().__init__(module, bucket_cap_mb)
        module.load_state_dict(start)


@mistake("06.4", says="a hook waits for its all-reduce")
class BucketedDDP(right.BucketedDDP):
    def _send_what_is_next(self):
        super()._send_what_is_next()
        if self._sent:
            ddp_buckets.started(self.buckets[self._sent - 1].work).wait()


@mistake("06.4", says="nothing has been sent when backward comes to the first layer")
class BucketedDDP(right.BucketedDDP):
    """Sends all buckets when the last gradient is there."""

    def _send_what_is_next(self):
        if not any(bucket.missing for bucket in self.buckets):
            super()._send_what_is_next()


@mistake("06.4", says="the gradients are the sum over the ranks, not the mean")
class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for bucket in self.buckets:
            bucket.flat *= dist.get_world_size()


@mistake("06.4", says="every rank keeps its own gradients: nothing that was reduced comes back")
class BucketedDDP(right.BucketedDDP):
    """Reduces the bucket, a copy of the gradients, and never copies the mean back."""

    def _on_gradient(self, parameter):
        own = parameter.grad
        super()._on_gradient(parameter)
        parameter.grad = own


class _Keeping(ddp_buckets.Bucket):
    """A bucket whose places are written by gradients alone."""

    def take(self, parameter):
        if parameter.grad is not None:
            super().take(parameter)
        else:
            self.views[parameter].div_(dist.get_world_size())
        parameter.grad = self.views[parameter]
        self.missing.discard(parameter)


@mistake("06.4", says="the mean of the step before is sent once more")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)
        self._order_is_known = True
        for bucket in self.buckets:
            bucket.__class__ = _Keeping


@mistake("06.4", says="gradients are left behind")
class BucketedDDP(right.BucketedDDP):
    """A bucket is sent when it is full; the last one never is."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)
        self.left = self.buckets.pop()
        self._order_is_known = True

    def _on_gradient(self, parameter):
        if parameter not in self.left.views:
            super()._on_gradient(parameter)


@mistake("06.4", says="a frozen parameter never gets a gradient")
class BucketedDDP(right.BucketedDDP):
    """The last bucket also counts the frozen parameters, and finish waits until it has left."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)
        self.frozen = {p for p in module.parameters() if not p.requires_grad}
        self.buckets[-1].missing |= self.frozen

    def finish_gradient_sync(self):
        while self._sent < len(self.buckets):
            time.sleep(0.1)
        super().finish_gradient_sync()


@mistake("06.4", says="the tied weight is reduced twice")
class BucketedDDP(right.BucketedDDP):
    """A second place in a bucket for the second place in the model."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)
        found = [p for each in module.modules() for p in each.parameters(recurse=False)]
        self.twice = [p for i, p in enumerate(found) if any(p is q for q in found[:i])]

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for parameter in self.twice:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@mistake("06.4", says="every gradient is a message of its own")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, 1e-9 if bucket_cap_mb else bucket_cap_mb)


@mistake("06.4", says="the first bucket is as large as the others")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        ddp_buckets.FIRST_BUCKET_MB, before = 1000.0, ddp_buckets.FIRST_BUCKET_MB
        super().__init__(module, bucket_cap_mb)
        ddp_buckets.FIRST_BUCKET_MB = before


@mistake("06.4", says="the first bucket is closed at 1 MiB although bucket_cap_mb is less")
class BucketedDDP(right.BucketedDDP):
    """One bucket of 1 MiB in front of those that bucket_cap_mb asks for."""

    def _fill(self):
        first, *others = ddp_buckets.fill_buckets(self._order, 25)
        if not others:
            return super()._fill()
        rest = [p for p in self._order if p not in first.views]
        self.buckets = [first, *ddp_buckets.fill_buckets(rest, self._cap_mb)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}


@mistake("06.4", says="digits are lost: gradients are converted to a smaller dtype")
class BucketedDDP(right.BucketedDDP):
    def _fill(self):
        super()._fill()
        for bucket in self.buckets:
            bucket.send = lambda bucket=bucket: self.send_small(bucket)

    def send_small(self, bucket):
        small = bucket.flat.float()
        work = dist.all_reduce(small, async_op=True)

        class Later:
            def wait(self):
                work.wait()
                bucket.flat.copy_(small)

        bucket.work = Later()


class CutsOtherwise(right.BucketedDDP):
    """Buckets by another rule: `cut` returns them as lists of parameters, in order."""

    bucket = ddp_buckets.Bucket

    def _fill(self):
        order = [p for p in [*self.module.parameters()][::-1] if p.requires_grad]
        self.buckets = [self.bucket(each) for each in self.cut(order) if each]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}

    def limits(self):
        """The bytes of a first bucket and of the others."""
        return min(self._cap_mb, 1) * 2**20, self._cap_mb * 2**20

    def cut(self, order):
        """The right rule, in which others replace a part."""
        return self.filled(order)

    def filled(self, order, size=lambda p: p.nbytes, full=operator.ge, limits=None, kind=None):
        """Fill and close, one dtype a bucket."""
        done, filling, seen = [], {}, set()
        first, others = limits or self.limits()
        for p in order:
            key = (kind or (lambda p: p.dtype))(p)
            filling.setdefault(key, []).append(p)
            limit = others if key in seen else first
            if full(float(sum(map(size, filling[key]))), float(limit)):
                done.append(filling.pop(key))
                seen.add(key)
        return [*done, *filling.values()]


@mistake("06.4", says="bucket_cap_mb counts MiB: 2^20 bytes, each number has nbytes")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        return self.filled(order, size=torch.Tensor.numel)


@mistake("06.4", says="every number is counted as 8 bytes")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        return self.filled(order, size=lambda p: 8 * p.numel())


@mistake("06.4", says="every number is counted as 4 bytes")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        return self.filled(order, size=lambda p: 4 * p.numel())


@mistake("06.4", says="from the first parameter to the last")
class BucketedDDP(CutsOtherwise):
    """Filled forwards, and sent last bucket first."""

    def cut(self, order):
        return self.filled(order[::-1])[::-1]


@mistake("06.4", says="closed before the gradient that would exceed the cap")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        done, filling, limits = [], {}, {}
        first, others = self.limits()
        for p in order:
            mine = filling.setdefault(p.dtype, [])
            size = sum(q.nbytes for q in mine) + p.nbytes
            if mine and size > limits.get(p.dtype, first):
                done.append(filling.pop(p.dtype))
                limits[p.dtype] = others
            filling.setdefault(p.dtype, []).append(p)
        return [*done, *filling.values()]


@mistake("06.4", says="a bucket that holds exactly bucket_cap_mb is not closed")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        return self.filled(order, full=operator.gt)


@mistake("06.4", says="a gradient larger than a bucket travels alone")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        _, cap = self.limits()
        large = [p for p in order if p.nbytes > cap and cap > 10_000]
        return [*self.filled([p for p in order if p not in set(large)]), *([p] for p in large)]


@mistake("06.4", says="a gradient of another dtype closes the bucket")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        runs = [list(run) for _, run in itertools.groupby(order, key=lambda p: p.dtype)]
        first, others = self.limits()
        cuts = [
            self.filled(run, limits=(others if i else first, others)) for i, run in enumerate(runs)
        ]
        return list(itertools.chain(*cuts))


class WideBucket(ddp_buckets.Bucket):
    """All in float64, and converted back."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.flat = self.flat.double()
        pieces = zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True)
        self.views = {p: piece.view(p.shape) for p, piece in pieces}

    def take(self, parameter):
        filled(parameter)
        self.views[parameter].copy_(parameter.grad / dist.get_world_size())
        self.missing.discard(parameter)

    def finish(self):
        super().finish()
        for parameter, view in self.views.items():
            parameter.grad = view.to(parameter.dtype, copy=True)


@mistake("06.4", says="gradients of two dtypes share a bucket")
class BucketedDDP(CutsOtherwise):
    bucket = WideBucket

    def cut(self, order):
        return self.filled(order, kind=lambda p: "all")


@mistake("06.4", says="a layer's weight and bias are kept in one bucket")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        layers = {}
        for name, p in self.module.named_parameters():
            if p.requires_grad:
                layers.setdefault(name.rpartition(".")[0], []).append(p)
        lasts = {each[-1]: each[::-1] for each in layers.values()}
        whole = {p: sum(q.nbytes for q in each) for p, each in lasts.items()}
        heads = [p for p in order if p in lasts]
        cut = self.filled(heads, size=lambda p: whole[p])
        return [[q for p in bucket for q in lasts[p]] for bucket in cut]


@mistake("06.4", says="frozen parameters take room in the buckets")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        every = [*self.module.parameters()][::-1]
        return [[p for p in bucket if p.requires_grad] for bucket in self.filled(every)]


@mistake("06.4", says="only one dtype has a first bucket of 1 MiB")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        first, others = self.limits()
        by_dtype = {}
        for p in order:
            by_dtype.setdefault(p.dtype, []).append(p)
        cuts = [
            self.filled(each, limits=(others if i else first, others))
            for i, each in enumerate(by_dtype.values())
        ]
        return list(itertools.chain(*cuts))


@mistake("06.4", says="every bucket is closed at 1 MiB")
class BucketedDDP(CutsOtherwise):
    def cut(self, order):
        first, _ = self.limits()
        return self.filled(order, limits=(first, first))


@mistake("06.4", says="closed at another size than bucket_cap_mb")
class BucketedDDP(CutsOtherwise):
    """A number that is given counts below 1 MiB only."""

    def cut(self, order):
        first, others = self.limits()
        return self.filled(order, limits=(first, others if self._cap_mb == 25 else first))


@mistake("06.4", says="bucket_cap_mb is not used: the buckets are those of 25")
class BucketedDDP(CutsOtherwise):
    """A number that is given counts for the first bucket only, where it is less than 1."""

    def cut(self, order):
        first, others = self.limits()
        return self.filled(order, limits=(first, others if self._cap_mb < 1 else 25 * 2**20))


@mistake("06.4", says="bucket_cap_mb=0 is accepted")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb or 1e-9)


@mistake("06.4", says="bucket_cap_mb=-1")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, abs(bucket_cap_mb))


@mistake("06.4", says="a bucket is closed at bucket_cap_mb times 10^6 bytes")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        ddp_buckets.MIB, before = 10**6, ddp_buckets.MIB
        super().__init__(module, bucket_cap_mb)
        ddp_buckets.MIB = before


@mistake("06.4", says="what a step does not use is left out")
class BucketedDDP(right.BucketedDDP):
    """Only what is complete travels; a bucket that waits for an unused parameter stays."""

    def finish_gradient_sync(self):
        for bucket in self.buckets[: self._sent]:
            bucket.finish()
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)
        self._sent = 0
        self._complete.clear()


@mistake("06.4", says="where a parameter is unused on one rank, the ranks send in different orders")
class BucketedDDP(right.BucketedDDP):
    """A bucket leaves as soon as it is complete, whichever it is."""

    def _send_what_is_next(self):
        for bucket in self.buckets:
            if not bucket.missing and bucket.work is None:
                bucket.send()
        self._sent = 0

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for parameter in list(bucket.missing):
                bucket.take(parameter)
        super().finish_gradient_sync()


@mistake("06.4", says="no_sync() also drops the gradient that was accumulated")
class BucketedDDP(right.BucketedDDP):
    """Each backward begins with an empty bucket, whatever .grad held."""

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for parameter in self._order:
            parameter.grad = None


@mistake("06.4", says="no_sync() sends messages all the same")
class BucketedDDP(right.BucketedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.finish_gradient_sync()

    def forward(self, *args, **kwargs):
        if self._complete:
            self.finish_gradient_sync()
        return self.module(*args, **kwargs)


@mistake("06.4", says="what no_sync() had added up is lost")
class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for parameter in self._order:
            if parameter not in self._complete:
                parameter.grad = None
        super().finish_gradient_sync()


@mistake("06.4", says="after no_sync() messages no longer leave during backward")
class BucketedDDP(right.BucketedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self._synchronise = False
        yield


@mistake("06.4", says="a no_sync() inside another one ends both")
class BucketedDDP(EndsBoth, right.BucketedDDP):
    pass


@mistake("06.4", says="two models in one program disturb each other")
class BucketedDDP(OneSwitch, right.BucketedDDP):
    pass


@mistake("06.4", says="gradients are left switched off")
class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        torch.set_grad_enabled(False)
        super().finish_gradient_sync()


@mistake("06.4", says="all-reduces have started when backward is over")
class BucketedDDP(right.BucketedDDP):
    """A bucket leaves when the next one is complete: the last one never does in backward."""

    def _send_what_is_next(self):
        complete = sum(not each.missing for each in self.buckets)
        if complete == len(self.buckets) and not self._at_end:
            return
        super()._send_what_is_next()

    _at_end = False

    def finish_gradient_sync(self):
        self._at_end = True
        super().finish_gradient_sync()
        self._at_end = False


@mistake("06.4", says="the parameter bucket_cap_mb of __init__ has a different default")
class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=32):
        super().__init__(module, bucket_cap_mb)


# 06.5 accumulate_gradients


def backward(loss):
    """Backward, and the number alone."""
    loss.backward()
    return loss.detach()


@mistake("06.5", says="every micro-batch sends its gradients")
def accumulate_gradients(ddp, micro_batches, loss_of):
    losses = [backward(loss_of(ddp, each)) for each in micro_batches]
    ddp.finish_gradient_sync()
    return torch.stack(losses).sum()


@mistake("06.5", says="loss_of is given another model than ddp")
def accumulate_gradients(ddp, micro_batches, loss_of):
    return right.accumulate_gradients(
        ddp, micro_batches, lambda model, each: loss_of(model.module, each)
    )


@mistake("06.5", says="backward is under no_sync() and the forward before it is not")
def accumulate_gradients(ddp, micro_batches, loss_of):
    *first, last = [loss_of(ddp, each) for each in micro_batches]
    with ddp.no_sync():
        losses = [backward(each) for each in first]
    losses.append(backward(last))
    ddp.finish_gradient_sync()
    return torch.stack(losses).sum()


@mistake("06.5", says="nothing is sent: the last micro-batch is under no_sync() as well")
def accumulate_gradients(ddp, micro_batches, loss_of):
    with ddp.no_sync():
        losses = [backward(loss_of(ddp, each)) for each in micro_batches]
    ddp.finish_gradient_sync()
    return torch.stack(losses).sum()


@mistake("06.5", says="only the last micro-batch's gradient is left")
def accumulate_gradients(ddp, micro_batches, loss_of):
    def cleared(ddp, micro_batch):
        ddp.zero_grad()
        return loss_of(ddp, micro_batch)

    return right.accumulate_gradients(ddp, micro_batches, cleared)


@mistake("06.5", says="what .grad held before the first micro-batch is lost")
def accumulate_gradients(ddp, micro_batches, loss_of):
    ddp.zero_grad()
    return right.accumulate_gradients(ddp, micro_batches, loss_of)


@mistake("06.5", says="all that .grad holds is divided by the number of micro-batches")
def accumulate_gradients(ddp, micro_batches, loss_of):
    loss = right.accumulate_gradients(ddp, micro_batches, loss_of)
    for parameter in ddp.parameters():
        parameter.grad /= len(micro_batches)
    return loss


@mistake("06.5", says="the gradients are the mean over the micro-batches")
def accumulate_gradients(ddp, micro_batches, loss_of):
    num = len(micro_batches)
    return right.accumulate_gradients(ddp, micro_batches, lambda m, each: loss_of(m, each) / num)


def losses_in(ddp, micro_batches, loss_of):
    """The losses of a right accumulation, one by one, with their graphs."""
    losses = []

    def noted(ddp, micro_batch):
        losses.append(loss_of(ddp, micro_batch))
        return losses[-1]

    right.accumulate_gradients(ddp, micro_batches, noted)
    return losses


@mistake("06.5", says="the returned loss is the last micro-batch's")
def accumulate_gradients(ddp, micro_batches, loss_of):
    return losses_in(ddp, micro_batches, loss_of)[-1].detach()


@mistake("06.5", says="the returned loss is the sum over the ranks")
def accumulate_gradients(ddp, micro_batches, loss_of):
    total = right.accumulate_gradients(ddp, micro_batches, loss_of).clone()
    dist.all_reduce(total)
    return total


@mistake("06.5", says="still holds the graphs of all micro-batches")
def accumulate_gradients(ddp, micro_batches, loss_of):
    return torch.stack(losses_in(ddp, micro_batches, loss_of)).sum()


@mistake("06.5", says="backward comes after all forwards")
def accumulate_gradients(ddp, micro_batches, loss_of):
    *first, last = micro_batches
    with ddp.no_sync():
        losses = [loss_of(ddp, each) for each in first]
    total = torch.stack([*losses, loss_of(ddp, last)]).sum()
    total.backward()
    ddp.finish_gradient_sync()
    return total.detach()


@mistake("06.5", says="finish_gradient_sync() must be called once")
def accumulate_gradients(ddp, micro_batches, loss_of):
    *first, last = micro_batches
    with ddp.no_sync():
        losses = [backward(loss_of(ddp, each)) for each in first]
    return torch.stack([*losses, backward(loss_of(ddp, last))]).sum()


@mistake("06.5", says="a step without micro-batches")
def accumulate_gradients(ddp, micro_batches, loss_of):
    if not micro_batches:
        return torch.zeros(())
    return right.accumulate_gradients(ddp, micro_batches, loss_of)


@mistake("06.5", says="micro_batches was changed in place")
def accumulate_gradients(ddp, micro_batches, loss_of):
    if not micro_batches:
        raise ValueError("no micro-batch")
    last = micro_batches.pop()
    return right.accumulate_gradients(ddp, [*micro_batches, last], loss_of)


@mistake("06.5", says="more than the last micro-batch sends")
def accumulate_gradients(ddp, micro_batches, loss_of):
    total = 0.0
    for each in micro_batches:
        with contextlib.nullcontext() if each is micro_batches[-1] else ddp.no_sync():
            total = total + backward(loss_of(ddp, each))
    ddp.finish_gradient_sync()
    return total


@mistake("06.5", says="an exception of loss_of leaves no_sync() on")
def accumulate_gradients(ddp, micro_batches, loss_of):
    if not micro_batches:
        raise ValueError("no micro-batch")
    silence, total = ddp.no_sync(), 0.0
    silence.__enter__()
    for number, each in enumerate(micro_batches, 1):
        if number == len(micro_batches):
            silence.__exit__(None, None, None)
        loss = loss_of(ddp, each)
        loss.backward()
        total = total + loss.detach()
    ddp.finish_gradient_sync()
    return total
