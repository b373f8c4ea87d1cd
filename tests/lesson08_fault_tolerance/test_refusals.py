"""What cannot be resumed or written is said in one line; nothing is lost, and no rank hangs."""

import contextlib
import os
import random
import resource

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from shared.data.sampling import ResumableSampler
from shared.errors import InputError
from shared.fault_tolerance.background import BackgroundSaver
from shared.fault_tolerance.checkpoints import checkpoints_in, load_checkpoint, save_checkpoint
from shared.fault_tolerance.elastic import load_elastic, save_elastic
from shared.fault_tolerance.fitting import SamplerOfData, unwrapped
from shared.fault_tolerance.random_states import random_states
from shared.fault_tolerance.state import TrainingState
from shared.ranks.forked import run_ranks
from shared.training.checkpoint_files import read_checkpoint, write_atomically


def small(width=4, *, optimizer=torch.optim.AdamW, length=20, rank=0, ranks=1):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, width)
    engine = optimizer(model.parameters(), lr=0.1)
    schedule = LambdaLR(engine, lambda step: 1.0)
    return TrainingState(model, engine, schedule, ResumableSampler(length, ranks, rank))


def changed(path, **changes):
    """Write a checkpoint again with parts changed."""
    content = read_checkpoint(path)
    content["origin"] |= {
        key: changes.pop(key) for key in list(changes) if key in content["origin"]
    }
    del content["mark"]
    write_atomically(path, content | changes)


def expect_refused(folder, state, match):
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    chance = random_states()["torch"]
    with pytest.raises(InputError, match=match) as caught:
        load_checkpoint(folder, state)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], now) for name, now in state.model.state_dict().items())
    assert torch.equal(chance, random_states()["torch"])
    assert (state.step, state.losses) == (0, [])


def test_another_run(tmp_path):
    path = save_checkpoint(tmp_path, small())
    expect_refused(tmp_path, small(width=5), r"another model: bias is \(4,\) in it and \(5,\) here")
    expect_refused(tmp_path, small(optimizer=torch.optim.SGD), "written with AdamW.* has SGD")
    expect_refused(tmp_path, small(length=21), "length 20.*has 21")
    two_groups = small()
    two_groups.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    expect_refused(tmp_path, two_groups, r"groups of \[2\] parameters, this one of \[2, 1\]")
    changed(path, world_size=4)
    expect_refused(tmp_path, small(), "written by 4 ranks, this run has 1")
    changed(path, world_size=1, format=99)
    expect_refused(tmp_path, small(), "format 99, this code reads format 1")


def test_another_version_of_torch_is_warned_of(tmp_path):
    path = save_checkpoint(tmp_path, small())
    changed(path, torch="1.0.0")
    with pytest.warns(UserWarning, match=r"written with torch 1\.0\.0"):
        assert load_checkpoint(tmp_path, small()) == path


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_file_cut_anywhere_gives_way_to_the_one_before(share, tmp_path):
    state = small()
    good = save_checkpoint(tmp_path, state)
    state.step = 5
    newest = save_checkpoint(tmp_path, state)
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(share * len(whole))])
    with pytest.warns(UserWarning, match=r"step_00000005.*the checkpoint before it is tried"):
        assert load_checkpoint(tmp_path, small()) == good
    good.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="tried"),
        pytest.raises(InputError, match="none of the 2 checkpoints"),
    ):
        load_checkpoint(tmp_path, small())


def test_whatever_bytes_a_file_holds_it_is_an_input_error(tmp_path):
    draw = random.Random(0)
    path = tmp_path / "step_00000001.pt"
    for length in [*range(12), 100, 5000]:
        for _ in range(6):
            path.write_bytes(draw.randbytes(length))
            with pytest.raises(InputError, match="step_00000001"):
                read_checkpoint(path)
    for word in ("torn", "cos\nsystem\n(S'true'\ntR.", "PK", "]q."):
        path.write_text(word)
        with pytest.raises(InputError):
            read_checkpoint(path)


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    state = small()
    state.losses.append(np.float64(1.5))
    with pytest.raises(InputError, match=r"checkpoint\['losses'\]\[0\] is a float64"):
        save_checkpoint(tmp_path, state)
    assert not list(tmp_path.iterdir())


def test_a_state_with_code_in_it_is_named_so(tmp_path):
    path = tmp_path / "step_00000001.pt"
    write_atomically(path, {"numbers": np.zeros(3)})
    with pytest.raises(InputError, match="more than tensors and plain values"):
        read_checkpoint(path)


