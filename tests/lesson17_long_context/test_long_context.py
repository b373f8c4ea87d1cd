"""What neither check nor notebook has: models in parts, Triton, bytes moved, refusals."""

import os
import subprocess
import sys
from typing import get_args

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist

from lessons.lesson17_long_context.experiments.counting import (
    fused_attention,
    moved_bytes,
    plain_attention,
)
from shared.errors import InputError
from shared.long_context.exchange import all_to_all_attention
from shared.long_context.models import context_parallel, sum_gradients
from shared.long_context.online import merge, online_softmax
from shared.long_context.orders import (
    balanced_order,
    cut_sequence,
    plain_order,
    positions_of,
)
from shared.long_context.ring import ring_attention
from shared.long_context.tiles import TiledAttention
from shared.model.config import Positions, TransformerConfig
from shared.model.language_model import LanguageModel
from shared.model.modern import ModernConfig, ModernModel
from shared.ranks.forked import run_ranks

F64 = torch.float64


def drawn(*shape, dtype=F64, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(*shape, dtype=dtype) for _ in range(4)]


def gap(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_two_sets_of_keys_merge_into_both():
    scores, values = torch.randn(3, 9, dtype=F64), torch.randn(9, 4, dtype=F64)
    scores[1, :5] = -torch.inf
    parts = [online_softmax([(scores[:, s], values[s])]) for s in (slice(5), slice(5, 9))]
    both = online_softmax([(scores, values)])
    assert gap(merge(*parts), both) < 1e-14


def test_bytes_moved_are_those_of_the_operators_and_no_view_moves_any():
    rows, square = 3 * 64 * 8 * 4, 3 * 64 * 64 * 4
    q, k, v, _ = drawn(1, 3, 64, 8, dtype=torch.float32)
    # q / 8 reads and writes; two products; a softmax reads and writes.
    assert moved_bytes(lambda: plain_attention(q, k, v)) == 2 * rows + 2 * (2 * rows + square) + (
        2 * square
    )
    assert moved_bytes(lambda: fused_attention(q, k, v)) == 4 * rows + 3 * 64 * 4


OTHER_PAIRS = [[2, 3], [1, 4], [0, 5]]  # as even as balanced_order's, on other ranks


@pytest.mark.parametrize(
    ("way", "given"), [("ring", None), ("all_to_all", None), ("ring", OTHER_PAIRS)]
)
def test_a_language_model_in_parts_is_the_whole_one(way, given):
    def difference(rank, positions):
        config = TransformerConfig(
            vocab_size=30, d_model=24, num_heads=3, num_layers=2, d_ff=48, dropout=0.0, max_len=24,
            positions=positions,
        )  # fmt: skip
        torch.manual_seed(rank)  # other weights on each rank: rank 0's count
        model = LanguageModel(config).double()
        torch.manual_seed(0)
        whole = LanguageModel(config).double()
        tokens = torch.randint(30, (2, 24))
        order = context_parallel(model, None, way, order=given)
        mine = cut_sequence(tokens, order, rank, 1)
        logits, wanted = model(mine), whole(tokens)
        losses = [x.logsumexp(-1).sum() for x in (logits, wanted)]
        for loss in losses:
            loss.backward()
        sum_gradients(model)
        ours = dict(model.named_parameters())
        pairs = [(p.grad, ours[n.replace("positions.", "positions.inner.")].grad)
                 for n, p in whole.named_parameters()]  # fmt: skip
        return gap(*zip((logits, cut_sequence(wanted, order, rank, 1)), *pairs, strict=True))

    def differences(rank):
        return {each: difference(rank, each) for each in get_args(Positions)}

    for of_rank in run_ranks(differences, 3):
        assert max(of_rank.values()) < 1e-12, of_rank


INTERPRETED = """
import torch
from shared.long_context.tiles import tiled_forward
from shared.long_context.triton_kernel import triton_forward
for is_causal in (True, False):
    q, k, v = torch.randn(3, 2, 100, 16)
    pairs = zip(triton_forward(q, k, v, is_causal), tiled_forward(q, k, v, is_causal))
    print(max((a - b).abs().max().item() for a, b in pairs))
"""


def test_the_triton_kernel_has_the_tiles_numbers_in_its_interpreter():
    pytest.importorskip("triton")
    run = [sys.executable, "-c", INTERPRETED]
    said = subprocess.run(
        run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stderr
    assert max(map(float, said.stdout.split())) < 1e-5


def test_bad_input_says_what_was_given_and_what_would_do():
    with pytest.raises(ValueError, match="at least one key"):
        online_softmax([])
    with pytest.raises(InputError, match=r"25 positions .* 6 equal chunks .* 24 or 30 would do"):
        positions_of(balanced_order(3), 0, 25)

    def refused(rank):
        q = torch.ones(1, 3, 4, 2)
        with pytest.raises(InputError, match=r"3 query heads .* 2 ranks: 1 ranks? would do"):
            all_to_all_attention(q, q, q)
        with pytest.raises(InputError, match="an order of 3 ranks on 2"):
            ring_attention(q, q, q, None, True, plain_order(3))
        for order in ([[0, 0], [1, 2]], [[0], [0]], [[0], [1, 2]], [[], []]):
            with pytest.raises(InputError, match="no partition"):
                ring_attention(q, q, q, None, True, order)
        with pytest.raises(InputError, match=r"3 queries on a rank .* 2 equal chunks"):
            ring_attention(q[:, :, :3], q, q, None, True, balanced_order(2))
        dropping = TransformerConfig(vocab_size=9, d_model=6, num_heads=3, num_layers=1, d_ff=6,
                                     dropout=0.0, inner_dropout=0.1)  # fmt: skip
        with pytest.raises(InputError, match=r"rate of 0\.1"):
            context_parallel(LanguageModel(dropping))
        plain = TransformerConfig(vocab_size=9, d_model=6, num_heads=3, num_layers=1, d_ff=6,
                                  dropout=0.0)  # fmt: skip
        with pytest.raises(InputError, match=r"3 heads .* 2 ranks: the ring"):
            context_parallel(LanguageModel(plain), None, "all_to_all")
        return dist.get_rank()

    assert run_ranks(refused, 2) == [0, 1]


@pytest.mark.parametrize(
    ("way", "words"), [("ring", "4 heads share 1 of keys"), ("all_to_all", "1 heads cannot be")]
)
def test_heads_that_share_keys_are_refused_before_the_first_forward(way, words):
    def refused(rank):
        config = ModernConfig(12, 16, 4, 1, 32, dropout=0.0, max_len=8, num_kv_heads=1)
        with pytest.raises(InputError, match=words):
            context_parallel(ModernModel(config), None, way)

    run_ranks(refused, 2)


def test_tiles_have_no_second_derivative():
    q = drawn(3, 4)[0].requires_grad_()
    (first,) = torch.autograd.grad(
        TiledAttention.apply(q, q, q, False).square().sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_that_share_keys_are_exchanged_as_well(ranks):
    def apart(rank):
        torch.manual_seed(0)
        config = ModernConfig(12, 16, 4, 1, 32, dropout=0.0, max_len=8, num_kv_heads=2)
        model, tokens = ModernModel(config), torch.randint(12, (2, 8))
        want = model(tokens)
        order = context_parallel(model, None, "all_to_all")
        found = model(cut_sequence(tokens, order, rank, 1))
        return (found - cut_sequence(want, order, rank, 1)).abs().max().item()

    assert max(run_ranks(apart, ranks)) < 1e-5
