"""ZeRO stages 1 and 2: every rank keeps the optimizer states, and the gradients, of its part."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.errors import InputError
from shared.sharding.backward import at_end_of_backward
from shared.sharding.clipping import clip_parts
from shared.sharding.flat import Bucket, PartWithMaster

BUCKET_SIZE = 1_000_000  # elements


class ZeroStage1(Optimizer):
    """An optimizer whose states are in parts: each rank updates its part of every parameter.

    `optimizer_class` (torch.optim.AdamW) with its settings does the updates. Gradients are
    averaged over the ranks in `step()`: it reduce-scatters them, updates, and gathers the
    parameters, so there is no DDP around the model. Parameters are rank 0's at the start. One
    without gradient counts as one with zeros: another rank may have used it. A frozen one is left
    alone. 16-bit parameters have float32 masters.

    `bucket_size` is the number of elements that travel at once; a larger parameter travels alone.
    The states are in parts over the ranks of the keyword `group`; None: all ranks.

    torch.nn.utils.clip_grad_norm_ is wrong with every stage, and says nothing: in stage 1 it finds
    this rank's gradients, not the means, in stages 2 and 3 no .grad at all, and clips nothing.
    Clip with `clip_grad_norm_` of this class. Drop gradients with `zero_grad` of this class: the
    model's own knows nothing of averaged ones, to which the next are added then.
    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.1.
    """

    stage = 1
    _averaged = False

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        *,
        bucket_size: int = BUCKET_SIZE,
        **kwargs: Any,
    ) -> None:
        if bucket_size < 1:
            raise InputError(f"bucket_size must be 1 element or more, got {bucket_size}")
        self.bucket_size = bucket_size
        # Among the keywords: the signature is that of exercise 10.2b, which has no groups.
        self.group: dist.ProcessGroup | None = kwargs.pop("group", None)
        self.buckets = list[Any]()  # Buckets, or stage 3's units
        # An optimizer over no parameter yet: it checks the settings and knows their defaults.
        self.inner = optimizer_class([{"params": []}], **kwargs)
        self.inner.param_groups.clear()
        super().__init__(params, self.inner.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters, with settings of their own; the same on every rank."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if not parameter.requires_grad:
                dist.broadcast(parameter.detach(), group=self.group, group_src=0)
        buckets = self._make_buckets([p for p in group["params"] if p.requires_grad])
        settings = {key: value for key, value in group.items() if key != "params"}
        self.inner.add_param_group({"params": [b.master for b in buckets], **settings})
        self.buckets += buckets

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Any]:
        """Fill buckets with the last parameters first: backward completes them in that order."""
        filled: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
        for parameter in reversed(parameters):
            lists = filled.setdefault((parameter.dtype, parameter.device), [[]])
            size = sum(p.numel() for p in lists[-1])
            if lists[-1] and size + parameter.numel() > self.bucket_size:
                lists.append([])
            lists[-1].append(parameter)
        return [Bucket(chosen, self.group) for lists in filled.values() for chosen in lists]

    def reduce_gradients(self) -> None:
        """Average the gradients now; afterwards each rank has its part of the means, `bucket.grad`.

        `step()` calls it. Call it before to look at gradients. What a further backward brings is
        averaged by the next call and added: all ranks run the same number of backward passes.
        """
        # Once averaged, a gradient was moved out of .grad: what is there is of a later backward.
        later = any(p.grad is not None for bucket in self.buckets for p in bucket.parameters)
        if later or not self._averaged:
            for bucket in self.buckets:
                bucket.reduce()
                bucket.finish()
        self._averaged = True

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Average the gradients and scale them, in place, to this 2-norm at the most.

        Call it between backward() and step(). Returns the norm of the whole mean gradient as it
        was before, the same on every rank, all of which take part; one number is sent. Raises
        InputError for a max_norm below 0.
        """
        self.reduce_gradients()
        parts = [bucket.grad for bucket in self.buckets]
        device = self.param_groups[0]["params"][0].device
        return clip_parts(parts, max_norm, self.group, device=device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, update this rank's parts, and gather the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        for work in [self._update(bucket) for bucket in self.buckets]:
            if work is not None:
                work.wait()
        self._averaged = False
        return loss

    def _update(self, bucket: PartWithMaster) -> dist.Work | None:
        """Update one part: the inner optimizer skips every master that has no gradient.

        So float32 copies of gradients and the update's temporaries are those of one bucket.
        """
        assert bucket.grad is not None, "reduce_gradients() comes before the update"
        bucket.master.grad = bucket.grad.to(bucket.master.dtype)
        self.inner.step()
        bucket.master.grad = None
        return self._publish(bucket)

    def _publish(self, bucket: Any) -> dist.Work | None:
        """Let the parameters become what the masters say: start to gather."""
        bucket.round()
        return bucket.gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, the averaged ones too: they are freed, whatever `set_to_none` is."""
        self._averaged = False
        for bucket in self.buckets:
            bucket.drop()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: settings, states and masters. Every rank has to save its own.

        Masters are copies: torch.save writes the storage of a view whole, here all parameters.
        """
        return {
            "stage": self.stage,
            **self._place(),
            "masters": [bucket.master.detach().clone() for bucket in self.buckets],
            **self.inner.state_dict(),
        }

    def _place(self) -> dict[str, int]:
        group = self.group
        return {"rank": dist.get_rank(group), "world_size": dist.get_world_size(group)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's state_dict(); the parameters become what the masters say.

        Raises ValueError for another stage, rank or number of ranks, and for other parts.
        """
        state = dict(state_dict)
        masters = state.pop("masters", [])
        for key, here in {"stage": self.stage, **self._place()}.items():
            if (there := state.pop(key, None)) != here:
                raise InputError(f"the state is of {key} {there}, this is {key} {here}")
        sizes, own = [m.numel() for m in masters], [b.master.numel() for b in self.buckets]
        if sizes != own:
            raise InputError(f"the state's parts have {sizes} elements, these {own}")
        self.inner.load_state_dict(state)
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        for bucket, master in zip(self.buckets, masters, strict=True):
            bucket.master.copy_(master)
            work = self._publish(bucket)
            if work is not None:
                work.wait()


class ZeroStage2(ZeroStage1):
    """Stage 1 whose gradients are in parts as well: reduce-scattered while backward goes on.

    When the last gradient of a bucket is there, the bucket travels, and its whole gradients are
    freed before those of the next bucket are collected. Buckets travel in one order on every rank;
    what a rank has not used counts with zeros, at the end of its backward. A gradient that is
    complete before its bucket's turn, in a later parameter group perhaps, waits whole, so that
    `bucket_size` bounds them in one group used in the order of its parameters. A second backward
    before step() sends again, and adds; so does what a re-entrant checkpoint (lesson 11's) computes
    of a gradient after its bucket has left: all ranks use the same blocks as often.
    Source: Rajbhandari et al. 2020, section 5.2.
    """

    stage = 2
    _next = 0  # the bucket whose turn it is in this backward
    _in_backward = False

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Any]:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        return super()._make_buckets(parameters)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """A gradient is complete; one of a later bucket waits in .grad."""
        self._begin_backward()
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            ready = [p for p in bucket.parameters if p.grad is not None]
            if ready and self._next:
                self.buckets[self._next - 1].finish()  # before this one begins to fill
            for p in ready:
                bucket.collect(p)
            if bucket.missing:
                break
            bucket.reduce()
            self._next += 1

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            at_end_of_backward(self._end_backward)  # as torch's DDP does it

    def _end_backward(self) -> None:
        """Send what is not complete, and again what came after its bucket had left."""
        left, rest = self.buckets[: self._next], self.buckets[self._next :]
        for bucket in left[-1:]:
            bucket.finish()
        for bucket in rest + [b for b in left if any(p.grad is not None for p in b.parameters)]:
            bucket.reduce()
            bucket.finish()
        self._next, self._in_backward = 0, False

    def reduce_gradients(self) -> None:
        """Nothing is left to do where there was a backward; a rank without one sends zeros.

        Raises RuntimeError after a backward that ended in an error.
        """
        self._refuse_failed_backward()
        for bucket in self.buckets:
            if bucket.grad is None:
                bucket.reduce()
                bucket.finish()

    def _refuse_failed_backward(self) -> None:
        if self._in_backward:
            raise RuntimeError("a backward ended in an error: call zero_grad() and leave its batch")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and forget a backward that ended in an error."""
        super().zero_grad(set_to_none)
        self._next, self._in_backward = 0, False
