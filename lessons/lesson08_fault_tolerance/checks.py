"""What tells a right answer of lesson 08 from a wrong one.

The oracle is a run that was not interrupted. Processes are really killed, disks really full (a
limit on file sizes), and ranks really wait. Where that happens: shared/laboratories/lesson08_*.py.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lessons.lesson08_fault_tolerance.laboratory import files
from lessons.lesson08_fault_tolerance.laboratory import small_runs as runs
from lessons.lesson08_fault_tolerance.laboratory import two_ranks as ranks
from lessons.lesson08_fault_tolerance.laboratory.files import (
    in_a_folder,
    in_short,
    names_in,
    some_content,
)
from lessons.lesson08_fault_tolerance.laboratory.small_runs import (
    EVERY,
    LENGTH,
    MARK,
    STEPS,
    WatchedRun,
    equal,
    toy,
)
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_equal, expect_raises, recognise, without_group
from shared.exercises.on_ranks import on_ranks
from shared.exercises.seeds import fresh_seed, seed_all
from shared.exercises.wrong import Wrong
from shared.fault_tolerance.fitting import origin

exercise_08_1a = checks_for(
    "08.1a",
    name="write_atomically",
    difficulty=2,
    minutes=20,
    hint=(
        "Another name in the same folder, such as path.with_name(f'.{path.name}.part'); open it, "
        "torch.save into the open file, flush(), os.fsync(file.fileno()), close, "
        "aside.replace(path). A folder is flushed by its descriptor: os.open(folder, os.O_RDONLY)."
    ),
)
exercise_08_1b = checks_for(
    "08.1b",
    name="random_states",
    difficulty=1,
    minutes=10,
    hint=(
        "random.getstate(), np.random.get_state(), torch.get_rng_state(): a state is where a "
        "generator stands now; a seed is where it began."
    ),
)
exercise_08_1c = checks_for(
    "08.1c",
    name="save_checkpoint",
    difficulty=3,
    minutes=30,
    hint=(
        "First what all ranks do (dist.all_gather_object of the random states), then what rank 0 "
        "does, then again what all do. No collective stands inside `if rank == 0`."
    ),
)
exercise_08_2 = checks_for(
    "08.2",
    name="load_checkpoint",
    difficulty=4,
    minutes=35,
    hint=(
        "Rank 0: sorted(folder.glob('step_*.pt')), from the newest back, read_checkpoint in "
        "try / except InputError. Then broadcast one list [error, path, content] to all."
    ),
)
exercise_08_3 = checks_for(
    "08.3",
    name="resume_training",
    difficulty=3,
    minutes=25,
    hint=(
        "while state.step < num_steps: the rest of this epoch in batches, then "
        "sampler.set_epoch(sampler.epoch + 1). torch's BatchSampler cuts batches from a sampler."
    ),
)

NO_GROUP = {
    "mistake": "the process group is asked where there is none",
    "expected": "rank 0 of 1 without a process group, and nobody to talk to",
    "hint": "dist.is_initialized()",
}
BARE = "getattr(state.model, 'module', state.model)"
OLD = "the value 1"
STALE = "where a torn file of step 99 lies beside them"


def on_two_ranks(
    act: Callable[..., Any], *args: Any, alone: str, lost: str = "", hint: str = ""
) -> list[Any]:
    """Return what `act(rank, *args)` gives on two ranks; `alone` is said where one is left waiting.

    `lost` is given where both must refuse, and is said where one does not.
    """
    plain = "it ends in an OSError, which is no InputError: what makes or opens a file stands "
    plain += "outside of write_atomically, or of what is caught"
    with tempfile.TemporaryDirectory(prefix="back_") as folder:
        waiting = Wrong(alone, "both ranks come back", hint=hint)
        backs = on_ranks(
            ranks.together, 2, Path(folder), waiting, act, *args, apart=alone, timeout=30, quiet=3,
            known={OSError: (plain, hint)} if lost else {},
            hint=hint or "whatever goes wrong on rank 0 is caught, sent, and raised on all ranks",
        )  # fmt: skip
    for rank, back in enumerate(backs):
        seen = back.refused or f"rank {rank} returned {in_short(back.result)}"
        wanted = "an InputError on every rank" if lost else "no error"
        expect(bool(back.refused) == bool(lost), mistake=lost, expected=wanted, seen=seen)
    return [back.result for back in backs]


def read_back(path: Path, mistake: str, hint: str) -> Any:
    """Return what a file of a candidate holds; `mistake` is said of one that cannot be read."""
    content, strange = files.read(path)
    expected = "tensors and plain values: numbers, strings, and lists and dicts of them"
    expect(not strange, mistake=mistake, expected=expected, seen=strange, hint=hint)
    return content


def expect_parts(got: dict[str, Any], want: dict[str, Any], words: dict[str, str]) -> None:
    """Every part of a checkpoint or a run must be what it was at the save, bit for bit."""
    for part, mistake in words.items():
        same, seen = equal(got.get(part), want[part]), in_short(got.get(part))
        expect(same, mistake=mistake, expected=f"{part!r} as it was at the save", seen=seen)


# 08.1a write_atomically


@exercise_08_1a.check("what is written can be read")
@in_a_folder
def atomic_content(write_atomically: Any, folder: Path) -> None:
    path = folder / "not" / "there" / "yet.pt"
    error = files.raised(FileNotFoundError, write_atomically, path, some_content(7))
    found = names_in(path.parent)
    recognise(
        {
            "the folder is not made: path.parent.mkdir(parents=True, exist_ok=True)": bool(error),
            "no file is written": not found,
            "the file aside never gets its final name": path.name not in found,
        },
        expected=f"a file {path.name}, in a folder that did not exist before",
        seen=error or f"{found}",
    )
    content = read_back(path, "this file could be written and never read", "torch.save of a dict")
    keys = sorted(content) if isinstance(content, dict) else []
    unmarked = "mark" not in keys or content["mark"] != MARK
    want = {"mark": MARK, **some_content(7)}
    recognise(
        {
            "the mark is missing: a reader could not tell this file from any other": unmarked,
            "the content is not what was given": not equal(content, want),
        },
        expected="{'mark': MARK, **content}",
        seen=f"a dict with {keys}" if keys else "no dict",
    )


@exercise_08_1a.check("a process that dies in the middle")
@in_a_folder
def atomic_kill(write_atomically: Any, folder: Path) -> None:
    path = files.old_file_in(folder)
    files.let_die(write_atomically, path, {**some_content(2), "last": files.Deadly()})
    words = "the save is not atomic: a process that dies in it takes the old file with it"
    hint = "write under another name, and rename when all of it is on the disk"
    what = "the old file afterwards"
    expect_equal(files.value_in(path), OLD, what=what, mistake=words, hint=hint)


@exercise_08_1a.check("the order of writing, flushing and renaming")
@in_a_folder
def atomic_order(write_atomically: Any, folder: Path) -> None:
    path = files.old_file_in(folder)
    beside = path.with_name("another.pt")
    beside.write_text("the best so far")
    order = files.order_of(path, partial(write_atomically, path, some_content(2)))
    events, unflushed = order.events, order.flushed is None
    at = events.index("renamed") if "renamed" in events else len(events)
    recognise(
        {
            "the final name itself is opened for writing: until all is written, it is "
            "torn": "opened" in events[:at],
            "the old file is removed before the new one has its name: in between there is "
            "none": "removed" in events,
            "the old file is moved out of the way before the new one has its name: in between "
            "there is none": "moved away" in events,
            "nothing is renamed to the final name": "renamed" not in events,
            "the file aside lies in another folder, perhaps on another disk: moving it from there "
            "copies, which is not one step": not order.same_folder,
            "os.fsync comes after the rename: in a power cut between the two, the new name holds "
            "nothing": unflushed and "flushed" in order.afterwards,
            "renamed without os.fsync: after a power cut the new name may hold nothing": unflushed,
            "os.fsync came before the file's own buffer was emptied: it knows nothing of "
            "that": order.flushed != order.size,
            "the folder is flushed before the rename, when the new name is not in it": (
                "folder flushed" in events and "folder flushed" not in order.afterwards
            ),
            "the folder is not flushed: the new name itself may be lost in a power "
            "cut": "folder flushed" not in order.afterwards,
        },
        expected="a file aside in the same folder, all of it flushed; one rename, which replaces; "
        "the folder flushed",
        seen=order.in_words,
        hint="file.flush(), os.fsync(file.fileno()), aside.replace(path), then os.fsync of "
        "os.open(folder, os.O_RDONLY)",
    )
    expect_equal(files.value_in(path), "the value 2", what="the file afterwards")
    words = "a file beside it is removed, which belongs to somebody else"
    expect(beside.exists(), mistake=words, expected=f"{beside.name} as it was", seen="no such file")


@exercise_08_1a.check("a full disk and a folder that cannot be")
@in_a_folder
def atomic_failure(write_atomically: Any, folder: Path) -> None:
    path = files.old_file_in(folder)
    refused, said = files.on_a_full_disk(write_atomically, path, some_content(2))
    left = [name for name in names_in(path.parent) if name != path.name]
    recognise(
        {
            "a full disk is not told as an InputError": not refused,
            "the error does not name the file": str(path) not in said,
            "a save on a full disk takes the old file with it": files.value_in(path) != OLD,
            "half a file is left beside the old one: a full disk stays full": bool(left),
        },
        expected=f"an InputError that names {path.name}, and the old file alone in its folder",
        seen=f"{said}; {files.value_in(path)} under the name, {left or 'nothing'} beside it",
        hint="finally: aside.unlink(missing_ok=True)",
    )
    below, hint = path / "below" / "a_file.pt", "there unlink(missing_ok=True) raises as well"
    act, what = partial(write_atomically, below, some_content(2)), "a folder that is a file"
    expect_raises(ValueError, act, what=what, mentions=["a_file.pt"], hint=hint)


# 08.1b random_states


@exercise_08_1b.check("the generators continue from where they stood")
def random_continue(random_states: Any) -> None:
    seed_all(fresh_seed())
    runs.draw_numbers()
    stood = torch.get_rng_state()
    states, cuda = runs.asked_without_cuda(random_states)
    unmoved = torch.equal(stood, torch.get_rng_state())
    whole, known = runs.states_now()["numpy"], states if isinstance(states, dict) else {}
    missing = ", ".join(name for name in runs.GENERATORS if name not in known)
    recognise(
        {
            "CUDA is asked where it is not in use: torch.cuda.is_initialized()": bool(cuda),
            "nothing is returned": states is None,
            f"a generator is left out: {missing}": bool(missing),
            "'cuda' is there although CUDA is not in use: set_random_states would put it back on "
            "a machine that has CUDA": "cuda" in known and not torch.cuda.is_initialized(),
        },
        expected="a dict of python, numpy and torch, and 'cuda' once CUDA is in use",
        seen=cuda or (f"{sorted(known)}" if known else in_short(states)),
    )
    after = runs.draw_numbers()
    seeds = any(isinstance(states[name], int) for name in runs.GENERATORS)
    strange = not runs.is_numpy_state(states["numpy"])
    recognise(
        {
            "a seed says where a generator began, not where it stands": seeds,
            "numpy's state is not in the form that set_random_states takes": strange,
        },
        expected="random.getstate(), torch.get_rng_state(), and the 5 parts of "
        "np.random.get_state() in a tuple, the array as an int64 tensor",
        seen=", ".join(f"{name}: {in_short(value)[:40]}" for name, value in states.items()),
        hint="name, keys, *rest = np.random.get_state()",
    )
    runs.set_states(states)
    again = runs.draw_numbers()
    words = "'s generator does not continue from there"
    mine, kept = states["numpy"], "has_gauss and cached_gaussian are left out: numpy draws normal "
    kept += "numbers in pairs, and the second of a pair waits there"
    cut = equal(mine[:3], whole[:3]) and mine[3:] != whole[3:]
    place = "of numpy's state the place in its array is left out: the array alone does not say "
    place += "which of its numbers comes next"
    seeded = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    begun = "torch's seed was taken: it says where the generator began, not where it stands"
    moved = {kept: cut, place: equal(mine[1], whole[1]) and mine[2] != whole[2]}
    moved |= {begun: unmoved and equal(states["torch"], seeded)} | {
        f"{name}{words}": again[name] != after[name] for name in after
    }
    hint = "was a number drawn, or a seed set, before the state was taken?"
    recognise(moved, expected="the numbers that came next", seen="others", hint=hint)
    words = "asked once more, it says where the generators stood the first time"
    same = equal(random_states(), states)
    expect(not same, mistake=words, expected="where they stand now", seen="the states of before")


@exercise_08_1b.check("a file with it can be read back, and taking it changes nothing")
@in_a_folder
def random_plain(random_states: Any, folder: Path) -> None:
    seed_all(fresh_seed())
    runs.draw_numbers()  # a generator that is set back to its seed has moved
    before, states = runs.states_now(), random_states()
    moved = {"taking the states moves a generator": not equal(before, runs.states_now())}
    recognise(moved, expected="the same states as before", seen="others")
    torch.save(states, folder / "states.pt")
    words = "a checkpoint with this in it could be written and never read: numpy's array is no "
    words += "plain value"
    read_back(folder / "states.pt", words, "torch.from_numpy(keys.astype(np.int64))")


@exercise_08_1b.check("CUDA's generator once CUDA is in use")
def random_cuda(random_states: Any) -> None:
    seen = runs.asked_with_cuda(random_states)
    recognise(
        {
            "CUDA's generator is left out once CUDA is in use": seen == "nothing",
            "'cuda' is not the state of the current device as set_random_states takes it": (
                bool(seen)
            ),
        },
        expected="'cuda': torch.cuda.get_rng_state()",
        seen=seen,
        hint="set_random_states puts it back by torch.cuda.set_rng_state, which takes one tensor",
    )


# 08.1c save_checkpoint

LEFT_OUT = {
    "model": "the weights are left out",
    "optimizer": "the optimizer is left out: its moments begin at zero again",
    "schedule": "the schedule is left out: the learning rate begins its warm-up again",
    "sampler": "the position in the data is left out: samples come again, others never",
    "random": "the random states are left out: dropout and noise come out otherwise",
    "step": "the number of the step is left out",
    "losses": "the losses are left out",
    "origin": "the origin is left out: nobody can tell whose checkpoint this is",
}


@exercise_08_1c.check("all that decides the next step is in the file")
@in_a_folder
def save_parts(save_checkpoint: Any, folder: Path) -> None:
    state, _ = runs.trained(3, fresh_seed(), wrapped=True)
    state.losses[0] = 0.1  # a float32 has only 0.10000000149
    path, name = without_group(save_checkpoint, folder, state, **NO_GROUP), "step_00000003.pt"
    expect(name in names_in(folder), expected=f"a file {name}", seen=f"{names_in(folder)}")
    expect_equal(path, folder / name, what="the path that is returned")
    words = "this file could be written and never read: it holds more than tensors and plain "
    words += "values, such as a whole model, or a method that was not called"
    content = read_back(path, words, "the state_dict() of each part")
    missing = {words: part not in content for part, words in LEFT_OUT.items()}
    recognise(missing, expected=", ".join(LEFT_OUT), seen=", ".join(content))
    first, listed = next(iter(content["model"]), ""), isinstance(content["random"], list)
    recognise(
        {
            "the weights bear DDP's prefix: 'module.' stands before every name, and the bare model "
            "will not take them": first.startswith("module."),
            "'random' is no list: each rank has an entry in it, and one rank has one": not listed,
        },
        expected="names such as 'embed.weight', and [random_states()]",
        seen=f"names such as {first!r}, and a {type(content['random']).__name__}",
        hint=BARE,
    )
    want = runs.content_of(state)
    expect_names(content["model"], want["model"])
    losses = content["losses"]
    few = isinstance(losses, list | tuple) and len(losses) != len(want["losses"])
    expect(
        not few,
        mistake="losses are missing: every step of the run has one",
        expected=f"{len(want['losses'])} losses after {state.step} steps",
        seen=f"{len(losses)}",
    )
    words = "the losses are not the floats of state.losses: a float32 tensor rounds them"
    expect_parts(content, want, {**dict.fromkeys(want, ""), "losses": words})
    bare, _ = runs.trained(1, fresh_seed())
    content = read_back(save_checkpoint(folder, bare), words, "the state_dict() of each part")
    expect_names(content["model"], runs.content_of(bare)["model"])


def expect_names(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The weights bear the bare model's names."""
    pairs = zip(got, want, strict=False)
    others = [f"{mine!r} for {right!r}" for mine, right in pairs if mine != right]
    expect(
        list(got) == list(want),
        mistake="names are changed within: only the prefix 'module.' of DDP goes" if others else "",
        expected=f"{', '.join(want)}",
        seen=", ".join(others) or ", ".join(got),
        hint=f"{BARE}, or name.removeprefix('module.')",
    )


