"""What tells a right answer of lesson 05 from a wrong one; the oracle adds in a single process."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons.lesson05_collectives.laboratory import known_sums as lab
from lessons.lesson05_collectives.laboratory.known_sums import Case, Exchange, Laboratory
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_close, expect_equal, recognise
from shared.exercises.wrong import Wrong
from shared.measuring.traffic import Call

exercise_05_1 = checks_for(
    "05.1",
    name="ring_reduce_scatter",
    difficulty=4,
    minutes=40,
    hint=(
        "Pad to n equal chunks. In step s rank r sends chunk (r - 1 - s) mod n to rank r + 1 and "
        "adds what comes from rank r - 1 to chunk (r - 2 - s) mod n. Draw it for n = 3."
    ),
    forbidden=("torch.distributed.all_", "torch.distributed.reduce_"),
)
exercise_05_2 = checks_for(
    "05.2",
    name="ring_all_gather",
    difficulty=2,
    minutes=15,
    hint=(
        "In step 0 rank r sends its own chunk. After that it sends on what it received in the step "
        "before: the chunk of rank r - s."
    ),
    forbidden=("torch.distributed.all_", "torch.distributed.reduce_"),
)
exercise_05_3 = checks_for(
    "05.3",
    name="ring_all_reduce",
    in_place=True,
    difficulty=2,
    minutes=15,
    hint="The two exercises above, then cut off the padding, restore the shape, and copy_.",
    forbidden=("torch.distributed.all_", "torch.distributed.reduce_"),
)
exercise_05_4 = checks_for(
    "05.4",
    name="tree_broadcast",
    in_place=True,
    difficulty=3,
    minutes=25,
    hint=(
        "Number the ranks from the source: place = (rank - src) mod n. Before round k the places 0 "
        "to 2**k - 1 have the tensor; place p sends to p + 2**k, if there is such a place."
    ),
    forbidden=("torch.distributed.broadcast",),
)
exercise_05_5 = checks_for(
    "05.5",
    name="central_all_reduce",
    in_place=True,
    difficulty=2,
    minutes=15,
    hint="Rank 0: n - 1 times recv and add, then n - 1 times send. The others: send, then recv.",
    forbidden=(
        "torch.distributed.all_reduce",
        "torch.distributed.reduce",
    ),
)


def expect_tensor(came: Any) -> None:
    """Name what beginners do instead of returning a tensor."""
    kind = type(came).__name__
    recognise(
        {"nothing is returned: the function ends without a return": came is None},
        expected="return ..., on every rank",
        seen="None",
    )
    recognise(
        {f"a {kind} of tensors is returned, not one tensor": isinstance(came, list | tuple)},
        expected="one flat tensor",
        seen=f"a {kind}",
        hint="torch.cat(pieces)",
    )


def sends(seen: Exchange) -> list[list[Call]]:
    """The messages that each rank sent; anything that is not a message is refused."""
    for calls in seen.calls:
        others = sorted({call.op for call in calls} - {"send", "recv"})
        moved = [op for op in others if op != "barrier"]
        recognise(
            {
                f"torch's own {''.join(moved[:1])} does the work": bool(moved),
                "a barrier: send and recv already wait for each other": bool(others),
            },
            expected="send and recv alone (isend, irecv, batch_isend_irecv)",
            seen=", ".join(others),
        )
    return [[call for call in calls if call.op == "send"] for calls in seen.calls]


def expect_own_dtype(seen: Exchange, num_bytes: int, num_messages: int) -> None:
    """So many messages of `num_bytes`, not all of twice or of half as many bytes."""
    lengths = [call.num_bytes for each in sends(seen) for call in each]
    wider = seen.case.dtype == torch.float32 and {*lengths} == {2 * num_bytes}
    halves = seen.case.dtype == torch.float64 and {2 * length for length in lengths} == {num_bytes}
    recognise(
        {
            "the numbers travel in a wider dtype than the tensor's": wider,
            "the numbers travel in float32 and lose digits": halves
            and len(lengths) == num_messages,
        },
        expected=f"messages of {num_bytes} bytes, in {seen.case.dtype}",
        seen=f"as many messages, of {max(lengths, default=0)} bytes",
    )


def expect_ring(seen: Exchange, steps: int, whole: int, onward: bool = True) -> None:
    """Every rank sends `steps` chunks of a tensor of `whole` numbers, all to one neighbour.

    `onward`: the next one, as the contract says it of both halves.
    """
    n, sent, size = seen.case.n, sends(seen), seen.case.dtype.itemsize
    whole, chunk = size * whole, size * -(-whole // n)
    expect_own_dtype(seen, chunk, n * steps)
    longest = max((call.num_bytes for each in sent for call in each), default=0)
    all_to_0 = {call.peer for each in sent[1:] for call in each} == {0}
    recognise(
        {"everything goes through one rank: it sends for all, the others wait": all_to_0},
        expected=f"rank 1 sends {steps} chunks to rank 2",
        seen=f"{len(sent[1])} messages from rank 1, all to rank 0",
        hint="the ring: from rank r to rank r + 1, and from nobody to anybody else",
    )
    too_long = longest > chunk
    recognise(
        {
            "whole tensors are sent, not chunks": too_long and longest >= whole,
            "what was gathered so far is sent again and again, not one chunk a step": too_long,
        },
        expected=f"messages of {chunk} bytes: one of the {n} chunks of the padded tensor",
        seen=f"messages of up to {longest} bytes for {n} ranks and shape {seen.case.shape}",
        hint="that costs n times as much: send in each step one chunk alone",
    )
    back = all({call.peer for call in sent[rank]} == {(rank - 1) % n} for rank in range(n))
    recognise(
        {"the ring runs backwards: every rank sends to the one before it": back and onward},
        expected="messages from rank r to rank r + 1, the last to rank 0",
        seen="messages from rank r to rank r - 1",
    )
    for rank, each in enumerate(sent):
        peers = {call.peer for call in each if call.peer is not None}
        other = peers not in ({(rank + 1) % n}, {(rank - 1) % n})
        recognise(
            {f"rank {rank} sends to {len(peers)} ranks: that is not a ring": other},
            expected=f"messages to rank {(rank + 1) % n} alone",
            seen=f"messages to ranks {sorted(peers)}",
            hint="in a ring every link carries the same load, and no switch is needed",
        )
        expect_equal(
            (len(each), sum(call.num_bytes for call in each)),
            (steps, steps * chunk),
            what=f"messages and bytes sent by rank {rank} of {n}, chunks of {chunk} bytes",
            mistake=f"{len(each)} messages where {steps} are enough" if len(each) > steps else "",
            hint="each half of the ring takes n - 1 steps, and a step is one chunk, in one message",
        )


def expect_all(
    tried: Laboratory, cases: Sequence[Case], want: Callable[[Exchange, int], Tensor], what: str
) -> None:
    """What `want` says of an exchange and a rank; `what` has a place for the dtype."""
    for case in cases:
        seen = tried[case]
        for rank, came in enumerate(seen.came):
            words = f"rank {rank} in its sub-group" if case.sub_groups else what.format(case.dtype)
            wanted = want(seen, rank)
            try:
                expect_close(came, wanted, what=words)
            except Wrong as fault:
                large = isinstance(came, Tensor) and came.dtype == torch.int64
                same_shape = large and came.shape == wanted.shape
                if same_shape and came.double().allclose(wanted.double()):
                    fault.mistake = "whole numbers lose digits: they go through a float"
                if case.sub_groups and not fault.mistake:
                    fault.mistake = "right in the whole world, wrong in a sub-group: group= is "
                    fault.mistake += "left out somewhere, or a place in the world is meant"
                raise


# 05.1 ring_reduce_scatter


@exercise_05_1.check("the sum of its own chunk, three ranks")
def own_chunk(ring_reduce_scatter: Any) -> None:
    seen = lab.scattered(ring_reduce_scatter)[lab.OWN_CHUNK]
    chunks = seen.total().view(3, -1)
    for rank, came in enumerate(seen.came):
        own = [given.view(3, -1)[rank] for given in seen.given]
        expect_tensor(came)
        recognise(
            {
                "where n divides the tensor, a chunk has one number too many: its size is rounded "
                "up, not numel // n + 1": came.shape == (5,)
            },
            expected="chunks of ceil(numel / n) numbers: 4 for 12 numbers on 3 ranks",
            seen="5",
            hint="-(-numel // n)",
        )
        expect_close(
            came,
            chunks[rank],
            what=f"the chunk that rank {rank} returns",
            looks_like={
                "rank r returns chunk r + 1: the ring ends one place too late": chunks[rank - 2],
                "rank r returns chunk r - 1: the ring starts one place off": chunks[rank - 1],
                "it is the mean, not the sum": chunks[rank] / 3,
                "every rank returns the whole sum, not its chunk of it": chunks.view(-1),
                "it is this rank's own chunk: nothing was added (or before an irecv had been "
                "waited for)": own[rank],
                "what came is written over the chunk, not added to it": own[rank - 2],
                "the chunk of the rank after it is not in the sum: it takes n - 1 steps": (
                    own[rank - 1] + own[rank]
                ),
                "the chunk of the rank before it is not in the sum: it takes n - 1 steps": (
                    own[rank - 2] + own[rank]
                ),
            },
            hint="in the last step rank r must receive chunk r",
        )


@exercise_05_1.check("odd sizes and shapes, two to five ranks; the input is left as it is")
def odd_sizes(ring_reduce_scatter: Any) -> None:
    for case in lab.ODD:
        seen = lab.scattered(ring_reduce_scatter)[case]
        numel = seen.given[0].numel()
        for rank, came in enumerate(seen.came):
            want = seen.chunk_of_sum(rank)
            what = f"chunk {rank} of {case.n}, shape {case.shape}"
            short = isinstance(came, Tensor) and came.numel() < len(want)
            recognise(
                {
                    f"the last {numel % case.n} of {numel} numbers are lost: the "
                    "size is divided and rounded down": short and rank == 0 and numel % case.n > 0,
                    "the chunks are not of one size: the padding is missing or cut off": short,
                },
                expected=f"{what} of {len(want)} numbers",
                seen=f"{came.numel() if short else 0} numbers",
                hint="pad with zeros to n * ceil(numel / n); tensor.chunk(n) alone does not",
            )
            pieces = seen.total().reshape(-1).tensor_split(case.n)
            even = [torch.cat([each, each.new_zeros(len(want) - len(each))]) for each in pieces]
            by_column = torch.zeros_like(want)
            if len(case.shape) == 2:
                columns = seen.total().T.reshape(-1)
                padded = torch.cat([columns, columns.new_zeros(-numel % case.n)])
                by_column = padded.view(case.n, -1)[rank]
            begun_anew = seen.total().reshape(-1).repeat(case.n)
            looks_like = {
                "the padding holds numbers of the tensor once more: it is of zeros": (
                    begun_anew[rank * len(want) :][: len(want)]
                ),
                "every chunk is padded for itself: the whole is padded at its end, and then cut": (
                    even[rank]
                ),
                "the numbers are taken in the order in which they lie in memory: a transposed "
                "tensor is flattened row by row": by_column,
            }
            expect_close(came, want, what=what, looks_like=looks_like)


@exercise_05_1.check("bytes that leave each rank")
def bytes_of_reduce_scatter(ring_reduce_scatter: Any) -> None:
    for case in lab.LONG:
        expect_ring(lab.scattered(ring_reduce_scatter)[case], case.n - 1, whole=case.shape[0])


@exercise_05_1.check("every dtype that torch can add")
def dtypes_of_reduce_scatter(ring_reduce_scatter: Any) -> None:
    tried = lab.scattered(ring_reduce_scatter)
    expect_all(tried, lab.SEVEN_OF_EACH_DTYPE, Exchange.chunk_of_sum, "the chunk of a {} tensor")


@exercise_05_1.check("a sub-group")
def sub_group_reduce_scatter(ring_reduce_scatter: Any) -> None:
    expect_all(lab.scattered(ring_reduce_scatter), [lab.SUB_GROUPS], Exchange.chunk_of_sum, "")


# 05.2 ring_all_gather


def one_is_there_twice(came: Tensor, chunks: list[Tensor], rank: int) -> bool:
    """Whether whole chunks came, this rank's own in its place, and one of them more than once."""
    rows = came.view(len(chunks), -1) if came.numel() == sum(c.numel() for c in chunks) else ()
    held = [[torch.equal(row, chunk.reshape(-1)) for chunk in chunks] for row in rows]
    places = [row.index(True) for row in held if any(row)]
    return len(places) == len(chunks) > len({*places}) and places[rank] == rank


