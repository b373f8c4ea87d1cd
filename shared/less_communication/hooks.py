"""Hooks for torch's DDP that send fewer bytes: 16 bits, the largest numbers, signs."""

import torch
import torch.distributed as dist
from torch import Tensor

from shared.less_communication.packing import pack_signs, unpack_signs
from shared.less_communication.states import ErrorFeedback, Flat, Group, TopK, ready
from shared.ranks.collectives import all_gather

Future = torch.futures.Future[Tensor]


def fp16_hook(group: Group, bucket: dist.GradBucket) -> Future:
    """Average a bucket in 16 bits; half of float32's bytes. Does not wait for its message.

    The division comes before the sum, which may otherwise be beyond 65,504 where the mean is not.
    A number that is beyond it itself arrives as infinity. Source: torch's fp16_compress_hook.
    """
    buffer = bucket.buffer()
    half = buffer.to(torch.float16).div_(dist.get_world_size(group))
    work = dist.all_reduce(half, group=group, async_op=True)
    assert work is not None, "this rank is not in the group"
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def topk_with_error_feedback(state: TopK, bucket: dist.GradBucket) -> Future:
    """Average the largest numbers of a bucket, by size without sign; keep the rest for later.

    k = state.count(numbers) values in the buffer's dtype and k int32 places from each rank, each
    by one all_gather; what has no value from a rank counts as 0 there. All ranks get the same bits.
    Sources: Stich et al. 2018 (arXiv 1809.07599); Lin et al. 2018 (arXiv 1712.01887).
    """
    buffer = bucket.buffer()
    whole = buffer + state.recall(bucket)
    places = whole.abs().topk(state.count(whole.numel()), sorted=False).indices
    values = whole[places]
    residual = whole.clone()
    residual[places] = 0
    state.keep(bucket, residual)
    all_values = _gathered(values, state)
    all_places = _gathered(places.int(), state)
    buffer.zero_()
    for one, where in zip(all_values, all_places, strict=True):  # the same order on every rank
        buffer.index_add_(0, where, one)
    return ready(buffer.div_(state.world_size))


def one_bit_with_error_feedback(state: ErrorFeedback, bucket: dist.GradBucket) -> Future:
    """Average the signs of a bucket, each gradient's times its mean size; keep the rest for later.

    ceil(numbers / 8) bytes of signs and one scale a gradient, in the buffer's dtype, from each
    rank, each by one all_gather. The mean size is the scale of least squared error.
    Sources: Seide et al. 2014; Karimireddy et al. 2019 (arXiv 1901.09847); 1-bit Adam, Tang et
    al. 2021 (arXiv 2102.02888), which sends signs of the momentum.
    """
    buffer = bucket.buffer()
    whole = buffer + state.recall(bucket)
    sizes = [gradient.numel() for gradient in bucket.gradients()]
    scales = torch.stack([part.abs().mean() for part in whole.split(sizes)])
    packed = pack_signs(whole)
    state.keep(bucket, whole - _signed(packed, scales, sizes))
    all_packed, all_scales = _gathered(packed, state), _gathered(scales, state)
    buffer.zero_()
    for one, scale in zip(all_packed, all_scales, strict=True):
        buffer += _signed(one, scale, sizes)
    return ready(buffer.div_(state.world_size))


def _signed(packed: Tensor, scales: Flat, sizes: list[int]) -> Flat:
    """The numbers that signs and scales stand for."""
    repeats = torch.tensor(sizes, device=scales.device)
    return unpack_signs(packed, sum(sizes), scales.dtype) * scales.repeat_interleave(repeats)


def _gathered(mine: Tensor, state: ErrorFeedback) -> tuple[Tensor, ...]:
    """Every rank's tensor, in the order of ranks."""
    if state.world_size == 1:
        return (mine,)
    whole = mine.new_empty(state.world_size * mine.numel())
    all_gather(whole, mine, state.group).wait()
    return whole.split(mine.numel())
