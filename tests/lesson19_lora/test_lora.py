"""What neither check nor notebook has: PEFT in 16 bits, bitsandbytes, bytes of the last rank."""

import copy
import importlib.util

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.nn.functional as F

from lessons.lesson19_lora.experiments.adapting import KINDS
from lessons.lesson19_lora.experiments.engines import (
    reference_losses,
    small_model,
    start_alike,
    trained,
    under,
    with_peft,
)
from shared.errors import InputError
from shared.lora.counting import Tuning, counted_bytes, predicted_bytes
from shared.lora.layers import LoRALinear, add_lora, merge
from shared.lora.nf4 import dequantize_nf4, dequantize_scales, double_quantize, quantize_nf4
from shared.lora.qlora import NF4Weight, QLoRALinear
from shared.ranks.forked import run_ranks

F32, BF16 = torch.float32, torch.bfloat16
SOME = ("w_q", "w_v", "linear1")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_adapted_model_is_peft_s_through_steps_of_adam(dtype):
    plain, tokens = small_model(dtype), torch.randint(60, (4, 20))
    ours = copy.deepcopy(plain)
    add_lora(ours, SOME, 3, 12)
    theirs = with_peft(plain, SOME, 3, 12)
    start_alike(ours, theirs)
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).double(),
                                   tokens[:, 1:].flatten())  # fmt: skip
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(trained(ours)) == len(trained(theirs))
    merged, by_peft = merge(ours), theirs.merge_and_unload()
    assert not trained(merged)
    for name, weight in by_peft.state_dict().items():
        # PEFT casts the update to the weight's dtype first, and so rounds twice.
        bounds = {"rtol": 1e-2, "atol": 1e-3} if dtype == BF16 else {}
        torch.testing.assert_close(merged.state_dict()[name], weight, **bounds)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("numel", [64 * 300, 64 * 10 + 7])
def test_codes_and_scales_are_those_of_bitsandbytes(dtype, numel):
    import bitsandbytes  # noqa: F401 - registers the operators

    ops, weight = torch.ops.bitsandbytes, torch.randn(numel).to(dtype)
    want, scales = ops.quantize_4bit.default(weight, 64, "nf4", torch.uint8)
    (codes, own), theirs = quantize_nf4(weight), want.flatten()
    if numel % 2:  # the last lower half counts for nobody: theirs is the level 0
        codes, theirs = (torch.cat([x[:-1], x[-1:] >> 4]) for x in (codes, theirs))
    assert torch.equal(codes, theirs)
    assert torch.equal(own, scales)
    back = ops.dequantize_4bit.default(want, scales, 64, "nf4", weight.shape, dtype)
    ours = dequantize_nf4(want.flatten(), own, weight.shape, dtype)
    assert torch.equal(ours, back.view_as(ours))


def test_scales_in_eighths_are_off_by_half_a_step_at_most():
    scales = quantize_nf4(torch.randn(130, 7))[1]
    kept = dequantize_scales(*double_quantize(scales))
    assert ((kept - scales).abs() <= (scales - scales.mean()).abs().max() / 28 + 1e-6).all()


def test_a_cast_model_keeps_its_scales():
    layer = NF4Weight(torch.nn.Linear(96, 64))
    before = layer.weight
    assert torch.equal(layer.bfloat16().weight, before)


def test_predicted_bytes_are_the_counted_ones_on_each_of_three_ranks():
    ranks = 3  # of the update's 5 rows the last one has 1, of the ranges of scales none

    def gaps(rank):
        found = {}
        for method in ("full", *KINDS):
            model = small_model()
            want = predicted_bytes(model, Tuning(method, SOME, 5), ranks, rank)
            if method != "full":
                add_lora(model, SOME, 5, 10, KINDS[method])
            model = under("fsdp2", model, torch.device("cpu"))
            optimizer = torch.optim.AdamW(trained(model))
            model(torch.randint(60, (2, 20))).square().mean().backward()
            optimizer.step()
            found[method] = (counted_bytes(model, optimizer), want)
        return found

    for seen in run_ranks(gaps, ranks):
        for case, (counted, want) in seen.items():
            assert counted == want, case


def test_the_reference_run_with_codes_is_one_curve_sharded_and_under_ddp():
    alone = run_ranks(reference_losses, 1, "qlora", "single")[0]
    assert alone[-1] < 0.8 * alone[0]
    for engine, steps in (("fsdp2", 50), ("ddp", 8)):
        found = run_ranks(reference_losses, 2, "qlora", engine, False, steps, timeout=200)
        assert found == [pytest.approx(alone[:steps], abs=5e-6)] * 2, engine


def test_a_model_that_is_one_layer_is_merged_too():
    linear = torch.nn.Linear(4, 3)
    adapter = LoRALinear(linear, 2, 1.0)
    torch.nn.init.normal_(adapter.lora_b)
    x = torch.randn(5, 4)
    merged = merge(adapter)
    assert type(merged) is torch.nn.Linear
    assert torch.allclose(merged(x), adapter(x), atol=1e-6)


def test_what_a_layer_kind_refuses_leaves_the_model_as_it_was():
    wide = torch.nn.Linear(4, 4).double()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), wide, torch.nn.Linear(4, 4))
    wide.bias.requires_grad_(False)
    before = [(name, p.requires_grad) for name, p in model.named_parameters()]
    with pytest.raises(InputError, match="float64"):
        add_lora(model, ["0", "1"], 2, 1.0, kind=QLoRALinear)
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == before


def test_a_parent_that_reads_a_layers_weight_gets_the_adapted_one():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    add_lora(model, ["out_proj", "linear1"], 2, 4.0)
    adapters = [model.self_attn.out_proj, model.linear1]
    for each in adapters:
        torch.nn.init.normal_(each.lora_b)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    found = model(x)
    found.square().sum().backward()
    assert all(
        p.grad is not None and p.grad.any() for each in adapters for p in (each.lora_a, each.lora_b)
    )
    model.eval()
    with torch.no_grad():
        fast = model(x)  # reads linear1's weight as well
    merge(model)
    for each in (found, fast, model.train()(x)):
        assert torch.allclose(each, model(x), atol=1e-6)


def test_a_layer_of_another_kind_is_named_by_its_kind():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(6, 4)
    model = torch.nn.ModuleDict({"c_attn": conv1d, "lm_head": torch.nn.Linear(4, 4)})
    words = r"no linear layer is called 'c_attn' \('c_attn' is a Conv1D\): there are lm_head"
    with pytest.raises(InputError, match=words):
        add_lora(model, ["c_attn"], 2, 1.0)
