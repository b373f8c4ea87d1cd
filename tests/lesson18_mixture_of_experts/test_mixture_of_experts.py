"""The proofs: the dense mixture, one process, DeepSpeed's layer, bytes by formula, the curve."""

import copy

import pytest
import torch
import torch._dynamo  # what meshes import: once here, not in every forked rank
import torch.distributed as dist

from lessons.lesson18_mixture_of_experts.experiments.balancing import parameters_and_operations
from lessons.lesson18_mixture_of_experts.experiments.beside_deepspeed import beside_deepspeed
from lessons.lesson18_mixture_of_experts.experiments.wrong_means import MEANS, steps_apart
from shared.errors import InputError
from shared.measuring.traffic import count_traffic
from shared.mixture_of_experts.dispatch import Dispatcher
from shared.mixture_of_experts.layer import MoELayer
from shared.mixture_of_experts.models import give_experts
from shared.mixture_of_experts.parallel import ExpertParallelLayer, average_gradients
from shared.mixture_of_experts.reference import expert_reference
from shared.mixture_of_experts.routing import (
    balance_loss,
    capacity_for,
    top_k_router,
    update_bias,
    within_capacity,
)
from shared.model.layers import PositionwiseFeedForward
from shared.model.modern import ModernConfig, ModernModel
from shared.ranks.forked import RankFailed, run_ranks
from shared.tensor_parallel.models import make_mesh
from shared.training.reference_run import read_record, run_reference

F64 = torch.float64


def layer_of(num_experts, k, width=8):
    torch.manual_seed(0)
    experts = [PositionwiseFeedForward(width, 2 * width) for _ in range(num_experts)]
    return MoELayer(experts, width, k).double()


