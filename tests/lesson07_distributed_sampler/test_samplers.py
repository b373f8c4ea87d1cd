"""The samplers: torch's indices, none twice and none left out after a change of ranks."""

import itertools
import random
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from shared.data.sampling import (
    DistributedSampler,
    RepeatedOrderWarning,
    ResumableSampler,
    WatchedSampler,
)
from shared.errors import InputError
from shared.ranks.forked import run_ranks


def parts(sampler_class, length, world_size, **options):
    return [
        list(sampler_class(range(length), num_replicas=world_size, rank=rank, **options))
        for rank in range(world_size)
    ]


def together(rank_parts):
    """The samples in the order in which the ranks, in step, have them."""
    return [index for step in itertools.zip_longest(*rank_parts) for index in step]


def test_equal_to_torch_index_for_index():
    lengths, worlds, epochs = (0, 1, 2, 5, 16, 41, 100), range(1, 9), (0, 1, 7)
    grid = itertools.product(lengths, worlds, (False, True), (False, True), (0, 1234), epochs)
    combinations = 0
    for length, world_size, shuffle, drop_last, seed, epoch in grid:
        combinations += 1
        options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed}
        for rank in range(world_size):
            place = {"num_replicas": world_size, "rank": rank}
            theirs = torch.utils.data.DistributedSampler(range(length), **place, **options)
            for sampler_class in (DistributedSampler, ResumableSampler):
                if sampler_class is ResumableSampler and drop_last and length < world_size:
                    continue  # it refuses what torch makes an empty part of
                ours = sampler_class(range(length), **place, **options)
                for sampler in (ours, theirs):
                    sampler.set_epoch(epoch)
                assert len(ours) == len(theirs)
                assert list(ours) == list(theirs)
    assert combinations >= 1_000


def test_place_comes_from_the_group():
    def place(rank):
        sampler = DistributedSampler(range(10), shuffle=False)
        return sampler.rank, sampler.num_replicas, list(sampler)

    assert run_ranks(place, 2) == [(0, 2, [0, 2, 4, 6, 8]), (1, 2, [1, 3, 5, 7, 9])]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((range(4), 2, 2), "rank is 2; with num_replicas 2 it must be 0..1"),
        ((range(4), 2, -1), "rank is -1"),
        ((range(4), None, 1), "there is no process group"),
        ((range(4), 2, None), "rank is None"),
    ],
)
def test_impossible_places_are_named(arguments, says):
    with pytest.raises(InputError, match=says):
        DistributedSampler(*arguments)


def test_drop_last_that_leaves_nothing_is_refused():
    with pytest.raises(InputError, match="3 samples, 4 ranks, drop_last"):
        ResumableSampler(3, 4, 0, drop_last=True)