def last_is_missing(came: Any, chunks: Sequence[Tensor], rank: int) -> bool:
    """Whether all is right but the last chunk to come, whose place holds nobody's chunk."""
    n = len(chunks)
    if n == 1 or not isinstance(came, Tensor) or came.shape != torch.cat(list(chunks)).shape:
        return False
    pieces, last = came.tensor_split(n), (rank + 1) % n
    others = all(torch.equal(pieces[r], chunks[r]) for r in range(n) if r != last)
    return others and not any(torch.equal(pieces[last], chunk) for chunk in chunks)


@exercise_05_2.check("the order of ranks, two to five of them")
def order_of_chunks(ring_all_gather: Any) -> None:
    for case in lab.ORDERS:
        n, seen = case.n, lab.gathered(ring_all_gather)[case]
        chunks = seen.given
        for rank, came in enumerate(seen.came):
            expect_tensor(came)
            own, before = chunks[rank], chunks[rank - 1]
            recognise(
                {
                    "the chunk of the rank after it never arrives: it takes n - 1 steps": (
                        last_is_missing(came, chunks, rank)
                    )
                },
                expected=f"the chunks of all {n} ranks on rank {rank}",
                seen=f"all but that of rank {(rank + 1) % n}, which is the last to come",
            )
            expect_close(
                came,
                torch.cat(chunks),
                what=f"what rank {rank} of {n} returns",
                looks_like={
                    "the chunks stand in the order of arrival, each rank's own first": (
                        torch.cat([chunks[(rank - i) % n] for i in range(n)])
                    ),
                    "each rank's own chunk stands first, then those of the ranks after it": (
                        torch.cat(chunks[rank:] + chunks[:rank])
                    ),
                    "every place holds this rank's own chunk": torch.cat(n * [own]),
                    "turned by one place: the chunks stand in the order of ranks, but rank 1's "
                    "comes first": torch.cat(chunks[1:] + chunks[:1]),
                    "turned by one place: the chunks stand in the order of ranks, but the last "
                    "rank's comes first": torch.cat(chunks[-1:] + chunks[:-1]),
                    "the chunks are stacked as rows: the result has to be flat": (
                        torch.stack(chunks)
                    ),
                    "the chunks stand in the reverse order of ranks": torch.cat(chunks[::-1]),
                    "the chunks are added, not put one behind the other": seen.total(),
                    "it forwards its own chunk in each step, not what came last": (
                        torch.cat([own if place == rank else before for place in range(n)])
                    ),
                    "one chunk is there twice and another is not: what was still being sent was "
                    "overwritten by what came (a second buffer, or wait() first)": (
                        came if one_is_there_twice(came, chunks, rank) else own.new_empty(0)
                    ),
                },
                hint="the chunk of rank r belongs at place r, whenever it arrives",
            )


