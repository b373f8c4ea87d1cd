"""The names of torch that another version may not have: private ones, and those newer than 2.9.

What to do where one is gone: CONTRIBUTING.md, "A new torch is out".
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

from shared.cli.command import ROOT
from shared.cli.finding import GOOD, NOTE, Finding

_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
PRIVATE = (
    "torch.UntypedStorage._cdata",
    "torch.UntypedStorage._new_with_weak_ptr",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_graph_task_id",
    "torch._C._distributed_c10d._dump_fr_trace",
    "torch._C._len_torch_function_stack",
    "torch._dynamo",
    "torch._foreach_copy_",
    "torch._foreach_div_",
    "torch._foreach_mul_",
    "torch._inductor.compile_fx",
    "torch._inductor.utils.run_and_get_code",
    "torch._scaled_mm",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.cuda.memory._dump_snapshot",
    "torch.cuda.memory._record_memory_history",
    "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES",
    "torch.distributed._compute_bucket_assignment_by_size",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointImpl.NO_REENTRANT",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointImpl.REENTRANT",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.tensor._redistribute",
    "torch.ops.aten._unsafe_view.default",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported",
    "torch.profiler._ExperimentalConfig",
    "torch.serialization._get_layout",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
)
NEWER = {  # than torch 2.9, and what is lost without it; a name with brackets is an argument
    f"{_RING}._templated_ring_attention": "",  # 17 looks where 2.9 has it as well
    f"{_RING}._templated_ring_attention_backward": "",
    "torch.distributed.flight_recorder": "a cell of 21 that asks torch's analyzer",
    "torch.nn.parallel.DistributedDataParallel(forward_sync_buffers)": "a cell of 20 that shows it",
}


def look_at_names() -> Finding:
    """Return which of the names this torch lacks, and what of the course is lost with each."""
    lost = {name: text for name, text in NEWER.items() if text and not has(name)}
    lost |= {name: f"fails: {', '.join(users(name))}" for name in PRIVATE if not has(name)}
    if not lost:
        num = len(PRIVATE) + len(NEWER)
        return Finding("torch names", GOOD, f"has all {num} that another version may lack")
    advice = "; ".join(f"{name.rpartition('.')[2]}: {text}" for name, text in lost.items())
    return Finding("torch names", NOTE, f"not in this torch: {', '.join(lost)}", advice)


def has(name: str) -> bool:
    """Whether this torch has a name, or the function an argument of it: "torch.f(argument)"."""
    path, _, argument = name.rstrip(")").partition("(")
    first, *words = path.split(".")
    found: Any = importlib.import_module(first)
    for number, word in enumerate(words, 2):
        try:
            if not hasattr(found, word):
                importlib.import_module(".".join(path.split(".")[:number]))
            found = getattr(found, word)
        except (ImportError, AttributeError):
            return False
    return not argument or argument in inspect.signature(found).parameters


def users(name: str, root: Path = ROOT) -> list[str]:
    """The files of the course that have the name's last word in their code."""
    from shared.exercises.cells import code_of  # at use: doctor runs before the course is there

    word = name.rpartition(".")[2]
    return [str(path.relative_to(root)) for path in files(root) if word in code_of(path)]


def files(root: Path = ROOT) -> list[Path]:
    """All modules, scripts and notebooks that a reader runs, but for this list."""
    found = [path for top in ("shared", "solutions", "lessons") for path in (root / top).rglob("*")]
    apart = {root / "solutions" / "alternatives", root / "solutions" / "mistakes"}
    ours = [p for p in found if p.suffix in (".py", ".ipynb") and not apart & {*p.parents}]
    return sorted(path for path in ours if path.resolve() != Path(__file__).resolve())
