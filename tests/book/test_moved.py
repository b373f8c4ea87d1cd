"""The picture of all collectives: every message can be sent, and all arrives, once."""

import itertools

import pytest

from shared.book.moved import COLLECTIVES, SUMS, WAYS, blocks, collective, film, wanted


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_message_carries_what_its_sender_has_and_all_arrives(operation):
    for way, ranks in itertools.product(WAYS, (2, 4, 8)):
        moments = film(operation, way, ranks)
        for (held, _), (_, messages) in itertools.pairwise(moments):
            assert len({source for source, _, _ in messages}) == len(messages)
            assert len({to for _, to, _ in messages}) == len(messages)
            for source, to, what in messages:
                for chunk, those in what.items():
                    assert those <= held[source][chunk]
                    there = held[to].get(chunk, frozenset())
                    assert not there & those or (operation in SUMS and there < those)
        for rank, held in enumerate(moments[-1][0]):
            for chunk, those in wanted(operation, rank, ranks).items():
                assert held[chunk] >= those, (way, ranks, rank)


def test_the_costs_are_those_that_are_known():
    """Buckets around a ring and minimum spanning trees: Chan et al. 2007 (10.1002/cpe.1206)."""
    shown = {op: collective(op, "ring", 8)["numbers"] for op in COLLECTIVES}
    assert shown["all_reduce"]["ring"] == "14 rounds, out 1.75 S, in 1.75 S"
    assert shown["all_reduce"]["tree"] == "6 rounds, out 3.00 S, in 3.00 S"
    assert shown["all_reduce"]["central rank"] == "14 rounds, out 7.00 S, in 7.00 S"
    for half in ("reduce_scatter", "all_gather"):
        assert shown[half]["ring"] == "7 rounds, out 0.88 S, in 0.88 S"
    assert shown["broadcast"]["tree"] == "3 rounds, out 3.00 S, in 1.00 S"
    sent = [m for _, messages in film("all_to_all", "ring", 4) for m in messages if m[0] == 0]
    assert [blocks("all_to_all", what) for _, _, what in sent] == [3, 2, 1]
