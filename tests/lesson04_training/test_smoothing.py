"""Lesson 04's small models: what is compared differs in the smoothing alone."""

import torch

from lessons.lesson04_training.experiments.smoothing_and_beams import (
    Task,
    bleu_by_beam,
    confidence,
    train_smoothed,
)
from shared.data.corpora import load_corpus


def test_a_seed_and_a_smoothing_name_a_model():
    task = Task.of(load_corpus("grammar"), num_test=4)
    plain, again, smoothed = (train_smoothed(task, each, num_steps=3) for each in (0.0, 0.0, 0.1))
    assert all(map(torch.equal, plain.parameters(), again.parameters()))
    assert not all(map(torch.equal, plain.parameters(), smoothed.parameters()))
    seen = confidence(plain, task)
    assert seen.loss > 0 and 0 <= seen.hits <= 100 and 0 < seen.surest <= 100
    assert set(bleu_by_beam(plain, task, ["greedy", "beam of 2"])) == {"greedy", "beam of 2"}
