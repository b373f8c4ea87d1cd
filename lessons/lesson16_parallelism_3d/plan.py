r"""Plan a training run: how to lay a model over GPUs, what it needs, how fast it will be.

    python lessons/lesson16_parallelism_3d/plan.py --model 70b --gpus 256 --memory 80
    python lessons/lesson16_parallelism_3d/plan.py --model gpt3-175b --gpus 1024 --gpu h100 \
        --link "400 Gbit/s" --batch 1536
    python lessons/lesson16_parallelism_3d/plan.py --model my_model.json --cluster my_cluster.json
    python lessons/lesson16_parallelism_3d/plan.py --model 8b --gpus 128 --tokens 15e12 --price 2.5
    python lessons/lesson16_parallelism_3d/plan.py --model 8b --gpus 128 --measured 6667 \
        --of "dp 8 x tp 1 x pp 1, ZeRO-3, 1 x 2, checkpoint full"
    python lessons/lesson16_parallelism_3d/plan.py --model config.json --sequence 4096 --lora 16
    python lessons/lesson16_parallelism_3d/plan.py --model 70b --gpus 256 --as megatron

Prints the five best layouts, each with its best variant: bytes by kind, seconds by kind, what
limits it; then why other plans do not fit, and everything that is assumed. Without --gpus: on the
fewest that a plan fits on. Arithmetic alone: it needs neither a GPU nor torch. Plans a few percent
apart are equally good: see the assumptions. A model file is a Hugging Face config.json or has
fields of `ModelSpec`, a cluster file of `Cluster` (shared/planner/specs.py, machines.py):
    {"num_layers": 32, "d_model": 4096, "num_heads": 32, "d_ff": 11008, "vocab_size": 32000,
     "seq_len": 4096, "gated": true, "bias": false, "norm": "rms", "tied": false}
    {"gpus": 64, "memory": "80 GB", "peak_flops": "989 TFLOP/s", "achievable": 0.8, "inner":
     "450 GB/s", "outer": "400 Gbit/s", "gpus_per_node": 8, "memory_bandwidth": "3.35 TB/s"}
"""

import argparse
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it need not be installed

from shared.errors import InputError
from shared.planner.limits import check_shape
from shared.planner.measured import pace_of, read_plan
from shared.planner.models import GPUS, MODELS
from shared.planner.report import (
    assumptions,
    best_of_layouts,
    costs,
    firsts,
    headline,
    near_miss,
    refusals,
    table,
)
from shared.planner.search import fewest_gpus, none_fits, survey
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.spoken import TOOLS, spoken
from shared.planner.units import quantity, read_cluster, read_model, with_sequence
from shared.planner.variants import Asked

TOKENS = 2**22  # of a step, where nobody says


def parser() -> argparse.ArgumentParser:
    """The flags; what is not given is searched for."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("--model", required=True, help=f"{', '.join(MODELS)} or a JSON file")
    add("--sequence", type=int, help="tokens of a sequence (the model's)")
    add("--batch", type=int, help="sequences of a step (4 million tokens)")
    add(
        "--precision",
        choices=("mixed", "float32"),
        default="mixed",
        help="mixed: 16-bit weights, float32 masters (mixed)",
    )
    add("--gpus", type=int, help="number of GPUs, or as the cluster file has it")
    add("--gpu", default="h100", help=f"{', '.join(GPUS)} (h100)")
    add("--cluster", type=Path, help="a JSON file, in place of --gpu")
    add("--memory", help='of a GPU, such as "80 GB"; a number alone is GB (the GPU\'s)')
    add("--link", help='a GPU\'s share of the link between nodes, such as "400 Gbit/s"')
    for axis in ("tp", "pp", "micro-batch"):
        add(f"--{axis}", type=int, help="if it is decided already")
    add("--zero", type=int, choices=range(4), help="if it is decided already")
    add("--checkpointing", choices=("none", "selective", "full"), help="if it is decided already")
    add("--deepspeed", action="store_true", help="its pipelines alone: no ZeRO-2, 3 or chunks")
    add("--eager", action="store_true", help="operations are not fused: no torch.compile")
    add("--lora", type=int, default=0, help="rank of adapters, the only weights that are trained")
    add("--measured", type=float, help="tokens/s a GPU of a run that you did of this model, and")
    add("--of", help="its plan in the words printed here (plan 1)")
    add("--tokens", type=float, help="of the whole training: prints days and GPU hours")
    add("--price", type=float, help="of a GPU hour")
    add("--as", dest="tool", choices=TOOLS, help="print plan 1 in the words of another tool too")
    add("--count", type=int, default=5, help="plans to print (5)")
    return found


def choose_model(args: argparse.Namespace) -> ModelSpec:
    """The model by its name or from its file, with the sequence that was asked for."""
    if args.model.endswith(".json"):
        return read_model(Path(args.model), args.sequence)
    if args.model not in MODELS:
        known = ", ".join(MODELS)
        raise InputError(f"unknown model {args.model!r}: known are {known}, and files *.json")
    return with_sequence(MODELS[args.model], args.sequence)


def choose_cluster(args: argparse.Namespace) -> Cluster:
    """The machines by the GPU's name or from their file, with what flags say of them."""
    if args.cluster is not None:
        cluster = read_cluster(args.cluster, args.gpus)
    elif args.gpu not in GPUS:
        known = ", ".join(GPUS)
        raise InputError(f"unknown GPU {args.gpu!r}: known are {known}; describe others by a file")
    else:
        cluster = GPUS[args.gpu](1 if args.gpus is None else args.gpus)
    if args.memory is not None:
        number = args.memory.lstrip("-").replace(".", "", 1).isdecimal()
        text = f"{args.memory} GB" if number else args.memory
        cluster = replace(cluster, memory=quantity(text, "bytes", "--memory"))
    if args.link is not None:
        cluster = replace(cluster, outer=quantity(args.link, "bytes/s", "--link"))
    if args.precision == "float32":  # tensor cores in TF32
        cluster = replace(cluster, peak_flops=cluster.peak_flops / 2)
    return cluster


