"""Layers cut over ranks, beside whole ones in the same process."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lessons.lesson14_tensor_parallel.laboratory.layers import HANG, IN_GROUPS, RATE
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import count_traffic
from shared.model.single_layer import block_of

WIDTH, HEADS, INNER = 24, 6, 36
NOT_ALL = "a layer that the mesh's ranks can share is refused: all ranks are taken for its group"
OPEN = 50.0  # a bias that no input closes: each zero after the ReLU is dropout's


@dataclass(frozen=True)
class Layer:
    """A layer and the number of ranks it is cut over."""

    kind: str
    ranks: int
    norm: str = "pre"
    beside: bool = False  # two such meshes, side by side


VALUES = (
    Layer("encoder", 2),
    Layer("encoder", 3, "post"),
    Layer("decoder", 2),
    Layer("encoder", 1),
    Layer("encoder", 2, beside=True),
)
DROPOUT, REFUSED = "dropout", "refused"


@dataclass
class Seen:
    """One rank's two steps of a cut layer, and those of a whole one with rank 0's weights."""

    returned: bool  # the layer itself came back
    names: list[str]
    wanted_names: list[str]
    heads: list[int]
    norms: bool  # the whole parameters have rank 0's numbers
    held: int  # elements of all parameters, and how many there should be
    wanted: int
    forward: list[str]
    backward: list[str]
    pairs: list[dict[str, tuple[Tensor | None, Tensor]]] = field(default_factory=list)


@dataclass
class Dropped:
    """A layer in training: what dropout took on this rank, inside and outside of the parts."""

    outputs: list[Tensor]  # of two forwards, with dropout on the sublayers' outputs alone
    masks: list[Tensor]  # after the ReLU, of two forwards with dropout inside alone
    weights: Tensor  # what attention let through
    inner_outputs: Tensor
    drawn: Tensor  # the next common random number
    evaluated: bool  # in evaluation nothing is dropped


@once_an_answer
def blocks(answer: Callable[..., Any]) -> Callable[[Any], list[Any]]:
    """An answer to 14.4 in every case."""
    seed = fresh_seed()
    rows: dict[int, dict[Any, Callable[[int], Any]]] = {}
    for case in VALUES:
        row = rows.setdefault(case.ranks * (1 + case.beside), {})
        row[case] = functools.partial(_two_steps, answer, seed, case)
    rows[2][DROPOUT] = functools.partial(_drop, answer, seed)
    rows[4][REFUSED] = functools.partial(_refuse, answer)
    cases = {ranks: RankCases(ranks, row) for ranks, row in rows.items()}
    at = {key: ranks for ranks, row in rows.items() for key in row}
    beside = IN_GROUPS | {ValueError: (NOT_ALL, "the mesh says which ranks are the group")}
    return lambda key: cases[at[key]].seen(
        key, apart=HANG, known=beside if getattr(key, "beside", False) else None
    )


def _mesh(ranks: int, beside: bool = False) -> Any:
    if beside:
        return init_device_mesh("cpu", (2, ranks), mesh_dim_names=("dp", "tp"))["tp"]
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def _part(whole: Tensor, like: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's part of a whole tensor, along the dim in which the part is shorter."""
    cut = [d for d in range(whole.dim()) if whole.dim() == like.dim() and _less(whole, like, d)]
    return whole.chunk(ranks, cut[0])[rank] if cut else whole


def _less(whole: Tensor, like: Tensor, dim: int) -> bool:
    return like.shape[dim] < whole.shape[dim]


def _two_steps(answer: Callable[..., Any], seed: int, case: Layer, rank: int) -> Seen:
    rank %= case.ranks
    own, whole = _layers(seed, case, rank)
    names = [name for name, _ in own.named_parameters()]
    cut = answer(own, _mesh(case.ranks, case.beside))
    mine, twin = dict(own.named_parameters()), dict(whole.named_parameters())
    found = [getattr(m, "num_heads", None) for m in own.modules()]
    heads = [each for each in found if isinstance(each, int)]
    parts = ("w_q", "w_k", "w_v", "linear1", "w_o.weight", "linear2.weight")
    wanted = sum(
        p.numel() // (case.ranks if any(part in name for part in parts) else 1)
        for name, p in twin.items()
    )
    norms = all(torch.equal(p, twin[n]) for n, p in mine.items() if n in twin and "norm" in n)
    seen = Seen(cut is own, [*mine], names, heads, norms, 0, wanted, [], [])
    seen.held = sum(p.numel() for p in mine.values())
    for step in range(2):
        seed_all(seed + 30 + step)
        seen.pairs.append(_step(own, whole, case, rank, seen))
        with torch.no_grad():
            for p in (*mine.values(), *twin.values()):
                if p.grad is not None:
                    p -= RATE / 10 * p.grad
    return seen