@exercise_08_1c.check("two ranks, one writer")
@in_a_folder
def save_two_ranks(save_checkpoint: Any, folder: Path) -> None:
    saved = on_two_ranks(
        ranks.save_after_steps, folder, save_checkpoint, fresh_seed(),
        alone="a collective stands inside `if rank == 0` (a barrier, a gather, a broadcast): "
        "the other ranks never get there",
        hint="every rank calls the same collectives in the same order",
    )  # fmt: skip
    early, wrote = not all(each.there for each in saved), bool(saved[1].own)
    nameless = [rank for rank, each in enumerate(saved) if each.returned != ranks.SAVED]
    recognise(
        {
            "every rank writes: one file each, or one file several times at once": wrote,
            "rank 1 continues before the file is there: nobody waits for rank 0": early,
        },
        expected="rank 0 writes; then a barrier, or a broadcast of how it went, before any returns",
        seen=f"rank 1 wrote {saved[1].own}" if wrote else "no file yet when a rank returned",
    )
    expect(
        not nameless,
        mistake="the path is returned on rank 0 alone",
        expected=f"folder / {ranks.SAVED!r} from every rank",
        seen=f"{[each.returned for each in saved]}",
    )
    states = torch.load(folder / "rank_0" / "step_00000002.pt", weights_only=True)["random"]
    one = not isinstance(states, list) or len(states) != 2
    same = not one and equal(states[0], states[1])
    recognise(
        {
            "the random states of one rank alone are in the file": one,
            "both ranks get the random states of one: their dropout would be the same": same,
        },
        expected="a list with one entry a rank, each rank's own",
        seen="equal ones" if same else f"a {type(states).__name__} of {len(states)}",
        hint="dist.all_gather_object",
    )
    for rank, own in enumerate(each.states for each in saved):
        kept, seen = {name: states[rank][name] for name in own}, "another rank's, or an older one"
        expect(equal(kept, own), expected=f"entry {rank} of 'random' is rank {rank}'s", seen=seen)


