"""Predicted peaks beside counted ones; what is refused before it starts, and what is named then."""

import re
import weakref
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lessons.lesson10_zero.experiments.results import bytes_needed as bytes_by_stage
from lessons.lesson11_gradient_checkpointing.experiments.results import PRESETS
from lessons.lesson19_lora.experiments.adapting import NAMES, held_loss
from lessons.lesson19_lora.experiments.results import RECIPES as LORA
from lessons.lesson19_lora.experiments.results import bytes_needed as bytes_to_adapt
from lessons.lesson23_capstone.results import find_config
from shared.capstone.config import read_config
from shared.capstone.modes import again, layers_of
from shared.capstone.tasks import build_model, model_spec
from shared.data.rows import Text
from shared.errors import InputError
from shared.lora.layers import add_lora
from shared.measuring.room import check_room
from shared.model import transformer
from shared.model.language_model import LanguageModel
from shared.planner.models import h100, spec_of
from shared.planner.peak import CUT_LOGITS, DDP, Held, loss_bytes, peak_bytes
from shared.planner.report import assumptions
from shared.planner.specs import ModelSpec, Plan
from shared.ranks.forked import run_ranks
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from shared.training.language_recipes import RECIPES, bytes_of_replicas
from shared.training.reference_run import loss_of
from tests.benchmarks.presets_that_fit import SCRIPTS

GB = 10**9
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