def group(length, world_size, state=None, **options):
    samplers = [ResumableSampler(length, world_size, rank, **options) for rank in range(world_size)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


def run(samplers, steps=None):
    """Let all ranks take `steps` samples each (all that is left without): what they had."""
    iterators = [iter(sampler) for sampler in samplers]
    return together([list(itertools.islice(each, steps)) for each in iterators])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_epoch_is_the_whole_epoch_once(shuffle):
    draw = random.Random(7)
    for _ in range(200):
        length, epoch = draw.randint(1, 60), draw.randint(0, 5)
        state, had, left = None, [], length
        while left > 0:  # several stops, each with another number of ranks
            world_size = draw.randint(1, 6)
            samplers = group(length, world_size, state, shuffle=shuffle, seed=3)
            for sampler in samplers:
                sampler.set_epoch(epoch)
            assert len(samplers[0]) == -(-left // world_size)
            had += run(samplers, draw.randint(1, 12))
            states = [sampler.state_dict() for sampler in samplers]
            assert all(each == states[0] for each in states)
            state = states[0]
            left = length - state["consumed"]
        whole = torch.utils.data.DistributedSampler(range(length), 1, 0, shuffle, seed=3)
        whole.set_epoch(epoch)
        assert had[:length] == list(whole)


def test_same_ranks_give_the_rest_of_the_uninterrupted_epoch_padding_and_all():
    whole = run(group(11, 4))
    samplers = group(11, 4)
    first = run(samplers, 1)
    rest = run(group(11, 4, samplers[0].state_dict()))
    assert first + rest == whole
    assert len(whole) == 12


def test_an_epoch_with_drop_last_that_is_over_has_no_tail_for_fewer_ranks():
    samplers = group(11, 4, drop_last=True)
    for sampler in samplers:
        list(sampler)
    states = [sampler.state_dict() for sampler in samplers]
    assert [list(sampler) for sampler in group(11, 1, states[0], drop_last=True)] == [[]]


def test_drop_last_after_a_change_of_ranks():
    samplers = group(11, 4, shuffle=False, drop_last=True)
    assert run(samplers, 1) == [0, 1, 2, 3]
    rest = group(11, 3, samplers[0].state_dict(), shuffle=False, drop_last=True)
    assert run(rest) == [4, 5, 6, 7, 8, 9]


def test_the_end_of_an_epoch_is_not_its_beginning():
    samplers = group(10, 2)
    run(samplers)
    state = samplers[0].state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 10)
    resumed = group(10, 2, state)
    assert run(resumed) == []
    for sampler in resumed:
        sampler.set_epoch(1)
    fresh = group(10, 2)
    for sampler in fresh:
        sampler.set_epoch(1)
    assert run(resumed) == run(fresh)


def test_without_set_epoch_a_further_iteration_is_a_whole_epoch():
    (sampler,) = group(6, 1, {**group(6, 1)[0].state_dict(), "consumed": 4})
    assert len(list(sampler)) == 2
    assert len(sampler) == 6
    assert len(list(sampler)) == 6


def test_workers_draw_ahead_so_the_position_is_given():
    sampler = ResumableSampler(40, 1, 0, shuffle=False)
    loader = DataLoader(range(40), batch_size=4, sampler=sampler, num_workers=1)
    batches = iter(loader)
    next(batches)
    assert sampler.state_dict()["consumed"] > 4
    state = sampler.state_dict(consumed=4)
    del batches
    resumed = ResumableSampler(40, 1, 0, shuffle=False)
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == 4


@pytest.mark.parametrize(("name", "value"), [("length", 9), ("seed", 1), ("shuffle", False)])
def test_a_state_of_another_order_is_refused(name, value):
    state = ResumableSampler(10, 1, 0).state_dict()
    with pytest.raises(InputError, match=f"{name} {value}, this sampler has"):
        ResumableSampler(10, 1, 0).load_state_dict({**state, name: value})


@pytest.mark.parametrize("consumed", [-1, 13])
def test_a_position_outside_the_epoch_is_refused(consumed):
    with pytest.raises(InputError, match=f"consumed is {consumed}"):
        ResumableSampler(10, 4, 0).state_dict(consumed=consumed)


def warned(sampler, epochs, call_set_epoch):
    watched = WatchedSampler(sampler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(epochs):
            if call_set_epoch:
                watched.set_epoch(epoch)
            assert len(list(watched)) == len(watched)
    return [w for w in caught if issubclass(w.category, RepeatedOrderWarning)]


@pytest.mark.parametrize("length", [8, 64, 65, 300])
def test_a_forgotten_set_epoch_is_seen(length):
    sampler = DistributedSampler(range(length), 1, 0)
    assert len(warned(sampler, 3, call_set_epoch=False)) == 2
    assert warned(sampler, 3, call_set_epoch=True) == []


def test_no_false_alarm():
    in_order = DistributedSampler(range(100), 1, 0, shuffle=False)
    assert warned(in_order, 3, call_set_epoch=False) == []
    too_few = DistributedSampler(range(7), 1, 0)
    assert warned(too_few, 3, call_set_epoch=False) == []
    assert warned(DistributedSampler(range(8), 1, 0), 200, call_set_epoch=True) == []


def test_watching_takes_nothing_ahead():
    sampler = WatchedSampler(ResumableSampler(100, 2, 0))
    entries = iter(sampler)
    next(entries)
    assert sampler.state_dict()["consumed"] == 2
