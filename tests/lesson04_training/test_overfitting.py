"""What lesson 04 says about overfitting holds for seeds that its page does not show."""

import pytest
import torch

from lessons.lesson04_training.experiments.overfitting import (
    FewSentences,
    averaged_loss,
    best_epoch,
    look,
    train_and_look,
)
from shared.data.corpora import load_corpus
from shared.training.loop import mean_loss


def test_the_held_out_loss_turns_while_the_training_loss_goes_on_falling():
    seed = 0  # the run that the page shows
    few = FewSentences.draw(load_corpus("grammar"), seed)
    model, epochs = train_and_look(few, 14, seed)
    turn = best_epoch(epochs)
    best, last = epochs[turn], epochs[-1]
    assert 4 <= turn <= 11
    assert last.held_out > best.held_out + 0.2
    assert last.training < 0.5 * best.training
    assert last.hits > best.hits - 2
    assert averaged_loss(model, epochs[turn - 1 : turn + 2], few.held_out) < best.held_out
    assert averaged_loss(model, epochs[-3:], few.held_out) > best.held_out


def test_what_is_looked_at_is_not_trained_on():
    corpus = load_corpus("grammar")
    first, second = (FewSentences.draw(corpus, seed) for seed in (0, 1))
    assert first.trained != second.trained
    assert torch.equal(first.held_out.src, second.held_out.src)
    assert not set(corpus.validation) & set(corpus.train)


def test_looking_gives_the_mean_loss_and_leaves_the_model_in_training():
    few = FewSentences.draw(load_corpus("grammar"), 0)
    model, _ = train_and_look(few, 1, dropout=0.3)
    loss, hits = look(model, few.held_out)
    assert loss == pytest.approx(mean_loss(model, [few.held_out]), rel=1e-5)
    assert model.training
    assert 0 < hits < 100