@exercise_08_1c.check("what rank 0 cannot do, all ranks hear of")
@in_a_folder
def save_failure(save_checkpoint: Any, folder: Path) -> None:
    (folder / "file").write_text("in the way")
    on_two_ranks(
        ranks.save_into_a_file, folder, save_checkpoint,
        alone="rank 0 left with its error, and the others wait for it in the barrier",
        lost="the error of rank 0 does not reach every rank: who does not hear of it goes on, "
        "without checkpoints",
        hint="catch it, tell the others, raise it everywhere",
    )  # fmt: skip


@exercise_08_1c.check("old checkpoints go, but never too early")
@in_a_folder
def save_keep(save_checkpoint: Any, folder: Path) -> None:
    state, steps_in = toy(1), files.steps_in
    others = {
        "best.pt": "best.pt is removed: only step_NNNNNNNN.pt are checkpoints of this run",
        "step_00000000_good.pt": "a file goes whose name only begins as a checkpoint's: "
        "step_NNNNNNNN.pt is all of it",
    }
    for name in others:
        (folder / name).write_text("kept for good")
    kept = ([1], [1, 2], [3], [3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7])
    asked = [{}, {}, {"keep": 1}, {}, {}, {"keep": 3}, {"keep": 5}]
    for keep, want in zip(asked, kept, strict=True):
        runs.train(state, 1)
        path = save_checkpoint(folder, state, **keep)
        os.utime(path, (2000 - state.step, 2000 - state.step))  # copying changes the times
        for name, words in others.items():
            there, expected = (folder / name).exists(), f"{name} as it was"
            expect(there, mistake=words, expected=expected, seen="no such file")
        trains = state.model.training
        words = "the model is left in eval(): training would continue without dropout"
        expect(trains, mistake=words, expected="model.training", seen=f"{trains}")
        what = f"the steps in the folder after {want[-1]} saves, keep={keep.get('keep', 2)}"
        looks_like = {
            "files are removed by their time, which copying changes, not by their step": [3, 5],
            "keep=1 removes nothing: older[:-(keep - 1)] is then older[:0], which is empty": [
                1,
                2,
                3,
            ],
            "a file goes while there are fewer than keep: older[: len(older) - (keep - 1)] counts "
            "from the end where that is below 0": [6, 7],
        }
        expect_equal(steps_in(folder), want, what=what, looks_like=looks_like)
    runs.train(state, 1)
    refused, said = files.on_a_full_disk(save_checkpoint, folder, state)
    expect(refused, expected="an InputError on a full disk", seen=said)
    words = "an old checkpoint is removed before the new one is written"
    expect_equal(steps_in(folder), want, what="the steps after a full disk", mistake=words)
    (folder / "step_00000099.pt").write_text("torn, and the run resumed from the one before")
    save_checkpoint(folder, state)
    words = "a file of a later step counts among the older ones, and a sound one goes in its place"
    left, wanted = steps_in(folder), f"steps 7 and 8 in the folder, {STALE}"
    expect({7, 8} <= {*left}, mistake=words, expected=wanted, seen=f"{left}")
    words = "a file of a later step is removed: only older ones go"
    expect(99 in left, mistake=words, expected=f"step 99 as well, {STALE}", seen=f"{left}")
    near = "step_0000000.pt"
    (folder / near).write_text("kept for good")
    runs.train(state, 1)
    save_checkpoint(folder, state)
    words = "a file goes whose number has seven digits: step_NNNNNNNN.pt has eight"
    there, expected = near in files.names_in(folder), f"{near} as it was"
    expect(there, mistake=words, expected=expected, seen="no such file")


