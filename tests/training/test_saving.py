"""Folders of checkpoints: one for all ranks, on a disk that may be full; the newest; the whole."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shared.capstone import resuming
from shared.capstone.record import LINES, Record
from shared.capstone.resuming import (
    RUN,
    Origin,
    _notes,
    _whole_beside,
    resume_run,
    save_run,
    saved_in,
    where_to_save,
)
from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.agreement import agree_on_folder, agree_on_place, refused_by_any
from shared.ranks.forked import run_ranks
from shared.ranks.group import Rank
from shared.script import lesson_parser
from shared.training.named_checkpoint import ModuleLayout, is_empty, load_named, save_named

ALONE = Rank(0, 0, 1, torch.device("cpu"), "gloo")


def said(work, *args: object) -> str:
    """What a call refuses, in words; "" where it does not."""
    try:
        work(*args)
    except InputError as error:
        return str(error)
    return ""


def test_folders_that_are_two_are_refused_on_both_ranks_and_nothing_is_left(tmp_path):
    def work(rank: int) -> list[str]:
        layout = ModuleLayout(nn.Linear(2, 2))
        own = tmp_path / f"node{rank}"
        return [
            said(agree_on_folder, tmp_path / "one", "--save"),
            said(agree_on_folder, own, "--save"),
            said(save_named, layout, None, own / "step_00000001"),
            said(agree_on_folder, tmp_path / ("one" if rank else "file"), "--save"),
        ]

    (tmp_path / "file").touch()
    first, second = run_ranks(work, 2)
    blind = "is not one folder for all: what rank 0 writes there is not seen by rank 1 on"
    for node, found in enumerate((first, second)):
        assert found[0] == ""
        assert found[1].startswith(f"--save {tmp_path}/node{node} {blind}")
        assert blind in found[2]
    assert first[3] == second[3]
    assert first[3].startswith(f"--save {tmp_path}/file cannot be written (")
    assert "(rank 0 on" in first[3]
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "one", "node0", "node1"}


def test_a_disk_that_is_full_under_out_is_one_line_on_every_rank(tmp_path):
    for name in ("full", "taken/" + LINES, "whole"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "full" / LINES).symlink_to("/dev/full")

    def work(rank: int) -> list[str]:
        place = Rank(rank, rank, 2, torch.device("cpu"), "gloo")
        record = Record(tmp_path / "whole", place, 10, 1)
        record.out = tmp_path / "full"
        found = [said(Record, tmp_path / "taken", place, 10, 1), said(record.evaluated, 3, 0.5)]
        sys.modules["torch.utils.tensorboard"] = None  # this fork's: as if it were not there
        found.append(said(Record, tmp_path / "whole", place, 10, 1, True))
        return [each.replace(str(tmp_path), "") for each in found]

    lines = (("taken", "Is a directory"), ("full", "No space left on device"))
    words = [f"--out /{out}: {LINES} cannot be written ({why})" for out, why in lines]
    words.append("--tensorboard needs its package: pip install tensorboard")
    assert run_ranks(work, 2) == [words, words]


def test_what_rank_0_refuses_is_raised_by_all():
    @refused_by_any()
    def conclude(rank: int) -> None:
        if rank == 0:
            raise InputError("full")

    assert run_ranks(lambda rank: said(conclude, rank), 2) == ["full", "full"]


def written(folder: Path, step: int, **notes: object) -> None:
    place = folder / f"step_{step:08d}"
    place.mkdir(parents=True)
    (place / RUN).write_text(json.dumps(notes))


def test_the_newest_checkpoint_is_the_one_that_was_written_last(tmp_path):
    for step, number in ((40, 3), (20, 4), (30, 2), (25, 5)):
        written(tmp_path, step, number=number)
    assert [int(path.name[5:]) for path in saved_in(tmp_path)] == [30, 40, 20, 25]
    written(tmp_path, 5)  # from before they were numbered
    (tmp_path / "step_00000030" / RUN).write_text("{")  # what does not say may be the newest
    assert [int(path.name[5:]) for path in saved_in(tmp_path)] == [5, 40, 20, 25, 30]


@pytest.mark.parametrize("resume", ["", "kept", "kept/step_00000040", "elsewhere"])
def test_saving_into_another_runs_folder_is_told(resume, tmp_path, capsys):
    written(tmp_path / "kept", 40, number=1)
    args = argparse.Namespace(save=tmp_path / "kept", out=tmp_path / "out")
    args.resume = tmp_path / resume if resume else None
    assert where_to_save(args, ALONE) == args.save
    told = "has another run's checkpoints, step_00000040 the newest" in capsys.readouterr().out
    assert told == (not resume.startswith("kept"))


def test_a_run_that_can_save_nothing_when_it_is_stopped_says_so(tmp_path, capfd):
    def work(rank: int) -> None:
        args = argparse.Namespace(save=None, resume=None, out=tmp_path / f"node{rank}")
        where_to_save(args, Rank(rank, rank, 2, torch.device("cpu"), "gloo"))

    run_ranks(work, 2)
    assert "SIGTERM or Ctrl-C will save nothing without --save" in capfd.readouterr().out


def test_notes_that_name_no_model_are_damaged(tmp_path):
    written(tmp_path, 4)
    origin = Origin({"d_model": 8}, {}, 9, 0, {"steps": 9})
    _, why = _notes(tmp_path / "step_00000004", origin)
    assert why == f"has a damaged {RUN}, which names no model"


def test_changed_bytes_of_a_checkpoint_are_refused_before_anything_is_loaded(tmp_path):
    model = nn.Linear(64, 64)
    save_named(ModuleLayout(model), None, tmp_path / "one")
    before = model.weight.detach().clone()
    (file,) = (tmp_path / "one").glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.find(model.weight.detach().numpy().tobytes())
    content[at + 4000] ^= 16
    file.write_bytes(content)
    with torch.no_grad():
        model.weight += 1
    words = r"is damaged: model\.weight in __0_0\.distcp is not what was saved"
    with pytest.raises(InputError, match=words):
        load_named(ModuleLayout(model), None, tmp_path / "one")
    assert torch.equal(model.weight, before + 1)
    file.write_bytes(content[: at + 100])
    with pytest.raises(InputError, match="is cut short: model"):
        load_named(ModuleLayout(model), None, tmp_path / "one")


def test_a_folder_with_nothing_in_it_begins(tmp_path, capsys):
    (tmp_path / ".step_00000001.part").mkdir()
    assert is_empty(tmp_path)
    assert "begins at step 1" in capsys.readouterr().out
    assert not is_empty(tmp_path / "nothing")
    (tmp_path / "text").touch()
    assert not is_empty(tmp_path)
    assert not is_empty(tmp_path / ("x" * 300))  # the disk refuses the question


@pytest.mark.parametrize("left", [".kept.old", "kept/.step_00000004.old"])
def test_a_save_that_was_killed_between_its_renames_is_no_empty_folder(left, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / left).mkdir()
    words = f"{tmp_path}/kept holds no checkpoint, but {tmp_path}/{left} is there"
    assert said(is_empty, tmp_path / "kept").startswith(words)


def test_a_damaged_checkpoint_goes_before_whole_ones(tmp_path):
    for number, step in enumerate((2, 4, 6, 8), start=1):
        written(tmp_path, step, number=number)
    (tmp_path / "step_00000004" / RUN).write_text("{")
    model, origin = nn.Linear(2, 2), Origin({}, {}, 9, 0, {"steps": 20})
    made = argparse.Namespace(layout=ModuleLayout(model), optimizer=None)
    made.optimizer = torch.optim.SGD(model.parameters())
    save_run(tmp_path, made, origin, 10, ALONE, "single", keep=2)
    assert [int(path.name[5:]) for path in saved_in(tmp_path)] == [8, 10]
    save_run(tmp_path, made, origin, 12, ALONE, "single", keep=2)
    made.optimizer = torch.optim.Adam(model.parameters())  # no other checkpoint would help
    assert re.search(r"has no optimizer.exp_avg \w+$", said(resume_run, tmp_path, made, origin))


def test_what_ranks_see_of_a_folder_may_differ_for_a_moment(tmp_path):
    for step in (2, 4):
        written(tmp_path, step)

    def work(rank: int) -> str:
        if rank == 1:
            resuming.saved_in = lambda folder: []
        return _whole_beside(tmp_path / "step_00000004", Origin({}, {}, 9, 0, {"steps": 9}))

    assert run_ranks(work, 2) == ["", ""]


def test_what_is_written_beside_a_folder_is_tried_before_training(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "kept")
    (tmp_path / "disk" / "kept").mkdir()
    save_named(ModuleLayout(nn.Linear(2, 2)), None, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "kept" / ".metadata").is_file()
    assert said(agree_on_place, tmp_path / "link", "--save") == ""
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "disk" / "kept")
    words = f"--save {tmp_path}/link is a mount point: give a folder inside it"
    assert said(agree_on_place, tmp_path / "link", "--save") == words


def test_an_empty_name_of_a_folder_is_no_folder(capsys):
    for flag in ("--save", "--resume", "--out"):
        with pytest.raises(SystemExit):
            lesson_parser("lesson01_x/a_script.py", "", checkpoint=True).parse_args([flag, ""])
        assert f"{flag}: must name a folder, got ''" in capsys.readouterr().err
    plain = re.compile(r'"--(save|saves|resume|out|checkpoints)", type=Path')
    files = [*ROOT.glob("lessons/*/*.py"), ROOT / "shared" / "script.py"]
    assert [str(path) for path in files if plain.search(path.read_text())] == []
