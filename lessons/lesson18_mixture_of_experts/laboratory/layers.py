"""A layer of experts in one process, and gradients on a mesh."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # what meshes import: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import count_traffic
from shared.mixture_of_experts.marks import is_expert
from shared.mixture_of_experts.parallel import ExpertParallelLayer
from shared.tensor_parallel.models import make_mesh

WIDTH = 4
NONE_LEFT_OUT = (
    "a gradient that is None is left out of the message: other ranks have one, and the parts of "
    "the sums no longer fit"
)


class Expert(nn.Module):
    """A small network that notes the rows of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return outer(tanh(inner(x)))."""
        self.calls.append(x.detach().clone())
        return self.outer(self.inner(x).tanh())


@dataclass(frozen=True)
class Shape:
    """A layer and what it is given."""

    experts: int
    k: int
    batch: tuple[int, ...]
    shunned: int | None = None  # an expert that no token chooses


SHAPES = (Shape(5, 2, (2, 7)), Shape(4, 1, (9,)), Shape(3, 3, (1, 4, 2)), Shape(4, 2, (6,), 2))


@dataclass
class Observed:
    """What was seen of a layer, and what a loop over the tokens says it should be."""

    layer: Any
    x: Tensor
    y: Tensor
    rows: list[list[int]]  # by expert, the rows of each call
    gradients: dict[str, Tensor | None]
    wanted: Tensor
    wanted_gradients: dict[str, Tensor]
    unweighted: Tensor
    last: Tensor  # each token with its last choice alone
    crossed: Tensor  # rows by expert, their weights by token
    wanted_rows: list[int]
    has_graph: bool


def layer_seen(answer: Callable[..., Any], shape: Shape) -> Observed:
    """Build, run forward and backward, and do the same token by token with plain autograd."""
    seed_all(fresh_seed())
    experts = [Expert().double() for _ in range(shape.experts)]
    layer = answer(experts, WIDTH, shape.k).double()
    x = torch.randn(*shape.batch, WIDTH, dtype=torch.float64)
    if shape.shunned is not None:
        x = x.abs()
        with torch.no_grad():
            layer.router.weight[shape.shunned] = -9.0
    upstream = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    y = layer(leaf * 1)
    routing = layer.routing
    has_graph = routing is not None and routing.probabilities.requires_grad
    y.backward(upstream)
    rows = [[len(call) for call in each.calls] for each in experts]
    names = ["x", *(name for name, _ in layer.named_parameters())]
    gradients = dict(zip(names, [leaf.grad, *(p.grad for p in layer.parameters())], strict=True))
    twin = leaf.detach().clone().requires_grad_()
    wanted, unweighted, last, crossed, chosen = _token_by_token(layer, experts, twin, shape.k)
    found = torch.autograd.grad(
        wanted, [twin, *layer.parameters()], upstream, allow_unused=True, materialize_grads=True
    )
    wanted_gradients = dict(zip(names, found, strict=True))
    return Observed(
        layer, x, y.detach(), rows, gradients, wanted.detach(), wanted_gradients, unweighted, last,
        crossed, chosen, has_graph,
    )  # fmt: skip


def _token_by_token(layer: Any, experts: Sequence[nn.Module], x: Tensor, k: int) -> tuple:
    """The layer as a loop: its output, three wrong ones, and the rows of each expert."""
    outputs, plain, last, chosen = [], [], [], [0] * len(experts)
    rows, all_weights, numbers = [], [], []
    for token in x.reshape(-1, WIDTH):
        probabilities = (layer.router.weight @ token).softmax(-1)
        top = probabilities.topk(k)
        weights = top.values / top.values.sum() if k > 1 else top.values
        each = [experts[i](token[None])[0] for i in top.indices.tolist()]
        outputs.append(sum(w * one for w, one in zip(weights, each, strict=True)))
        plain.append(sum(each))
        nearest = int(top.indices.argmax())
        last.append(weights[nearest] * each[nearest])
        for i in top.indices.tolist():
            chosen[i] += 1
        rows, all_weights = [*rows, *each], [*all_weights, *weights]
        numbers += top.indices.tolist()
    order = torch.tensor(numbers).argsort(stable=True)
    weighted = torch.stack(all_weights)[:, None] * torch.stack(rows)[order]
    crossed = torch.zeros(len(outputs), WIDTH, dtype=x.dtype).index_add(0, order // k, weighted)
    wrong = (torch.stack(plain), torch.stack(last), crossed)
    return torch.stack(outputs).view_as(x), *(w.detach().view_as(x) for w in wrong), chosen


@dataclass(frozen=True)
class Mesh:
    """Ranks of dp x ep; some gradients may be missing on some ranks, some parameters frozen."""

    dp: int
    ep: int
    missing: bool = False
    frozen: bool = False


MESHES = (Mesh(2, 2), Mesh(1, 2), Mesh(2, 1), Mesh(2, 2, missing=True), Mesh(1, 2, frozen=True))


@dataclass
class Averaged:
    """Gradients by name on one rank: before, after, wanted; and who had which before."""

    before: dict[str, Tensor]
    after: dict[str, Tensor | None]
    wanted: dict[str, Tensor]
    experts: set[str]
    sent: int
    held: int  # bytes of all gradients


@once_an_answer
def averages(answer: Callable[..., Any]) -> Callable[[Mesh], list[Averaged]]:
    """An answer to 18.5 on meshes: a norm and a layer of four experts beside one process."""
    seed = fresh_seed()
    cases: dict[int, dict[Mesh, Any]] = {}
    for mesh in MESHES:
        of_size = cases.setdefault(mesh.dp * mesh.ep, {})
        of_size[mesh] = functools.partial(_averaged, answer, seed, mesh)
    ranks = {size: RankCases(size, of_size) for size, of_size in cases.items()}
    known = {"doesn't match": (NONE_LEFT_OUT, "a gradient of zeros in its place")}
    return lambda mesh: ranks[mesh.dp * mesh.ep].seen(mesh, apart=NONE_LEFT_OUT, known=known)


class Loop(nn.Module):
    """A layer of experts, token by token; experts without tokens have gradients of zeros."""

    def __init__(self, experts: list[Expert], k: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, len(experts), bias=False)
        self.experts, self.k = nn.ModuleList(experts), k

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sums of shape x.shape."""
        nothing = sum(expert(x[:0]).sum() for expert in self.experts)
        return _token_by_token(self, list(self.experts), x, self.k)[0] + nothing