@exercise_08_1c.check("a process that dies while it saves")
@in_a_folder
def save_atomic(save_checkpoint: Any, folder: Path) -> None:
    state = toy(1)
    save_checkpoint(folder, state)
    state.step = 9
    files.let_die(files.save_and_die, save_checkpoint, folder, state)
    half = {"the save is not atomic: half a file bears a checkpoint's name": [0, 9]}
    what = "the steps in the folder after a kill in the save of step 9"
    expect_equal(files.steps_in(folder), [0], what=what, looks_like=half, hint="write_atomically")


# 08.2 load_checkpoint

LOST = {
    "model": "the weights are not put back",
    "optimizer": "the optimizer's moments are not put back",
    "schedule": "the schedule is not put back",
    "sampler": "the position in the data is not put back",
    "step": "the number of the step is not put back",
    "losses": "the losses are not put back",
}


@exercise_08_2.check("nothing to load")
@in_a_folder
def load_nothing(load_checkpoint: Any, folder: Path) -> None:
    state, want = toy(1), runs.content_of(toy(1))
    for where in (folder, folder / "not_there"):
        got = files.load(load_checkpoint, where, state)
        words = "a folder that is not there is an error: a run that begins has none yet"
        recognise(
            {words: isinstance(got.error, FileNotFoundError)},
            expected="None",
            seen=got.said,
            hint="folder.glob of a folder that is not there finds nothing",
        )
        path = without_group(got.returned, **NO_GROUP)
        expect_equal(path, None, what="load_checkpoint of a folder without checkpoints")
    expect_parts(runs.content_of(state), want, {"model": "the weights are changed"})


