"""Train on a few ranks with a fault that you choose, and name it from what all ranks saw.

--fault says what goes wrong on the last rank: blocked_port, wrong_interface, versions (seen before
the run); batches, mismatch, full_disk, out_of_memory (the others hang until --timeout); slow_node.
The order of looking is the one for a run of your own: reports of all ranks, who reaches whom, the
links, then the calls that all ranks recorded, then the seconds before the all_reduce.
"""

import argparse
from pathlib import Path

import torch

from lessons.lesson21_clusters.diagnosis import (
    FACTOR,
    NOTHING,
    figures,
    own_seconds,
    verdict,
    whole_seconds,
)
from lessons.lesson21_clusters.faults import (
    FAULTS,
    LATE,
    PLAYED,
    STEPS,
    WHEN,
    Fault,
    Seen,
    look_around,
    train,
)
from shared.clusters.addresses import Meeting, meet
from shared.clusters.links import measure_links
from shared.clusters.report import Finding, disagreements, unreached
from shared.errors import InputError
from shared.model.language_model import LanguageModel
from shared.ranks.agreement import gathered
from shared.ranks.group import Rank, process_group
from shared.results import write_results
from shared.script import choose_preset, lesson_parser, positive_float, prepare, run_script
from shared.training.language_recipes import RECIPES
from solutions.lesson21_clusters import explain_hang, find_odd, find_straggler

VOCABULARY = 400


def arguments() -> argparse.Namespace:
    """The flags; raises InputError for a device on which no rank could tell what it saw."""
    parser = lesson_parser(__file__, __doc__)
    what = f"what goes wrong (batches; alone, or in fewer than {WHEN} steps: none)"
    parser.add_argument("--fault", choices=FAULTS, help=what)
    what = "seconds until a rank gives up waiting (5)"
    parser.add_argument("--timeout", type=positive_float, default=5.0, help=what)
    args = parser.parse_args()
    if args.device == "cuda":
        raise InputError(
            "--device cuda: NCCL's watchdog ends a rank that has waited for too long, and with it"
            " what it saw; the faults of this script need gloo: leave --device out"
        )
    args.device = "cpu"
    return args


def before(meeting: Meeting, fault: Fault, out: Path) -> list[Finding]:
    """What is found before there is a group; raises InputError for what is this machine's own."""
    if meeting.world_size == 1 and fault.name in (*PLAYED, "batches", "mismatch", "slow_node"):
        raise InputError(f"--fault {fault.name} is a difference between ranks: start two or more")
    reports, reached = look_around(meeting, fault, torch.device("cpu"), out)
    findings = [*unreached(reports, reached), *disagreements(reports)]
    broken = [each.words for each in findings if each.breaks]
    if broken and fault.name not in PLAYED:  # no group would come about
        raise InputError(f"before any fault was put in: {broken[0]}")
    return findings


def run(args: argparse.Namespace, rank: Rank, fault: Fault, steps: int) -> list[Seen]:
    """Train; what every rank saw."""
    recipe = choose_preset(args, rank.device, RECIPES)
    torch.manual_seed(args.seed)  # the same parameters on every rank
    model = LanguageModel(recipe.config(VOCABULARY))
    share = max(1, recipe.batch // rank.world_size)

    def batch(step: int) -> torch.Tensor:
        """Tokens drawn at random: what is learned is of no interest here."""
        number = (1_000 * args.seed + step) * rank.world_size + rank.rank
        draw = torch.Generator().manual_seed(number)
        return torch.randint(VOCABULARY, (share, recipe.length + 1), generator=draw)

    return gathered(train(rank.rank, model, batch, fault, steps, args.timeout))


def main() -> None:
    args, meeting = arguments(), meet()
    short = (args.steps or STEPS) < WHEN
    if args.fault in LATE and short:
        raise InputError(f"--fault {args.fault} strikes in step {WHEN}, not in {args.steps}")
    args.fault = args.fault or ("none" if meeting.world_size == 1 or short else "batches")
    fault = Fault(args.fault, here=meeting.rank == meeting.world_size - 1)
    findings = before(meeting, fault, args.out)
    with process_group("cpu") as rank:
        prepare(args, rank, globals())
        odd = find_odd(measure_links(num_bytes=1 << 16).small)
        steps = 0 if any(each.breaks for each in findings) else args.steps or STEPS
        seen = run(args, rank, fault, steps)
        hangs = explain_hang([each.recording for each in seen])
        own, said = own_seconds(seen), [each.said for each in seen]
        straggler = find_straggler(own, FACTOR) if own.numel() else None
        words = verdict(findings, hangs, said, straggler, odd)
        if rank.is_main:
            for number, each in enumerate(said):
                print(f"rank {number} {'raised ' + each if each else 'came to its end'}")
            row = {"fault": args.fault, "ranks": rank.world_size, "found": words}
            write_results(
                args,
                rank,
                headline=f"{args.fault}: {words}",
                table=[row],
                figures=figures(own, whole_seconds(seen)),
                verdict=words,
                found=words != NOTHING,
                raised=said,
            )


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