@exercise_05_2.check("bytes that leave each rank")
def bytes_of_all_gather(ring_all_gather: Any) -> None:
    for case in lab.CHUNKS:
        expect_ring(lab.gathered(ring_all_gather)[case], case.n - 1, whole=case.n * case.shape[0])


@exercise_05_2.check("every dtype; chunks of any shape; the chunk is left as it is")
def dtypes_of_all_gather(ring_all_gather: Any) -> None:
    tried, what = lab.gathered(ring_all_gather), "gathered chunks of {}"
    expect_all(tried, lab.ANY_CHUNK, Exchange.chunks_in_order, what)


@exercise_05_2.check("a sub-group")
def sub_group_all_gather(ring_all_gather: Any) -> None:
    expect_all(lab.gathered(ring_all_gather), [lab.ONE_NUMBER], Exchange.chunks_in_order, "")


# 05.3 ring_all_reduce and 05.5 central_all_reduce


def looks_displaced(case: Case, total: Tensor, own: Tensor) -> dict[str, Tensor]:
    """Sums that are cut off at the wrong end, end too early, or lie in another order."""
    flat, missing = total.reshape(-1), -total.numel() % case.n
    even = total.numel() // case.n * case.n
    shifted = torch.cat([flat[missing:], flat.new_zeros(missing)])[: len(flat)]
    rows = {"the padding is cut off at the front: it stands behind the numbers": shifted}
    if 0 < even < len(flat):
        rows[
            f"the last {len(flat) - even} of {len(flat)} numbers are not summed: the size is "
            "divided and rounded down"
        ] = torch.cat([flat[:even], own.reshape(-1)[even:]])
    rows = {words: value.view(case.shape) for words, value in rows.items()}
    if len(case.shape) == 2:
        rows[
            "the sums are there, in the order in which the tensor lies in memory: it is not "
            "contiguous, and its numbers count row by row"
        ] = flat.view(case.shape[::-1]).T
    return rows