@exercise_08_2.check("the run resumes as if nothing had happened")
@in_a_folder
def load_everything(load_checkpoint: Any, folder: Path) -> None:
    for wrapped in (False, True):
        state, _ = runs.trained(8, fresh_seed(), wrapped=wrapped)
        path = files.write_checkpoint(folder, state)
        then, again = runs.content_of(state), toy(2, wrapped=wrapped)
        numbers, *later = (runs.draw_numbers() for _ in range(3))
        optimizer, again.losses[:] = again.optimizer, [9.0]  # of steps that count no more
        runs.draw_when_loaded(again)
        seed_all(fresh_seed())
        got = files.load(load_checkpoint, folder, again)
        drawn = runs.draw_numbers()
        recognise(
            {
                "the optimizer is replaced by another: the schedule sets the rate of the first": (
                    again.optimizer is not optimizer
                ),
                "the model is left in eval(): dropout is off from here on": (
                    not again.model.training
                ),
                "the losses are added to those that were there: they belong in their place": (
                    list(again.losses) == [9.0, *state.losses]
                ),
                "the losses come back rounded: a float32 has seven of their digits": runs.rounded(
                    again.losses, state.losses
                ),
            },
            expected="the same objects, with the checkpoint's values in them, and no others",
            seen=f"another optimizer or mode, or losses {in_short(again.losses)}",
        )
        words = "the weights are loaded into the wrapper, whose names begin with 'module.'"
        recognise(
            {words: '"module.' in str(got.error)},  # and not "submodule.", a layer of its own
            expected="names as the bare model has them, loaded into the bare model",
            seen=got.said,
            hint=BARE,
        )
        expect_equal(got.returned(), path, what="the path that is returned")
        expect_parts(runs.content_of(again), then, LOST)
        early = (
            "the random states are not put back last: what is loaded after them may draw numbers"
        )
        next_ones = {name: [each[name] for each in (numbers, *later)] for name in drawn}
        passed = all(drawn[name] in next_ones[name] for name in drawn)
        kept = {early: drawn != numbers and passed} | {
            f"the state of {name}'s generator is not put back": drawn[name] != numbers[name]
            for name in drawn
        }
        recognise(kept, expected="the numbers that came next", seen="others")


