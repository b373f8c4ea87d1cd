"""Bytes and messages to the digit, what later lessons use, what is refused."""

import argparse
import copy
import threading
import time
from functools import partial

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lessons.lesson10_zero.experiments import results
from lessons.lesson10_zero.experiments.counting import engine_bytes
from lessons.lesson10_zero.experiments.stages import sent
from lessons.lesson10_zero.laboratory.stages import Sums, one_step, through_a_file
from shared.errors import InputError
from shared.measuring.live import TASKS, count_live_bytes, live_storages, settle
from shared.measuring.traffic import Call, Traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.ranks.forked import run_ranks
from shared.ranks.group import Rank
from shared.sharding.counting import formula, ring_bytes, state_bytes
from shared.sharding.zero_reference import SETTINGS, build_zero
from shared.training.precision import MasterWeightAdamW
from shared.training.reference_run import reference_model
from solutions.alternatives.lesson10_zero import ALTERNATIVES
from solutions.lesson10_zero import ZeroStage1, ZeroStage2, ZeroStage3

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
NUMEL = sum(p.numel() for p in reference_model().parameters())


@pytest.mark.skipif(not TASKS.is_dir(), reason="asks /proc")
def test_bytes_are_read_when_other_threads_have_let_go():
    """On a busy machine gloo's thread may hold a message for longer than a fixed pause."""
    started, numbers = threading.Event(), torch.ones(300, 300)
    with count_live_bytes() as live:
        held = [torch.zeros(1000)]

        def let_go_late():
            started.set()
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                numbers @ numbers  # other threads may run Python meanwhile
            held.clear()

        thread = threading.Thread(target=let_go_late)
        thread.start()
        started.wait()
        assert live.now() == 4000
        settle(0.001, most=20)
        assert live.now() == 0
    thread.join()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_bytes_counts_the_same_from_the_engines_side(dtype):
    def count(rank):
        found = []
        for stage in STAGES:
            model = reference_model(dtype)
            optimizer = build_zero(stage, model, **SETTINGS)
            tokens = torch.randint(0, 32, (2, 6))
            model(tokens, tokens).square().mean().backward()
            before = state_bytes(model, optimizer)
            optimizer.step()
            after = state_bytes(model, optimizer)
            found.append(before["gradients"] + after["weights"] + after["optimizer states"])
        return found

    for found in run_ranks(count, 2):
        half = dtype is torch.bfloat16
        assert found == [formula(stage, 2, half=half) * NUMEL for stage in STAGES]


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_an_answer_with_names_of_its_own_is_counted_to_the_byte(stage):
    """Lists called `buckets` beside `inner` are no sign of the course's own classes."""

    def count(rank):
        known = {storage.data_ptr() for storage in live_storages()}
        model = reference_model(torch.bfloat16)
        trained = model if stage == 3 else model.parameters()
        whole_stage = {1: "10.2b", 2: "10.3", 3: "10.4b"}[stage]
        optimizer = ALTERNATIVES[whole_stage][0](trained, torch.optim.AdamW, **SETTINGS)
        tokens = torch.randint(0, 32, (20, 50))  # not negligible, as a batch is not
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens[:, :6], tokens[:, :6]).float().square().mean().backward()
            kinds = engine_bytes(model, optimizer, known, (tokens,))
            optimizer.step()
        return sum(kinds.values())

    assert run_ranks(count, 2) == 2 * [formula(stage, 2) * NUMEL]


def test_messages_of_four_micro_batches_to_the_digit():
    """The notebook rounds them."""
    sizes = run_ranks(lambda rank: [sent(rank, STAGES, stage, 4)[0] for stage in STAGES], 2)[0]
    tied = 3 * 2048 / NUMEL  # the tied matrix has three users
    assert sizes == pytest.approx([2, 1 + 4, 4 * (3 + tied)])


def test_the_worst_moment_is_a_bucket_or_two_units_above_the_formula():
    def moments(rank, stage):
        with count_live_bytes() as live:
            model = Sums(torch.bfloat16)
            size = {} if stage == 3 else {"bucket_size": 700}
            optimizer = build_zero(stage, model, **SETTINGS, **size)
            for value in range(2):
                found = one_step(model, optimizer, live, value)
        return found

    two = run_ranks(moments, 4, 2)[0]
    assert two["most in backward"] - two["after backward"] == 600 * 2  # the last, largest bucket
    three = run_ranks(moments, 4, 3)[0]
    assert three["most in forward"] - three["after zero_grad"] == 636 * 2
    # The first layer's weights, the second's gradients; the first's own part is still to come.
    expected = 636 * 2 + 516 * 2 - 636 * 2 // 4
    assert three["most in backward"] - three["after backward"] == expected


