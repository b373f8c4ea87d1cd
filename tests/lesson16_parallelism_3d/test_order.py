"""The ranks of the benchmark of plans: they sleep for the FLOPs that the planner counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lessons.lesson16_parallelism_3d.experiments.plan_order import (
    CONFIG,
    LENGTH,
    Setting,
    bytes_between,
    plans_of_four,
    small_spec,
    step_seconds,
)
from shared.model.language_model import LanguageModel
from shared.parallel3d.cutting import is_block
from shared.pipeline.stages import parts_of
from shared.planner.specs import Plan
from shared.ranks.forked import run_ranks

pytestmark = pytest.mark.full  # no notebook and no script has them


def test_a_part_sleeps_for_the_flops_of_the_formula():
    spec, carry = small_spec(), ()
    tokens = torch.randint(1, CONFIG.vocab_size, (2, LENGTH))
    *layers, head = parts_of(LanguageModel(CONFIG))
    for part in layers:
        with FlopCounterMode(display=False) as counter:
            carry = part(carry, tokens)
        wanted = spec.layer_flops * tokens.numel() if is_block(part) else 0
        assert counter.get_total_flops() == wanted
    with FlopCounterMode(display=False) as counter:
        head(carry, tokens)
    assert counter.get_total_flops() == spec.head_flops * tokens.numel()


def test_all_plans_of_four_ranks_take_the_same_sequences():
    plans = plans_of_four()
    assert len(plans) == len(set(plans)) == 42
    assert {(plan.batch, plan.num_gpus) for plan in plans} == {(32, 4)}


def test_a_rank_sleeps_as_long_as_its_device_computes():
    # 3 times forward, in float32, of one process: what is slept is the least that a step takes.
    plan = Plan(1, 1, 1, micro_batch=1, num_micro_batches=2, precision="float32")
    spec = small_spec()
    speed = spec.flops * LENGTH * plan.batch / 0.5  # FLOPs of a step in half a second
    (seconds,) = run_ranks(step_seconds, 1, [plan], Setting(speed, 1))[0]
    assert seconds >= 0.5


def test_across_nodes_go_what_the_order_says():
    plan = Plan(1, 2, 2, micro_batch=1, num_micro_batches=2, precision="float32")
    inside, across = (
        run_ranks(bytes_between, 4, plan, Setting(1e12, 1, order), 2)
        for order in (("pp", "dp", "tp"), ("tp", "dp", "pp"))
    )
    vectors = 2 * 4 * LENGTH * CONFIG.d_model  # bytes of the two micro-batches
    # Whole vectors there, or their gradients back, from each rank of tp; and the loss.
    assert inside == [vectors + 4] * 4
    assert sum(across) > 4 * sum(inside)
