"""What tells a right answer of lesson 06 from a wrong one.

The oracle is the single-process twin: one process, rank 0's weights, the whole batch, plain
autograd; for the buckets also torch's own assignment. What travels is counted below the Python
functions, and overlap is judged by the order of events, never by a clock.
"""

import contextlib
import copy
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.exercises.checks import Wrong, checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, expect_raises, wrong
from shared.exercises.seeds import fresh_seed
from shared.measuring.traffic import count_traffic
from shared.ranks.failures import RankFailed, own_line
from shared.ranks.forked import run_ranks

exercise_06_1 = checks_for(
    "06.1",
    name="broadcast_parameters",
    difficulty=2,
    minutes=15,
    hints=[
        "dist.broadcast(tensor, src) fills the tensor on the other ranks. named_parameters() and "
        "named_buffers() each give a tied tensor once.",
        "Compare first: dist.all_gather_object(layouts, layout) gives every rank the names, "
        "shapes, dtypes and requires_grad of all. Then all ranks raise, or none does.",
    ],
)
exercise_06_2 = checks_for(
    "06.2",
    name="average_gradients",
    difficulty=2,
    minutes=15,
    hints=[
        "For each parameter: dist.all_reduce(parameter.grad), then divide by the world size.",
        "A rank that leaves an all-reduce out lets the others wait. When may .grad be None?",
    ],
)
exercise_06_3 = checks_for(
    "06.3",
    name="OverlappedDDP",
    difficulty=4,
    minutes=30,
    hints=[
        "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) once its gradient is "
        "complete; f starts dist.all_reduce(parameter.grad, async_op=True) and keeps the handle.",
        "Keep a list of the trainable parameters, last first, and a set of those that are "
        "complete. The hook sends as many from the head of the list as are complete.",
        "finish_gradient_sync: send what is left (zeros where .grad is None), wait for every "
        "handle, and empty list and set for the next step.",
    ],
)
exercise_06_4 = checks_for(
    "06.4",
    name="BucketedDDP",
    difficulty=5,
    minutes=45,
    hints=[
        "A bucket: its parameters, one flat tensor, a view into it for each parameter, the number "
        "of gradients that are still missing.",
        "The hook copies the gradient into its view and lets parameter.grad be that view: after "
        "the all-reduce nothing has to be copied back.",
        "Send buckets strictly in order: bucket 2 may be complete before bucket 1.",
    ],
)
exercise_06_5 = checks_for(
    "06.5",
    name="accumulate_gradients",
    difficulty=2,
    minutes=15,
    hints=[
        "All micro-batches but the last under `with ddp.no_sync():`, forward and backward; the "
        "last outside of it; then finish_gradient_sync().",
    ],
)

PATIENCE = 10.0  # seconds until ranks count as hanging; they need a tenth of one
# How it ends when ranks do not call the same collectives: a hang, or whatever gloo makes of it.
APART = (
    "were not back",
    "SIGABRT",
    "onnection closed",
    "preamble",
    "Connection reset",
    "Broken pipe",
)
# What torch says, what it means here, and what to do.
KNOWN_ERRORS = {
    "context manager protocol": (
        "no_sync() gives no context manager: `with ddp.no_sync():` cannot enter it",
        "@contextlib.contextmanager above a function with one yield makes one",
    ),
    "Expected parameter `tensor`": (
        "torch.distributed is handed something that is no tensor, None perhaps",
        "which parameters have no .grad, and when?",
    ),
    "before Module.__init__()": (
        "the base class is not set up",
        "super().__init__(module) comes first in __init__",
    ),
}
WAITED = (
    "the tensor of an all-reduce that was started with async_op=True is neither read nor divided "
    "before wait(); and .grad is complete in register_post_accumulate_grad_hook, not before"
)
LEFT_OVER = (
    "step 1 was right: what a step leaves behind (handles, sets, counts) has to be cleared for the "
    "next in finish_gradient_sync()"
)
SMALL = 0.0005  # a bucket_cap_mb of 524 bytes, so that small models have several buckets
Wrap = Callable[[nn.Module], Any]


class Mark(torch.autograd.Function):
    """The identity; calls back when backward passes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grads[0], None


class Net(nn.Module):
    """Odd sizes, a tied weight, frozen parameters, buffers, a layer that a step can leave out."""

    def __init__(self, tied: bool = False, frozen: bool = False, wide: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, wide)
        self.fixed = nn.Linear(wide, wide, bias=False)
        self.middle = nn.Linear(wide, wide)
        self.again = nn.Linear(wide, wide, bias=False)
        self.spare = nn.Linear(wide, wide)
        self.last = nn.Linear(wide, 3)
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("count", torch.randint(0, 1000, (2,)))
        if tied:
            self.again.weight = self.middle.weight
        if frozen:
            self.fixed.requires_grad_(False)
            self.spare.bias.requires_grad_(False)
        self.on_mark: Callable[[], None] = lambda: None

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = Mark.apply(self.first(x), lambda: self.on_mark()).tanh()
        h = self.again(self.middle(self.fixed(h)).tanh()).tanh()
        if not skip:
            h = h + self.spare(h)
        return self.last(h) + self.shift


@dataclass
class Case:
    """A run of some training steps on some ranks."""

    world_size: int = 2
    tied: bool = False
    frozen: bool = False
    steps: int = 2
    skipped: set[tuple[int, int]] = field(default_factory=set)  # (rank, step) without `spare`
    keep: bool = False  # zero_grad(set_to_none=False): gradients stay where they are
    wide: int = 7
    quiet: int = 0  # so many micro-batches under no_sync before the one that is sent
    seed: int = field(default_factory=fresh_seed)

    def net(self) -> Net:
        """The model, from the random state as it is."""
        return Net(self.tied, self.frozen, self.wide).double()

    def batch(self, rank: int, step: int, part: int = 0) -> Tensor:
        """This rank's rows of a step's (micro-)batch."""
        seed = self.seed + 1000 * rank + 10 * step + part
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).double()

    def loss(self, model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
        """The mean over this rank's rows."""
        skip = (rank, step) in self.skipped
        return model(self.batch(rank, step, part), skip=skip).square().mean()