class Alive(TorchDispatchMode):
    """The most bytes of storages at one moment, in blocks of 512 as a GPU hands them out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = weakref.WeakSet[torch.UntypedStorage]()

    def change(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage() not in self.known:
                storage = each.untyped_storage()
                size = -(-storage.nbytes() // 512) * 512
                self.known.add(storage)
                weakref.finalize(storage, self.change, -size)
                self.change(size)
        return result


def counted(build: Callable[[], nn.Module], *args: Any, **kwargs: Any) -> int:
    """The peak of two steps, in which no number is computed and no memory is needed."""
    with FakeTensorMode(), Alive() as alive:
        two_steps(build(), *args, **kwargs)
    return alive.most


def two_steps(
    model: nn.Module,
    rows: int,
    length: int,
    held: Held,
    micro_batches: int = 1,
    loss_of: Callable[..., torch.Tensor] = loss_of,
) -> None:
    cast = torch.bfloat16 if held == "autocast" else None
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            tokens = torch.zeros(rows, length, dtype=torch.long)
            with torch.autocast("cpu", cast, enabled=cast is not None):
                loss = loss_of(model, Text(tokens, tokens), rows * length)
            loss.backward()
            del loss
        optimizer.step()


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch):
    """Fake tensors cannot be asked whether their tokens are in the vocabulary."""
    monkeypatch.setattr(transformer, "check_tokens", lambda *_: None)


def of_recipe(name: str) -> tuple[Callable[[], nn.Module], ModelSpec, int]:
    recipe = RECIPES[name]
    config = recipe.config(recipe.vocab_size)
    return partial(LanguageModel, config), spec_of(config, recipe.length), recipe.batch


def of_lesson_11() -> tuple[Callable[[], nn.Module], ModelSpec, int]:
    size = PRESETS["large"]
    config = replace(size.config(), dropout=0.0)  # a mask has a byte a number on a GPU alone
    return partial(LanguageModel, config), spec_of(config, size.length), size.batch


def of_lesson_23(name: str) -> tuple[Callable[[], nn.Module], ModelSpec, int]:
    config = read_config(find_config(Path(name)))
    table = config.model
    spec = model_spec(table, table.vocab_size)
    assert spec is not None, "the planner knows language models"
    return partial(build_model, table, table.vocab_size), spec, config.training.batch


@pytest.mark.parametrize(
    ("model", "held", "within"),
    [
        (of_recipe("small"), "float32", 0.01),
        (of_recipe("small"), "autocast", 0.01),
        (of_recipe("large"), "autocast", 0.01),
        pytest.param(of_recipe("large"), "float32", 0.01, marks=pytest.mark.full),
        pytest.param(of_lesson_11(), "autocast", 0.02, marks=pytest.mark.full),
        pytest.param(of_lesson_23("124m"), "autocast", 0.01, marks=pytest.mark.full),
        (of_lesson_23("small"), "float32", 0.01),
        (of_lesson_23("small"), "autocast", 0.02),  # the CPU's kernel copies shared heads, no GPU's
    ],
)
def test_the_peak_of_a_step(model, held, within):
    build, spec, rows = model
    no_kernel = held == "float32" and spec.kv_heads < spec.num_heads  # on a GPU
    with sdpa_kernel(SDPBackend.MATH) if no_kernel else nullcontext():
        found = counted(build, rows, spec.seq_len, held)
    assert peak_bytes(spec, Plan(micro_batch=rows), held) == pytest.approx(found, rel=within)


@pytest.mark.parametrize(
    ("cast", "kept", "most"),
    [(False, (4, 12), (8, 16)), (True, (4, 12), (6, 14))],  # without a variable, with one
)
def test_the_bytes_of_a_logit(cast, kept, most):
    """Backward adds two gradients to the softmax; logits that a variable holds stay meanwhile."""
    tokens, words = 64, 1000
    for held, expected in zip((False, True), (kept, most), strict=True):
        with FakeTensorMode(), Alive() as alive:
            x, head = (torch.zeros(n, 8, requires_grad=True) for n in (tokens, words))
            targets, before = torch.zeros(tokens, dtype=torch.long), alive.now
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                logits = F.linear(x, head)
                loss = F.cross_entropy(logits, targets)
            if not held:
                del logits
            forward, alive.most = alive.now - before, 0
            loss.backward()
        seen = (forward, alive.most - before)
        assert [round(each / (tokens * words)) for each in seen] == list(expected)
    spec = ModelSpec(1, 8, 1, 8, words, tokens)
    assert loss_bytes(spec, Plan()) == (kept[1] - kept[0]) * tokens * words
    told = " ".join(assumptions(spec, h100(1), Plan()))
    pattern = (
        r"(\d+) bytes that are kept, and (\d+) when .* \((\d+) to (\d+) where a variable holds"
    )
    (found,) = re.findall(pattern, told)
    assert tuple(map(int, found[:2])) == kept
    assert str(most[1]) in found[2:]


def test_the_gradients_of_one_micro_batch_are_there_when_the_next_begins_its_backward():
    build, spec, rows = of_recipe("small")
    found = counted(build, rows // 4, spec.seq_len, "float32", micro_batches=4)
    plan = Plan(micro_batch=rows // 4, num_micro_batches=4)
    assert peak_bytes(spec, plan) == pytest.approx(found, rel=0.02)


def test_the_buckets_of_ddp_and_the_logits_of_a_cut_vocabulary():
    build, spec, rows = of_recipe("small")
    given = rows, spec.seq_len, "autocast"

    def by_parts(model: nn.Module, batch: Text, num_tokens: int) -> torch.Tensor:
        losses = vocab_parallel_cross_entropy(model(batch.tokens), batch.targets)
        return losses.sum() / num_tokens

    def peaks(rank: int) -> tuple[int, int]:
        with Alive() as ddp:
            two_steps(DistributedDataParallel(build()), *given)
        with Alive() as cut:
            two_steps(build(), *given, loss_of=by_parts)
        return ddp.most, cut.most

    ((ddp, cut),) = run_ranks(peaks, 1)
    plan = Plan(micro_batch=rows)
    assert peak_bytes(spec, plan, "autocast", beside=DDP) == pytest.approx(ddp, rel=0.01)
    assert peak_bytes(spec, plan, "autocast", CUT_LOGITS[True]) == pytest.approx(cut, rel=0.01)


def test_lesson_19s_evaluation_needs_more_than_its_small_steps():
    recipe = LORA["small"]
    with Alive() as alive:
        model = LanguageModel(recipe.config(recipe.vocab_size))
        add_lora(model, NAMES, 8, 16.0)
        held_loss(model, torch.zeros(1000, dtype=torch.long), recipe.length)
    needed = bytes_to_adapt(Namespace(), recipe, 1, half=True)
    assert needed == pytest.approx(alive.most, rel=0.06)  # weights, of large a thousandth


@pytest.mark.full
def test_the_peak_of_a_step_that_computes_layers_again():
    build, spec, rows = of_recipe("large")

    def again_by_layer() -> nn.Module:
        model = build()
        for layer in layers_of(model):
            layer.forward = partial(again, layer.forward)
        return model

    found = counted(again_by_layer, rows, spec.seq_len, "float32")
    plan = Plan(micro_batch=rows, checkpoint="full")
    assert peak_bytes(spec, plan) == pytest.approx(found, rel=0.02)


@pytest.fixture
def gpu_of(monkeypatch):
    """A GPU with so many bytes free."""

    def given(free: float, total: float = 80 * GB) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), int(total)))

    return given


@each_script
def test_a_preset_that_does_not_fit_names_what_does(script, gpu_of):
    args = Namespace(**script.arguments, preset="large")
    need = script.needed(args, script.presets["large"], 1, True)
    gpu_of(0.8 * need)
    with pytest.raises(InputError, match="--preset large needs about") as refused:
        check_room(args, script.presets, script.needed, half=True)
    words = str(refused.value)
    assert f"{need / GB:.3g} GB on each of 1 GPU(s)" in words
    assert "--preset small" in words
    assert script.needed(args, script.presets["small"], 1, True) < 0.05 * need


@each_script
def test_a_preset_that_may_fit_is_not_refused(script, gpu_of):
    args = Namespace(**script.arguments, preset="large")
    gpu_of(0.91 * script.needed(args, script.presets["large"], 1, False))
    check_room(args, script.presets, script.needed, half=False)


def test_more_gpus_and_flags_are_named_where_they_do(gpu_of):
    gpu_of(15.2 * GB)
    args = Namespace(preset="large")
    with pytest.raises(InputError, match="take --preset small or 4 GPUs"):
        check_room(args, RECIPES, bytes_of_replicas, half=False)
    assert bytes_of_replicas(args, RECIPES["large"], 4, False) <= 15.2 * GB
    assert bytes_of_replicas(args, RECIPES["large"], 3, False) > 15.2 * GB
    (script,) = [each for each in SCRIPTS if each.name == "23"]
    gpu_of(24 * GB)
    args = Namespace(**script.arguments, preset="large")
    with pytest.raises(InputError, match="take --checkpointing or --preset small or 2 GPUs"):
        check_room(args, script.presets, script.needed, half=True)


def test_what_the_planner_cannot_cut_is_the_scripts_own_to_refuse(gpu_of):
    def refuses(*_: object) -> int:
        raise InputError("12 stages for 10 layers are 2 too many")

    gpu_of(10**6)
    check_room(Namespace(preset="small"), RECIPES, refuses, half=False)


def test_a_file_of_deepspeeds_decides_its_rows_itself():
    args = Namespace(engine="deepspeed", search=False)
    assert bytes_by_stage(args, RECIPES["large"], 1, True) == 0


def test_a_gpu_that_others_have_filled(gpu_of):
    gpu_of(10**6)
    words = "0.001 of 80 GB free: take a GPU that nobody uses; `nvidia-smi` shows who has the rest"
    with pytest.raises(InputError, match=re.escape(words)):
        check_room(Namespace(preset="small"), RECIPES, bytes_of_replicas, half=False)
