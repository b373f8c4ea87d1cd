"""What every lesson's script shares: flags, presets, what comes before the first step, errors."""

import argparse
import contextlib
import fcntl
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record
from tqdm import tqdm

from shared.data.corpora import ParallelCorpus, load_corpus
from shared.data.text import TextCorpus, load_text
from shared.errors import InputError, NoGroup
from shared.exercises.mine import put_mine_in_place
from shared.exercises.notebook import NotSolved
from shared.measuring.room import Needed, check_room
from shared.ranks.agreement import (
    agree_on,
    agree_on_folder,
    agree_on_place,
    fingerprint,
    gathered,
    refused_by_any,
)
from shared.ranks.group import Rank
from shared.ranks.torchrun import tell_torchrun

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ("tiny", "small", "large")
OUT_OF_MEMORY = (
    'what to do, the cheapest first: lessons/when_something_does_not_work.md, "CUDA out of memory"'
)
OF_A_MACHINE = {"out", "device"}  # arguments that may differ from one machine to the next
T = TypeVar("T")


def lesson_parser(
    script: str,
    description: str | None,
    *,
    dataset: str | None = None,
    text: str | None = None,
    precision: bool = False,
    clip: bool = False,
    checkpoint: bool = False,
    steps: str = "training steps",
) -> argparse.ArgumentParser:
    """The parser with the flags that all scripts have; add the lesson's own to it.

    `script` is the script's `__file__`: its folder names the lesson, and the default folder under
    runs/. `dataset`, when given, is
    the default of a `--dataset` flag of sentence pairs, with what belongs to it; `text` is that
    of one for a language model. `precision` adds `--precision`, which `autocast` reads, and
    `clip` adds `--max-norm`: infinite, since the recipes and the scores that we give clip nothing.
    `checkpoint` adds `--save`, which `prepare` tries to write to, and `--resume`. `steps` says
    what `--steps` counts.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lesson = Path(script).resolve().parent.name
    parser.set_defaults(lesson=lesson, beside=checkpoint)
    parser.add_argument("--preset", choices=PRESETS, help="size (small on a CPU, large on a GPU)")
    parser.add_argument("--steps", type=positive_int, help=f"{steps} (the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (0)")
    what = "auto takes CUDA where there is one (auto)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=what)
    parser.add_argument("--mine", action="store_true", help="run my answers from lesson.ipynb")
    out = ROOT / "runs" / lesson
    parser.add_argument("--out", type=given_path, default=out, help=f"results (runs/{lesson})")
    if dataset is not None:
        what = f"grammar, multi30k, wmt16 or a folder of pairs ({dataset})"
        parser.add_argument("--dataset", default=dataset, help=what)
        what = "pairs with an empty side: refuse the data, or leave them out (error)"
        parser.add_argument("--empty", choices=("error", "drop"), default="error", help=what)
        for side, default in (("source", "en"), ("target", "de")):
            what = f"{side} language: the ending of the data's files or its column ({default})"
            parser.add_argument(f"--{side}", default=default, help=what)
    if text is not None:
        what = f"stdlib, wikitext-2 or a folder of text ({text})"
        parser.add_argument("--dataset", default=text, help=what)
    if precision:
        what = "bf16: matrix products in bfloat16, by autocast (bf16 on a GPU, fp32 on a CPU)"
        parser.add_argument("--precision", choices=("fp32", "bf16"), help=what)
    if clip:
        what = "cut longer gradients, all parameters together, to this length (never)"
        parser.add_argument("--max-norm", type=positive_float, default=math.inf, help=what)
    if checkpoint:
        parser.add_argument(
            "--save", type=given_path, metavar="DIR", help="a checkpoint at the end"
        )
        what = "continue from one, of any number of ranks, or begin where the folder is empty;"
        what += " --steps are those of the whole run"
        parser.add_argument("--resume", type=given_path, metavar="DIR", help=what)
    return parser


def positive_float(text: str) -> float:
    """An argparse type for lengths; raises ArgumentTypeError with the value that was given."""
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")


def positive_int(text: str) -> int:
    """An argparse type for counts; raises ArgumentTypeError with the value that was given."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def given_path(text: str) -> Path:
    """An argparse type for paths; raises ArgumentTypeError for "", which Path takes for "."."""
    if text:
        return Path(text)
    raise argparse.ArgumentTypeError("must name a folder, got '': is a variable not set?")


def choose_preset(
    args: argparse.Namespace,
    device: torch.device,
    presets: Mapping[str, T],
    needed: Needed | None = None,
) -> T:
    """The preset that was asked for, or the one that fits the device; its name goes into `args`.

    Where `needed` says the bytes of a rank, raises InputError unless a GPU has them (`check_room`).
    """
    args.preset = args.preset or ("large" if device.type == "cuda" else "small")
    if needed is not None and device.type == "cuda":
        given = getattr(args, "precision", None)
        check_room(args, presets, needed, given == "bf16" if given else has_bf16(device))
    return presets[args.preset]


