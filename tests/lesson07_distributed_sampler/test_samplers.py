"""The samplers at the edges: odd sizes, refusals, workers that draw ahead, a watched order."""

import warnings

import pytest
from torch.utils.data import DataLoader

from shared.data.sampling import (
    DistributedSampler,
    RepeatedOrderWarning,
    ResumableSampler,
    WatchedSampler,
)
from shared.errors import InputError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DistributedSampler(range(4), 2, 2), "rank is 2; with num_replicas 2 .* 0..1"),
        (lambda: DistributedSampler(range(4), 2, -1), "rank is -1"),
        (lambda: DistributedSampler(range(4), None, 1), "there is no process group"),
        (lambda: DistributedSampler(range(4), 2, None), "rank is None"),
        (lambda: ResumableSampler(3, 4, 0, drop_last=True), "3 samples, 4 ranks, drop_last"),
        (lambda: ResumableSampler(10, 4, 0).state_dict(consumed=13), "consumed is 13"),
    ],
)
def test_what_cannot_be_is_named(make, says):
    with pytest.raises(InputError, match=says):
        make()


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
