"""The proofs: PEFT, bitsandbytes' numbers, bytes of each rank, messages, the reference run."""

import copy
import importlib.util
import math

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.nn.functional as F

from lessons.lesson19_lora.experiments.adapting import KINDS, NAMES
from lessons.lesson19_lora.experiments.engines import (
    reference_losses,
    small_model,
    start_alike,
    step_traffic,
    trained,
    under,
    with_peft,
)
from shared.errors import InputError
from shared.lora.counting import Tuning, counted_bytes, nf4_parts, predicted_bytes
from shared.lora.layers import LoRALinear, add_lora, merge
from shared.lora.levels import NF4_LEVELS, normal_levels
from shared.lora.nf4 import dequantize_nf4, dequantize_scales, double_quantize, quantize_nf4
from shared.lora.qlora import NF4Weight, QLoRALinear
from shared.measuring.memory import saved_bytes
from shared.ranks.forked import run_ranks

F32, BF16 = torch.float32, torch.bfloat16
SOME = ("w_q", "w_v", "linear1")


@pytest.mark.parametrize("dtype", [torch.float64, F32, BF16])
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
    assert losses[0] == pytest.approx(losses[1], abs=1e-12 if dtype == torch.float64 else 1e-6)
    assert len(trained(ours)) == len(trained(theirs))
    merged, by_peft = merge(ours), theirs.merge_and_unload()
    for name, weight in by_peft.state_dict().items():
        # PEFT casts the update to the weight's dtype first, and so rounds twice.
        bounds = {"rtol": 1e-2, "atol": 1e-3} if dtype == BF16 else {}
        torch.testing.assert_close(merged.state_dict()[name], weight, **bounds)


def test_a_merged_model_is_the_adapted_one_and_has_the_plain_one_s_names():
    plain = small_model(torch.float64)
    model = copy.deepcopy(plain)
    add_lora(model, NAMES, 5, 10)
    for p in trained(model):
        torch.nn.init.normal_(p, std=0.1)
    tokens = torch.randint(60, (2, 20))
    want = model(tokens)
    torch.testing.assert_close(merge(model)(tokens), want, rtol=1e-11, atol=1e-12)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not trained(model)


def test_the_levels_are_the_paper_s_and_come_from_quantiles():
    assert (NF4_LEVELS - normal_levels()).abs().max() < 2e-7
    assert NF4_LEVELS[7] == 0
    assert len(NF4_LEVELS) == 16


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


def test_four_bits_and_an_eighth():
    weight = torch.randn(1024, 1024)
    codes, scales = quantize_nf4(weight)
    parts = [codes.nbytes, *(x.nbytes for x in double_quantize(scales))]
    assert tuple(parts) == nf4_parts(weight.numel())
    assert 8 * sum(parts) / weight.numel() == pytest.approx(4.127, abs=1e-3)


def test_no_weight_is_further_from_its_level_than_half_a_gap():
    weight = torch.randn(130, 7)
    codes, scales = quantize_nf4(weight)
    back = dequantize_nf4(codes, scales, weight.shape)
    gaps = (NF4_LEVELS[1:] - NF4_LEVELS[:-1]).max() / 2
    widths = scales.repeat_interleave(64)[: weight.numel()].view_as(weight)
    assert ((back - weight).abs() <= gaps * widths * (1 + 1e-6)).all()
    assert torch.equal(torch.zeros(65), dequantize_nf4(*quantize_nf4(torch.zeros(65)), (65,)))
    kept = dequantize_scales(*double_quantize(scales))
    assert ((kept - scales).abs() <= (scales - scales.mean()).abs().max() / 28 + 1e-6).all()


