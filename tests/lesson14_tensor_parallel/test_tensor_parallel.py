"""The proofs: the unsharded twin, torch's own engine, messages and bytes by formula."""

import copy

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F

from lessons.lesson14_tensor_parallel.experiments.counting import (
    layer_traffic,
    replica_traffic,
)
from lessons.lesson14_tensor_parallel.experiments.races import column_backward
from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.model.layers import DecoderLayer, EncoderLayer
from shared.model.modern import ModernConfig, ModernModel
from shared.ranks.forked import RankFailed, run_ranks
from shared.tensor_parallel.blocks import parallel_block, sequence_parallel_block
from shared.tensor_parallel.conjugates import gather_sequence, scatter_sum
from shared.tensor_parallel.models import (
    cut_vocabulary,
    make_mesh,
    parallel_model,
    sum_partial_gradients,
    whole_state_dict,
)
from shared.tensor_parallel.torch_twin import torch_parallel_block, whole_gradients
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from solutions.alternatives.lesson14_tensor_parallel import ALTERNATIVES

CONFIG = TransformerConfig(
    vocab_size=60, d_model=48, num_heads=12, num_layers=2, d_ff=96, dropout=0.0, max_len=24
)


def torch_plan(block, mesh):
    """torch's engine with a message for each of queries, keys and values."""
    return torch_parallel_block(block, mesh, share_input=False)


def part_of(whole, like, rank, ranks):
    """This rank's part of a parameter's gradient."""
    dim = getattr(like, "cut_dim", None)
    return whole if dim is None else whole.chunk(ranks, dim)[rank]


@pytest.mark.parametrize(
    ("kind", "norm", "ranks"),
    [
        (EncoderLayer, "post", 2),
        (DecoderLayer, "pre", 2),
        (DecoderLayer, "post", 3),
    ],
)
def test_a_layer_is_the_whole_one_forward_and_every_gradient(kind, norm, ranks):
    def differences(rank, cut):
        torch.manual_seed(rank)  # other weights on each rank: rank 0's count
        config = TransformerConfig(**{**vars(CONFIG), "norm": norm})
        mine = kind(config).double()
        torch.manual_seed(0)
        whole = kind(config).double()
        x, memory = (torch.randn(2, 12, 48, dtype=torch.float64) for _ in range(2))
        upstream, found = torch.randn_like(x), []
        sequence = cut is sequence_parallel_block
        results = []
        for block, parts in ((cut(mine, make_mesh("cpu", tp=ranks)), sequence), (whole, False)):
            inputs = [each.clone() for each in (x, memory)]
            if parts:
                inputs = [each.chunk(ranks, 1)[rank] for each in inputs]
            inputs = [each.clone().requires_grad_() for each in inputs]
            more = {"causal": True} if kind is EncoderLayer else {}
            given = inputs if kind is DecoderLayer else inputs[:1]
            y = block(*given, **more)
            y.backward(upstream.chunk(ranks, 1)[rank] if parts else upstream)
            results.append((y, [each.grad for each in given]))
        sum_partial_gradients(mine)
        (y, gradients), (y_whole, wanted) = results
        pairs = list(zip([y, *gradients], [y_whole, *wanted], strict=True))
        if sequence:
            pairs = [(a, b.chunk(ranks, 1)[rank]) for a, b in pairs]
        found = [(a - b).abs().max() for a, b in pairs]
        own = dict(mine.named_parameters())
        torchs = whole_gradients(mine) if cut in (torch_parallel_block, torch_plan) else {}
        for name, each in whole.named_parameters():
            want = each.grad if torchs else part_of(each.grad, own[name], rank, ranks)
            found.append((torchs.get(name, own[name].grad) - want).abs().max())
        return float(max(found))

    cuts = [parallel_block, sequence_parallel_block]
    if norm == "pre":
        cuts += [torch_parallel_block]
    for found in run_ranks(lambda rank: {c.__name__: differences(rank, c) for c in cuts}, ranks):
        assert max(found.values()) < 1e-13, found