def expect_sums(seen: Exchange) -> None:
    """The sum in every rank's own tensor."""
    case, n, total, before = seen.case, seen.case.n, seen.total(), seen.given
    sends(seen)
    several = n > 1 and bool(total.any())
    added = several and torch.equal(seen.came[1], total + before[1])
    recognise(
        {"the sum is added to the tensor, which is in the sum already": added},
        expected=f"the sum of {n} tensors",
        seen="each rank's own tensor counted twice",
        hint="overwrite: tensor.copy_(the sum, in the tensor's shape)",
    )
    same = [torch.equal(came, own) for came, own in zip(seen.came, before, strict=True)]
    only_0 = several and same == [False] + [True] * (n - 1)
    recognise(
        {"only rank 0 has the sum: nobody sent it back": only_0},
        expected="the sum on every rank",
        seen="the other ranks' tensors as they were",
    )
    untouched = (
        "a tensor that is not contiguous is left as it was: a copy of it was summed"
        if len(case.shape) == 2
        else "the tensor is as it was: the sum must be copied into it"
    )
    for rank, came in enumerate(seen.came):
        chunk = -(-total.numel() // n)
        part = slice(rank * chunk, (rank + 1) * chunk)
        more = torch.ones(total.numel(), dtype=torch.bool)
        more[part] = False
        recognise(
            {
                "the second half of the ring adds what comes: the chunks are whole by then, and "
                "take the places of what is there": several
                and bool(more.any())
                and torch.equal(came.reshape(-1) > total.reshape(-1) + 0.5, more)
            },
            expected="the sum in every chunk",
            seen=f"more than the sum in every chunk but rank {rank}'s own",
            hint="+= in the reduce-scatter, an assignment in the all-gather",
        )
        alone = before[rank].reshape(-1).clone()
        alone[part] = total.reshape(-1)[part]
        alone = alone.view(case.shape)
        expect_close(
            came,
            total,
            what=f"the tensor of rank {rank} of {n}, shape {case.shape}",
            looks_like={
                untouched: before[rank],
                "it is the mean, not the sum": total / n,
                "rank 0 counts its own tensor twice": total + before[0],
                "rank 0 leaves its own tensor out": total - before[0],
                "rank 0 sends the sum back before it has heard all: a part of the ranks is in it": (
                    sum(before[1 : rank + 1], before[0])
                ),
                "the last rank's tensor is left out": total - before[-1],
                "only this rank's chunk is summed: the all-gather is missing": alone,
                **looks_displaced(case, total, before[rank]),
            },
            hint="tensor.copy_(the sum, in the tensor's shape) writes into the caller's memory; "
            "tensor = ... and tensor.data = ... do not",
        )


@exercise_05_3.check("in place, any size and shape, two to five ranks")
def all_reduce_values(ring_all_reduce: Any) -> None:
    for case in lab.ANY_SIZE:
        expect_sums(lab.reduced(ring_all_reduce)[case])


@exercise_05_3.check("bytes that leave each rank")
def bytes_of_all_reduce(ring_all_reduce: Any) -> None:
    for case in lab.LONG:
        steps, whole = 2 * (case.n - 1), case.shape[0]
        expect_ring(lab.reduced(ring_all_reduce)[case], steps, whole, onward=False)


@exercise_05_3.check("the same bits on every rank, every dtype")
def same_bits(ring_all_reduce: Any) -> None:
    tried = lab.reduced(ring_all_reduce)
    expect_all(tried, lab.SEVEN_OF_EACH_DTYPE, Exchange.total, "the sum of {} tensors")
    differ = any(not torch.equal(a, b) for a, b in itertools.pairwise(tried[lab.NOISE].came))
    recognise(
        {"the ranks hold sums that differ in their last bits": differ},
        expected="equal bits: each chunk is summed once, and copied",
        seen="sums in different orders of addition",
        hint="weights that should stay equal would drift apart",
    )


@exercise_05_3.check("a parameter, and a sub-group")
def sub_group_all_reduce(ring_all_reduce: Any) -> None:
    expect_all(lab.reduced(ring_all_reduce), [lab.SUB_GROUPS], Exchange.total, "")


@exercise_05_5.check("in place, any size and shape, two to five ranks")
def central_values(central_all_reduce: Any) -> None:
    for case in lab.ANY_SIZE:
        expect_sums(lab.reduced(central_all_reduce)[case])


@exercise_05_5.check("bytes that leave each rank")
def central_bytes(central_all_reduce: Any) -> None:
    for case in lab.LONG:
        seen, n, whole = lab.reduced(central_all_reduce)[case], case.n, case.shape[0]
        sent, whole = sends(seen), whole * case.dtype.itemsize
        others = {call.peer for each in sent[1:] for call in each if call.peer is not None}
        recognise(
            {"the ranks talk to each other: here everything goes through rank 0": others != {0}},
            expected="messages to rank 0 alone from the other ranks",
            seen=f"messages to ranks {sorted(others)}",
            hint="this exercise is the bad example; build it as it is described",
        )
        expect_own_dtype(seen, whole, 2 * (n - 1))
        heard = [call.peer for call in seen.calls[0] if call.op == "recv"]
        recognise(
            {
                "rank 0 does not receive in the order of ranks: another order of additions has "
                "other last bits": heard != list(range(1, n)) and len(heard) == n - 1
            },
            expected=f"messages from ranks {list(range(1, n))}, in this order",
            seen=f"from {heard}" + " (None: from anyone)" * (None in heard),
        )
        for rank, each in enumerate(sent):
            want = (n - 1) * whole if rank == 0 else whole
            num_bytes = sum(call.num_bytes for call in each)
            expect_equal(
                num_bytes,
                want,
                what=f"bytes sent by rank {rank} of {n}",
                mistake="everybody's tensors are handed on to be added again: the sum is enough"
                if num_bytes > want
                else "",
            )
            expect_equal(
                len(each),
                n - 1 if rank == 0 else 1,
                what=f"messages sent by rank {rank} of {n}",
                mistake="a tensor travels in several messages: each costs its latency",
            )


@exercise_05_5.check("every dtype, and a sub-group")
def central_dtypes(central_all_reduce: Any) -> None:
    cases = [*lab.SEVEN_OF_EACH_DTYPE, lab.SUB_GROUPS]
    expect_all(lab.reduced(central_all_reduce), cases, Exchange.total, "the sum of {} tensors")


# 05.4 tree_broadcast


@exercise_05_4.check("the source's tensor on every rank, two to five of them")
def broadcast_values(tree_broadcast: Any) -> None:
    for case in lab.SOURCES:
        n, src = case.n, case.rest[0]
        try:
            seen = lab.spread(tree_broadcast)[case]
        except Wrong as fault:
            if case == lab.SOURCES[1]:  # the first was rank 0 of as many
                fault.mistake = f"right from rank 0, wrong from rank {src}: {fault.mistake}"
                fault.hint = (
                    "places count from the source: the rank at a place is place + src, mod n"
                )
            raise
        before, after = seen.given, seen.came
        recognise(
            {
                "it is the tensor of rank 0, whatever src is": (
                    src > 0 and all(torch.equal(came, before[0]) for came in after)
                )
            },
            expected=f"the tensor of rank {src}",
            seen=f"that of rank 0, on all {n} ranks",
            hint="number the ranks from the source: (rank - src) % n",
        )
        left = [rank for rank in range(n) if rank != src and torch.equal(after[rank], before[rank])]
        recognise(
            {
                f"with {n} ranks not all get it: the rounds end too early, or a place is left "
                "out, where n is no power of two": n == 5 and 0 < len(left) < n - 1
            },
            expected=f"the tensor of rank {src} on all of them",
            seen=f"ranks {left} have their own still",
            hint="go on while fewer than n have it",
        )
        untouched = (
            "the tensor is as it was: nothing arrived"
            if len(case.shape) == 1
            else "a tensor that is not contiguous is left as it was: a copy of it received"
        )
        for rank, came in enumerate(after):
            expect_close(
                came,
                before[src],
                what=f"the tensor of rank {rank} of {n}, from rank {src}, shape {case.shape}",
                looks_like={
                    untouched: before[rank],
                    "what arrives is added to the tensor": before[rank] + before[src],
                },
            )


@exercise_05_4.check("messages and rounds")
def broadcast_rounds(tree_broadcast: Any) -> None:
    for case in lab.ROUNDS:
        seen, n, src = lab.spread(tree_broadcast)[case], case.n, case.rest[0]
        sent, whole = sends(seen), 6 * case.dtype.itemsize
        expect_own_dtype(seen, whole, n - 1)
        total, enough = sum(call.num_bytes for each in sent for call in each), (n - 1) * whole
        expect_equal(
            total,
            enough,
            what=f"bytes of all messages, {n} ranks",
            mistake="some ranks are sent the tensor more than once: n - 1 messages are enough"
            if total > enough
            else "",
            hint="each rank but the source receives once",
        )
        peers = [[call.peer for call in each if call.peer is not None] for each in sent]
        rounds, most = lab.num_rounds(peers, src), (n - 1).bit_length()
        slow = rounds > most
        recognise(
            {
                "the source sends to everybody itself: the others never help": (
                    slow and len(peers[src]) == n - 1
                ),
                "a chain: each rank sends to one other, and the last waits for all": (
                    slow and max(map(len, peers)) == 1
                ),
                "it is no tree of the smallest depth": slow,
            },
            expected=f"{most} rounds for {n} ranks: ceil(log2 {n})",
            seen=f"{rounds} rounds, one message after another from each rank",
            hint="whoever has it sends it on: 1, 2, 4, 8 ranks have it",
        )


@exercise_05_4.check("every dtype, and a sub-group whose src counts within it")
def sub_group_broadcast(tree_broadcast: Any) -> None:
    cases = [*lab.FROM_1_OF_EACH_DTYPE, lab.FROM_1_IN_SUB_GROUPS]
    expect_all(lab.spread(tree_broadcast), cases, Exchange.of_source, "a {} tensor")