@exercise_08_2.check("the newest, whatever the clock says")
@in_a_folder
def load_newest(load_checkpoint: Any, folder: Path) -> None:
    state, paths = toy(1), []
    for seconds in (1000, 2000, 1):
        runs.train(state, 4)
        paths.append(files.write_checkpoint(folder, state))
        os.utime(paths[-1], (seconds, seconds))
    best = folder / "the_best.pt"
    best.write_bytes(paths[0].read_bytes())
    got, hint = files.load(load_checkpoint, folder, toy(2)), "the step stands in the name"
    looks_like = {
        "the oldest is taken": paths[0],
        "a file is taken that is not named step_NNNNNNNN.pt": best,
        "the newest is chosen by the file's time, which copying changes": paths[1],
    }
    what = "the newest checkpoint"
    expect_equal(got.returned(), paths[2], what=what, looks_like=looks_like, hint=hint)


@exercise_08_2.check("torn and foreign files")
@in_a_folder
def load_torn(load_checkpoint: Any, folder: Path) -> None:
    state, _ = runs.trained(4)
    good, then = files.write_checkpoint(folder, state), runs.content_of(state)
    unsound, again = files.add_unsound(folder, state), toy(2)
    got = files.load(load_checkpoint, folder, again)
    silent = [name for name in unsound if not any(name in said for said in got.warnings)]
    ran = (folder / "ran").exists()
    recognise(
        {
            "code that stood in a file was run: a checkpoint from elsewhere could do anything": ran,
            "a file without 'origin' is taken for a checkpoint": (
                isinstance(got.error, KeyError) and "origin" in str(got.error)
            ),
            "a damaged file is loaded as if it were sound: torch.load does not look at the "
            "checksums, read_checkpoint does": got.path == folder / unsound[-1],
            "a torn file ends the run, though a sound one lies beside it": bool(got.error),
            "a torn file sends the run back to the beginning": got.path is None,
            "a file is passed over in silence, or in a warning without its name: nobody looks why "
            "work was lost": bool(silent),
        },
        expected=f"{good.name}, and a warning that names each of the {len(unsound)} newer files",
        seen=got.said or f"{got.path and got.path.name}, no warning of {silent}",
        hint="read_checkpoint, which runs no code, in try / except InputError, and warnings.warn",
    )
    expect_equal(got.path, good, what="the checkpoint that is used")
    gone = [name for name in unsound if name not in names_in(folder)]
    words = "a file that cannot be read is removed: who wants to look at it, or to mend it, cannot"
    expect(not gone, mistake=words, expected="the files as they were", seen=f"without {gone}")
    expect_parts(runs.content_of(again), then, LOST)
    good.unlink()
    got = files.load(load_checkpoint, folder, toy(2))
    words = "files that cannot be read pass for no files: the run begins anew and overwrites them"
    wanted, seen = "an InputError when there are files and none is sound", got.said or "no error"
    expect(got.refused, mistake="" if got.error else words, expected=wanted, seen=seen)


@exercise_08_2.check("a checkpoint of another run")
@in_a_folder
def load_foreign(load_checkpoint: Any, folder: Path) -> None:
    state, _ = runs.trained(4)
    for what, other, changes in (
        ("a checkpoint of another model", toy(1, width=6), {}),
        ("a checkpoint of another number of ranks", toy(1), {"world_size": 4}),
        ("a checkpoint of another format", toy(1), {"format": 0}),
    ):
        files.write_checkpoint(folder, state, origin={**origin(state), **changes})
        older = files.write_checkpoint(folder, other)  # it would fit
        before = runs.content_of(other)
        got = files.load(load_checkpoint, folder, other)
        changed = not equal(before, runs.content_of(other))
        recognise(
            {
                f"{what} is passed over as if it were torn, and an older one is taken: the run "
                "would go on from there, and write over what is newer": got.path == older,
                f"{what} is accepted": got.error is None,
                f"{what} ends in an error that no user understands": not got.refused,
                "it is refused after half of it was loaded": changed,
            },
            expected="an InputError that says what differs, and the state as it was",
            seen="parts of the checkpoint in the state" if got.refused else got.said or "no error",
            hint="refuse_unless_it_fits before the first load_state_dict",
        )


