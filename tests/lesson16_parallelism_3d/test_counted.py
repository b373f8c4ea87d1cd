"""What the planner says of a model of the course, counted by parameters and by autograd."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shared.measuring.activations import counting_saved
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.planner.memory import memory_per_rank
from shared.planner.specs import ModelSpec, Plan

CUT = ("w_q.", "w_k.", "w_v.", "linear1.", "w_o.weight", "linear2.weight", "embedding.", "output.")


@dataclass(frozen=True)
class Counted:
    """What was counted of a model that is laid out by a plan; bytes, by pipeline rank."""

    model: ModelSpec
    plan: Plan
    parameters: list[int]
    activations: dict[int, int]  # of the ranks between the first and the last, one micro-batch


def counted() -> Iterator[Counted]:
    """Three models: on one rank, in four stages, and in two with the layers cut as well."""
    draw = random.Random(0)
    for tp, cut in ((1, None), (1, (1, 2, 1, 1)), (3, (3, 2))):
        config = TransformerConfig(
            vocab_size=3 * draw.randint(9, 20),
            d_model=24,
            num_heads=6,
            num_layers=5,
            d_ff=3 * draw.randint(8, 20),
            dropout=draw.choice((0.0, 0.1)),
            positions=draw.choice(("learned", "sinusoidal")),
            tie_embeddings=draw.random() < 0.5,
            max_len=16,
        )
        model = ModelSpec(
            config.num_layers,
            config.d_model,
            config.num_heads,
            config.d_ff,
            config.vocab_size,
            seq_len=draw.randint(8, 12),
            tied=config.tie_embeddings,
            num_positions=config.max_len if config.positions == "learned" else 0,
            dropout=config.dropout > 0,
        )
        stages = len(cut or (5,))
        plan = Plan(tp=tp, pp=stages, micro_batch=2, precision="float32", cut=cut)
        yield count(LanguageModel(config), model, plan)


def count(built: LanguageModel, model: ModelSpec, plan: Plan) -> Counted:
    """Lay the parameters out stage by stage, and run the stages one after the other."""
    ends = [0, *itertools.accumulate(plan.cut or (model.num_layers,))]
    parameters, activations = [], {}
    for rank, (a, b) in enumerate(itertools.pairwise(ends)):
        own: dict[str, nn.Module] = {"layers": built.layers[a:b]}
        if rank == 0:
            own |= {"embedding": built.embedding, "positions": built.positions}
        if rank == plan.pp - 1:
            own |= {"norm": built.norm, "output": built.output}
        named = nn.ModuleDict(own).named_parameters()
        parameters.append(sum(p.nbytes // (plan.tp if is_cut(n) else 1) for n, p in named))
        if plan.tp == 1 and 0 < rank < plan.pp - 1:
            activations[rank] = saved_by(built.layers[a:b], model, plan)
    return Counted(model, plan, parameters, activations)


def is_cut(name: str) -> bool:
    """Whether tensor parallelism cuts the parameter of this name."""
    return any(part in name for part in CUT)


def saved_by(layers: nn.ModuleList, model: ModelSpec, plan: Plan) -> int:
    """Bytes that a stage keeps for backward; what the stage before it has sent is a leaf here."""
    x = torch.randn(plan.micro_batch, model.seq_len, model.d_model).requires_grad_()
    with counting_saved(layers.parameters()) as saved:
        for layer in layers:
            x = layer(x, causal=True)
    return saved.peak


def test_each_stage_has_the_bytes_that_are_counted():
    for one in counted():
        stages = memory_per_rank(one.model, one.plan).stages
        assert [stage.parameters for stage in stages] == one.parameters
        for rank, saved in one.activations.items():
            assert stages[rank].activations == saved
