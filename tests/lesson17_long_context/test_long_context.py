"""The proofs: torch's attention and gradients, bytes by formula, torch's own ring, the curve."""

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F

from lessons.lesson17_long_context.experiments.counting import (
    fused_attention,
    moved_bytes,
    plain_attention,
)
from lessons.lesson17_long_context.experiments.torch_ring import (
    engine_error,
    head_tail_order,
    torch_ring,
)
from shared.errors import InputError
from shared.long_context.exchange import all_to_all_attention
from shared.long_context.models import context_parallel, sum_gradients
from shared.long_context.online import merge, online_softmax
from shared.long_context.orders import (
    balanced_order,
    cut_sequence,
    joined_sequence,
    plain_order,
    positions_of,
)
from shared.long_context.reference import context_reference
from shared.long_context.ring import ring_attention
from shared.long_context.tiles import TiledAttention, tiled_forward
from shared.measuring.memory import saved_bytes
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.model.modern import ModernConfig, ModernModel
from shared.ranks.forked import run_ranks
from shared.training.reference_run import compare_with_record, run_reference

F64 = torch.float64
ROUNDING = 5e-6  # as for the other engines: a different order of additions


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
    with pytest.raises(ValueError, match="at least one key"):
        online_softmax([])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (65, 129), (129, 65), (130, 130)])
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-14), (torch.float32, 1e-5)])
def test_tiles_are_torchs_attention(queries, keys, is_causal, dtype, bound):
    torch.manual_seed(1)
    leaves = [torch.randn(2, 3, n, 8, dtype=dtype).requires_grad_() for n in (queries, keys, keys)]
    ours = TiledAttention.apply(*leaves, is_causal)
    theirs = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    pull = torch.randn_like(ours)
    grads = [torch.autograd.grad(x, leaves, pull) for x in (ours, theirs)]
    assert gap([ours, *grads[0]], [theirs, *grads[1]]) < bound


def test_gradients_are_the_differences():
    q, k, v, _ = (x.requires_grad_() for x in drawn(1, 5, 3))
    assert torch.autograd.gradcheck(lambda *x: TiledAttention.apply(*x, True), (q, k, v))


@pytest.mark.parametrize("length", [128, 256])
def test_bytes_kept_are_linear_in_the_length_and_the_plain_ones_square(length):
    q, k, v, _ = (x.requires_grad_() for x in drawn(2, length, 16, dtype=torch.float32))
    assert saved_bytes(lambda: TiledAttention.apply(q, k, v, True)) == 4 * 2 * length * (4 * 16 + 1)

    def plain():
        return (q / 4 @ k.mT).softmax(-1) @ v

    assert saved_bytes(plain) == 4 * 2 * (length**2 + 3 * length * 16)


def test_bytes_moved_are_those_of_the_operators_and_no_view_moves_any():
    rows, square = 3 * 64 * 8 * 4, 3 * 64 * 64 * 4
    q, k, v, _ = drawn(1, 3, 64, 8, dtype=torch.float32)
    # q / 8 reads and writes; two products; a softmax reads and writes.
    assert moved_bytes(lambda: plain_attention(q, k, v)) == 2 * rows + 2 * (2 * rows + square) + (
        2 * square
    )
    assert moved_bytes(lambda: fused_attention(q, k, v)) == 4 * rows + 3 * 64 * 4


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_ring_and_exchange_are_one_process_and_send_the_formula(ranks, is_causal):
    whole = drawn(2, 12, 24, 4)

    def differences(rank):
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        want = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        wanted = [want, *torch.autograd.grad(want, leaves, whole[3])]
        found = []
        for way, order in (
            ("ring", plain_order(ranks)),
            ("ring", balanced_order(ranks)),
            ("exchange", plain_order(ranks)),
        ):
            mine = [cut_sequence(x, order, rank, 2).requires_grad_() for x in whole[:3]]
            with count_traffic() as forward:
                if way == "ring":
                    y = ring_attention(*mine, None, is_causal, order)
                else:
                    y = all_to_all_attention(*mine, None, is_causal)
            with count_traffic() as back:
                grads = torch.autograd.grad(y, mine, cut_sequence(whole[3], order, rank, 2))
            own = [cut_sequence(x, order, rank, 2) for x in wanted]
            part = mine[1].nbytes
            op = "send" if way == "ring" else "all_to_all"
            sent = [each.bytes_of(op) / part for each in (forward, back)]
            found.append((gap([y, *grads], own), sent))
        return found

    n = ranks
    ring = [2 * (n - 1), 4 * n - 2] if n > 1 else [0, 0]
    formulas = [ring, ring, [4, 4] if n > 1 else [0, 0]]
    for of_rank in run_ranks(differences, ranks):
        for (off, sent), formula in zip(of_rank, formulas, strict=True):
            assert off < 1e-13
            assert sent == formula


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_own_ring_has_the_same_output_gradients_and_order(ranks):
    whole = drawn(2, 4, 8 * ranks, 8, dtype=torch.float32)
    order = balanced_order(ranks)
    places = torch.cat([positions_of(order, r, 8 * ranks) for r in range(ranks)])
    assert head_tail_order(8 * ranks, ranks).tolist() == places.tolist()

    def differences(rank):
        mine = [cut_sequence(x, order, rank, 2) for x in whole]
        theirs = torch_ring(*mine)
        leaves = [x.clone().requires_grad_() for x in mine[:3]]
        y = ring_attention(*leaves, None, True, order)
        return gap([y, *torch.autograd.grad(y, leaves, mine[3])], theirs)

    assert max(run_ranks(differences, ranks)) < 1e-5


