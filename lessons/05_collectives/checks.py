"""What tells a right answer of lesson 05 from a wrong one; the oracle adds in a single process."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, wrong
from shared.exercises.seeds import fresh_seed
from shared.exercises.wrong import Wrong
from shared.measuring.traffic import Call, count_traffic
from shared.ranks.failures import RankFailed, is_own_file, own_line
from shared.ranks.forked import run_ranks

exercise_05_1 = checks_for(
    "05.1",
    name="ring_reduce_scatter",
    difficulty=4,
    minutes=40,
    hints=[
        "Pad to n equal chunks. In step s rank r sends chunk (r - 1 - s) mod n to rank r + 1 and "
        "adds what comes from rank r - 1 to chunk (r - 2 - s) mod n. Draw it for n = 3.",
        "isend, then recv, then wait for the isend: if all ranks send first, all wait for ever.",
    ],
)
exercise_05_2 = checks_for(
    "05.2",
    name="ring_all_gather",
    difficulty=2,
    minutes=15,
    hints=[
        "In step 0 rank r sends its own chunk. After that it sends on what it received in the step "
        "before: the chunk of rank r - s."
    ],
)
exercise_05_3 = checks_for(
    "05.3",
    name="ring_all_reduce",
    in_place=True,
    difficulty=2,
    minutes=15,
    hints=["The two exercises above, then cut off the padding, restore the shape, and copy_."],
)
exercise_05_4 = checks_for(
    "05.4",
    name="tree_broadcast",
    in_place=True,
    difficulty=3,
    minutes=25,
    hints=[
        "Number the ranks from the source: place = (rank - src) mod n. Before round k the places 0 "
        "to 2**k - 1 have the tensor; place p sends to p + 2**k, if there is such a place."
    ],
)
exercise_05_5 = checks_for(
    "05.5",
    name="central_all_reduce",
    in_place=True,
    difficulty=2,
    minutes=15,
    hints=["Rank 0: n - 1 times recv and add, then n - 1 times send. The others: send, then recv."],
)
QUIET = 1.5  # seconds without any work after which ranks that wait for each other are ended
PATIENCE = 20.0  # seconds until ranks that are still at work are ended; they need a tenth of one
UNPAIRED = "a message without its other side: a send nobody receives, or a recv nobody sends to"
PAIRED = (
    "for each send(x, b) on rank a there must be one recv(y, a) on rank b; neighbours in a ring "
    "are (rank + 1) % n and (rank - 1) % n"
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16]
DTYPES += [torch.uint8, torch.bool, torch.complex64]
Operation = Callable[[Any, Tensor], Tensor]
Outcome = list[tuple[Tensor, Tensor, list[Call]]]


def values(rank: int, shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """One rank's tensor: whole numbers whose sum over five ranks is exact in every dtype.

    No number is zero, and at no place do two of five ranks have the same one: whose tensor it is
    must not be left to chance.
    """
    generator = torch.Generator().manual_seed(seed + rank)
    numbers = 5 * torch.randint(0, 10, tuple(shape), generator=generator) + rank % 5 + 1
    return numbers < 10 if dtype == torch.bool else numbers.to(dtype)


def added(n: int, shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What one process gets when it adds the tensors of n ranks."""
    return functools.reduce(torch.add, [values(r, shape, seed, dtype) for r in range(n)])