@dataclass
class Step:
    """What one rank saw of one step."""

    grads: dict[str, Tensor | None]
    messages: list[tuple[str, int]]  # operation and bytes, in order
    quiet: int  # messages while no_sync was on
    at_first_layer: int  # messages that had left when backward came to the first layer
    after_backward: int


@dataclass
class Seen:
    """What one rank saw of a run."""

    started: dict[str, Tensor]
    initial: dict[str, Tensor]
    same_objects: bool
    keys: list[str]
    steps: list[Step]
    weights_moved: bool = False  # by anything but the optimizer, where they differ between ranks


def clone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a state's tensors."""
    return {name: each.detach().clone() for name, each in state.items()}


def grads_of(net: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients by name, each tied one once."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}


@torch.no_grad()
def descend(net: nn.Module) -> None:
    """A step of plain descent; torch.optim would import its compiler in every rank, for seconds."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad


def laboratory(rank: int, wrap: Wrap, case: Case) -> Seen:
    """Wrap a net whose weights differ on every rank, train it, and write down what happens."""
    torch.manual_seed(case.seed + rank)
    net = case.net()
    initial, before = clone(net.state_dict()), list(net.parameters())
    ddp = wrap(net)
    same = all(a is b for a, b in zip(before, net.parameters(), strict=True))
    seen = Seen(clone(net.state_dict()), initial, same, list(ddp.state_dict()), [])
    for step in range(case.steps):
        net.zero_grad(set_to_none=not case.keep)
        seen.steps.append(train_step(rank, net, ddp, case, step))
        descend(net)
    if case.steps:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += rank
        net.zero_grad()
        weights = clone(net.state_dict())
        train_step(rank, net, ddp, case, 0)
        seen.weights_moved = any((net.state_dict()[n] != x).any() for n, x in weights.items())
    return seen


def train_step(rank: int, net: Net, ddp: Any, case: Case, step: int) -> Step:
    """Forward, backward, finish, under observation."""
    marks: list[int] = []
    with count_traffic() as traffic:
        net.on_mark = lambda: marks.append(len(traffic.calls))
        if case.quiet:
            with ddp.no_sync():
                for part in range(case.quiet):
                    case.loss(ddp, rank, step, part).backward()
        quiet = len(traffic.calls)
        loss = case.loss(ddp, rank, step, case.quiet)
        marks.clear()
        loss.backward()
        after_backward = len(traffic.calls)
        ddp.finish_gradient_sync()
    messages = [(call.op, call.num_bytes) for call in traffic.calls]
    return Step(grads_of(net), messages, quiet, marks[0], after_backward)


def on_ranks(fn: Callable, world_size: int, *args: Any, hang: str, hint: str = "") -> list:
    """run_ranks; a hang and a rank that raises become findings in words."""
    try:
        return run_ranks(fn, world_size, *args, timeout=PATIENCE)
    except RankFailed as failure:
        lines = str(failure).splitlines()
        if any(sign in str(failure) for sign in APART):
            wrong(hang, expected="every rank comes back", seen=lines[0][:150], hint=hint)
        if "NotImplementedError" in lines[0]:
            raise NotImplementedError from None
        known = next((words for sign, words in KNOWN_ERRORS.items() if sign in lines[0]), ("", ""))
        wrong(
            known[0],
            expected="a step without an error",
            seen=lines[0][:200] + own_line(str(failure)),
            hint=known[1] or hint,
        )
        raise


def twin_steps(case: Case, start: dict[str, Tensor]) -> Iterator[list[dict[str, Tensor | None]]]:
    """For each step every rank's own gradients, from weights that follow the whole batch."""
    twin = case.net()
    twin.load_state_dict(start)
    for step in range(case.steps):
        local = []
        for rank in range(case.world_size):
            twin.zero_grad()
            for part in range(case.quiet + 1):
                case.loss(twin, rank, step, part).backward()
            local.append(grads_of(twin))
        yield local
        mean = mean_of(local)
        for name, parameter in twin.named_parameters():
            parameter.grad = mean[name]
        descend(twin)


def mean_of(local: Sequence[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    """The mean over ranks; a rank without a gradient counts as zeros."""
    result = {}
    for name in local[0]:
        there = [each[name] for each in local if each[name] is not None]
        result[name] = torch.stack(there).sum(0) / len(local) if there else None
    return result


def expect_gradients(case: Case, seen: list[Seen]) -> None:
    """On every rank and in every step the mean over the ranks, as the single process has it."""
    expect(
        not any(one.weights_moved for one in seen),
        mistake="the weights are averaged, not the gradients: the hook is handed the parameter, "
        "its gradient is parameter.grad",
        expected="weights that only the optimizer changes",
        seen="they move before optimizer.step()",
    )
    for step, local in enumerate(twin_steps(case, seen[0].started)):
        want = mean_of(local)
        trained = {n: x for n, x in want.items() if x is not None}
        name_all(trained, [s.steps[step].grads for s in seen], local, step)


def name_all(
    want: dict[str, Tensor],
    got: Sequence[dict[str, Tensor | None]],
    local: Sequence[dict[str, Tensor | None]],
    step: int,
) -> None:
    """Compare flat: all gradients of a rank at once, so that a mistake is seen as a whole."""

    def flat(grads: dict[str, Tensor | None]) -> Tensor:
        parts = [grads.get(name) for name in want]
        pairs = zip(want.values(), parts, strict=True)
        return torch.cat([(x * 0 if own is None else own).flatten() for x, own in pairs])

    for rank, mine in enumerate(got):
        absent = [name for name in want if mine.get(name) is None]
        own, mean = flat(local[rank]), flat(dict(want))
        stale = sum((mine[n] - want[n]).abs().max() > 1e-9 for n in want if mine[n] is not None)
        kept = sum(bool(torch.equal(flat_of(mine[n]), flat_of(local[rank][n]))) for n in want)
        if absent:
            wrong(
                f"{absent[0]} has no gradient on rank {rank}",
                expected="the mean over all ranks, zeros counted where a rank did not use it",
                seen="None",
            )
        if 0 < stale < len(want) and kept == stale:
            wrong(
                f"{stale} of {len(want)} gradients are still rank {rank}'s own, the others are "
                "means",
                expected=f"means everywhere (step {step + 1})",
                seen="a message was left out, or not written back",
            )
        try:
            expect_close(
                flat(mine),
                mean,
                what=f"rank {rank}'s gradients in step {step + 1}",
                looks_like={
                    "the gradients are the sum over the ranks, not the mean: divide by the world "
                    "size": mean * len(got),
                    "every rank keeps its own gradients: nothing that was reduced comes back": own,
                    "the gradients are divided by the world size twice": mean / len(got),
                    "each rank's own gradient, divided by the world size": own / len(got),
                    "the sum is divided by 2, which is not the number of ranks": mean
                    * len(got)
                    / 2,
                },
            )
        except Wrong as fault:
            if not fault.mistake:
                fault.hint = LEFT_OVER if step else WAITED
            raise


def flat_of(grad: Tensor | None) -> Tensor:
    """A gradient as one row; none as nothing."""
    return torch.zeros(0) if grad is None else grad.flatten()


# 06.1


def broadcast_lab(rank: int, candidate: Any, case: Case, src: int) -> tuple[dict, dict, bool]:
    """State before and after on this rank, and whether the parameters are the same objects."""
    torch.manual_seed(case.seed + rank)
    net = case.net()
    net.last.weight = nn.Parameter(net.last.weight.detach().T.contiguous().T)  # column by column
    before, objects = clone(net.state_dict()), [*net.parameters(), *net.buffers()]
    candidate(net, src=src)
    after = [*net.parameters(), *net.buffers()]
    return before, clone(net.state_dict()), all(a is b for a, b in zip(objects, after, strict=True))


@exercise_06_1.check("parameters and buffers of rank src")
def broadcast_values(broadcast_parameters: Any) -> None:
    for src, world_size in ((0, 2), (2, 3)):
        case = Case(world_size, tied=True, frozen=True)
        runs = on_ranks(
            broadcast_lab, world_size, broadcast_parameters, case, src,
            hang=f"with src={src} of {world_size} ranks, not all of them take part in each "
            "broadcast",
        )  # fmt: skip
        states = [before for before, _, _ in runs]
        for rank, (_, after, same) in enumerate(runs):
            weights_first = sorted(after.items(), key=lambda item: item[0] in ("shift", "count"))
            for name, got in weights_first:
                is_buffer = name in ("shift", "count")
                expect_close(
                    got,
                    states[src][name],
                    what=f"{name} on rank {rank} of {world_size}, src={src}",
                    looks_like={
                        "src is not used: the weights are rank 0's": states[0][name],
                        "the weights are averaged, which is no one's start": torch.stack(
                            [each[name].double() for each in states]
                        ).mean(0),
                        (
                            "the buffers are left as they were" if is_buffer
                            else "a frozen parameter is left as it was: it is used in forward too"
                            if name in ("fixed.weight", "spare.bias")
                            else f"{name} is left as it was"
                        ): states[rank][name],
                    },
                    hint="dist.broadcast(tensor, src) for all of them; what is started with "
                    "async_op=True must be waited for before it is read",
                )  # fmt: skip
            expect(
                same,
                mistake="the parameters are replaced by new ones: an optimizer that was made "
                "before would go on training the old",
                expected="the same Parameter objects with new numbers in them",
                seen="other objects",
            )


def mismatch_lab(rank: int, candidate: Any, kind: str, seed: int) -> str:
    """What a rank hears when rank 1 has built another model."""
    torch.manual_seed(seed + rank)
    net = Net(wide=7).double()
    if rank == 1 and kind == "shape":
        net.middle.weight = nn.Parameter(torch.zeros(7, 8).double())
    if rank == 1 and kind == "name":
        net.extra = nn.Linear(2, 2).double()
    if rank == 1 and kind == "requires_grad":
        net.middle.weight.requires_grad_(False)
    try:
        candidate(net)
    except ValueError as error:
        return f"ValueError: {error}"
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@exercise_06_1.check("ranks that have built different models")
def broadcast_mismatch(broadcast_parameters: Any) -> None:
    kinds = {"shape": "middle.weight", "name": "extra.weight", "requires_grad": "middle.weight"}
    for kind, name in kinds.items():
        heard = on_ranks(
            mismatch_lab, 2, broadcast_parameters, kind, fresh_seed(),
            hang=f"ranks that differ in a {kind} hang: compare the layouts before the first "
            "broadcast, on every rank",
        )  # fmt: skip
        for rank, words in enumerate(heard):
            what = f"a {kind} that differs between the ranks ({name})"
            if words == "no error":
                wrong(f"{what} is accepted", expected="a ValueError on every rank", seen=words)
            expect(
                words.startswith("ValueError"),
                mistake=f"{what} ends in another error than ValueError",
                expected="ValueError on every rank, before the first broadcast",
                seen=f"rank {rank}: {words[:120]}",
            )
            expect(
                name in words,
                mistake=f"the error does not say which tensor differs in its {kind}",
                expected=f"a message that contains {name}",
                seen=words[:120],
            )


# 06.2


class AfterBackward:
    """average_gradients, in the place of an engine."""

    def __init__(self, net: nn.Module, candidate: Any) -> None:
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                dist.broadcast(tensor, 0)
        self.net, self.candidate = net, candidate

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.net(*args, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Average."""
        self.candidate(self.net)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's."""
        return self.net.state_dict()


def trainable_bytes(case: Case) -> list[int]:
    """The gradients' bytes, each trained parameter once, the last one first."""
    return [p.nbytes for p in case.net().parameters() if p.requires_grad][::-1]


def expect_all_reduce(step: Step) -> None:
    """No other operation in a step."""
    other = [op for op, _ in step.messages if op != "all_reduce"]
    if other:
        wrong(
            f"gradients travel by {other[0]}, not by all_reduce",
            expected="all_reduce: each rank sends 2(n-1)/n of the gradients",
            seen=f"{len(other)} messages of other kinds",
            hint="all_gather brings every rank's gradients to every rank: n times the memory"
            if "gather" in other[0]
            else "reduce gives the sum to one rank; all ranks need it",
        )


def expect_messages(case: Case, step: Step, *, exact: bool) -> None:
    """Each gradient travels once; with `exact` as a message of its own."""
    expect_all_reduce(step)
    sizes = [size for _, size in step.messages]
    want, net = trainable_bytes(case), case.net()
    extra = sum(sizes) - sum(want)
    if case.tied and extra == net.middle.weight.nbytes:
        wrong(
            "the tied weight is reduced twice: it is one parameter in two places",
            expected=f"{sum(want)} bytes in {len(want)} gradients",
            seen=f"{sum(sizes)} bytes",
            hint="parameters() yields it once; a loop over modules finds it twice",
        )
    frozen = sum(p.nbytes for p in net.parameters() if not p.requires_grad)
    if case.frozen and extra >= frozen:
        wrong(
            "frozen parameters are sent as well: they have no gradient",
            expected=f"{sum(want)} bytes of gradients",
            seen=f"{sum(sizes)} bytes",
        )
    if not sizes:
        wrong("nothing is sent at all", expected="an all-reduce", seen="no message")
    if extra < 0:
        wrong(
            "gradients are left behind: not all that was computed has travelled",
            expected=f"{sum(want)} bytes",
            seen=f"{sum(sizes)} bytes in {len(sizes)} messages",
            hint="what no hook has sent by the end of backward, finish_gradient_sync has to send",
        )
    expect_equal(sum(sizes), sum(want), what="bytes of all-reduce in a step")
    if exact:
        expect_equal(
            len(sizes),
            len(want),
            what="all-reduce calls in a step, one a parameter",
            mistake="several gradients travel as one message: that is the subject of 06.4"
            if len(sizes) < len(want)
            else "",
        )


@exercise_06_2.check("the mean over ranks, tied and frozen parameters, twice")
def average_values(average_gradients: Any) -> None:
    for world_size, keep in ((3, False), (2, True)):
        case = Case(world_size, tied=True, frozen=True, keep=keep)
        seen = on_ranks(
            laboratory, world_size, lambda net: AfterBackward(net, average_gradients), case,
            hang="the ranks wait for each other for ever: do all of them call the same "
            "collectives?",
        )  # fmt: skip
        expect_all_reduce(seen[0].steps[0])
        expect_gradients(case, seen)
        for name in ("fixed.weight", "spare.bias"):
            got = seen[0].steps[0].grads[name]
            expect(
                got is None,
                mistake="a frozen parameter is given a gradient",
                expected=f"{name}.grad stays None: an optimizer with weight decay would move it",
                seen="a tensor",
            )
        for step in seen[0].steps:
            expect_messages(case, step, exact=True)


@exercise_06_2.check("a parameter that one rank did not use")
def average_unused(average_gradients: Any) -> None:
    def wrap(net: nn.Module) -> AfterBackward:
        return AfterBackward(net, average_gradients)

    check_order(wrap)
    case = Case(3, skipped={(1, 0), (0, 1), (2, 1)})
    expect_gradients(case, on_ranks(laboratory, 3, wrap, case, hang="the ranks wait for ever"))


# 06.3 and 06.4


def check_start(wrap: Wrap) -> None:
    """All begin with rank 0's weights; the wrapper's state has the model's names."""
    case = Case(2, tied=True, frozen=True, steps=0)
    hang = "the ranks wait for each other while the model is wrapped: not all call the same"
    seen = on_ranks(laboratory, 2, wrap, case, hang=hang)
    for rank, one in enumerate(seen):
        weights_first = sorted(one.started, key=lambda name: name in ("shift", "count"))
        for name, got in ((name, one.started[name]) for name in weights_first):
            left = "buffers" if name in ("shift", "count") else "weights"
            expect_close(
                got,
                seen[0].initial[name],
                what=f"{name} on rank {rank} after wrapping",
                looks_like={
                    f"the ranks start from different {left}: rank 0's are not broadcast": (
                        one.initial[name]
                    ),
                    "the ranks start from the mean of their weights": torch.stack(
                        [each.initial[name].double() for each in seen]
                    ).mean(0),
                },
                hint="broadcast_parameters(module) of 06.1",
            )
        expect_equal(
            one.keys,
            list(one.initial),
            what="the names in state_dict()",
            mistake="state_dict() does not have the names of the bare model",
            hint="inherit from Wrapped and leave state_dict alone",
        )


def rendezvous(rank: int, wrap: Wrap, case: Case, folder: Path) -> bool:
    """Rank 1 begins its backward when rank 0 has ended its own; did that ever happen?"""
    torch.manual_seed(case.seed + rank)
    ddp = wrap(case.net())
    loss = case.loss(ddp, rank, 0)
    done = folder / "done"
    if rank == 1:
        patience = time.monotonic() + PATIENCE / 2
        while not done.exists() and time.monotonic() < patience:
            time.sleep(0.005)
    came = done.exists()
    loss.backward()
    if rank == 0:
        done.touch()
    ddp.finish_gradient_sync()
    return came or rank == 0


def check_overlap(wrap: Wrap) -> None:
    """Messages leave while backward goes on, and backward never waits for one."""
    case = Case(2, steps=1)
    with tempfile.TemporaryDirectory() as folder:
        came = on_ranks(
            rendezvous, 2, wrap, case, Path(folder), hang="two ranks wait for each other for ever"
        )
    expect(
        all(came),
        mistake="a hook waits for its all-reduce: backward stands still while the message "
        "travels, and nothing overlaps",
        expected="rank 0's backward ends although rank 1 has not begun its own",
        seen="it only ends once rank 1 has joined",
        hint="async_op=True in the hook, handle.wait() in finish_gradient_sync alone",
    )
    step = on_ranks(laboratory, 2, wrap, case, hang="two ranks wait for each other for ever")[
        0
    ].steps[0]
    sizes = [size for op, size in step.messages if op == "all_reduce"]
    if len(sizes) == 1 and sizes[0] >= sum(trainable_bytes(case)):
        wrong(
            "all gradients travel as one message: it leaves when the last of them is complete",
            expected=f"several messages, {sum(sizes)} bytes in all"
            f" (where there are buckets: of {SMALL * 2**20:.0f} bytes)",
            seen="1 message",
            hint="bucket_cap_mb counts MiB: 2^20 bytes, each number has nbytes / numel of them",
        )
    expect(
        step.at_first_layer > 0,
        mistake="nothing has been sent when backward comes to the first layer: the messages "
        "leave when there is nothing left to hide them behind",
        expected="the last layers' gradients on their way by then",
        seen=f"0 of {len(step.messages)} messages",
        hint="start a message in the hook of the gradient that completes it, and begin with the "
        "last parameters: their gradients are complete first",
    )


def check_values(wrap: Wrap, exact: bool, frozen_hang: str) -> None:
    """The twin's gradients, with all that models come with, two steps on."""
    for case in (
        Case(2, tied=True, frozen=True),
        Case(3, tied=True),
        Case(2, frozen=True, keep=True, steps=3),
    ):
        seen = on_ranks(laboratory, case.world_size, wrap, case, hang=frozen_hang)
        # The first step may end with an exchange about the order to send in from then on.
        first = [size for op, size in seen[0].steps[0].messages if op == "all_reduce"]
        for number, step in enumerate(seen[0].steps):
            expect_equal(
                sum(size for op, size in step.messages if op == "all_reduce"),
                sum(first),
                what=f"the bytes sent in step {number + 1}",
                mistake="a later step sends other messages than the first: what is left over "
                "from the step before?",
            )
        expect_messages(case, seen[0].steps[1], exact=exact)
        expect_gradients(case, seen)


def check_order(wrap: Wrap) -> None:
    """One rank by itself, with a layer left out and without: the same messages, in one order."""
    case = Case(1, skipped={(0, 2)}, steps=4)
    seen = on_ranks(laboratory, 1, wrap, case, hang="a single rank waits for ever")[0]
    without, with_it = seen.steps[2].messages, seen.steps[3].messages
    expect_equal(
        sorted(without),
        sorted(with_it),
        what="the messages of a step that does not use a layer",
        mistake="what a step does not use is left out: another rank may use it, and would wait "
        "for ever",
        hint="zeros take part where .grad is None",
    )
    expect_equal(
        without,
        with_it,
        what="the order of the messages of a step that does not use a layer",
        mistake="where a parameter is unused on one rank, the ranks send in different orders, and "
        "gradients of different parameters meet",
        hint="send in one fixed order on every rank, whatever the order of the hooks",
    )


def check_unused(wrap: Wrap) -> None:
    """A layer that a step leaves out, on one rank, then on another, then on all."""
    check_order(wrap)
    case = Case(2, skipped={(0, 0), (1, 1), (0, 2), (1, 2)}, steps=4)
    words = "a parameter that one rank did not use makes the ranks wait for each other for ever"
    expect_gradients(case, on_ranks(laboratory, 2, wrap, case, hang=words))


def check_no_sync(wrap: Wrap) -> None:
    """Two quiet micro-batches and one that is sent: the sum of all three, averaged."""
    case = Case(2, tied=True, quiet=2)
    seen = on_ranks(laboratory, 2, wrap, case, hang="after no_sync() the ranks wait for ever")
    step = seen[0].steps[1]
    expect(
        step.quiet == 0,
        mistake="no_sync() sends messages all the same",
        expected="no message inside it",
        seen=f"{step.quiet} messages",
    )
    dropped = copy.deepcopy(case)
    for words, parts in (
        ("no_sync() also drops the gradient that was accumulated: only the last micro-batch's "
         "is left", [2]),
        ("the last micro-batch's gradient is missing: the messages left too early", [0, 1]),
    ):  # fmt: skip
        if same_as_parts(dropped, seen, parts):
            wrong(words, expected="the sum over all three micro-batches, averaged", seen="a part")
    expect_gradients(case, seen)
    expect(
        step.at_first_layer > 0,
        mistake="after no_sync() messages no longer leave during backward",
        expected="hooks that are back at work once the block is left",
        seen="0 messages at the first layer",
    )
    left = on_ranks(interrupted, 2, wrap, Case(2), hang="after no_sync() the ranks wait for ever")
    expect(
        all(left),
        mistake="an exception inside no_sync() leaves it switched on for ever",
        expected="messages in the next backward",
        seen="none",
        hint="try: yield, finally: switch back",
    )


def same_as_parts(case: Case, seen: list[Seen], parts: list[int]) -> bool:
    """Whether the first step's gradients are those of some of the micro-batches alone."""
    twin = case.net()
    twin.load_state_dict(seen[0].started)
    for rank in range(case.world_size):
        for part in parts:
            case.loss(twin, rank, 0, part).backward()
    got = seen[0].steps[0].grads
    return all(
        got[name] is not None and torch.allclose(got[name], grad / case.world_size)
        for name, grad in grads_of(twin).items()
        if grad is not None
    )


def interrupted(rank: int, wrap: Wrap, case: Case) -> bool:
    """Whether a step after an exception inside no_sync() is sent again during backward."""
    torch.manual_seed(case.seed + rank)
    ddp = wrap(case.net())
    with contextlib.suppress(KeyError), ddp.no_sync():
        raise KeyError("a batch that cannot be read")
    with count_traffic() as traffic:
        case.loss(ddp, rank, 0).backward()
    ddp.finish_gradient_sync()
    return bool(traffic.calls)


FROZEN = (
    "the ranks wait for ever: a frozen parameter never gets a gradient, so what counts on it is "
    "never complete"
)


@exercise_06_3.check("the start: rank 0's weights everywhere")
def overlapped_start(OverlappedDDP: Any) -> None:
    check_start(OverlappedDDP)


@exercise_06_3.check("overlap, by the order of events")
def overlapped_order(OverlappedDDP: Any) -> None:
    check_overlap(OverlappedDDP)


@exercise_06_3.check("gradients and messages, tied and frozen parameters, several steps")
def overlapped_values(OverlappedDDP: Any) -> None:
    check_values(OverlappedDDP, True, FROZEN)


@exercise_06_3.check("a parameter that is not used in a step")
def overlapped_unused(OverlappedDDP: Any) -> None:
    check_unused(OverlappedDDP)


@exercise_06_3.check("no_sync")
def overlapped_no_sync(OverlappedDDP: Any) -> None:
    check_no_sync(OverlappedDDP)


def small_buckets(BucketedDDP: Any) -> Wrap:
    """The candidate with buckets of 524 bytes."""
    return lambda net: BucketedDDP(net, bucket_cap_mb=SMALL)


@exercise_06_4.check("the start: rank 0's weights everywhere")
def bucketed_start(BucketedDDP: Any) -> None:
    check_start(small_buckets(BucketedDDP))


@exercise_06_4.check("overlap, by the order of events")
def bucketed_order(BucketedDDP: Any) -> None:
    check_overlap(small_buckets(BucketedDDP))


@exercise_06_4.check("gradients, tied and frozen parameters, several steps")
def bucketed_values(BucketedDDP: Any) -> None:
    check_values(small_buckets(BucketedDDP), False, FROZEN)


class Mixed(nn.Module):
    """Layers of two dtypes and more than 2 MiB, to fill buckets."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (230, 400, 330, 510, 390, 170, 250)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.layers[2].double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


def bucket_sizes(rank: int, wrap: Wrap) -> list[int]:
    """The messages of one step of the mixed model."""
    net = Mixed()
    ddp = wrap(net)
    with count_traffic() as traffic:
        ddp(torch.ones(2, 230)).square().mean().backward()
        ddp.finish_gradient_sync()
    return [call.num_bytes for call in traffic.calls if call.op == "all_reduce"]


def torch_buckets(cap_mb: float, first: int = 2**20) -> list[int]:
    """What torch's own rule makes of the model, last parameters first: bytes of each bucket."""
    order = list(Mixed().parameters())[::-1]
    limits = [int(min(cap_mb * 2**20, first)), int(cap_mb * 2**20)]
    buckets, _ = dist._compute_bucket_assignment_by_size(order, limits)
    return [sum(order[index].nbytes for index in bucket) for bucket in buckets]


@exercise_06_4.check("how the gradients are cut into buckets")
def bucketed_sizes(BucketedDDP: Any) -> None:
    for cap_mb in (0.2, 25, 0.6, 0.42):
        wrap = BucketedDDP if cap_mb == 25 else lambda net, cap=cap_mb: BucketedDDP(net, cap)
        got = on_ranks(bucket_sizes, 2, wrap, hang="two ranks wait for ever")[0]
        want = torch_buckets(cap_mb)
        each = [p.nbytes for p in Mixed().parameters()]
        if sum(got) > sum(want):
            wrong(
                "gradients of two dtypes share a bucket: one of them is converted to the other",
                expected=f"{sum(want)} bytes in all, one dtype a bucket",
                seen=f"{sum(got)} bytes",
            )
        if sorted(got) == sorted(torch_buckets(cap_mb / 1.048576, first=10**6)) != sorted(want):
            wrong(
                "a bucket is closed at bucket_cap_mb times 10^6 bytes",
                expected=f"{cap_mb:g} MiB = {cap_mb * 2**20:.0f} bytes",
                seen=f"buckets of {sorted(got)} bytes",
                hint="a MiB is 2^20 bytes",
            )
        if len(want) > 1 and len(got) == len(each):
            wrong(
                "every gradient is a message of its own: there are no buckets",
                expected=f"{len(want)} all-reduces",
                seen=f"{len(got)} for {len(each)} parameters",
            )
        if cap_mb == 25 and len(got) == 2:
            wrong(
                "the first bucket is as large as the others: the first message leaves late",
                expected="a first bucket that is closed at 1 MiB, whatever bucket_cap_mb is",
                seen=f"buckets of {sorted(got)} bytes",
            )
        expect_equal(
            sorted(got),
            sorted(want),
            what=f"bytes of the buckets for bucket_cap_mb={cap_mb:g}",
            hint="last parameter first; one dtype a bucket; closed once it holds the cap or more",
        )
    for cap_mb in (0, -1):
        expect_raises(
            ValueError,
            lambda cap=cap_mb: on_ranks_raise(lambda: BucketedDDP(nn.Linear(2, 2), cap)),
            what=f"bucket_cap_mb={cap_mb}",
        )


def on_ranks_raise(run: Callable[[], Any]) -> None:
    """Run on one rank; raise here what was raised there."""

    def lab(rank: int) -> tuple[str, str] | None:
        try:
            run()
        except NotImplementedError:
            raise
        except Exception as error:
            kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            return kind, str(error)
        return None

    try:
        raised = run_ranks(lab, 1, timeout=PATIENCE)[0]
    except RankFailed as failure:
        if "NotImplementedError" in str(failure).splitlines()[0]:
            raise NotImplementedError from None
        raise
    if raised and raised[0] == "ValueError":
        raise ValueError(raised[1])
    if raised:
        raise RuntimeError(": ".join(raised))


@exercise_06_4.check("a parameter that is not used in a step")
def bucketed_unused(BucketedDDP: Any) -> None:
    check_unused(small_buckets(BucketedDDP))


@exercise_06_4.check("no_sync")
def bucketed_no_sync(BucketedDDP: Any) -> None:
    check_no_sync(small_buckets(BucketedDDP))


# 06.5


class PlainDDP(nn.Module):
    """A stand-in engine: right numbers, no overlap. Like torch's it decides in forward to send."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.on, self.sending = module, True, True
        self.finished, self.sent, self.late = 0, 0, False
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's; what follows in backward is sent unless no_sync is on now."""
        self.sending = self.on
        return self.module(*args, **kwargs)

    def average(self, parameter: nn.Parameter) -> None:
        """The hook."""
        if self.sending:
            self.sent, self.late = self.sent + 1, self.late or not self.on
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in torch."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def finish_gradient_sync(self) -> None:
        """Nothing is left to do; counted."""
        self.finished += 1


def accumulate_lab(rank: int, candidate: Any, case: Case, parts: int) -> dict[str, Any]:
    """One step of several micro-batches through the candidate."""
    torch.manual_seed(case.seed + rank)
    net = case.net()
    ddp = PlainDDP(net)
    start = clone(net.state_dict())

    graphs, most = 0, 0  # forwards whose backward is still to come

    def loss_of(model: nn.Module, part: int) -> Tensor:
        nonlocal graphs, most
        graphs += 1
        most = max(most, graphs)
        loss = case.loss(model, rank, 0, part) * (part + 1) / 10
        loss.register_hook(done_with)
        return loss

    def done_with(_: Tensor) -> None:
        nonlocal graphs
        graphs -= 1

    loss = candidate(ddp, list(range(parts)), loss_of)
    return {
        "start": start,
        "grads": grads_of(net),
        "loss": loss.detach() if isinstance(loss, Tensor) else loss,
        "graph": isinstance(loss, Tensor) and loss.requires_grad,
        "sent": ddp.sent,
        "late": ddp.late,
        "finished": ddp.finished,
        "most": most,
    }


@exercise_06_5.check("the gradients of all micro-batches, sent once")
def accumulate_values(accumulate_gradients: Any) -> None:
    for parts in (3, 1):
        case = Case(2)
        seen = on_ranks(
            accumulate_lab, 2, accumulate_gradients, case, parts,
            hang="the ranks wait for each other for ever",
        )  # fmt: skip
        num, sent = len(list(case.net().parameters())), seen[0]["sent"]
        if sent == 0:
            wrong(
                "nothing is sent: the last micro-batch is under no_sync() as well",
                expected="the last forward and backward outside of it",
                seen="0 messages",
            )
        if seen[0]["late"]:
            wrong(
                "backward is under no_sync() and the forward before it is not: messages leave "
                "all the same",
                expected="forward and backward under it: torch's DDP decides in forward",
                seen=f"{sent} messages for {parts} micro-batches",
            )
        if sent > num:
            wrong(
                "every micro-batch sends its gradients: accumulation alone saves no message",
                expected=f"{num} messages, those of the last micro-batch",
                seen=f"{sent} for {parts} micro-batches",
                hint="forward and backward of the others under ddp.no_sync()",
            )
        expect_accumulated(case, seen, parts)
        expect_equal(
            max(one["most"] for one in seen),
            1,
            what="graphs alive at once",
            mistake="backward comes after all forwards: the activations of all micro-batches are "
            "in memory at once, which accumulation is to avoid",
            hint="forward and backward of one micro-batch, then those of the next",
        )


def expect_accumulated(case: Case, seen: list[dict[str, Any]], parts: int) -> None:
    """Gradients against the twin, then the loss, then the end of the step."""
    local, losses = [], []
    twin = case.net()
    twin.load_state_dict(seen[0]["start"])
    for rank in range(2):
        per_part, loss = [], []
        for part in range(parts):
            twin.zero_grad()
            value = case.loss(twin, rank, 0, part) * (part + 1) / 10
            value.backward()
            loss.append(value.detach())
            per_part.append(flat_grads(grads_of(twin)))
        local.append(torch.stack(per_part))
        losses.append(torch.stack(loss))
    both = torch.stack(local).mean(0)  # (parts, numbers)
    for rank, one in enumerate(seen):
        expect_close(
            flat_grads(one["grads"]),
            both.sum(0),
            what=f"rank {rank}'s gradients after {parts} micro-batches",
            looks_like={
                "only the last micro-batch's gradient is left: it must be added to": both[-1],
                "the gradients are the mean over the micro-batches: parts are added": both.mean(0),
                "the first micro-batch is sent and the later ones are added to it on each rank: "
                "the last one has to be the one that sends": both[0] + local[rank][1:].sum(0),
            },
        )
        expect(
            isinstance(one["loss"], Tensor),
            expected="the sum of the losses as a tensor",
            seen=type(one["loss"]).__name__,
            mistake="nothing is returned"
            if one["loss"] is None
            else "the returned loss is no tensor: .item() waits for the device each time",
            hint="add up loss.detach(), and return the sum",
        )
        expect_close(
            one["loss"].reshape(()),
            losses[rank].sum(),
            what="the returned loss",
            looks_like={
                "the returned loss is the last micro-batch's": losses[rank][-1],
                "the returned loss is the mean of the parts": losses[rank].mean(),
            },
        )
        expect(
            not one["graph"],
            mistake="the returned loss still holds the graphs of all micro-batches: the memory "
            "that accumulation is to save",
            expected="a loss without gradient",
            seen="requires_grad=True",
            hint="loss.detach() after loss.backward()",
        )
        expect_equal(
            one["finished"],
            1,
            what="calls of finish_gradient_sync",
            mistake="finish_gradient_sync() must be called once, after the last backward",
        )


def flat_grads(grads: dict[str, Tensor | None]) -> Tensor:
    """All gradients as one row, nothing where there is none."""
    return torch.cat([flat_of(each).double() for each in grads.values()])


@exercise_06_5.check("no micro-batch at all")
def accumulate_nothing(accumulate_gradients: Any) -> None:
    def run() -> None:
        ddp = PlainDDP(nn.Linear(2, 2))
        accumulate_gradients(ddp, [], lambda model, part: model(torch.ones(1, 2)).sum())

    expect_raises(ValueError, lambda: on_ranks_raise(run), what="a step without micro-batches")