def test_nothing_of_a_four_bit_weight_is_kept_whole_for_backward():
    linear = torch.nn.Linear(96, 64)
    x = torch.randn(3, 96, requires_grad=True)
    layer = QLoRALinear(linear, 2, 4)
    torch.nn.init.normal_(layer.lora_b)
    kept = saved_bytes(lambda: layer(x), ignore=tuple(layer.parameters()))
    assert kept < linear.weight.nbytes / 4
    y = layer(x)
    whole = layer.base.weight + layer.scale * layer.lora_b @ layer.lora_a
    want = F.linear(x, whole, linear.bias)
    torch.testing.assert_close(y, want)
    ours = torch.autograd.grad(y.square().sum(), [x, layer.lora_a, layer.lora_b])
    theirs = torch.autograd.grad(want.square().sum(), [x, layer.lora_a, layer.lora_b])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_cast_model_keeps_its_scales():
    layer = NF4Weight(torch.nn.Linear(96, 64))
    before = layer.weight
    assert torch.equal(layer.bfloat16().weight, before)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_predicted_bytes_are_the_counted_ones_on_each_rank(ranks, dtype):
    def gaps(rank):
        found = {}
        for method in ("full", *KINDS):
            for engine in ("ddp", "fsdp2"):
                tuning = Tuning(method, SOME, 5)
                model = small_model(dtype)
                want = predicted_bytes(model, tuning, ranks if engine == "fsdp2" else 1, rank)
                if engine == "ddp":
                    want = predicted_bytes(model, tuning)
                if method != "full":
                    add_lora(model, SOME, 5, 10, KINDS[method])
                model = under(engine, model, torch.device("cpu"))
                optimizer = torch.optim.AdamW(trained(model))
                model(torch.randint(60, (2, 20))).square().mean().backward()
                optimizer.step()
                found[method, engine] = (counted_bytes(model, optimizer), want)
        return found

    for seen in run_ranks(gaps, ranks):
        for case, (counted, want) in seen.items():
            assert counted == want, case


def test_ddp_sends_gradients_of_adapters_alone():
    tuning = Tuning("lora", SOME, 4)
    numbers = predicted_bytes(small_model(), tuning)["gradients"]
    for first, second in run_ranks(step_traffic, 2, "ddp", tuning, F32):
        assert second.bytes_of("all_reduce") == numbers
        assert set(second.ops) <= {"all_reduce", "broadcast"}
        # DDP sends buffers (the positions) before every forward, and once the buckets' sizes.
        assert 0 <= second.bytes_of("broadcast") - 24 * 48 * 4 < 100
        assert first.bytes_of("broadcast") > 40_000  # at the start, all of the model


def test_fsdp_gathers_what_is_frozen_and_reduces_only_adapters():
    seen = {
        method: run_ranks(step_traffic, 2, "fsdp2", Tuning(method, SOME, 4), BF16)[0][1]
        for method in ("full", *KINDS)
    }
    gathered = {method: each.bytes_of("all_gather") for method, each in seen.items()}
    reduced = {method: each.bytes_of("reduce_scatter") for method, each in seen.items()}
    adapters = predicted_bytes(small_model(BF16), Tuning("lora", SOME, 4))["gradients"]
    assert reduced["lora"] == reduced["qlora"] == adapters < reduced["full"] / 5
    assert gathered["qlora"] < gathered["lora"]
    assert gathered["lora"] > 0.9 * gathered["full"]


@pytest.mark.parametrize("method", list(KINDS))
def test_the_reference_run_with_adapters_is_one_curve(method):
    alone = run_ranks(reference_losses, 1, method, "single")[0]
    assert alone[-1] < 0.8 * alone[0]
    for engine in ("ddp", "fsdp2"):
        for losses in run_ranks(reference_losses, 2, method, engine):
            assert losses == pytest.approx(alone, abs=5e-6), engine
    if method == "lora":
        theirs = run_ranks(reference_losses, 1, method, "single", True)[0]
        assert theirs == pytest.approx(alone, abs=5e-6)


@pytest.mark.parametrize("rank", [0, -1, 49, 1000])
def test_a_rank_that_no_update_has_is_refused_and_changes_nothing(rank):
    model = small_model()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(InputError, match=rf"LoRA rank {rank} on a layer of .*would do"):
        add_lora(model, ["w_q"], rank, 8)
    assert names == [name for name, _ in model.named_modules()]
    assert all(p.requires_grad for p in model.parameters())


def test_a_name_without_a_layer_and_a_dtype_without_nf4_are_refused():
    with pytest.raises(InputError, match=r"no linear layer is called 'q_proj': there are w_q, "):
        add_lora(small_model(), ["w_q", "q_proj"], 2, 4)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(InputError, match=f"not {dtype}"):
            quantize_nf4(torch.ones(64).to(dtype))


def test_a_layer_at_two_places_gets_one_adapter_and_stays_one():
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"a": shared, "b": torch.nn.Sequential(shared), "c": shared})
    assert add_lora(model, ["a", "0", "c"], 2, math.pi) == ["a", "b.0", "c"]
    assert model["a"] is model["b"][0] is model["c"]
    assert isinstance(model["a"], LoRALinear)
    merge(model)
    assert model["a"] is model["b"][0] is model["c"]
