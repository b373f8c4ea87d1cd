"""The loss of a translator: cross-entropy against a smoothed target, per unpadded token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def label_smoothed_loss(
    logits: Float[Tensor, "batch length vocab"],
    targets: Int[Tensor, "batch length"],
    smoothing: float = 0.1,
    pad_id: int = 0,
) -> Float[Tensor, ""]:
    """Mean cross-entropy per unpadded token against a smoothed target, in nats.

    The right token holds 1 - smoothing of the target's probability; `smoothing` is spread evenly
    over all V tokens, the right one included (Szegedy et al. 2016, section 7; what
    `F.cross_entropy(label_smoothing=)` does). Positions whose target is `pad_id` do not count,
    neither above the fraction line nor below. A batch of padding alone has loss 0 and gradients of
    0, so that backward() runs on every rank.

    Raises ValueError unless 0 <= smoothing < 1.
    """
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing must be at least 0 and below 1, not {smoothing}")
    # Under autocast logits are bf16, whose 8 bits are too few for a logarithm.
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    right = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # (B, T)
    loss = -(1 - smoothing) * right  # (B, T)
    if smoothing:  # a logit of -inf is a token ruled out: fine, unless it is to have a share
        loss = loss - smoothing * log_p.mean(dim=-1)
    counted = targets != pad_id
    return loss.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)