@exercise_08_2.check("two ranks, one disk")
@in_a_folder
def load_two_ranks(load_checkpoint: Any, folder: Path) -> None:
    state, _ = runs.trained(4)
    states, numbers = zip(*(runs.states_and_numbers(fresh_seed()) for _ in range(2)), strict=True)
    begun = {**origin(state), "world_size": 2}
    path = files.write_checkpoint(folder, state, random=list(states), origin=begun)
    apart = "one rank alone takes part in a collective"
    hint = "rank 0 alone looks, and sends what it found: rank 1, whose machine has no such folder, "
    hint += "would find nothing and leave"
    told = on_two_ranks(ranks.load_on_rank, folder, load_checkpoint, alone=apart, hint=hint)
    steps, drawn, names = zip(*told, strict=True)
    recognise(
        {
            "every rank looks for itself: rank 1, whose machine has no such folder, begins anew "
            "while rank 0 resumes": steps == (4, 0),
            "every rank takes rank 0's random states": drawn == (numbers[0], numbers[0]),
            "rank 1 has loaded the checkpoint and returns no path: None says that there is none": (
                steps == (4, 4) and names == (path.name, "")
            ),
        },
        expected="step 4 on both ranks, each with its own content['random'][rank]",
        seen=f"steps {steps}, {'equal' if drawn[0] == drawn[1] else 'different'} random numbers",
        hint="rank 0 reads, and sends: dist.broadcast_object_list",
    )
    wanted = list(zip((4, 4), numbers, (path.name, path.name), strict=True))
    expect_equal(told, wanted, what="steps, next numbers and names of the files")
    on_two_ranks(
        ranks.load_on_rank, folder / "empty", load_checkpoint,
        alone="rank 0 found nothing and left, and the others wait to hear of it",
        hint="no return before the broadcast: send that there is nothing",
    )  # fmt: skip
    on_two_ranks(
        ranks.load_where_rank_1_differs, folder, load_checkpoint,
        alone="a rank that the checkpoint does not fit left with its error, and the others wait",
        lost="the checkpoint does not fit on rank 1, and rank 0 resumes: every rank looks whether "
        "it fits, and all have to hear of it",
        hint="refuse_unless_it_fits on every rank, then dist.all_gather_object of what it said",
    )  # fmt: skip
    changed = {path.name: path.read_text() for path in folder.glob("changed*")}
    words = "it is refused after half of it was loaded"
    hint = "every rank looks, all hear of it, and only then is anything put back"
    expect(not changed, mistake=words, expected="the state as it was", seen=f"{changed}", hint=hint)
    path.write_text("torn")
    on_two_ranks(
        ranks.load_on_rank, folder, load_checkpoint,
        alone="rank 0 left with its error, and the others wait for it",
        lost="the error of rank 0 does not reach the others",
        hint="send the error as well, and raise it on all ranks",
    )  # fmt: skip


# 08.3 resume_training


def resumed(resume_training: Any, run: WatchedRun, num_steps: int = STEPS) -> WatchedRun:
    """Let the candidate train a run; a loop without an end is a finding."""
    endless = run.resume(resume_training, num_steps)
    recognise(
        {"it never stops": bool(endless), "nothing is returned": run.losses is None},
        expected=f"the losses, at step {num_steps}",
        seen=endless or "None",
        hint="`break` leaves the inner loop alone" if endless else "",
    )
    return run


def expect_losses(run: WatchedRun, want: list[float]) -> None:
    """There is one loss for each step of the whole run, in the state and returned."""
    for got, what in ((run.state.losses, "state.losses"), (run.losses, "what is returned")):
        strange = {type(each).__name__ for each in got if type(each) is not float}
        expect(
            not strange,
            mistake="the losses are no floats: tensors in the list keep their graphs and devices, "
            "and the checkpoint has to hold them"
            if "Tensor" in strange
            else "",
            expected=f"{what}: the floats that take_step returned",
            seen=", ".join(sorted(strange)),
        )
        few = type(got) is list and len(got) < len(want)
        words = "losses are missing: those of before the interruption belong to them" if few else ""
        if runs.rounded(got, want):
            words = "the losses are rounded: they are to be the floats that take_step returned"
        hint = "those of the run that was not interrupted"
        expect_equal(got, want, what=what, mistake=words, hint=hint)


@exercise_08_3.check("a run from the beginning")
def resume_plain(resume_training: Any) -> None:
    seed = fresh_seed()
    want, order = runs.trained(STEPS, seed)
    seed_all(seed)
    run = resumed(resume_training, WatchedRun(toy(1)))
    seen, rates, early = run.seen, run.schedule_steps, run.stepped[:1] == [1]
    again = len(seen) > LENGTH and seen[LENGTH : 2 * LENGTH] == seen[:LENGTH]
    recognise(
        {
            "nothing is loaded: after a restart the run would begin anew": not run.loads,
            "every epoch has the same order: set_epoch is not called": again,
            "a batch goes on into the next epoch: an epoch ends with its own, shorter batch": (
                len(seen) == 56 and seen[:LENGTH] == order[:LENGTH]
            ),
            "the last, shorter batch of an epoch is left out": len(seen) == 56,
            "training continues to the end of the epoch, past num_steps": len(seen) > 52,
            "the schedule is not stepped": rates == 0,
            "the schedule is stepped before the step: the first rate is never used": early,
        },
        expected=f"load(state), then {STEPS} steps on 22 + 22 + 8 samples, each epoch in another "
        "order, and the schedule after each of them",
        seen=f"calls of load: {run.loads}; {len(seen)} samples, {'not ' if again else ''}another "
        f"order in epoch 1; the schedule stepped {rates} times{', once too early' * early}",
    )
    expect_equal(seen, order, what="the samples in their order")
    expect_equal((run.state.step, rates), (STEPS, STEPS), what="state.step, and the schedule's")
    expect_losses(run, want.losses)