def _layers(seed: int, case: Layer, rank: int) -> list[nn.Module]:
    """This rank's own layer, and one with rank 0's weights, which are for all."""
    made = []
    for each in (seed + rank, seed):
        seed_all(each)
        block = block_of(case.kind, WIDTH, HEADS, norm=case.norm, d_ff=INNER).double()
        for p in block.parameters():
            p.data += 0.1 * torch.randn_like(p)  # norms and biases that differ, too
        for name, p in block.named_parameters():
            p.requires_grad_(case.norm == "pre" or "norm1" not in name)
        made.append(block)
    return made


def _step(
    own: nn.Module, whole: nn.Module, case: Layer, rank: int, seen: Seen
) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Outputs and gradients of both layers by name; what the cut one sent goes into `seen`."""
    draws = [torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (5, 5, 4)]
    upstream, more = draws[0], {"causal": True} if case.kind == "encoder" else {}
    results = []
    for block in (own, whole):
        given = [x.clone().requires_grad_() for x in draws[1:]]
        given = given if case.kind == "decoder" else given[:1]
        block.zero_grad()
        with count_traffic() as forward:
            y = block(*given, **more)
        with count_traffic() as backward:
            y.backward(upstream)
        results.append([y.detach(), *(x.grad for x in given)])
        if block is own:
            seen.forward, seen.backward = forward.ops, backward.ops
    labels = ("the output", "the gradient of x", "the gradient of memory")
    pairs = dict(zip(labels, zip(*results, strict=True), strict=False))
    mine = dict(own.named_parameters())
    for name, p in whole.named_parameters():
        if name in mine and p.grad is not None:
            want = _part(p.grad, mine[name], rank, case.ranks)
            pairs[f"the gradient of {name}"] = mine[name].grad, want
    return pairs


def _drop(answer: Callable[..., Any], seed: int, rank: int) -> Dropped:
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))

    def cut(**settings: Any) -> Any:
        seed_all(seed)
        block = block_of("encoder", WIDTH, HEADS, d_ff=INNER, fused=False, **settings)
        nn.init.constant_(block.feed_forward.linear1.bias, OPEN)
        nn.init.zeros_(block.self_attention.w_q.weight)  # every key gets the same weight
        nn.init.zeros_(block.self_attention.w_q.bias)
        nn.init.zeros_(block.self_attention.w_v.weight)
        nn.init.ones_(block.self_attention.w_v.bias)
        answer(block, _mesh(2))
        seed_all(seed + 1)
        return block

    block = cut(dropout=0.5)
    outputs = [block(x).detach() for _ in range(2)]
    block = cut(inner_dropout=0.5)
    masks, weights = list[Tensor](), list[Tensor]()
    catch = [
        (block.feed_forward.linear2, masks),
        (block.self_attention.w_o, weights),
    ]
    for module, into in catch:
        module.register_forward_pre_hook(lambda m, args, into=into: into.append(args[0].detach()))
    inner = [block(x).detach() for _ in range(2)]
    drawn = torch.rand(3)
    block.eval()
    evaluated = torch.equal(block(x), block(x)) and bool((masks[-1] != 0).all())
    zeros = [mask == 0 for mask in masks[:2]]
    return Dropped(outputs, zeros, weights[0], inner[0], drawn, evaluated)


def _refuse(answer: Callable[..., Any], rank: int) -> dict[str, tuple[str, bool]]:
    """What each bad request raises, and whether the layer is as it was."""
    two_axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    requests = {
        "6 heads on 4 ranks": (6, 36, _mesh(4)),
        "d_ff 30 on 4 ranks": (4, 30, _mesh(4)),
        "a mesh of two axes": (4, 36, two_axes),
    }
    told = {}
    for words, (heads, inner, mesh) in requests.items():
        block = block_of("decoder", WIDTH, heads, d_ff=inner)
        before = {name: p.shape for name, p in block.named_parameters()}
        error = "nothing"
        try:
            answer(block, mesh)
        except NotImplementedError:
            raise
        except ValueError:
            error = "ValueError"
        except Exception as other:
            error = type(other).__name__
        same = before == {name: p.shape for name, p in block.named_parameters()}
        kept = block.self_attention.num_heads == heads
        told[words] = error, same and kept
    return told