def test_messages_and_bytes_of_a_layer_are_the_formulas():
    ranks, batch, length, width = 3, 2, 12, 48  # the notebook has 2 and 4 as well
    number = 8 * batch * length * width * (ranks - 1) // ranks
    twice = ["all_reduce"] * 2
    seen = run_ranks(layer_traffic, ranks, parallel_block, batch, length, width)
    assert seen == [(twice, twice, 4 * number)] * ranks  # float32: 4 bytes a number
    numel = 12 * width**2 + 13 * width
    numel += -numel % ranks
    assert run_ranks(replica_traffic, ranks, width) == [8 * numel * (ranks - 1) // ranks] * ranks
    forward, backward, _ = run_ranks(layer_traffic, ranks, torch_plan, batch, length, width)[0]
    assert (forward, backward) == (twice, ["all_reduce"] * 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_backward_that_overlaps_has_the_same_gradients(overlap):
    for took, x_gradient, w_gradient in run_ranks(column_backward, 2, 24, 16, overlap, 1):
        torch.manual_seed(0)
        x, upstream = torch.randn(24, 16), torch.randn(2, 24, 32)
        weights = torch.randn(2, 32, 16)
        assert took > 0
        torch.testing.assert_close(x_gradient, (upstream @ weights).sum(0))
        assert any(torch.allclose(w_gradient, g.T @ x, atol=1e-5) for g in upstream)


@pytest.mark.parametrize(
    ("positions", "tied"), [("sinusoidal", True), ("learned", False), ("rotary", True)]
)
def test_a_language_model_trains_as_one_process_for_some_steps(positions, tied):
    config = TransformerConfig(**{**vars(CONFIG), "positions": positions, "tie_embeddings": tied})

    def trained(rank, sequence_parallel):
        torch.manual_seed(0)
        whole = LanguageModel(config).double()
        mine = copy.deepcopy(whole)
        mesh = make_mesh("cpu", tp=3)
        parallel_model(mine, mesh, sequence_parallel)
        first = {
            n: x.equal(y)
            for (n, x), y in zip(
                whole_state_dict(mine).items(), whole.state_dict().values(), strict=True
            )
        }
        draws = torch.Generator().manual_seed(1)
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-4) for m in (whole, mine)]
        for _ in range(3):
            tokens = torch.randint(60, (2, 13), generator=draws)
            for optimizer in optimizers:
                optimizer.zero_grad()
            logits = whole(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            vocab_parallel_cross_entropy(mine(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
            sum_partial_gradients(mine)
            for optimizer in optimizers:
                optimizer.step()
        again = whole_state_dict(mine)
        assert list(again) == list(whole.state_dict())
        gaps = [(again[n] - x).abs().max().item() for n, x in whole.state_dict().items()]
        return all(first.values()), max(gaps)

    for found in run_ranks(lambda rank: [trained(rank, each) for each in (False, True)], 3):
        for same, gap in found:
            assert same
            assert gap < 1e-10


@pytest.mark.parametrize("cut", ALTERNATIVES["14.4"], ids=lambda cut: cut.__name__)
def test_a_right_answer_in_another_style_is_put_together_again(cut):
    """What the notebook does after training with the reader's own layers (the marks say how)."""

    def gap(rank):
        torch.manual_seed(0)
        whole = LanguageModel(CONFIG)
        mine, mesh = copy.deepcopy(whole), make_mesh("cpu", tp=3)
        for layer in mine.layers:
            cut(layer, mesh)
        cut_vocabulary(mine, mesh)
        again = whole_state_dict(mine)
        return max((again[name] - x).abs().max().item() for name, x in whole.state_dict().items())

    assert run_ranks(gap, 3) == [0.0] * 3


def test_sequence_messages_are_each_others_gradient_and_refuse_what_does_not_divide():
    def work(rank):
        torch.manual_seed(rank)
        x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
        everyone = [torch.empty_like(x) for _ in range(3)]
        dist.all_gather(everyone, x.detach())
        part = scatter_sum(x)
        whole = gather_sequence(part)
        upstream = torch.arange(60.0, dtype=torch.float64).view(2, 6, 5) * (rank + 1)
        whole.backward(upstream)
        return (whole - sum(everyone)).abs().max().item(), (
            x.grad - 6 * upstream / (rank + 1)
        ).abs().max().item()

    assert max(max(pair) for pair in run_ranks(work, 3)) < 1e-12
    with pytest.raises(RankFailed, match="5 positions cannot be cut into 3 equal parts"):
        run_ranks(lambda rank: scatter_sum(torch.zeros(1, 5, 2)), 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_heads": 4}, "4 heads cannot be shared out evenly over 3 ranks"),
        ({"d_ff": 64}, "d_ff 64 cannot be shared out evenly over 3 ranks"),
        ({"vocab_size": 61}, "61 outputs of a column-parallel layer cannot be cut into 3"),
    ],
)
def test_what_cannot_be_cut_is_said_in_one_line(config, words):
    def work(rank):
        model = LanguageModel(TransformerConfig(**{**vars(CONFIG), **config}))
        try:
            parallel_model(model, make_mesh("cpu", tp=3))
        except InputError as error:
            return str(error)
        return ""

    assert all(words in said for said in run_ranks(work, 3))


def test_a_mesh_has_a_place_for_every_rank():
    def work(rank):
        said = []
        for act in (
            lambda: make_mesh("cpu", dp=2, tp=2),
            lambda: parallel_block(EncoderLayer(CONFIG), make_mesh("cpu", dp=1, tp=3)),
        ):
            with pytest.raises(InputError) as error:
                act()
            said.append(str(error.value))
        return said

    first, second = run_ranks(work, 3)[0]
    assert first == "a mesh of dp 2 x tp 2 has 4 places for 3 ranks"
    assert "this one has 2 (dp, tp)" in second


def gradients_of_norms(rank, modern):
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "d_model": 16, "num_heads": 4, "num_layers": 1, "d_ff": 32}
    sizes |= {"max_len": 8, "dropout": 0.0}
    if modern:
        model = ModernModel(ModernConfig(**sizes, num_kv_heads=2))
    else:
        model = LanguageModel(TransformerConfig(**sizes))
    whole = copy.deepcopy(model)
    tokens, follow = torch.randint(12, (2, 2, 8))
    F.cross_entropy(whole(tokens).flatten(0, 1), follow.flatten()).backward()
    parallel_model(model, dist.group.WORLD, sequence_parallel=True)
    vocab_parallel_cross_entropy(model(tokens), follow, dist.group.WORLD).mean().backward()
    sum_partial_gradients(model, dist.group.WORLD)
    own = dict(model.named_parameters())
    return {n: (p.grad - own[n].grad).abs().max().item() for n, p in whole.named_parameters()
            if "norm" in n}  # fmt: skip


@pytest.mark.parametrize("modern", [False, True])
def test_norms_of_any_kind_have_the_gradient_of_the_whole_sequence(modern):
    for apart in run_ranks(gradients_of_norms, 2, modern):
        assert apart and max(apart.values()) < 1e-6
