"""The loss of odd logits, plans of batches, and means over ranks."""

import pytest
import torch

from shared.data.batching import collate
from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.forked import run_ranks
from shared.training.loop import (
    average_weights,
    batch_plan,
    mean_loss,
    mean_over_ranks,
)
from shared.training.loss import label_smoothed_loss

CONFIG = TransformerConfig(20, d_model=16, num_heads=2, num_layers=1, d_ff=32, dropout=0.0)
PAIRS = [([4, 5, 6], [7, 8]), ([9], [10, 11, 12, 13, 14]), ([15, 16], [17]), ([4, 9], [8, 10, 7])]


def test_infinite_logits_at_padding_do_not_spoil_the_loss():
    logits = torch.zeros(1, 2, 4, requires_grad=True)
    spoilt = logits.masked_fill(torch.tensor([[[False], [True]]]), float("nan"))
    loss = label_smoothed_loss(spoilt, torch.tensor([[1, 0]]))
    loss.backward()
    assert loss.isfinite()


def test_a_token_that_is_ruled_out_does_not_spoil_the_loss():
    logits = torch.tensor([[[0.0, 0.0, -float("inf"), 0.0]]])
    assert label_smoothed_loss(logits, torch.tensor([[1]]), 0.0).exp().item() == pytest.approx(3)
    assert label_smoothed_loss(logits, torch.tensor([[1]]), 0.1).item() == float("inf")


def test_the_plan_does_not_depend_on_the_number_of_ranks():
    lengths = [(n % 7 + 2, n % 5 + 2) for n in range(100)]
    alone = [whole for whole in batch_plan(lengths, 60, 29, seed=3) if len(whole) >= 4][:25]
    four = [batch_plan(lengths, 60, 25, 3, rank, 4) for rank in range(4)]
    assert len(alone) == 25
    for step, whole in enumerate(alone):
        parts = [plan[step] for plan in four]
        assert sorted(index for part in parts for index in part) == sorted(whole)
        assert all(parts)


def test_a_plan_without_room_for_all_ranks_is_refused():
    with pytest.raises(InputError, match=r"ranks \(8\): allow 40 tokens or more"):
        batch_plan([(5, 5)] * 20, 10, 3, 0, 0, 8)
    assert len(batch_plan([(5, 5)] * 20, 40, 3, 0, 0, 8)) == 3


def test_data_that_is_too_small_is_not_told_to_allow_more_tokens():
    with pytest.raises(InputError, match=r"3 training pairs .* 4 ranks: give more data") as caught:
        batch_plan([(5, 5)] * 3, 1000, 3, 0, 0, 4)
    assert "tokens" not in str(caught.value)


def test_a_rank_without_tokens_does_no_harm():
    def on_rank(rank: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(3))
        weight.grad = torch.tensor([6.0, 0.0, 3.0]) * (1 - rank)
        loss = mean_over_ranks([weight], torch.tensor(9.0 * (1 - rank)), 3 * (1 - rank))
        return torch.cat([weight.grad, loss[None]])

    for seen in run_ranks(on_rank, 2):
        assert seen.tolist() == [2.0, 0.0, 1.0, 3.0]


def test_mean_loss_weighs_by_tokens_and_leaves_the_mode():
    torch.manual_seed(0)
    model = Transformer(CONFIG).train()
    parts = [collate(PAIRS[:1]), collate(PAIRS[1:])]
    assert mean_loss(model, parts) == pytest.approx(mean_loss(model, [collate(PAIRS)]), rel=1e-5)
    assert model.training


def test_average_weights():
    states = [{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 6.0])}]
    assert average_weights(states)["a"].tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match="same names"):
        average_weights([*states, {"b": torch.zeros(2)}])
    with pytest.raises(ValueError, match="one or more"):
        average_weights([])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_are_not_counted_in_16_bits(dtype):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 70_003.0)
    loss = mean_over_ranks([parameter], torch.tensor(64.0, dtype=dtype), 70_003)
    assert loss.item() == pytest.approx(64 / 70_003)
    assert parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_without_gradients_has_a_mean_loss(ranks):
    def mean(rank):
        return mean_over_ranks([], torch.tensor(6.0), 3).item()

    assert run_ranks(mean, ranks) == [2.0] * ranks
