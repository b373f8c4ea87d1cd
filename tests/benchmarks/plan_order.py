"""Do predicted seconds put all plans of four ranks in the order that they are measured in?

Four ranks, each in a network namespace of its own behind a link of --mbit. Their layers sleep for
as long as a device of --gflops would compute (lesson 16's experiments/plan_order.py); what is sent
is real. The model's numbers are fitted on every other plan and tested on the rest, both ways.
Then eight ranks on two nodes of four, with a link of --mbit between them, and of a quarter: the
same step with the mesh's axes laid over the nodes in three orders. Linux, root, iproute2.

    python tests/benchmarks/plan_order.py
    python tests/benchmarks/plan_order.py --figure order.png
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from lessons.lesson16_parallelism_3d.experiments.plan_order import (
    Setting,
    bytes_between,
    message_seconds,
    plans_of_four,
    small_spec,
    step_seconds,
)
from shared.planner.fit import fit, mean_error
from shared.planner.outcomes import Fitted
from shared.planner.search import describe
from shared.planner.seconds import step_time
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.plots import measured, save_figure, theory, use_style
from shared.ranks.forked import run_ranks
from shared.ranks.links import throttled_links, why_not
from shared.results import format_table

ORDERS = (("pp", "dp", "tp"), ("dp", "pp", "tp"), ("tp", "dp", "pp"))


@dataclass(frozen=True)
class Timed:
    """What a plan took, as `fit` wants a published run."""

    model: ModelSpec
    plan: Plan
    cluster: Cluster
    seconds: float

    def predicted(self, fitted: Fitted) -> float:
        """Seconds by the planner."""
        return step_time(self.model, self.plan, self.cluster, fitted).total


def main() -> None:
    args = parse()
    if reason := why_not():
        sys.exit(f"no throttled links on this machine: {reason}")
    timed = measure(args)
    halves = ((timed[::2], timed[1::2]), (timed[1::2], timed[::2]), (timed, timed))
    for words, (train, test) in zip(("even", "odd", "all"), halves, strict=True):
        numbers = fit(train)
        print(
            f"fitted on {words:4} plans: products {numbers.matmul:.2f} of the device, messages "
            f"{numbers.link:.2f} of the link; on the "
            f"{'same' if train is test else 'others'}: rank correlation "
            f"{rank_correlation(test, numbers):.3f}, mean error {mean_error(test, numbers):.1%}"
        )
    print(format_table([row(each, numbers) for each in sorted(timed, key=lambda x: x.seconds)]))
    if args.figure:
        draw(timed, numbers, args.figure)
    print(format_table([over_nodes(args, order) for order in ORDERS]))


def measure(args: argparse.Namespace) -> list[Timed]:
    """Every plan of four ranks, each rank behind a link of its own."""
    plans, speed = plans_of_four(), args.mbit * 1e6 / 8
    with throttled_links(4, args.mbit) as links:
        messages = run_ranks(message_seconds, 4, before=links.enter)[0]
        print("; ".join(f"{name}: {1000 * each:.1f} ms" for name, each in messages.items()))
        setting = Setting(args.gflops * 1e9, args.steps)
        found = run_ranks(step_seconds, 4, plans, setting, timeout=3000, before=links.enter)[0]
    latency = messages["all-reduce of a number"]
    cluster = Cluster(4, 1e12, args.gflops * 1e9, 1, speed, speed, 1e12, latency=latency)
    model = small_spec()
    return [Timed(model, plan, cluster, each) for plan, each in zip(plans, found, strict=True)]


def over_nodes(args: argparse.Namespace, order: Sequence[str]) -> dict[str, object]:
    """A step on dp 2 x tp 2 x pp 2 whose ranks 0 to 3 are on the first of two nodes."""
    plan = Plan(2, 2, 2, micro_batch=4, num_micro_batches=4, precision="float32")
    setting = Setting(args.gflops * 1e9, 5, order)
    sent = sum(run_ranks(bytes_between, 8, plan, setting, 4, timeout=200))
    found: dict[str, object] = {"order": ", ".join(order), "MB between nodes": round(sent / 1e6, 2)}
    for mbit in (args.mbit, args.mbit / 4):
        with throttled_links(2, mbit) as links:
            ranks = run_ranks(
                step_seconds, 8, [plan], setting, timeout=600, before=lambda r: links.enter(r // 4)
            )
        found[f"s a step, {mbit:g} Mbit/s"] = round(ranks[0][0], 2)
    return found


def rank_correlation(timed: Sequence[Timed], numbers: Fitted) -> float:
    """Spearman's: 1 where the predicted order is the measured one, 0 where it is arbitrary."""
    clock, planner = (
        np.argsort(np.argsort(seconds))
        for seconds in ([t.seconds for t in timed], [t.predicted(numbers) for t in timed])
    )
    return float(np.corrcoef(clock, planner)[0, 1])


def row(timed: Timed, numbers: Fitted) -> dict[str, object]:
    """A plan in the table."""
    predicted = timed.predicted(numbers)
    return {
        "plan": describe(timed.plan),
        "sequence parallel": "yes" if timed.plan.sequence_parallel else "",
        "measured, s": round(timed.seconds, 2),
        "predicted, s": round(predicted, 2),
        "error, %": round(100 * (predicted / timed.seconds - 1), 1),
    }


def draw(timed: Sequence[Timed], numbers: Fitted, path: Path) -> None:
    """Predicted over measured seconds, a point a plan."""
    use_style()
    figure, ax = plt.subplots()
    for words, recomputed in (("kept", "none"), ("computed again", "full")):
        some = [t for t in timed if t.plan.checkpoint == recomputed]
        measured(ax, [t.seconds for t in some], [t.predicted(numbers) for t in some], words)
    ends = [min(t.seconds for t in timed), max(t.seconds for t in timed)]
    theory(ax, ends, ends, "equal")
    ax.set(xlabel="measured (s a step)", ylabel="predicted (s a step)")
    ax.set_title(f"{len(timed)} plans of four ranks: seconds by the planner and by the clock")
    ax.legend(title="activations")
    save_figure(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=400.0, help="of each link (400)")
    parser.add_argument("--gflops", type=float, default=5.0, help="GFLOP/s of a device (5)")
    parser.add_argument("--steps", type=int, default=3, help="steps a plan, of which the median")
    parser.add_argument("--figure", type=Path, help="draw predicted over measured into this PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