def prepare(args: argparse.Namespace, rank: Rank, names: dict[str, Any]) -> None:
    """What comes before a script does anything: one command, one folder, the answers that run.

    The ranks agree on their arguments; rank 0 takes `--out` for itself; with `--mine` the
    learner's answers take the place of the exercises that the script imports, whose `globals()`
    is `names`. Raises InputError when the ranks were given different arguments or answers, when
    the folder cannot be written or another run writes to it, and for answers that do not run.
    """
    agree_on_arguments(args)
    with refused_by_any():
        if rank.is_main:
            take_folder(args.out)
    if isinstance(getattr(args, "save", None), Path):  # before hours of training; 08 names a way
        (agree_on_place if args.beside else agree_on_folder)(args.save, "--save")
    args.answers = put_mine_in_place(args.lesson.removeprefix("lesson")[:2], names, mine=args.mine)
    agree_on("their answers", args.answers, "give every machine the same notebook")
    if rank.is_main and {"mine", "shared/"} & {*args.answers.values()}:
        whose = ", ".join(f"{id} {what}" for id, what in args.answers.items())
        print(f"answers: {whose}", flush=True)


def agree_on_arguments(args: argparse.Namespace) -> None:
    """Raise InputError on every rank, naming the flag, unless all were given the same."""
    own = {key: str(value) for key, value in vars(args).items() if key not in OF_A_MACHINE}
    everyone = gathered(own)
    for key in own:
        if any(other[key] != everyone[0][key] for other in everyone):
            agree_on(f"--{key.replace('_', '-')}", own[key], "start the same command everywhere")


def load_same_corpus(args: argparse.Namespace, max_train: int | None = None) -> ParallelCorpus:
    """Load `--dataset`; raises InputError on every rank unless all of them read the same."""
    corpus = load_corpus(args.dataset, args.source, args.target, args.empty, max_train)
    args.data = fingerprint(text for pair in corpus.train for text in pair)
    agree_on("their training data", args.data, "give every machine the same files")
    return corpus


def load_same_text(args: argparse.Namespace) -> TextCorpus:
    """Load the text of `--dataset`; raises InputError on every rank unless all read the same."""
    corpus = load_text(args.dataset)
    args.data = fingerprint([corpus.train])
    agree_on("their training text", args.data, "give every machine the same files")
    return corpus


def has_bf16(device: torch.device) -> bool:
    """Whether this is a GPU with instructions for bf16: older ones, as the T4, emulate it."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(args: argparse.Namespace, device: torch.device) -> torch.autocast:
    """The context in which a forward and its loss run, by `--precision`.

    Raises InputError for bf16 on a CPU, unless `--device cpu` says that the CPU is meant: most are
    slower with it than with float32 (lesson 09 measures this one).
    """
    on_cpu = device.type == "cpu"
    if args.precision is None:
        args.precision = "bf16" if has_bf16(device) else "fp32"
    if on_cpu and args.precision == "bf16" and args.device != "cpu":
        raise InputError(
            "--precision bf16 on a CPU: most CPUs are slower with it than in fp32; add --device cpu"
            " if you mean it"
        )
    return torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main; a user's mistake is one line on stderr and exit status 2.

    So are a GPU that is full, and an exercise that a learner's own answer uses and nobody solved.
    The first rank of each machine says it; a rank that did not meet the others speaks for itself.
    torchrun's own summary shows the line of the rank that failed first, or that rank's traceback
    (`record`). Ctrl-C ends with status 130.
    """
    try:
        record(main, WholeErrorFile())()
    except (InputError, NotSolved, torch.OutOfMemoryError) as error:
        words = f"error: {error}"
        if isinstance(error, torch.OutOfMemoryError):  # its fourth sentence is for experts
            first = ". ".join(" ".join(str(error).split()).split(". ")[:3])
            words = f"error: {first}: take a smaller --preset or more GPUs; `nvidia-smi` shows who "
            words += f"else uses this one; {OUT_OF_MEMORY}"
        if isinstance(error, NoGroup) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(words, file=sys.stderr, flush=True)
        tell_torchrun(words, words)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _give_folders_back()


class WholeErrorFile(ErrorHandler):
    """torch's handler, whose file is there whole or not at all: torchrun ends at half a one."""

    def record_exception(self, e: BaseException) -> None:
        """Write the error and its traceback for torchrun."""
        tell_torchrun(f"{type(e).__name__}: {e}", traceback.format_exc())


def progress(items: Iterable[T], rank: Rank, label: str, total: int | None = None) -> Iterable[T]:
    """A progress bar on rank 0's terminal; silent on other ranks and in log files."""
    quiet = not (rank.is_main and sys.stderr.isatty())
    return tqdm(items, desc=label, disable=quiet, leave=False, total=total)


def checked_out(out: Path, flag: str = "--out") -> Path:
    """Make the folder for results now, before hours of training, or say why it cannot be.

    Raises InputError, naming the flag that gave it, when it cannot be made or written to.
    """
    probe = out / f".writable_{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.write_text(" ")  # a full disk still takes an empty file
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{flag} {out} cannot be written ({error.strerror}): give a folder that can"
        ) from None
    return out


def take_folder(out: Path) -> None:
    """Make the folder and lock it until the script's end, or its process's, however it ends.

    Raises InputError when it cannot be written, and when another run holds it, naming that one.
    Source: man 2 flock.
    """
    lock = (checked_out(out) / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        raise InputError(
            f"--out {out}: another run writes to it ({lock.read().strip() or 'unknown'}); wait for"
            " it, or give another folder"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    _locks.append(lock)


def _give_folders_back() -> None:
    for lock in _locks:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()
    _locks.clear()


_locks: list[IO[str]] = []  # of the folders that this process holds