def on_ranks(fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """run_ranks, with the ways in which an exchange of messages fails put into words."""
    try:
        return run_ranks(fn, n, *args, quiet=QUIET, timeout=PATIENCE)
    except RankFailed as failed:
        if type(failed.error) is Wrong:
            raise failed.error from None
        text = str(failed)
    if "raised NotImplementedError" in text:
        raise NotImplementedError
    first = text.splitlines()[0]
    if "were not back" in text:
        not_back(first, text.split(" was here:")[1:], n)
    if "Pair is not connected" in text:
        wrong(
            f"a rank sends to itself, or receives from itself{' (there is only one)' * (n == 1)}",
            expected="messages between different ranks",
            seen=f"{first.split(' raised')[0]}: Pair is not connected{own_line(text)}",
            hint="print rank and peer of every message, on paper or here, for so few ranks",
        )
    if "SIGABRT" in first:
        wrong(
            "a message is longer than the buffer of the rank that receives it",
            expected="buffers of the sender's size and dtype",
            seen=first,
            hint="torch.empty_like(chunk) has the dtype; the padded chunks have one size",
        )
    if "Connection" in text or "Broken pipe" in text or "recvCompletion" in text:
        wrong(
            UNPAIRED,
            expected="a recv for every send, and a send for every recv",
            seen=" ".join(first.split())[:120],
            hint=PAIRED,
        )
    if "a leaf Variable that requires grad" in text:
        wrong(
            "a parameter is refused: autograd forbids to overwrite a leaf that needs a gradient",
            expected="a tensor with requires_grad=True, overwritten",
            seen=" ".join(first.split())[:200] + own_line(text),
            hint="tensor.detach() is the same memory without autograd: write into that",
        )
    wrong("", expected="no error", seen=" ".join(first.split())[:250] + own_line(text))
    raise AssertionError


def not_back(first: str, stacks: list[str], n: int) -> None:
    """Ranks that hang: all in send, one message without its other side, or a loop without end."""
    where = f"{first}; {'; '.join(place_in(stack) for stack in stacks)}"
    seconds = float(first.split("not back after ")[1].split()[0])
    if seconds >= PATIENCE and Path("/proc/self/stat").exists():  # not idle all the time
        wrong(
            "a loop that never ends: after so long the ranks are still at work",
            expected="all ranks back after a few messages",
            seen=where,
            hint="does what the loop's condition asks for change inside it?",
        )
    senders = sum(" in send\n" in stack for stack in stacks)
    wrong(
        "every rank waits in send until its neighbour receives, and none does: a deadlock"
        if senders == n
        else UNPAIRED,
        expected="all ranks back",
        seen=where,
        hint="isend starts a message and goes on; recv; then wait() for what isend returned"
        if senders == n
        else PAIRED,
    )


def place_in(stack: str) -> str:
    """The learner's own frame of a stack: the first that is not torch's."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    own = [(line, name) for file, line, name in frames if is_own_file(file)]
    return f"line {own[0][0]} in {own[0][1]}" if own else "somewhere in torch"


def observed(
    candidate: Any, operation: Operation, n: int, shape: Sequence[int], seed: int,
    dtype: torch.dtype = torch.float64, columns: bool = False,
) -> Outcome:  # fmt: skip
    """Per rank: what came out, the input afterwards, and the messages."""

    def work(rank: int) -> tuple[Tensor, Tensor, list[Call]]:
        own = values(rank, shape, seed, dtype)
        own = own.T.contiguous().T if columns else own  # by columns: not contiguous
        with count_traffic() as traffic:
            came = operation(candidate, own)
        return came, own, traffic.calls

    return on_ranks(work, n)


def returns(candidate: Any, own: Tensor) -> Tensor:
    """For the exercises that return a new tensor."""
    return candidate(own)


def in_place(candidate: Any, own: Tensor) -> Tensor:
    """For the exercises that overwrite their argument: what is in the caller's memory."""
    memory = own.detach()  # `tensor.data = ...` would give `own` another
    candidate(own)
    return memory


def expect_returned(came: Any) -> None:
    """Name what beginners do instead of returning a tensor."""
    expect(
        came is not None,
        mistake="nothing is returned: the function ends without a return",
        expected="return ..., on every rank",
        seen="None",
    )
    if isinstance(came, list | tuple):
        wrong(
            f"a {type(came).__name__} of tensors is returned, not one tensor",
            expected="one flat tensor",
            seen=f"a {type(came).__name__} of {len(came)}",
            hint="torch.cat(pieces)",
        )


def sends(calls: list[Call]) -> list[Call]:
    """The messages that a rank sent; anything that is not a message is refused."""
    others = sorted({call.op for call in calls} - {"send", "recv"})
    if others:
        wrong(
            f"torch's own {others[0]} does the work",
            expected="send and recv alone (isend, irecv, batch_isend_irecv)",
            seen=", ".join(others),
        )
    return [call for call in calls if call.op == "send"]


def expect_ring(outcome: Outcome, shape: Sequence[int], steps: int, whole: int, chunk: int) -> None:
    """Every rank sends `steps` chunks of `chunk` bytes, all to the same neighbour."""
    n = len(outcome)
    sent = [sends(calls) for _, _, calls in outcome]
    longest = max((call.num_bytes for each in sent for call in each), default=0)
    if {call.peer for each in sent[1:] for call in each} == {0}:
        wrong(
            "everything goes through one rank: it sends for all, the others wait",
            expected=f"rank 1 sends {steps} chunks to rank 2",
            seen=f"{len(sent[1])} messages from rank 1, all to rank 0",
            hint="the ring: from rank r to rank r + 1, and from nobody to anybody else",
        )
    if longest > chunk:
        wrong(
            "whole tensors are sent, not chunks" if longest >= whole
            else "what was gathered so far is sent again and again, not one chunk a step",
            expected=f"messages of {chunk} bytes: one of the {n} chunks of the padded tensor",
            seen=f"messages of up to {longest} bytes for {n} ranks and shape {tuple(shape)}",
            hint="that is right and costs n times as much: send in each step one chunk alone",
        )  # fmt: skip
    for rank, each in enumerate(sent):
        peers = {call.peer for call in each}
        if len(peers) > 1 or peers not in ({(rank + 1) % n}, {(rank - 1) % n}):
            wrong(
                f"rank {rank} sends to {len(peers)} ranks: that is not a ring",
                expected=f"messages to rank {(rank + 1) % n} alone",
                seen=f"messages to ranks {sorted(p for p in peers if p is not None)}",
                hint="in a ring every link carries the same load, and no switch is needed",
            )
        expect_equal(
            sum(call.num_bytes for call in each),
            steps * chunk,
            what=f"bytes sent by rank {rank} of {n}, {steps} chunks of {chunk} bytes",
            mistake=f"{len(each)} messages where {steps} are enough" if len(each) > steps else "",
            hint="each half of the ring takes n - 1 steps, and a step is one chunk",
        )


def in_sub_groups(candidate: Any, operation: Callable[[Any, Tensor, Any], Tensor]) -> list[Tensor]:
    """Five ranks; 1, 2 and 4 are one group, 0 and 3 the other. What came out, by rank."""

    def work(rank: int) -> Tensor:
        groups = [dist.new_group(members) for members in ([1, 2, 4], [0, 3])]
        own = torch.full((6,), 10.0**rank)
        return operation(candidate, own, groups[0 if rank in (1, 2, 4) else 1])

    try:
        return on_ranks(work, 5)
    except NotImplementedError:
        raise
    except Exception as error:
        if "a parameter is refused" in str(error):
            raise
        wrong(
            "in a sub-group the ranks do not find each other",
            expected="ranks 1, 2 and 4 as a group of three",
            seen=getattr(error, "seen", "") or str(error)[:200],
            hint="every call needs group=group. dist.get_rank(group) counts within the group, dst= "
            "and src= in the whole world: pass group_dst= and group_src=, or "
            "dist.get_global_rank(group, r)",
        )
        raise AssertionError from None


@exercise_05_1.check("the sum of its own chunk, three ranks")
def own_chunk(ring_reduce_scatter: Any) -> None:
    n, numel, seed = 3, 12, fresh_seed()
    outcome = observed(ring_reduce_scatter, returns, n, (numel,), seed)
    chunks = added(n, (numel,), seed).view(n, -1)
    for rank, (came, _, _) in enumerate(outcome):
        own = [values(r, (numel,), seed, torch.float64).view(n, -1)[rank] for r in range(n)]
        expect_returned(came)
        expect_close(
            came,
            chunks[rank],
            what=f"the chunk that rank {rank} returns",
            looks_like={
                "rank r returns chunk r + 1: the ring ends one place too late": (
                    chunks[(rank + 1) % n]
                ),
                "rank r returns chunk r - 1: the ring starts one place off": chunks[rank - 1],
                "it is the mean, not the sum": chunks[rank] / n,
                "every rank returns the whole sum, not its chunk of it": chunks.view(-1),
                "it is this rank's own chunk: nothing was added (or before an irecv had been "
                "waited for)": own[rank],
                "what came is written over the chunk, not added to it": own[(rank + 1) % n],
            },
            hint="in the last step rank r must receive chunk r",
        )


@exercise_05_1.check("odd sizes and shapes, two to five ranks; the input is left as it is")
def odd_sizes(ring_reduce_scatter: Any) -> None:
    for n, shape in [(2, (7,)), (3, (7,)), (4, (3, 5)), (5, (3,)), (4, (8,)), (1, (3,))]:
        seed = fresh_seed()
        outcome = observed(ring_reduce_scatter, returns, n, shape, seed, columns=len(shape) == 2)
        total = added(n, shape, seed).reshape(-1)
        chunk = -(-total.numel() // n)
        padded = torch.cat([total, total.new_zeros(n * chunk - total.numel())])
        for rank, (came, left, _) in enumerate(outcome):
            what = f"chunk {rank} of {n}, shape {shape}"
            if isinstance(came, Tensor) and came.numel() < chunk:
                wrong(
                    f"the last {total.numel() % n} of {total.numel()} numbers are lost: the size "
                    "is divided and rounded down"
                    if rank == 0
                    else "the chunks are not of one size: the padding is missing or cut off",
                    expected=f"{what} of {chunk} numbers",
                    seen=f"{came.numel()} numbers",
                    hint="pad with zeros to n * ceil(numel / n); tensor.chunk(n) alone does not",
                )
            expect_close(came, padded.view(n, chunk)[rank], what=what)
            expect(
                torch.equal(left, values(rank, shape, seed, torch.float64)),
                mistake="the input is changed: chunks of the caller's own tensor are added up",
                expected="the tensor as it was given",
                seen=f"other values in it on rank {rank}",
                hint="add in a padded copy",
            )


@exercise_05_1.check("bytes that leave each rank")
def bytes_of_reduce_scatter(ring_reduce_scatter: Any) -> None:
    for n, numel in [(3, 300), (5, 301)]:
        outcome = observed(ring_reduce_scatter, returns, n, (numel,), fresh_seed())
        expect_ring(outcome, (numel,), n - 1, 8 * numel, 8 * -(-numel // n))


@exercise_05_1.check("every dtype that torch can add")
def dtypes_of_reduce_scatter(ring_reduce_scatter: Any) -> None:
    seed = fresh_seed()

    def work(rank: int) -> list[Tensor]:
        return [ring_reduce_scatter(values(rank, (7,), seed, dtype)) for dtype in DTYPES]

    for rank, each in enumerate(on_ranks(work, 3)):
        for dtype, came in zip(DTYPES, each, strict=True):
            total = torch.cat([added(3, (7,), seed, dtype), torch.zeros(2, dtype=dtype)])
            expect_close(came, total.view(3, 3)[rank], what=f"the chunk of a {dtype} tensor")


@exercise_05_1.check("a sub-group")
def sub_group_reduce_scatter(ring_reduce_scatter: Any) -> None:
    got = in_sub_groups(ring_reduce_scatter, lambda answer, own, group: answer(own, group))
    for rank, came in enumerate(got):
        size, total = (2, 10110.0) if rank in (1, 2, 4) else (3, 1001.0)
        expect_close(came, torch.full((size,), total), what=f"rank {rank} in its sub-group")


@exercise_05_2.check("the order of ranks, two to five of them")
def order_of_chunks(ring_all_gather: Any) -> None:
    for n, numel in [(3, 4), (2, 1), (4, 3), (5, 2), (1, 3)]:
        seed = fresh_seed()
        outcome = observed(ring_all_gather, returns, n, (numel,), seed)
        chunks = [values(r, (numel,), seed, torch.float64) for r in range(n)]
        for rank, (came, _, _) in enumerate(outcome):
            expect_returned(came)
            turned = chunks[rank:] + chunks[:rank]
            back = [chunks[(rank - i) % n] for i in range(n)]
            expect_close(
                came,
                torch.cat(chunks),
                what=f"what rank {rank} of {n} returns",
                looks_like={
                    "the chunks stand in the order of arrival, each rank's own first": (
                        torch.cat(back)
                    ),
                    "each rank's own chunk stands first, then those of the ranks after it": (
                        torch.cat(turned)
                    ),
                    "every place holds this rank's own chunk": torch.cat(n * [chunks[rank]]),
                    "the chunks are added, not put one behind the other": sum(
                        chunks[1:], chunks[0]
                    ),
                    "it forwards its own chunk in each step, not what came last": forwarded_own(
                        chunks, rank
                    ),
                },
                hint="the chunk of rank r belongs at place r, whenever it arrives",
            )


def forwarded_own(chunks: list[Tensor], rank: int) -> Tensor:
    """What is gathered when every rank sends its own chunk in every step."""
    n = len(chunks)
    return torch.cat([chunks[rank] if place == rank else chunks[rank - 1] for place in range(n)])


@exercise_05_2.check("bytes that leave each rank")
def bytes_of_all_gather(ring_all_gather: Any) -> None:
    for n, numel in [(4, 30), (5, 7)]:
        outcome = observed(ring_all_gather, returns, n, (numel,), fresh_seed())
        expect_ring(outcome, (numel,), n - 1, 8 * numel * n, 8 * numel)


@exercise_05_2.check("every dtype; chunks of any shape; the chunk is left as it is")
def dtypes_of_all_gather(ring_all_gather: Any) -> None:
    seed = fresh_seed()

    def work(rank: int) -> list[tuple[Tensor, bool]]:
        results = []
        for dtype in DTYPES:
            chunk = values(rank, (2, 3), seed, dtype).T
            results.append((ring_all_gather(chunk), torch.equal(chunk, values_of(rank, dtype))))
        return results

    def values_of(rank: int, dtype: torch.dtype) -> Tensor:
        return values(rank, (2, 3), seed, dtype).T

    for each in on_ranks(work, 3):
        for dtype, (came, same) in zip(DTYPES, each, strict=True):
            want = torch.cat([values_of(rank, dtype).reshape(-1) for rank in range(3)])
            expect_close(came, want, what=f"gathered chunks of {dtype}, shape (3, 2)")
            expect(same, expected="the chunk as it was given", seen="other values in it")


@exercise_05_2.check("a sub-group")
def sub_group_all_gather(ring_all_gather: Any) -> None:
    got = in_sub_groups(ring_all_gather, lambda answer, own, group: answer(own[:1], group))
    for rank, came in enumerate(got):
        members = (1, 2, 4) if rank in (1, 2, 4) else (0, 3)
        want = torch.tensor([10.0**member for member in members])
        expect_close(came, want, what=f"rank {rank} in its sub-group")


@exercise_05_3.check("in place, any size and shape, two to five ranks")
def all_reduce_values(ring_all_reduce: Any) -> None:
    expect_all_reduce(ring_all_reduce)


def expect_all_reduce(candidate: Any) -> None:
    """The sum in every rank's own tensor, for exercises 05.3 and 05.5."""
    for n, shape in [(3, (12,)), (2, (7,)), (4, (3, 5)), (5, (3,)), (3, (0,)), (3, ()), (1, (3,))]:
        seed, columns = fresh_seed(), len(shape) == 2
        outcome = observed(candidate, in_place, n, shape, seed, columns=columns)
        total = added(n, shape, seed)
        for _, _, calls in outcome:
            sends(calls)
        before = [values(rank, shape, seed, torch.float64) for rank in range(n)]
        same = [torch.equal(came, own) for (came, _, _), own in zip(outcome, before, strict=True)]
        if n > 1 and torch.equal(outcome[1][0], total + before[1]) and total.any():
            wrong(
                "the sum is added to the tensor, which is in the sum already",
                expected=f"the sum of {n} tensors",
                seen="each rank's own tensor counted twice",
                hint="overwrite: tensor.copy_(the sum, in the tensor's shape)",
            )
        if n > 1 and total.any() and same == [False] + [True] * (n - 1):
            wrong(
                "only rank 0 has the sum: nobody sent it back",
                expected="the sum on every rank",
                seen="the other ranks' tensors as they were",
            )
        untouched = (
            "a tensor that is not contiguous is left as it was: a copy of it was summed"
            if columns
            else "the tensor is as it was: the sum must be copied into it"
        )
        for rank, (came, _, _) in enumerate(outcome):
            part = slice(rank * -(-total.numel() // n), (rank + 1) * -(-total.numel() // n))
            alone = before[rank].reshape(-1).clone()
            alone[part] = total.reshape(-1)[part]
            expect_close(
                came,
                total,
                what=f"the tensor of rank {rank} of {n}, shape {shape}",
                looks_like={
                    untouched: before[rank],
                    "it is the mean, not the sum": total / n,
                    "rank 0 counts its own tensor twice": total + before[0],
                    "rank 0 sends the sum back before it has heard all: a part of the ranks is "
                    "in it": sum(before[1 : rank + 1], before[0]),
                    "only this rank's chunk is summed: the all-gather is missing": alone.view(
                        shape
                    ),
                },
                hint="tensor.copy_(the sum, in the tensor's shape) writes into the caller's "
                "memory; tensor = ... and tensor.data = ... do not",
            )


@exercise_05_3.check("bytes that leave each rank")
def bytes_of_all_reduce(ring_all_reduce: Any) -> None:
    for n, numel in [(3, 300), (5, 301)]:
        outcome = observed(ring_all_reduce, in_place, n, (numel,), fresh_seed())
        expect_ring(outcome, (numel,), 2 * (n - 1), 8 * numel, 8 * -(-numel // n))


@exercise_05_3.check("the same bits on every rank, every dtype")
def same_bits(ring_all_reduce: Any) -> None:
    seed = fresh_seed()

    def work(rank: int) -> list[Tensor]:
        tensors = [values(rank, (7,), seed, dtype) for dtype in DTYPES]
        noise = torch.randn(1001, generator=torch.Generator().manual_seed(seed + rank))
        for tensor in [*tensors, noise]:
            ring_all_reduce(tensor)
        return [*tensors, noise]

    got = on_ranks(work, 3)
    for each in got:
        for dtype, came in zip(DTYPES, each[:-1], strict=True):
            expect_close(came, added(3, (7,), seed, dtype), what=f"the sum of {dtype} tensors")
        expect(
            torch.equal(each[-1], got[0][-1]),
            mistake="the ranks hold sums that differ in their last bits",
            expected="equal bits: each chunk is summed once, and copied",
            seen="sums in different orders of addition",
            hint="weights that should stay equal would drift apart",
        )


@exercise_05_3.check("a parameter, and a sub-group")
def sub_group_all_reduce(ring_all_reduce: Any) -> None:
    expect_sub_group_sum(ring_all_reduce)


def expect_sub_group_sum(candidate: Any) -> None:
    """The sum within each sub-group, in a tensor that autograd knows."""

    def operation(answer: Any, own: Tensor, group: Any) -> Tensor:
        leaf = own.requires_grad_()
        answer(leaf, group)
        return leaf.detach()

    for rank, came in enumerate(in_sub_groups(candidate, operation)):
        total = 10110.0 if rank in (1, 2, 4) else 1001.0
        expect_close(came, torch.full((6,), total), what=f"rank {rank} in its sub-group")


@exercise_05_4.check("the source's tensor on every rank, two to five of them")
def broadcast_values(tree_broadcast: Any) -> None:
    cases = [(4, 0, (5,)), (4, 2, (5,)), (2, 1, (7,)), (5, 4, (1,)), (3, 1, (3, 5)), (1, 0, (2,))]
    for n, src, shape in cases:
        seed, flat = fresh_seed(), len(shape) != 2

        def operation(answer: Any, own: Tensor, src: int = src) -> Tensor:
            return in_place(lambda memory: answer(memory, src), own)

        outcome = observed(tree_broadcast, operation, n, shape, seed, columns=not flat)
        before = [values(rank, shape, seed, torch.float64) for rank in range(n)]
        after = [came for came, _, _ in outcome]
        if src and n > 1 and all(torch.equal(came, before[0]) for came in after):
            wrong(
                "it is the tensor of rank 0, whatever src is",
                expected=f"the tensor of rank {src}",
                seen=f"that of rank 0, on all {n} ranks",
                hint="number the ranks from the source: (rank - src) % n",
            )
        left = [rank for rank in range(n) if rank != src and torch.equal(after[rank], before[rank])]
        if n == 5 and 0 < len(left) < n - 1:
            wrong(
                f"with {n} ranks not all get it: the rounds end too early, or a place is left out, "
                "where n is no power of two",
                expected=f"the tensor of rank {src} on all of them",
                seen=f"ranks {left} have their own still",
                hint="go on while fewer than n have it",
            )
        untouched = (
            "the tensor is as it was: nothing arrived"
            if flat
            else "a tensor that is not contiguous is left as it was: a copy of it received"
        )
        for rank, came in enumerate(after):
            expect_close(
                came,
                before[src],
                what=f"the tensor of rank {rank} of {n}, from rank {src}, shape {shape}",
                looks_like={untouched: before[rank]},
            )


@exercise_05_4.check("messages and rounds")
def broadcast_rounds(tree_broadcast: Any) -> None:
    for n, src in [(4, 0), (5, 3), (7, 2)]:

        def operation(answer: Any, own: Tensor, src: int = src) -> Tensor:
            answer(own, src)
            return own

        outcome = observed(tree_broadcast, operation, n, (6,), fresh_seed())
        sent = [sends(calls) for _, _, calls in outcome]
        peers = [[call.peer for call in each if call.peer is not None] for each in sent]
        rounds, most = num_rounds(peers, src), (n - 1).bit_length()
        if rounds > most:
            flat = len(peers[src]) == n - 1
            wrong(
                "the source sends to everybody itself: the others never help"
                if flat
                else "a chain: each rank sends to one other, and the last waits for all"
                if max(map(len, peers)) == 1
                else "it is no tree of the smallest depth",
                expected=f"{most} rounds for {n} ranks: ceil(log2 {n})",
                seen=f"{rounds} rounds, one message after another from each rank",
                hint="whoever has it sends it on: 1, 2, 4, 8 ranks have it",
            )
        whole = 6 * 8
        total = sum(call.num_bytes for each in sent for call in each)
        expect_equal(total, (n - 1) * whole, what=f"bytes of all messages, {n} ranks")


def num_rounds(peers: list[list[int]], src: int) -> int:
    """When the last rank has it, if a message takes one round and a rank sends one at a time."""
    arrived, waiting = {src: 0}, [src]
    while waiting:
        rank = waiting.pop(0)
        for place, peer in enumerate(peers[rank]):
            if peer not in arrived:
                arrived[peer] = arrived[rank] + place + 1
                waiting.append(peer)
    return max(arrived.values())


@exercise_05_4.check("every dtype, and a sub-group whose src counts within it")
def sub_group_broadcast(tree_broadcast: Any) -> None:
    seed = fresh_seed()

    def work(rank: int) -> list[Tensor]:
        tensors = [values(rank, (7,), seed, dtype) for dtype in DTYPES]
        for tensor in tensors:
            tree_broadcast(tensor, 1)
        return tensors

    for each in on_ranks(work, 3):
        for dtype, came in zip(DTYPES, each, strict=True):
            expect_close(came, values(1, (7,), seed, dtype), what=f"a {dtype} tensor")

    def operation(answer: Any, own: Tensor, group: Any) -> Tensor:
        leaf = own.requires_grad_()
        answer(leaf, 1, group)
        return leaf.detach()

    for rank, came in enumerate(in_sub_groups(tree_broadcast, operation)):
        src = 2 if rank in (1, 2, 4) else 3
        expect_close(came, torch.full((6,), 10.0**src), what=f"rank {rank} in its sub-group")


@exercise_05_5.check("in place, any size and shape, two to five ranks")
def central_values(central_all_reduce: Any) -> None:
    expect_all_reduce(central_all_reduce)


@exercise_05_5.check("bytes that leave each rank")
def central_bytes(central_all_reduce: Any) -> None:
    n, whole = 4, 8 * 30
    outcome = observed(central_all_reduce, in_place, n, (30,), fresh_seed())
    sent = [sends(calls) for _, _, calls in outcome]
    others = {call.peer for each in sent[1:] for call in each}
    if others != {0}:
        wrong(
            "the ranks talk to each other: here everything goes through rank 0",
            expected="messages to rank 0 alone from the other ranks",
            seen=f"messages to ranks {sorted(p for p in others if p is not None)}",
            hint="this exercise is the bad example; build it as it is described",
        )
    for rank, each in enumerate(sent):
        want = (n - 1) * whole if rank == 0 else whole
        expect_equal(
            sum(call.num_bytes for call in each), want, what=f"bytes sent by rank {rank} of {n}"
        )


@exercise_05_5.check("every dtype, and a sub-group")
def central_dtypes(central_all_reduce: Any) -> None:
    seed = fresh_seed()

    def work(rank: int) -> list[Tensor]:
        tensors = [values(rank, (7,), seed, dtype) for dtype in DTYPES]
        for tensor in tensors:
            central_all_reduce(tensor)
        return tensors

    for each in on_ranks(work, 3):
        for dtype, came in zip(DTYPES, each, strict=True):
            expect_close(came, added(3, (7,), seed, dtype), what=f"the sum of {dtype} tensors")
    expect_sub_group_sum(central_all_reduce)