def _model(seed: int, frozen: bool) -> nn.Sequential:
    seed_all(seed)
    layer = Loop([Expert() for _ in range(4)], 2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 2)).double()
    if frozen:
        model[0].requires_grad_(False)
        layer.experts[1].inner.requires_grad_(False)
    return model


def _batch(seed: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def _loss(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    return torch.stack([model(x).square().mean() for x in batches]).sum()


def _all_chosen(model: nn.Sequential, batches: Sequence[Tensor]) -> bool:
    """Whether these tokens, those of the ranks of one ep, choose each of the experts."""
    model.zero_grad()
    _loss(model, batches).backward()
    return all(each.outer.weight.grad.any() for each in model[1].experts)  # ty: ignore


def _averaged(answer: Callable[..., Any], seed: int, case: Mesh, rank: int) -> Averaged:
    mesh, ranks = make_mesh("cpu", dp=case.dp, ep=case.ep), case.dp * case.ep
    busy = False
    while not busy:  # an expert that no token chooses would hide whose gradients it was given
        seed, batches = seed + ranks, [_batch(seed + r) for r in range(ranks)]
        whole, mine = _model(seed, case.frozen), _model(seed, case.frozen)
        groups = (batches[start : start + case.ep] for start in range(0, ranks, case.ep))
        busy = all(_all_chosen(whole, each) for each in groups)
    whole.zero_grad()
    (_loss(whole, batches) / ranks).backward()
    mine[1] = ExpertParallelLayer(mine[1], mesh["ep"].get_group())  # ty: ignore
    mine(batches[rank]).square().mean().backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    if case.missing:
        _leave_out(mine, wanted, mesh, rank)
    own = dict(mine.named_parameters())
    grads = {n: p.grad for n, p in own.items() if p.requires_grad}
    before = {n: torch.zeros_like(own[n]) if g is None else g.clone() for n, g in grads.items()}
    with count_traffic() as traffic:
        answer(mine, mesh)
    after = {name: own[name].grad for name in before}
    for name, p in own.items():
        if not p.requires_grad and p.grad is not None:
            after[name], wanted[name] = p.grad, torch.full_like(p, torch.nan)  # frozen: no gradient
    experts = {name for name, p in own.items() if is_expert(p)}
    sent = sum(call.num_bytes for call in traffic.calls)
    held = sum(p.nbytes for p in own.values())
    return Averaged(before, after, wanted, experts, sent, held)


def _leave_out(mine: nn.Module, wanted: dict, mesh: DeviceMesh, rank: int) -> None:
    """Take gradients away, as if parts had not been used in this step.

    Odd ranks have none of the last layer; of an expert's copies one has none, and the next copy
    none of the next expert.
    """
    numbers = [name.split(".")[2] for name, _ in mine.named_parameters() if "experts" in name]
    unused = f"1.experts.{list(dict.fromkeys(numbers))[mesh['dp'].get_local_rank()]}."
    for name, parameter in mine.named_parameters():
        if not (name.startswith("2.") or is_expert(parameter)):
            continue
        lost = name.startswith(unused) if is_expert(parameter) else rank % 2 == 1
        assert parameter.grad is not None
        part = torch.zeros_like(parameter) if lost else parameter.grad.clone()
        parameter.grad = None if lost else parameter.grad
        dist.all_reduce(part, group=mesh["dp"].get_group() if is_expert(parameter) else None)
        wanted[name] = part / mesh.size()
