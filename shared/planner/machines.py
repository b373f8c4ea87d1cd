"""The machines that a plan is laid over."""

from dataclasses import dataclass

from shared.errors import InputError
from shared.planner.checking import at_least, yes_or_no


@dataclass(frozen=True)
class Cluster:
    """The machines: bytes, FLOP/s, bytes/s in one direction a GPU, seconds a message.

    `inner` is the link between the GPUs of a node, `outer` a GPU's share of the node's link to
    others; `memory_bandwidth` is that of a GPU's own memory. `achievable`: the share of
    `peak_flops` that large matrix products reach on this GPU, as measured by others. `throttled`:
    its power limits its clock in a long run, as an H100's does.
    """

    gpus: int
    memory: float
    peak_flops: float
    gpus_per_node: int
    inner: float
    outer: float
    memory_bandwidth: float
    latency: float = 5e-6
    achievable: float = 1.0
    throttled: bool = False

    def link(self, size: int, stride: int) -> float:
        """Bytes/s a GPU between `size` ranks that stand `stride` apart.

        A group that spans nodes has the network cards of all its GPUs in a node.
        """
        if size * stride <= self.gpus_per_node:
            return self.inner
        inside = max(1, min(size, self.gpus_per_node // stride))
        return min(self.inner, self.outer * inside)

    def __post_init__(self) -> None:
        at_least(self, ("gpus", "gpus_per_node"), 1)
        yes_or_no(self, ("throttled",))
        rates = ("memory", "peak_flops", "inner", "outer", "memory_bandwidth", "achievable")
        at_least(self, ("latency", *rates), 0)
        for name in rates:
            if not getattr(self, name):
                raise InputError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.achievable > 1:
            raise InputError(f"achievable is a share of the peak, 1 at most, got {self.achievable}")
