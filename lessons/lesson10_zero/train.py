"""Train a language model under ZeRO: stages 1 to 3 by hand, or DeepSpeed with a JSON file.

--engine zero1, zero2 or zero3 trains with the lesson's own stages, --deepspeed ds_zero3.json with
DeepSpeed as the file says. The table shows the bytes a parameter, counted, beside the formula.
--resume trains --steps more, at the rates of the last part of a run that has all these steps.
--search finds the most layers that one GPU holds, by stage and with offloading.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lessons.lesson10_zero.experiments import results
from lessons.lesson10_zero.experiments.config_files import accumulation, read_config, zero_section
from lessons.lesson10_zero.experiments.results import Run, conclude, resume, save
from lessons.lesson10_zero.experiments.search import search
from shared import script
from shared.data.rows import Text
from shared.errors import InputError
from shared.measuring.live import live_storages
from shared.measuring.timing import synchronized_now
from shared.model.language_model import LanguageModel
from shared.ranks.group import Rank, process_group
from shared.sharding.stage3 import ZeroStage3
from shared.sharding.stages import ZeroStage1, ZeroStage2
from shared.training.deepspeed_engine import DeepSpeedEngine
from shared.training.engine import DataParallelEngine
from shared.training.language_recipes import RECIPES, Recipe, load_tokens, rows, rows_a_rank
from shared.training.quiet_deepspeed import import_deepspeed
from shared.training.schedules import set_learning_rate

HERE = Path(__file__).resolve().parent
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.01}


def by_hand(args: argparse.Namespace, model: LanguageModel, recipe: Recipe, rank: Rank) -> Run:
    """A stage of the lesson takes the place of AdamW, and of DDP."""
    stage = int(args.engine[-1])
    half = args.precision == "bf16" or (not args.precision and script.has_bf16(rank.device))
    if half:
        model.bfloat16()  # before the optimizer, which then makes float32 masters
    if stage == 3:
        optimizer = ZeroStage3(model, torch.optim.AdamW, lr=recipe.peak, **ADAMW)
    else:
        kind = ZeroStage1 if stage == 1 else ZeroStage2
        optimizer = kind(model.parameters(), torch.optim.AdamW, lr=recipe.peak, **ADAMW)
    engine = DataParallelEngine(model, optimizer, rank.world_size)
    return Run(
        args.engine,
        stage,
        model,
        engine,
        rows=rows_a_rank(recipe, rank),
        peak_rate=recipe.peak,
        half=half,
    )


def with_deepspeed(file: Path, model: LanguageModel, recipe: Recipe, rank: Rank) -> Run:
    """The file decides stage, precision, rows and optimizer; without one, torch's AdamW."""
    share = rows_a_rank(recipe, rank)
    config = read_config(file, rank.device, rank.world_size, share, recipe.peak, recipe.d_model)
    given = config.get("optimizer", {}).get("params", {})
    client = None
    if "optimizer" not in config:
        client = torch.optim.AdamW(model.parameters(), lr=recipe.peak, **ADAMW)
    # deepspeed.initialize, with its log kept quiet and its errors in one line
    engine = results.start_deepspeed(rank, file, model=model, optimizer=client, config=config)
    stage, rate = zero_section(config).get("stage", 0), given.get("lr", recipe.peak)
    micro_batch, count = accumulation(config, rank.world_size)
    half = config.get("bf16", config.get("fp16", {})).get("enabled", False)
    name, parts = f"deepspeed, stage {stage}", DeepSpeedEngine(engine, count)
    return Run(name, stage, model, parts, micro_batch * count, rate, half, engine)


def train_step(run: Run, batch: Text, num_tokens: int, count: bool) -> None:
    """One step, the same for every engine; bytes are counted where all gradients are there."""
    run.engine.optimizer.zero_grad()
    run.losses.append(run.engine.forward_backward(batch, num_tokens))
    run.engine.average_gradients()
    if count:
        run.count(batch.tokens, batch.targets)
    run.engine.optimizer.step()


def train(run: Run, ids: torch.Tensor, recipe: Recipe, steps: range, rank: Rank, seed: int) -> int:
    """Train on the same rows whatever the number of ranks; the tokens of a step on all ranks."""
    size, length = run.rows * rank.world_size, recipe.length
    mine = slice(rank.rank * run.rows, (rank.rank + 1) * run.rows)
    for step in script.progress(steps, rank, "training"):
        batch = Text(*rows(ids, step, seed, size, length, mine)).to(rank.device)
        rate = recipe.learning_rate(step, steps.stop - 1, run.peak_rate)
        set_learning_rate(run.engine.optimizer, rate)
        dist.barrier()
        began = synchronized_now(rank.device)
        train_step(run, batch, size * length, count=step == steps[-1])
        run.seconds.append(synchronized_now(rank.device) - began)
    return size * length


def main() -> None:
    parser = script.lesson_parser(__file__, __doc__, text="stdlib")
    engines = ("zero1", "zero2", "zero3", "deepspeed")
    parser.add_argument("--engine", choices=engines, help="(zero2; deepspeed with --deepspeed)")
    parser.add_argument("--deepspeed", type=Path, metavar="FILE", help="a JSON file of DeepSpeed")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="by hand (bf16 on a GPU)")
    folder: dict[str, Any] = {"type": script.given_path, "metavar": "DIR"}
    parser.add_argument("--save", **folder, help="save a checkpoint at the end")
    what = "load, then make --steps more; begin where DIR is empty"
    parser.add_argument("--resume", **folder, help=what)
    parser.add_argument("--search", action="store_true", help="the largest model for this GPU")
    args = parser.parse_args()
    args.engine = args.engine or ("deepspeed" if args.deepspeed else "zero2")
    if args.deepspeed and (args.engine != "deepspeed" or args.precision):
        raise InputError("--deepspeed FILE decides engine and precision: leave out the other flag")
    file = args.deepspeed or HERE / "ds_zero2.json"
    if args.engine == "deepspeed" or args.search:
        import_deepspeed(args.device)
    with process_group(args.device) as rank:
        script.prepare(args, rank, globals())
        recipe = script.choose_preset(args, rank.device, RECIPES, results.bytes_needed)
        if args.search:
            return search(args, rank, HERE, recipe, with_deepspeed)
        ids, vocab_size = load_tokens(script.load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        known = {storage.data_ptr() for storage in live_storages()}
        model = LanguageModel(recipe.config(vocab_size)).to(rank.device)
        count = sum(p.numel() for p in model.parameters())
        if args.engine == "deepspeed":
            run = with_deepspeed(file, model, recipe, rank)
        else:
            run = by_hand(args, model, recipe, rank)
        run.known = known
        done = resume(run, args.resume, rank, args.data) if args.resume else 0
        steps = range(done + 1, done + (args.steps or recipe.steps) + 1)
        tokens = train(run, ids, recipe, steps, rank, args.seed)
        conclude(args, rank, run, tokens, count)
        if args.save:  # last: a disk that is full costs the checkpoint, not the results
            save(run, args.save, rank, args.data, steps[-1])
        if run.deepspeed is not None:
            run.deepspeed.destroy()  # its hooks hold the process group


if __name__ == "__main__":
    script.run_script(main)
