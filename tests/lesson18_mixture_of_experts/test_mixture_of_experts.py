"""What neither check nor notebook has: experts without rows, wrong divisors, odd inputs."""

import copy
from functools import partial

import pytest
import torch
import torch._dynamo  # what meshes import: once here, not in every forked rank

from lessons.lesson18_mixture_of_experts.experiments.wrong_means import MEANS, all_means
from shared.errors import InputError
from shared.mixture_of_experts.layer import MoELayer
from shared.mixture_of_experts.models import give_experts
from shared.mixture_of_experts.parallel import ExpertParallelLayer, Parts, average_gradients
from shared.mixture_of_experts.routing import (
    balance_loss,
    capacity_for,
    update_bias,
)
from shared.model.layers import PositionwiseFeedForward
from shared.model.modern import ModernConfig, ModernModel
from shared.ranks.forked import RankFailed, run_ranks
from shared.tensor_parallel.models import make_mesh

F64 = torch.float64


def layer_of(num_experts, k, width=8):
    torch.manual_seed(0)
    experts = [PositionwiseFeedForward(width, 2 * width) for _ in range(num_experts)]
    return MoELayer(experts, width, k).double()


def test_experts_on_ranks_are_those_of_one_process_where_some_get_no_rows():
    ranks = 4

    def gaps(rank):
        mesh = make_mesh("cpu", dp=2, ep=2)
        whole = layer_of(4, 1)
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

    assert max(run_ranks(gaps, ranks)) < 1e-13


def test_adamw_hides_a_wrong_divisor_and_sgd_does_not():
    found = run_ranks(all_means, 4, 1, 3)[0]
    right, by_dp, over_all, _ = (found[how, 0] for how in MEANS)
    assert right["SGD"][0] < 1e-14
    assert by_dp["AdamW"][1] < 1e-5 < 1e-3 < by_dp["SGD"][1]
    assert min(over_all[o][0] for o in ("SGD", "AdamW")) > 1e-3


def test_a_bias_moves_towards_even_loads():
    bias = torch.zeros(3, dtype=F64)
    update_bias(bias, torch.tensor([9, 0, 3]), 0.1)
    assert bias.tolist() == [-0.1, 0.1, 0.1]  # the mean is 4


def test_capacity_is_rounded_up_and_a_layer_drops_the_last():
    assert capacity_for(1.25, 10, 4) == 4

    def kept(rank):
        layer = ExpertParallelLayer(layer_of(2, 1), None, capacity_factor=1.0)
        y = layer(torch.ones(6, 8, dtype=F64))
        return layer.kept, y.abs().sum(-1).bool().tolist()

    share, computed = run_ranks(kept, 1)[0]
    assert share == 0.5
    assert computed == [True] * 3 + [False] * 3


def watched(called, part, *args):
    called.append(part.__name__)
    return part(*args)


def test_the_parts_that_a_layer_is_given_are_those_that_run():
    def names(rank):
        called = []
        parts = (partial(watched, called, part) for part in Parts())
        layer = ExpertParallelLayer(layer_of(2, 1), None, 1.0, Parts(*parts))
        layer(torch.ones(6, 8, dtype=F64))
        return called

    assert run_ranks(names, 1) == [["top_k_router", "within_capacity", "Dispatcher"]]


def test_what_cannot_be_is_refused_with_both_numbers():
    with pytest.raises(InputError, match="capacity factor of 0"):
        capacity_for(0, 4, 2)
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
