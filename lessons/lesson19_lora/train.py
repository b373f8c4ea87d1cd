"""Teach a language model a language, then tune it to a second one with few trained parameters.

The source side of --dataset comes first and the whole model learns it. Then the model is tuned to
the target side: --method lora trains two thin matrices beside each one named by --names, qlora has
the frozen ones in four bits, full trains everything. Ranks share each step's rows. --engine fsdp2
shards what is frozen as well; under ddp each rank has it whole, and it is sent once, at the start.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.lesson19_lora.experiments.adapting import NAMES, texts_of
from lessons.lesson19_lora.experiments.engines import trained, under
from lessons.lesson19_lora.experiments.results import (
    RECIPES,
    Fit,
    bytes_needed,
    check_flags,
    conclude,
    loss_on,
)
from shared.lora.counting import counted_bytes, predicted_bytes
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.language_model import LanguageModel
from shared.ranks.group import process_group
from shared.script import (
    autocast,
    choose_preset,
    lesson_parser,
    load_same_corpus,
    positive_float,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.training.language_recipes import Recipe, rows, rows_a_rank
from shared.training.schedules import set_learning_rate
from solutions.lesson19_lora import LoRALinear, QLoRALinear, add_lora


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], cast
) -> Tensor:
    """One step; what is frozen has no gradient, and the optimizer does not know it."""
    tokens, follow = batch
    optimizer.zero_grad()
    with cast:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), follow.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def fit(model: nn.Module, text: Tensor, recipe: Recipe, steps: int, peak: float, job: Fit) -> Fit:
    """Train what is not frozen, on this rank's rows of each step."""
    rank, share = job.rank, rows_a_rank(recipe, job.rank)
    mine = slice(share * rank.rank, share * (rank.rank + 1))
    job.optimizer = torch.optim.AdamW(trained(model))
    for step in progress(range(1, steps + 1), rank, job.label):
        batch = rows(text, step, job.seed, share * rank.world_size, recipe.length, mine)
        tokens, follow = (x.to(rank.device) for x in batch)
        set_learning_rate(job.optimizer, recipe.learning_rate(step, steps, peak))
        began = synchronized_now(rank.device)
        if step < steps:
            loss = train_step(model, job.optimizer, (tokens, follow), job.cast)
        else:
            with count_traffic() as job.traffic:
                loss = train_step(model, job.optimizer, (tokens, follow), job.cast)
        job.losses.append(loss)
        job.seconds.append(synchronized_now(rank.device) - began)
    return job


def main() -> None:
    parser = lesson_parser(__file__, __doc__, dataset="grammar", precision=True)
    parser.add_argument(
        "--method", choices=("lora", "qlora", "full"), default="lora", help="(lora)"
    )
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="ddp", help="(ddp)")
    parser.add_argument("--rank", type=int, default=8, help="of the update (8)")
    parser.add_argument("--alpha", type=positive_float, help="scale x rank (twice the rank)")
    parser.add_argument("--names", nargs="+", default=list(NAMES), help="layers to adapt (all)")
    parser.add_argument("--peak", type=positive_float, help="learning rate (full 1e-3, else 1e-2)")
    parser.add_argument("--base-steps", type=positive_int, help="on the source (twice --steps)")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        cast = autocast(args, rank.device)
        torch.manual_seed(args.seed)
        model = LanguageModel(recipe.config(256)).to(rank.device)  # a token is a byte
        tuning = check_flags(args, model)
        texts = texts_of(load_same_corpus(args), recipe.characters, recipe.length)
        steps = args.steps or recipe.steps

        base = under("ddp", model, rank.device)
        job = Fit(rank, args.seed, cast, "learning the source")
        fit(base, texts.base, recipe, args.base_steps or 2 * steps, recipe.peak, job)
        model.zero_grad()  # what gets frozen would keep its last gradient in memory
        before = loss_on(base, texts, recipe, rank.device)

        shards = rank.world_size if args.engine == "fsdp2" else 1
        predicted = predicted_bytes(model, tuning, shards, rank.rank % shards)
        if args.method != "full":
            kind = {"lora": LoRALinear, "qlora": QLoRALinear}[args.method]
            add_lora(model, args.names, args.rank, args.alpha, kind)
        model = under(args.engine, model, rank.device)
        job = Fit(rank, args.seed + 1, cast, f"tuning with {args.method}")
        fit(model, texts.new, recipe, steps, args.peak, job)
        # Before the evaluation: FSDP reshards its root in backward, and none follows there.
        memory = {"predicted": predicted, "counted": counted_bytes(model, job.optimizer)}
        after = loss_on(model, texts, recipe, rank.device)
        conclude(args, recipe, job, memory, before, after)


if __name__ == "__main__":
    run_script(main)
