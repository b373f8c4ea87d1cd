"""An answer that computes nothing passes no check."""

import torch

from shared.exercises.lessons import load_checks


def test_a_mask_of_zeros_is_wrong_in_every_check():
    def zeros(length, device=None):
        return torch.zeros(1, 1, length, length, dtype=torch.bool, device=device)

    checks = load_checks("02")["02.3"]
    assert len([each for each in checks.faults(zeros) if each]) == len(checks.checks) == 2
