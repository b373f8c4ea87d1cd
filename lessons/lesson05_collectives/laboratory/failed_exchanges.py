"""Lesson 05: what a failed exchange of messages says about the answer."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from shared.exercises.expecting import expect
from shared.exercises.on_ranks import raise_as_finding
from shared.exercises.wrong import Wrong
from shared.measuring.traffic import Call
from shared.ranks.failures import Failure, RankFailed
from shared.ranks.watching import can_watch

LEAF = "a leaf Variable that requires grad"  # torch's words
UNPAIRED = "a message without its other side: a send nobody receives, or a recv nobody sends to"
PAIRED = (
    "for each send(x, b) on rank a there must be one recv(y, a) on rank b; neighbours in a ring "
    "are (rank + 1) % n and (rank - 1) % n"
)
# How messages fail: the sign, the mistake, what was expected, the hint.
FAILURES: list[tuple[Callable[[RankFailed], bool], str, str, str]] = [
    (
        lambda failed: failed.kind is Failure.TO_ITSELF,
        "a rank sends to itself, or receives from itself",
        "messages between different ranks",
        "print rank and peer of every message, on paper or here, for so few ranks",
    ),
    (
        lambda failed: failed.signal == "SIGABRT",
        "a message is longer than the buffer of the rank that receives it",
        "buffers of the sender's size and dtype",
        "torch.empty_like(chunk) has the dtype; the padded chunks have one size",
    ),
    (
        lambda failed: failed.kind is Failure.LATE and not failed.quiet and can_watch(),
        "a loop that never ends: after so long the ranks are still at work",
        "all ranks back after a few messages",
        "does what the loop's condition asks for change inside it?",
    ),
    (
        lambda failed: failed.kind is Failure.LATE and all(r.is_in("send") for r in failed.late),
        "every rank waits in send until its neighbour receives, and none does: a deadlock",
        "all ranks back",
        "isend starts a message and goes on; recv; then wait() for what isend returned",
    ),
    (
        lambda failed: failed.kind in (Failure.LATE, Failure.PEER_LOST),
        UNPAIRED,
        "a recv for every send, and a send for every recv",
        PAIRED,
    ),
    (
        lambda failed: "offset < this->size" in failed.error_text,  # gloo's words
        "an empty tensor is received from anyone, which gloo cannot do: name the sender",
        "messages from ranks that are named, in their order",
        "dist.recv(buffer, group_src=other); the order of arrival leaves the last bits to chance",
    ),
    (
        lambda failed: "has to be contiguous" in failed.error_text,
        "what is sent or received is not contiguous: so is all that keeps the layout of a "
        "transposed tensor, as empty_like and clone do",
        "messages that lie in memory row by row",
        "tensor.contiguous(), or torch.empty(tensor.shape, dtype=tensor.dtype)",
    ),
    (
        lambda failed: "must match the size of tensor b" in failed.error_text,
        "tensors of different sizes are added: the last chunk is shorter than the others, as "
        "tensor.chunk(n) and tensor_split(n) leave it",
        "n chunks of ceil(numel / n) numbers, the last of them padded with zeros",
        "pad first, then cut: view(n, -1)",
    ),
    (
        lambda failed: "view size is not compatible" in failed.error_text,
        "view() refuses a tensor that is not contiguous, such as a transposed matrix",
        "any shape, contiguous or not",
        "reshape(-1) takes all of them; where it has to copy, the result must be copied back",
    ),
    (
        lambda failed: LEAF in failed.error_text,
        "a parameter is refused: autograd forbids to overwrite a leaf that needs a gradient",
        "a tensor with requires_grad=True, overwritten",
        "tensor.detach() is the same memory without autograd: write into that",
    ),
]


def report_exchange(failed: RankFailed, n: int) -> NoReturn:
    """Raise what a failed exchange of messages between n ranks says about the answer."""
    seen = "; ".join([failed.headline, *(late.place for late in failed.late if late.place)])
    if failed.kind in (Failure.TO_ITSELF, Failure.PEER_LOST):  # gloo's own words say less
        seen = f"rank {failed.rank} of {n} {failed.kind}"
    for sign, mistake, expected, hint in FAILURES:
        if sign(failed):
            only = failed.kind is Failure.TO_ITSELF and n == 1
            alone = " (there is only one, and n - 1 steps are none)" * only
            raise Wrong(mistake + alone, expected, seen + failed.at, hint) from None
    raise_as_finding(failed, {})


def report_sub_groups(failed: RankFailed) -> NoReturn:
    """Raise what a failed exchange within sub-groups of five ranks says about the answer."""
    own_words = type(failed.error) is Wrong or isinstance(failed.error, NotImplementedError)
    if own_words or LEAF in failed.error_text:
        report_exchange(failed, 5)
    raise Wrong(
        "in a sub-group the ranks do not find each other",
        "ranks 1, 2 and 4 as a group of three",
        failed.headline + failed.at,
        "every call needs group=group. dist.get_rank(group) counts within the group, dst= and "
        "src= in the whole world: pass group_dst= and group_src=, or "
        "dist.get_global_rank(group, r)",
    ) from None


def expect_paired(calls: Sequence[Sequence[Call]]) -> None:
    """Each rank must receive as many messages as were sent to it; `calls` by rank."""
    for rank, own in enumerate(calls):
        sent = sum(call.op == "send" and call.peer == rank for each in calls for call in each)
        received = sum(call.op == "recv" for call in own)
        expect(
            sent == received,
            mistake=UNPAIRED,
            expected="a recv for every send, and a send for every recv",
            seen=f"{sent} messages are sent to rank {rank}, which receives {received}",
            hint=PAIRED,
        )