def check_asked(model: ModelSpec, cluster: Cluster, args: argparse.Namespace) -> Asked:
    """What is decided already; raises InputError where that alone cannot be."""
    for flag in ("tp", "pp", "micro_batch", "batch", "count", "tokens", "price"):
        value, least = getattr(args, flag), 0 if flag == "price" else 1
        if value is not None and not least <= value < math.inf:
            words = f"--{flag.replace('_', '-')} must be {least} or more"
            raise InputError(f"{words}{' and finite' * (value == math.inf)}, got {value:g}")
    if args.price is not None and args.tokens is None:
        raise InputError("--price needs --tokens: it is that of the whole training")
    if args.lora < 0:
        raise InputError(f"--lora must be 0 or more, got {args.lora}")
    if args.of is not None and args.measured is None:
        raise InputError("--of is the plan of a run whose tokens/s --measured says")
    if args.checkpointing == "selective" and model.fused_attention:
        raise InputError(
            "--checkpointing selective leaves out scores, which this model's fused attention does "
            "not keep anyway: take none or full"
        )
    tp, pp = args.tp or 1, args.pp or 1
    check_shape(model, Plan(tp=tp, pp=pp))
    given = args.gpus is not None or args.cluster is not None
    if given and tp * pp > cluster.gpus:
        raise InputError(f"tp {tp} x pp {pp} are {tp * pp} GPUs, here are {cluster.gpus}")
    if given and cluster.gpus % (tp * pp):
        over = cluster.gpus % (tp * pp)
        raise InputError(
            f"tp {tp} x pp {pp} does not divide {cluster.gpus} GPUs: {over} are left over"
        )
    if pp > 1 and (args.zero or 0) > 1 and args.deepspeed:
        raise InputError(
            f"--zero {args.zero} with --pp {pp}: DeepSpeed refuses ZeRO-2 and 3 in a pipeline; "
            "take --zero 1, or leave --deepspeed out for an engine that allows it"
        )
    wanted = args.tp, args.pp, args.zero, args.checkpointing, args.micro_batch, args.precision
    return Asked(*wanted, args.deepspeed, not args.eager, args.lora)


def own_run(
    model: ModelSpec, cluster: Cluster, asked: Asked, first: Plan, args: argparse.Namespace
) -> tuple[Plan | None, float]:
    """The plan that was measured and its time as a multiple of the prediction; without, 1."""
    if args.measured is None:
        return None, 1.0
    like = Plan(precision=args.precision, fused=asked.fused, lora=asked.lora)
    plan = first if args.of is None else read_plan(args.of, model, like)
    return plan, pace_of(model, plan, cluster, args.measured)


def step_rows(model: ModelSpec, args: argparse.Namespace) -> int:
    """Sequences of a step."""
    return args.batch or max(1, TOKENS // model.seq_len)


def main() -> None:
    args = parser().parse_args()
    model, cluster = choose_model(args), choose_cluster(args)
    asked, batch = check_asked(model, cluster, args), step_rows(model, args)
    least = None
    if args.gpus is None and args.cluster is None:
        least = fewest_gpus(model, lambda n: replace(cluster, gpus=n), batch, asked)
        cluster = replace(cluster, gpus=least or 16_384)
    gpu = args.gpu if args.cluster is None else args.cluster.stem
    print(headline(args.model, model, gpu, cluster, batch), end="\n\n")
    found = survey(model, cluster, batch, asked)
    if not found.choices:
        raise InputError(none_fits(found, cluster))
    measured, pace = own_run(model, cluster, asked, found.choices[0].plan, args)
    found.choices[:] = [replace(each, time=each.time.scaled(pace)) for each in found.choices]
    if least is not None:
        print(f"{least} GPUs are the fewest, of 1, 2, 4 ..., on which a plan fits\n")
    best = best_of_layouts(found.choices, args.count)
    print(
        *table(model, best, cluster, measured), *firsts(model, found, cluster), sep="\n", end="\n\n"
    )
    if args.tool is not None:
        words = spoken(args.tool, model, best[0].plan, cluster)
        print(f"plan 1 for {args.tool}:", words, sep="\n", end="\n\n")
    if args.tokens is not None:
        words = costs(model, best[0], args.tokens, args.price, cluster, measured)
        print(words, end="\n\n")
    print(*refusals(found), *near_miss(model, found, cluster, pace), sep="\n", end="\n\n")
    print("assumptions:")
    print(*(f"  {each}" for each in assumptions(model, cluster, best[0].plan)), sep="\n")
    if args.measured is not None:
        print(
            f"  all seconds are {pace:.2f} times those predicted, as of the run that was measured"
        )
    if args.precision == "float32":
        print("  float32: products in TF32, at half of the peak")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