@exercise_08_3.check("when it saves, and what the file will say")
def resume_saves(resume_training: Any) -> None:
    run = resumed(resume_training, WatchedRun(toy(1)))
    want, early = [*range(EVERY, STEPS, EVERY), STEPS], run.saves[:1] == [EVERY - 1]
    recognise(
        {
            "saved before the step is counted: resumed from that file, it is done twice": early,
            "the end of the run is not saved": run.saves[-1:] != [STEPS],
            "saved before the schedule is stepped: resumed from that file, every learning rate "
            "comes a step late": run.saves == want and run.rates != want,
            "batches are drawn ahead of training: the file says that they were trained on": (
                any(run.ahead)
            ),
            "saved before the step's loss is in state.losses": any(run.lacking),
        },
        expected=f"saves at {want}, the schedule stepped as often, the sampler at the samples "
        "that were trained on, and their losses in state.losses",
        seen=f"saves at {run.saves}, the schedule stepped {run.rates} times"
        + f", the sampler ahead of training by {run.ahead} samples" * any(run.ahead)
        + f", {run.lacking} losses missing" * any(run.lacking),
    )
    expect_equal(run.saves, want, what="the steps of the saves")
    run = resumed(resume_training, WatchedRun(toy(1)), num_steps=2 * EVERY)
    twice, what = {"the last step is saved twice": [3, 6, 6]}, "the saves of a run of 6 steps"
    expect_equal(run.saves, [EVERY, 2 * EVERY], what=what, looks_like=twice)


@exercise_08_3.check("resumed in the middle of an epoch")
def resume_middle(resume_training: Any) -> None:
    for done in (4, 6, 9):
        seed = fresh_seed()
        want, order = runs.trained(STEPS, seed)
        first, before = runs.trained(done, seed)
        snapshot = runs.content_of(first)
        seed_all(seed + 1)
        run = resumed(resume_training, WatchedRun(toy(2), snapshot))
        expect_rest(run.seen, order, len(before), done)
        saves = [s for s in range(done + 1, STEPS + 1) if s % EVERY == 0 or s == STEPS]
        words = "the interval is counted from the restart, not from the run's first step"
        expect_equal(run.saves, saves, what="the steps of the saves", mistake=words)
        expect_equal(run.state.step, STEPS, what="state.step afterwards")
        same = equal(run.state.model.state_dict(), want.model.state_dict())
        expect(same, expected="the weights of the uninterrupted run, bit for bit", seen="others")
        expect_losses(run, want.losses)


def expect_rest(seen: list[int], order: list[int], begin: int, done: int) -> None:
    """The samples after a restart are those that had not been seen."""
    rest, place = order[begin:], begin % LENGTH
    inside, longer = place > 0, len(seen) > len(rest)
    epoch, following = order[begin - place :][:4], order[begin - place + LENGTH :][:4]
    first = begin > LENGTH and seen[:4] in (order[:4], order[place:][:4])
    recognise(
        {
            "the run begins anew: what was loaded is not used": seen == order,
            "the run goes back to epoch 0 after a restart: sampler.epoch says where it is": first,
            "samples come twice: the epoch begins anew after a restart": inside
            and seen[:4] == epoch,
            "samples are skipped: the rest of the epoch is given up after a restart": inside
            and seen[:4] == following,
            "steps are counted from 0 after a restart: it trains for too long": longer,
        },
        expected=f"after {done} steps {rest[:4]} and so on, {len(rest)} samples",
        seen=f"{seen[:4]} and so on, {len(seen)} samples",
        hint="iterating over the sampler resumes where its state says",
    )
    expect_equal(seen, rest, what=f"the samples after {done} steps")


@exercise_08_3.check("a run that is done")
def resume_done(resume_training: Any) -> None:
    first, _ = runs.trained(STEPS, fresh_seed())
    run = resumed(resume_training, WatchedRun(toy(2), runs.content_of(first)))
    recognise(
        {
            "a run that is done takes further steps": bool(run.seen),
            "a run that is done saves once more": bool(run.saves),
        },
        expected="no step and no save: it is at num_steps",
        seen=f"{len(run.seen)} samples more, saves at {run.saves}",
    )
    expect_losses(run, first.losses)


@exercise_08_3.check("both ranks save and load")
def resume_two_ranks(resume_training: Any) -> None:
    resume = partial(resumed, resume_training, num_steps=2 * EVERY)
    apart = "one rank alone takes part in a collective"
    loads, saves = zip(*on_two_ranks(ranks.resume_on_rank, resume, alone=apart), strict=True)
    seen = f"calls of load {loads}, steps of the saves {saves} on ranks 0 and 1"
    recognise(
        {
            "only rank 0 calls load: it will wait there for the others": loads[0] != loads[1],
            "only rank 0 calls save: it will wait there for the others": saves[0] != saves[1],
        },
        expected="load and save on every rank; who writes is decided inside",
        seen=seen,
    )
    expect(all(loads) and all(saves), expected="load and save on both ranks", seen=seen)
