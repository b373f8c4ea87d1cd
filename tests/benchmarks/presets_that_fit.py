"""Which presets fit into which GPU, by script: counted, nothing is run, no GPU is needed.

    .venv/bin/python -m tests.benchmarks.presets_that_fit

Prints the table of lessons/on_a_gpu.md. The bytes are those that the scripts ask for before they
begin (`check_room`); tests/training/test_room.py compares them with counted steps.
"""

from argparse import Namespace
from typing import NamedTuple

from lessons.lesson10_zero.experiments import results as lesson10
from lessons.lesson11_gradient_checkpointing.experiments import results as lesson11
from lessons.lesson12_profiler_traces.experiments import report as lesson12
from lessons.lesson13_fsdp.experiments import results as lesson13
from lessons.lesson14_tensor_parallel.experiments import results as lesson14
from lessons.lesson15_pipeline_parallel.experiments import runs as lesson15
from lessons.lesson16_parallelism_3d.experiments import choosing as lesson16
from lessons.lesson17_long_context.experiments import results as lesson17
from lessons.lesson18_mixture_of_experts.experiments import results as lesson18
from lessons.lesson19_lora.experiments import results as lesson19
from lessons.lesson20_less_communication import results as lesson20
from lessons.lesson23_capstone import results as lesson23
from shared.measuring.room import Needed, fewest_ranks
from shared.training.language_recipes import RECIPES

GB = 1e9
FREE = 0.95  # of a GPU's memory: the driver and CUDA have the rest
GPUS = {"16 GB, fp32": (16, False), "24 GB, bf16": (24, True), "80 GB, bf16": (80, True)}


class Script(NamedTuple):
    """A script with some flags: what says its bytes, its presets, its arguments."""

    name: str
    needed: Needed
    presets: dict
    arguments: dict


MESH = dict.fromkeys(("dp", "tp", "pp"), -1) | {
    "micro_batches": None,
    "schedule": "1f1b",
    "zero": 0,
}
CAPSTONE = {"mode": None, "config": None}
CONFIGS = {"tiny": "tiny", "small": "small", "large": "124m"}
SCRIPTS = [
    Script("10", lesson10.bytes_needed, RECIPES, {"engine": "zero2", "search": False}),
    Script("11", lesson11.bytes_needed, lesson11.PRESETS, {}),
    Script("12", lesson12.bytes_needed, lesson12.PRESETS, {"read": None, "engine": "ddp"}),
    Script(
        "13",
        lesson13.bytes_needed,
        RECIPES,
        {"engine": "by_hand", "search": None, "offload": False, "mesh": ""},
    ),
    Script(
        "14",
        lesson14.bytes_needed,
        lesson14.RECIPES,
        {"engine": "by_hand", "tp": None, "sequence_parallel": False},
    ),
    Script(
        "15",
        lesson15.bytes_needed,
        lesson15.RECIPES,
        {"schedule": "1f1b", "micro_batches": None, "chunks": 1},
    ),
    Script("16", lesson16.bytes_needed, lesson16.RECIPES, MESH | {"checkpointing": False}),
    Script(
        "16 `--checkpointing`",
        lesson16.bytes_needed,
        lesson16.RECIPES,
        MESH | {"checkpointing": True},
    ),
    Script("17", lesson17.bytes_needed, lesson17.RECIPES, {"engine": "ring", "length": None}),
    Script("18", lesson18.bytes_needed, lesson18.RECIPES, {"experts": None, "ep": None, "k": 2}),
    Script("19", lesson19.bytes_needed, lesson19.RECIPES, {}),
    Script(
        "20",
        lesson20.bytes_needed,
        lesson20.RECIPES,
        {"method": "power_sgd", "engine": "by_hand"},
    ),
    Script("23", lesson23.bytes_needed, CONFIGS, CAPSTONE | {"checkpointing": False}),
    Script(
        "23 `--checkpointing`", lesson23.bytes_needed, CONFIGS, CAPSTONE | {"checkpointing": True}
    ),
]


def row(script: Script) -> list[str]:
    """Bytes of small and large on one GPU, and on how many GPUs large fits."""
    args = Namespace(**script.arguments)
    small, large = script.presets["small"], script.presets["large"]
    cells = [f"{script.needed(args, small, 1, False) / GB:.2f}"]
    cells += [f"{script.needed(args, large, 1, half) / GB:.0f}" for half in (False, True)]
    for memory, half in GPUS.values():
        fewest = fewest_ranks(args, large, script.needed, half, FREE * memory * GB)
        cells.append(str(fewest or "none"))
    return [script.name, *cells]


def main() -> None:
    """Print the table."""
    head = ["lesson's script", "small, fp32", "large, fp32", "large, bf16"]
    print("|", " | ".join(head + [f"GPUs of {name}" for name in GPUS]), "|")
    print("|" + " --- |" * (len(head) + len(GPUS)))
    for script in SCRIPTS:
        print("|", " | ".join(row(script)), "|")


if __name__ == "__main__":
    main()
