"""Lesson 16's mistakes on purpose: norms that are counted wrong, and what they do to training."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.lesson16_parallelism_3d.experiments.proofs import (
    Clip,
    Group,
    clipped,
    clipped_curve,
    mesh_engine,
)
from shared.model.transformer import Transformer
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import Groups, make_groups
from shared.training.engine import DataParallelEngine, reference_curve, train_step
from shared.training.reference_run import CONFIG, reference_batches, reference_optimizer


def clip_by_own_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, tp: Group = None, pp: Group = None
) -> Tensor:
    """Every rank clips what it has by the norm of what it has, as torch's function would."""
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def clip_all_squares(
    parameters: Iterable[nn.Parameter], max_norm: float, tp: Group = None, pp: Group = None
) -> Tensor:
    """The squares of all ranks are added: of tp's copies, and of a tied weight's on two stages."""
    return _clip_counting(parameters, max_norm, tp, pp, copies=True, tied=True)


def clip_copies_often(
    parameters: Iterable[nn.Parameter], max_norm: float, tp: Group = None, pp: Group = None
) -> Tensor:
    """What every rank of tp has a copy of counts on each of them; a tied weight counts once."""
    return _clip_counting(parameters, max_norm, tp, pp, copies=True, tied=False)


def clip_tied_often(
    parameters: Iterable[nn.Parameter], max_norm: float, tp: Group = None, pp: Group = None
) -> Tensor:
    """A tied weight counts on both of its stages; what every rank of tp has counts once."""
    return _clip_counting(parameters, max_norm, tp, pp, copies=False, tied=True)


def _clip_counting(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    tp: Group,
    pp: Group,
    *,
    copies: bool,
    tied: bool,
) -> Tensor:
    own = [p for p in parameters if p.grad is not None]
    total = torch.zeros(())
    for p in own:
        whole = copies or hasattr(p, "cut_dim")
        share = 1.0 if whole else 1.0 / dist.get_world_size(tp)
        if p.grad is not None and (tied or not getattr(p, "tied_copy", False)):
            total += share * p.grad.square().sum()
    for group in (tp, pp):
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for p in own:
        if p.grad is not None:
            p.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def seeded(seed: int) -> Transformer:
    """The reference run's model from another start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(CONFIG)


def first_norms(
    rank: int, groups: Groups, seeds: Sequence[int], clips: Sequence[Clip]
) -> list[list[float]]:
    """By seed, the norm of the first step's gradient as each function has it on this rank."""
    found, mesh = [], make_groups(groups)
    for seed in seeds:
        engine = mesh_engine(seeded(seed), mesh)
        engine.forward_backward(reference_batches()[0])
        engine.average_gradients()
        found.append([clipped(engine, clip, 1e9).item() for clip in clips])
    return found


def clipped_runs(
    rank: int,
    groups: Groups,
    seeds: Sequence[int],
    clips: Sequence[Clip],
    max_norm: float,
    steps: int,
) -> list[list[tuple[list[float], float]]]:
    """By function and seed, the losses, and how far apart copies of one parameter have come.

    The latter is the largest difference on the ranks of tp of any number that is not cut.
    """
    mesh, found = make_groups(groups), [[] for _ in clips]
    for seed in seeds:
        engine = mesh_engine(seeded(seed), mesh, num_micro_batches=1)  # half of the messages
        begin = [p.detach().clone() for p in engine.pipeline.parameters()]
        for runs, clip in zip(found, clips, strict=True):
            _restart(engine, begin)  # making an engine takes as long as four steps
            losses = clipped_curve(engine, steps, max_norm, clip).losses
            runs.append((losses, _apart(engine)))
    return found


def _restart(engine: Parallel3D, begin: Sequence[Tensor]) -> None:
    for p, was in zip(engine.pipeline.parameters(), begin, strict=True):
        p.data.copy_(was)
    engine.optimizer.state.clear()


def _apart(engine: Parallel3D) -> float:
    copies = [p.detach() for p in engine.pipeline.parameters() if not hasattr(p, "cut_dim")]
    most = torch.cat([x.flatten() for x in copies])
    least = most.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, engine.mesh.tp.group)
    dist.all_reduce(least, dist.ReduceOp.MIN, engine.mesh.tp.group)
    return (most - least).max().item()


def clipped_otherwise(seed: int, max_norm: float, steps: int, rate: float | None) -> list[float]:
    """Losses of one process that clips at `max_norm`: SGD at `rate`, or the run's AdamW if None."""
    model = seeded(seed)
    parameters = list(model.parameters())
    if rate is None:
        engine = DataParallelEngine(model, reference_optimizer(parameters))
        return reference_curve(engine, range(steps), max_norm).losses
    engine = DataParallelEngine(model, torch.optim.SGD(parameters, lr=rate))
    batches = reference_batches()[:steps]
    return [train_step(engine, batch, max_norm=max_norm).part.item() for batch in batches]