def test_all_experts_are_the_dense_mixture():
    layer, x = layer_of(5, 5), torch.randn(3, 4, 8, dtype=F64)
    p = layer.router(x).softmax(-1)
    dense = sum(p[..., e, None] * expert(x) for e, expert in enumerate(layer.experts))
    torch.testing.assert_close(layer(x), dense, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dp", "ep"), [(1, 2), (2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
@pytest.mark.parametrize("k", [1, 2])
def test_experts_on_ranks_are_those_of_one_process(dp, ep, k):
    def gaps(rank):
        mesh, ranks = make_mesh("cpu", dp=dp, ep=ep), dp * ep
        whole = layer_of(4, k)
        mine = ExpertParallelLayer(copy.deepcopy(whole), mesh["ep"].get_group())
        torch.manual_seed(1)
        everyone = torch.randn(ranks, 5, 8, dtype=F64)
        everyone[0, :, :] = everyone[0, :1, :]  # rank 0's tokens are alike: experts without rows
        y_whole, y = whole(everyone), mine(everyone[rank])
        (y_whole.square().mean() + balance_loss_alone(whole.routing)).backward()
        (y.square().mean() + balance_loss(mine.routing)).backward()
        average_gradients(mine, mesh)
        named = dict(whole.named_parameters())
        found = [(y - y_whole[rank]).abs().max()]
        found += [(p.grad - named[n].grad).abs().max() for n, p in mine.named_parameters()]
        return max(found).item()

    def balance_loss_alone(routing):
        shares = torch.bincount(routing.experts.flatten(), minlength=4).to(F64)
        return 4 * (shares / routing.experts.numel() * routing.probabilities.mean(0)).sum()

    assert max(run_ranks(gaps, dp * ep)) < 1e-13


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_deepspeeds_layer_has_the_same_numbers_and_sends_more(ranks, k):
    for seen in run_ranks(beside_deepspeed, ranks, k):
        assert max(seen.output, seen.gradients) < 1e-6
        assert seen.ours < seen.theirs or ranks == 1


def test_a_layer_sends_its_rows_twice_each_way_and_the_counts():
    def sent(rank):
        layer = ExpertParallelLayer(layer_of(4, 2), dist.group.WORLD)
        with count_traffic() as traffic:
            layer(torch.randn(12, 8, dtype=F64, requires_grad=True)).sum().backward()
        return traffic.ops, [call.num_bytes for call in traffic.calls]

    seen = run_ranks(sent, 2)
    for ops, sizes in seen:
        assert ops == ["all_to_all"] * 5
        assert sizes[:2] == [8 * 4, 2 * 12 * 8 * 8]
        assert sizes[3:] == sizes[1:3]  # of each pair, what this rank has and what came to it
    assert sum(sizes[2] for _, sizes in seen) == 2 * 2 * 12 * 8 * 8  # outputs of all ranks


def test_the_curve_on_a_mesh_is_that_of_one_process():
    _, step = expert_reference(None)
    alone = run_reference(step)
    assert alone[0] == pytest.approx(read_record()["losses"][0], abs=5e-6)

    def curve(rank):
        return run_reference(expert_reference(make_mesh("cpu", dp=1, ep=2))[1])

    assert run_ranks(curve, 2, timeout=120)[0] == pytest.approx(alone, abs=1e-12)


def test_adamw_hides_a_wrong_divisor_and_sgd_does_not():
    found = {how: run_ranks(steps_apart, 4, how, 0, 3)[0] for how in MEANS}
    assert found["right"]["SGD"][0] < 1e-14
    assert found["experts by dp"]["AdamW"][1] < 1e-5 < 1e-3 < found["experts by dp"]["SGD"][1]
    assert min(found["experts over all"][o][0] for o in ("SGD", "AdamW")) > 1e-3


def test_a_bias_moves_towards_even_loads():
    bias = torch.zeros(3, dtype=F64)
    update_bias(bias, torch.tensor([9, 0, 3]), 0.1)
    assert bias.tolist() == [-0.1, 0.1, 0.1]  # the mean is 4


def test_capacity_is_rounded_up_and_drops_the_last():
    assert capacity_for(1.25, 10, 4) == 4
    experts = torch.tensor([[0], [0], [1], [0]])
    assert within_capacity(experts, 2, 2)[:, 0].tolist() == [True, True, True, False]

    def kept(rank):
        layer = ExpertParallelLayer(layer_of(2, 1), None, capacity_factor=1.0)
        y = layer(torch.ones(6, 8, dtype=F64))
        return layer.kept, y.abs().sum(-1).bool().tolist()

    share, computed = run_ranks(kept, 1)[0]
    assert share == 0.5
    assert computed == [True] * 3 + [False] * 3


def test_operations_do_not_grow_with_the_experts():
    (few, one), (many, other) = (parameters_and_operations(n, 1) for n in (8, 64))
    assert many == 8 * few
    assert other - one == 2 * 64 * 56  # the router's alone


def test_what_cannot_be_is_refused_with_both_numbers():
    with pytest.raises(InputError, match="k = 5 of 4 experts"):
        top_k_router(torch.randn(2, 4), 5)
    with pytest.raises(InputError, match="capacity factor of 0"):
        capacity_for(0, 4, 2)
    with pytest.raises(RankFailed, match="3 experts cannot be shared out evenly over 2 ranks"):
        run_ranks(lambda rank: Dispatcher(torch.ones(3, dtype=torch.int64)), 2)
    with pytest.raises(RankFailed, match="3 experts cannot be shared out evenly over 2 ranks"):
        run_ranks(lambda rank: ExpertParallelLayer(layer_of(3, 1), None), 2)


def test_experts_of_a_gated_network_draw_all_their_matrices():
    model = ModernModel(ModernConfig(11, 16, 4, 1, 32, max_len=8, num_kv_heads=2))
    give_experts(model, 2, 1)
    first, second = model.layers[0].feed_forward.experts
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert [torch.equal(a, b) for a, b in pairs if a.dim() > 1] == [False] * 3


def test_a_rank_without_tokens_has_a_loss_of_balance():
    def loss(rank):
        torch.manual_seed(0)
        layer = ExpertParallelLayer(MoELayer([torch.nn.Linear(4, 4) for _ in range(4)], 4, 2), None)
        layer(torch.randn(0 if rank else 3, 4))
        return balance_loss(layer.routing).isfinite().item()

    assert run_ranks(loss, 2) == [True, True]
