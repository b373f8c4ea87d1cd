"""When gradients are complete, when their messages may leave, and how a bucket is laid out.

The order in which gradients come is recorded with hooks in a real backward pass, and the buckets
are those that torch's own rule makes of a model's parameters.
"""

from collections.abc import Sequence

import torch.distributed as dist
from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor, nn

from shared.plots import GREY, MEANING

TONES = (MEANING["gradients"], "#f3cf80")  # neighbours differ, and both mean gradients


def completed_order(model: nn.Module, loss: Float[Tensor, ""]) -> list[str]:
    """Run backward; return the parameters' names in the order in which their gradients came."""
    order: list[str] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return order


def leaving_times(queue: Sequence[str], completed: Sequence[str]) -> dict[str, int]:
    """When each message leaves: with the event at which it and all before it are complete.

    Events are counted from 1, a gradient each; the one after the last is finish_gradient_sync().
    """
    came = {name: event for event, name in enumerate(completed, 1)}
    times: dict[str, int] = {}
    latest = 0
    for name in queue:
        latest = max(latest, came.get(name, len(completed) + 1))
        times[name] = latest
    return times


def draw_leaving(ax: Axes, title: str, model: nn.Module, completed: Sequence[str]) -> None:
    """A row a parameter, last first: a dot when its gradient is complete, an arrow when it goes."""
    queue = [name for name, _ in model.named_parameters()][::-1]
    dots = []
    leaves = leaving_times(queue, completed)
    end = len(completed) + 1
    for row, name in enumerate(queue):
        if name in completed:
            came = completed.index(name) + 1
            ax.plot([came, leaves[name]], [row, row], color=GREY, linewidth=1)
            dots = ax.plot(came, row, "o", color=MEANING["gradients"], zorder=3)
        sent = ax.plot(leaves[name], row, ">", color=MEANING["communication"], markersize=9)
    ax.axvline(end, color=GREY, linestyle=":", linewidth=1)
    ax.set_yticks(range(len(queue)), queue)
    ax.set(xlim=(0.5, end + 0.5), ylim=(len(queue) - 0.5, -0.5), title=title)
    ticks = [*range(1, end), end]
    ax.set_xticks(ticks, [*map(str, range(1, end)), "finish"])
    ax.set_xlabel("events: a gradient is complete")
    ax.legend([*dots, *sent], ["gradient complete", "message leaves"], loc="lower left",
              frameon=True, framealpha=1, fontsize=8)  # fmt: skip
    ax.grid(axis="x", visible=False)


def draw_buckets(ax: Axes, model: nn.Module, cap_bytes: int) -> None:
    """Each bucket a bar of bytes, cut into the views of its gradients; large views bear names."""
    named = list(model.named_parameters())[::-1]
    tensors = [parameter.detach() for _, parameter in named]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [cap_bytes])
    for row, bucket in enumerate(buckets):
        left = 0
        for index in bucket:
            name, tensor = named[index][0], tensors[index]
            color = TONES[index % 2]
            ax.barh(row, tensor.nbytes, left=left, height=0.6, color=color, edgecolor="white")
            if tensor.nbytes > cap_bytes / 3:
                words = f"{name}\n{tuple(tensor.shape)}"
                middle = left + tensor.nbytes / 2
                ax.text(middle, row, words, ha="center", va="center", fontsize=8)
            else:  # too narrow for a name inside
                place = (-0.33, "bottom") if index % 2 else (0.33, "top")
                ax.text(left + 3, row + place[0], name, va=place[1], fontsize=7,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
            left += tensor.nbytes
    ax.axvline(cap_bytes, color="black", linestyle="--", linewidth=1)
    ax.set_yticks(range(len(buckets)), [f"bucket {row + 1}" for row in range(len(buckets))])
    ax.set(xlabel="bytes", ylim=(len(buckets) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