@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_parameters_go_the_way_of_the_master_weights(stage):
    def both(rank):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
        twin = copy.deepcopy(net)
        optimizer = build_zero(stage, net, lr=1e-3, weight_decay=0.1)
        plain = MasterWeightAdamW(twin.parameters(), lr=1e-3, weight_decay=0.1)
        inputs = torch.randn(10, 2, 4, 6, dtype=torch.bfloat16)
        for rows in inputs:
            optimizer.zero_grad()
            plain.zero_grad()
            net(rows[rank]).square().mean().backward()
            for each in rows:
                (twin(each).square().mean() / 2).backward()
            optimizer.step()
            plain.step()
        mine = optimizer.full_state_dict() if stage == 3 else net.state_dict()
        return [(mine[n] - p).abs().max().item() for n, p in twin.named_parameters()]

    assert max(run_ranks(both, 2)[0]) <= 2**-8  # one rounding of bf16 below 1


def language_model(**changes):
    torch.manual_seed(5)
    config = TransformerConfig(
        vocab_size=16, d_model=8, num_heads=2, num_layers=2, d_ff=12, dropout=0.0, max_len=8
    )
    return LanguageModel(TransformerConfig(**{**vars(config), **changes}))


class Recomputed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x, **options):
        return checkpoint(partial(self.layer, **options), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("inner", [True, False])
def test_stage_3_under_recomputation(inner):
    """What lesson 11 does; the unit is the layer that is computed again, or what holds it."""

    def gradients(rank):
        found = []
        for reentrant in (None, True, False):
            model = language_model(positions="learned")
            layers = list(model.layers)
            if reentrant is not None:
                model.layers = nn.ModuleList(Recomputed(each, reentrant) for each in layers)
            units = [model.embedding, model.positions, *(layers if inner else model.layers)]
            optimizer = ZeroStage3(model, torch.optim.AdamW, units=units)
            model(torch.arange(12).view(2, 6) + rank).square().mean().backward()
            found.append([bucket.grad for bucket in optimizer.buckets])
            assert {p.numel() for p in model.parameters()} == {0}
        return found

    for plain, *recomputed in run_ranks(gradients, 2):
        for grads in recomputed:
            assert all(torch.allclose(a, b) for a, b in zip(plain, grads, strict=True))


def test_a_state_of_another_stage_or_world_size_is_refused():
    def state(rank, stage):
        model = language_model()
        optimizer = build_zero(stage, model)
        return through_a_file(optimizer.state_dict())

    of_two = run_ranks(state, 2, 2)[0]

    def load(rank, stage):
        optimizer = build_zero(stage, language_model())
        with pytest.raises(InputError) as error:
            optimizer.load_state_dict(of_two)
        return str(error.value)

    assert "world_size 2, this is world_size 1" in run_ranks(load, 1, 2)[0]
    assert "stage 2, this is stage 3" in run_ranks(load, 2, 3)[0]


def test_a_stage_that_is_none_and_a_second_group_in_stage_3_are_refused():
    def refused(rank):
        with pytest.raises(InputError, match="not 4"):
            build_zero(4, nn.Linear(2, 2))
        with pytest.raises(InputError, match="bucket_size"):
            build_zero(1, nn.Linear(2, 2), bucket_size=0)
        model = nn.Sequential()
        model.layers = nn.ModuleList([nn.Linear(2, 2)])
        with pytest.raises(InputError, match="a ModuleList is never called"):
            build_zero(3, model, units=[model.layers])
        optimizer = build_zero(3, nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="one group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        dist.barrier()

    run_ranks(refused, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_were_looked_at_are_added_to(stage):
    """reduce_gradients(), a further micro-batch, step(): both count, and nothing is left over."""

    def train(rank, look):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = build_zero(stage, net, lr=0.1)
        for step in range(2):
            for part in range(2):
                net(torch.randn(2, 4, generator=seeded(rank, step, part))).square().sum().backward()
                if look:
                    optimizer.reduce_gradients()
                    optimizer.reduce_gradients()  # nothing new: nothing changes
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.full_state_dict() if stage == 3 else net.state_dict()

    plain, looked = run_ranks(lambda rank: (train(rank, False), train(rank, True)), 2)[0]
    for name, value in plain.items():
        torch.testing.assert_close(looked[name], value)


def seeded(*numbers):
    return torch.Generator().manual_seed(sum(100**i * n for i, n in enumerate(numbers)))


@pytest.mark.parametrize("stage", STAGES)
def test_without_zero_grad_gradients_add_up_as_under_adamw(stage):
    """The model's own zero_grad() drops none that is averaged: the docstring says so."""

    def train(rank):
        found = []
        for drop in ("nobody", "model"):
            torch.manual_seed(0)
            net = nn.Linear(4, 3)
            twin = copy.deepcopy(net)
            optimizer = build_zero(stage, net, lr=0.1)
            plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
            for step in range(3):
                if drop == "model":
                    net.zero_grad()
                rows = torch.randn(2, 4, generator=seeded(step))
                net(rows).square().sum().backward()
                optimizer.step()
                twin(rows).square().sum().backward()
                plain.step()
            found.append((optimizer.full_state_dict() if stage == 3 else net.state_dict(), twin))
        return [(own, twin.state_dict()) for own, twin in found]

    for own, twin in run_ranks(train, 2)[0]:
        for name, value in twin.items():
            torch.testing.assert_close(own[name], value)


def test_a_collective_that_goes_around_no_ring_is_refused():
    call = Call("all_to_all", 8, None, 2, 0.0)
    with pytest.raises(InputError, match="all_to_all goes around no ring; known are reduce_scat"):
        ring_bytes(Traffic([call]))
    for op, share in (("all_reduce", 8), ("reduce", 4)):
        assert ring_bytes(Traffic([Call(op, 8, None, 2, 0.0)])) == share


def half_frozen(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    return model


def resumed_with_frozen(rank):
    model = half_frozen(0)
    zero = ZeroStage3(model, torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    zero.step()
    again = ZeroStage3(half_frozen(1), torch.optim.AdamW, lr=0.1)
    again.load_state_dict(zero.state_dict())
    want, found = zero.full_state_dict(), again.full_state_dict()
    return {name: torch.equal(want[name], found[name]) for name in want}


def test_a_state_of_stage_3_has_the_frozen_parameters():
    for equal in run_ranks(resumed_with_frozen, 2):
        assert len(equal) == 4 and all(equal.values())


def masters_moved(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    zero = ZeroStage3(model, torch.optim.AdamW, lr=1e-4)
    for _ in range(3):
        zero.zero_grad()
        model(torch.randn(2, 4).bfloat16()).float().square().sum().backward()
        zero.step()
    before = [bucket.master.detach().clone() for bucket in zero.buckets]
    with zero.gathered(write=True), torch.no_grad():
        model[0].bias.zero_()
    moved = [b.master.detach() != old for b, old in zip(zero.buckets, before, strict=True)]
    return sum(each.sum().item() for each in moved), zero.full_state_dict()["0.bias"].tolist()


def test_masters_of_what_nobody_wrote_to_stay_float32():
    moved, bias = zip(*run_ranks(masters_moved, 2), strict=True)
    assert sum(moved) == 4 and bias == ([0.0] * 4, [0.0] * 4)


def test_a_state_of_another_optimizer_is_refused():
    def refused(rank):
        zero = ZeroStage1(nn.Linear(2, 2).parameters(), torch.optim.AdamW, lr=1.0)
        with pytest.raises(InputError, match="the state is of stage None, this is stage 1"):
            zero.load_state_dict(torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict())

    run_ranks(refused, 1)


def test_a_state_without_frozen_parts_is_refused_and_changes_nothing():
    def refused(rank):
        state = ZeroStage3(half_frozen(1), torch.optim.AdamW, lr=0.1).state_dict()
        zero = ZeroStage3(half_frozen(0), torch.optim.AdamW, lr=0.1)
        before = zero.full_state_dict()
        for bad in ([], [torch.zeros(1)]):
            with pytest.raises(InputError, match="the state's frozen parts have"):
                zero.load_state_dict({**state, "frozen": bad})
        after = zero.full_state_dict()
        return all(torch.equal(before[name], after[name]) for name in before)

    assert run_ranks(refused, 2) == [True, True]


def test_a_part_of_deepspeeds_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "about.json").write_text("{}")
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "part.pt").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(results, "_about", lambda *given: {})
    alone = Rank(0, 0, 1, torch.device("cpu"), "gloo")
    with pytest.raises(InputError, match=r"last/part\.pt cannot be read: No such file"):
        results.resume(argparse.Namespace(deepspeed=True), tmp_path, alone, "")
