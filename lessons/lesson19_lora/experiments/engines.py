"""Tuning under an engine; PEFT's own adapters; lesson 04's reference run with adapters."""

import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lessons.lesson19_lora.experiments.adapting import KINDS, NAMES
from shared.lora.adapter import Adapter
from shared.lora.counting import Tuning
from shared.lora.layers import add_lora
from shared.measuring.traffic import Traffic, count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.training.engine import DataParallelEngine, reference_curve
from shared.training.reference_run import NUM_STEPS, reference_model, reference_optimizer


def under(engine: str, model: nn.Module, device: torch.device) -> nn.Module:
    """The model under torch's DDP without a second copy of gradients, or sharded by FSDP2."""
    if engine == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in list(model.modules()):
        if type(layer).__name__.endswith("Layer"):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is given."""
    return [p for p in model.parameters() if p.requires_grad]


def with_peft(model: nn.Module, names: tuple[str, ...], rank: int, alpha: float) -> nn.Module:
    """A copy of a plain model with PEFT's adapters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, in notebooks
        from peft import LoraConfig, get_peft_model  # three seconds, and only compared with

    config = LoraConfig(r=rank, lora_alpha=int(alpha), target_modules=list(names))
    return get_peft_model(copy.deepcopy(model), config)


@torch.no_grad()
def start_alike(ours: nn.Module, peft: nn.Module) -> None:
    """Give PEFT's adapters our numbers, layer by layer."""
    theirs = dict(peft.named_parameters())
    for name, adapter in ours.named_modules():
        if isinstance(adapter, Adapter):
            for letter, own in (("A", adapter.lora_a), ("B", adapter.lora_b)):
                theirs[f"base_model.model.{name}.lora_{letter}.default.weight"].copy_(own)


def reference_losses(
    rank: int, method: str, engine: str, peft: bool = False, steps: int = NUM_STEPS
) -> list[float]:
    """The reference run's losses with adapters of rank 4; `engine` is single, ddp, fsdp2."""
    model: nn.Module = reference_model()
    plain = copy.deepcopy(model)
    torch.manual_seed(19)  # the adapters' start, on every rank the same
    add_lora(model, NAMES, 4, 8, KINDS[method])
    if peft:
        ours, model = model, with_peft(plain, NAMES, 4, 8)
        start_alike(ours, model)
    ranks = 1 if engine == "single" else dist.get_world_size()
    if engine != "single":
        model = under(engine, model, torch.device("cpu"))
    optimizer = reference_optimizer(trained(model))
    return reference_curve(DataParallelEngine(model, optimizer, ranks), range(steps)).losses


def small_model(dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A small language model on which bytes and messages are counted."""
    torch.manual_seed(0)
    config = TransformerConfig(60, 48, num_heads=4, num_layers=2, d_ff=192, dropout=0.0, max_len=24)
    return LanguageModel(config).to(dtype)


def step_traffic(rank: int, engine: str, tuning: Tuning, dtype: torch.dtype) -> list[Traffic]:
    """What this rank starts when the model is wrapped, and in the second step."""
    model: nn.Module = small_model(dtype)
    if tuning.method != "full":
        add_lora(model, tuning.names, tuning.rank, 2 * tuning.rank, KINDS[tuning.method])
    with count_traffic() as first:
        model = under(engine, model, torch.device("cpu"))
    optimizer = torch.optim.AdamW(trained(model))
    tokens = torch.randint(60, (2, 20))
    for _ in range(2):
        optimizer.zero_grad()
        with count_traffic() as second:
            model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
    return [first, second]