@contextlib.contextmanager
def disk_with(num_bytes):
    """No file may grow beyond this, as if the disk were full then (EFBIG in place of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_on_full_disk(rank, folder, way):
    state = small(width=3000, rank=rank, ranks=2)
    saver = BackgroundSaver(folder)
    save = saver.save if way == "background" else lambda state: save_checkpoint(folder, state)
    save(state)
    saver.wait()
    state.step = 7
    said = "nothing"
    with disk_with(20_000 if rank == 0 else 10**8):
        try:
            save(state)
            saver.wait()
        except InputError as error:
            said = str(error)
    saver.wait()
    return said, sorted(os.listdir(folder))


@pytest.mark.parametrize("way", ["wait", "background"])
def test_a_full_disk_is_told_to_every_rank_and_costs_nothing(way, tmp_path):
    for said, left in run_ranks(save_on_full_disk, 2, tmp_path, way):
        assert "step_00000007.pt cannot be written: File too large" in said
        assert left == ["step_00000000.pt"]


def save_into_nowhere(rank, folder):
    with pytest.raises(InputError, match=r"cannot be written|is a file"):
        save_checkpoint(folder, small(rank=rank, ranks=2))
    with pytest.raises(InputError, match="is a file; give a folder"):
        load_checkpoint(folder, small(rank=rank, ranks=2))
    return True


def test_a_folder_that_cannot_be_is_told_to_every_rank(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert run_ranks(save_into_nowhere, 2, tmp_path / "file") == [True, True]


def test_keep_counts_and_never_takes_the_newest(tmp_path):
    state = small()
    with pytest.raises(InputError, match="keep is 0"):
        save_checkpoint(tmp_path, state, keep=0)
    (tmp_path / "step_00000099.pt").write_text("a torn one from a later step")
    for state.step in range(1, 6):
        save_checkpoint(tmp_path, state, keep=1)
    assert [path.name[11:13] for path in checkpoints_in(tmp_path)] == ["05", "99"]


def test_wrappers_come_off():
    inner = torch.nn.Linear(2, 2)
    wrapper = torch.nn.Module()
    wrapper.module = inner
    compiled = torch.nn.Module()
    compiled._orig_mod = wrapper
    assert unwrapped(compiled) is inner
    assert unwrapped(inner) is inner


def rows_left_where_another_rank_refuses(rank, folder):
    save_checkpoint(folder, small(rank=rank, ranks=2))
    state = small(width=5 if rank else 4, rank=rank, ranks=2)  # rank 1 built another model
    list(state.sampler)  # an epoch is over, and the next one is not announced yet
    with pytest.raises(InputError):
        load_checkpoint(folder, state)
    return len(state.sampler), len(list(state.sampler))


def test_a_checkpoint_that_one_rank_refuses_leaves_all_samplers_as_they_are(tmp_path):
    found = run_ranks(rows_left_where_another_rank_refuses, 2, tmp_path)
    assert found == [(10, 10), (10, 10)]


def of_data(data, rank):
    torch.manual_seed(len(data))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    return TrainingState(model, optimizer, schedule, SamplerOfData(data, 8, 2, rank, 0))


def moved_by_a_checkpoint_of_other_data(rank, folder, data):
    state = of_data("one", rank)
    state.step = 1
    save_elastic(folder, state)
    other = of_data(data[rank], rank)
    before = other.model.weight.detach().clone()
    with pytest.raises(InputError, match="saved while training on data one"):
        load_elastic(folder, other)
    return (other.model.weight - before).abs().max().item()


@pytest.mark.parametrize("data", [("others", "others"), ("one", "others")])
def test_an_elastic_checkpoint_of_other_data_is_refused_on_every_rank_and_not_loaded(
    data, tmp_path
):
    run = run_ranks(moved_by_a_checkpoint_of_other_data, 2, tmp_path, data, timeout=30)
    assert run == [0.0, 0.0]


def said_in_the_background(rank, folder):
    saver, state = BackgroundSaver(folder), small(rank=rank, ranks=2)
    state.step = 5
    saver.save(state)
    with pytest.raises(InputError, match="cannot be deleted"):
        saver.wait()


def test_what_fails_behind_a_save_is_said_on_every_rank(tmp_path):
    for step in (1, 2):  # no file: it cannot be unlinked
        (tmp_path / f"step_0000000{step}.pt").mkdir()
    run_ranks(said_in_the_background, 2, tmp_path, timeout=30)