def test_torchs_context_manager_refuses_a_cpu_and_says_which_operator():
    seen = run_ranks(lambda rank: engine_error(), 2)
    assert all("_for_cpu" in words and "sharding strategy" in words for words in seen)


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (2, "ring"),
        (2, "all_to_all"),
        pytest.param(4, "ring", marks=pytest.mark.full),
        pytest.param(4, "all_to_all", marks=pytest.mark.full),
    ],
)
def test_the_one_loss_curve(ranks, way):
    def curve(rank):
        _, step = context_reference(None, way)
        return run_reference(step)

    for losses in run_ranks(curve, ranks, timeout=280):
        assert compare_with_record(losses) < ROUNDING


OTHER_PAIRS = [[2, 3], [1, 4], [0, 5]]  # as even as balanced_order's, on other ranks


@pytest.mark.parametrize(
    ("way", "given"), [("ring", None), ("all_to_all", None), ("ring", OTHER_PAIRS)]
)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_a_language_model_in_parts_is_the_whole_one(way, given, positions):
    config = TransformerConfig(
        vocab_size=30, d_model=24, num_heads=3, num_layers=2, d_ff=48, dropout=0.0, max_len=24,
        positions=positions,
    )  # fmt: skip

    def differences(rank):
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

    assert max(run_ranks(differences, 3)) < 1e-12


def test_sixteen_bits_are_summed_in_float32():
    q, k, v, g = drawn(1, 2, 64, 8, dtype=torch.bfloat16)
    output, logsumexp = tiled_forward(q, k, v, True, 16)
    assert (output.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ours = torch.autograd.grad(TiledAttention.apply(*leaves, True), leaves, g)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*exact, is_causal=True)
    theirs = torch.autograd.grad(y, exact, g.double())
    assert {x.dtype for x in ours} == {torch.bfloat16}
    assert gap([x.double() for x in ours], theirs) < 2e-2


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


def test_a_sequence_is_whole_again():
    x = torch.arange(24).view(1, 24)
    for order in (plain_order(3), balanced_order(3)):
        parts = [cut_sequence(x, order, rank, 1) for rank in range(3)]
        assert joined_sequence(parts, order, 1).tolist() == x.tolist()


def test_bad_input_says_what_was_given_and_what_would_do():
    with pytest.raises(InputError, match=r"25 positions .* 6 equal chunks .* 24 or 30 would do"):
        positions_of(balanced_order(3), 0, 25)

    def refused(rank):
        q = torch.ones(1, 3, 4, 2)
        with pytest.raises(InputError, match=r"3 query heads .* 2 ranks: 1 ranks? would do"):
            all_to_all_attention(q, q, q)
        with pytest.raises(InputError, match="an order of 3 ranks on 2"):
            ring_attention(q, q, q, None, True, plain_order(3))
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
