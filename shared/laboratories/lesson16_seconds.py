"""Lesson 16: seconds of a step, message by message, and what they are where one is overlooked.

`Seconds` has a field for each thing that people overlook or take for another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.laboratories.lesson16_bytes import RIGHT, Bytes, layer_items
from shared.planner.outcomes import FITTED, Fitted
from shared.planner.specs import Cluster, ModelSpec, Plan

Numbers = dict[str, float]
KINDS = ("compute", "tensor_parallel", "pipeline", "bubble", "data_parallel", "model_flops")


@dataclass(frozen=True)
class Case:
    """What is asked: a model, a plan, a cluster and the fitted shares."""

    model: ModelSpec
    plan: Plan
    cluster: Cluster
    fitted: Fitted

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.plan.micro_batch * self.model.seq_len

    @property
    def size(self) -> int:
        """Bytes of a number of the stream."""
        return 2 if self.plan.precision == "mixed" else 4


def layer_flops(model: ModelSpec) -> tuple[int, int]:
    """FLOPs of a token's forward through a layer, and those of them that are attention's."""
    matrices = sum(size for size, cut in layer_items(replace(model, bias=False)) if cut)
    scores = 4 * model.seq_len * model.d_model  # q k and weights v, an addition counts as one
    scores //= 2 if model.fused_attention else 1
    return 2 * matrices + scores, scores


@dataclass(frozen=True)
class Seconds:
    """How seconds are counted: a field for each thing that may be overlooked, by default right."""

    passes: int = 3  # forward, and twice its work in backward
    head_passes: int = 3
    again: bool = True
    again_with: tuple[str, ...] = ("full", "selective")
    again_flops: bool = True
    full_flops: bool = True
    again_bytes: bool = True
    score_bytes: bool = True
    head_shared: bool = True
    sequences: bool = True  # micro_batch of them
    again_fused: bool = False  # attention that keeps no scores
    trips: int = 2  # of what a layer keeps through the memory
    head: bool = True
    tp_shares: bool = True
    slowest: str = "slowest"
    fitted: bool = True  # the argument, not FITTED
    batches: bool = True
    matmul: bool = True
    achievable: bool = True
    memory: bool = True
    # messages
    two_bytes: bool = False  # in float32 as well
    of_layers: str = "the most of a rank"
    all_reduces: int = 4
    ring: float = 2.0
    ring_share: bool = True
    tp_link: str = "link"
    latency: bool = True
    link_share: bool = True
    ways: int = 2
    pp_link: str = "link"
    pp_parts: bool = True
    chunks: bool = True
    # bubble
    bubble: str = "(p - 1) / (v m)"
    bubble_of: str = "all"
    # data parallelism
    dp_parts: bool = True
    dp_ring: float = 1.0
    dp_twice: bool = True
    dp_link: str = "link"
    hidden: str = "one backward"
    hides_parameters: tuple[int, ...] = ()  # with these stages of ZeRO
    hides_anyway: bool = False  # with ZeRO-3, without overlap
    overlap: bool = True  # asked for; False: hidden without it as well
    zero3_hides: float = 1.0  # micro-batches' compute
    zero3_one: bool = False  # one micro-batch's compute, whatever hides gradients
    below_0: bool = False
    zero2_every: bool = True
    zero2_hides_once: bool = False
    dp_numbers: Bytes = RIGHT
    zero3_gathers: int = 2
    mean_rank: bool = False
    every_batch: bool = False
    zero: bool = True
    # FLOPs
    again_counts: bool = False
    a_gpu: bool = True
    of_batch: bool = True

    def tokens(self, at: Case) -> int:
        """Tokens of a micro-batch."""
        return at.tokens if self.sequences else at.model.seq_len

    def compute(self, at: Case) -> float:
        """Seconds of compute of one micro-batch."""
        (layer, scores), plan, again = layer_flops(at.model), at.plan, 0
        kept, score_bytes = (
            RIGHT.kept(at.model, replace(plan, checkpoint=each))[i]
            for each, i in (("none", 0), ("selective", 1))
        )
        bytes_moved = self.trips * kept
        redone = plan.checkpoint if self.again and plan.checkpoint in self.again_with else "none"
        if redone == "full":
            again, bytes_moved = layer * self.full_flops, bytes_moved + self.again_bytes * kept
        if redone == "selective" and (score_bytes or self.again_fused):
            moved = score_bytes if self.again_bytes and self.score_bytes else 0
            again, bytes_moved = scores, bytes_moved + moved
        again = again if self.again_flops else 0
        rate = at.cluster.peak_flops * (plan.tp if self.tp_shares else 1)
        rate *= at.fitted.matmul if self.matmul else 1
        rate *= at.cluster.achievable if self.achievable else 1
        one = self.tokens(at) * (self.passes * layer + again) / rate
        one += self.memory * at.fitted.traffic * bytes_moved / at.cluster.memory_bandwidth
        head = self.head * self.head_passes * self.tokens(at) / rate
        head *= 2 * at.model.vocab_size * at.model.d_model
        head *= 1 if self.head_shared else plan.tp
        stages = [sum(each) * one for each in plan.layers(at.model)]
        behind = max(stages) + head
        stages[-1] += head
        return {
            "slowest": max(stages),
            "mean": sum(stages) / len(stages),
            "first": stages[0],
            "last": stages[-1],
            "slowest, and the head": behind,
            "all": sum(stages),
        }[self.slowest]

    def link(self, at: Case, kind: str, size: int, stride: int) -> float:
        """Bytes/s."""
        links = {"inner": at.cluster.inner, "outer": at.cluster.outer}
        strides = {"neighbours": 1, "tp apart": at.plan.tp}
        rate = links.get(kind) or at.cluster.link(size, strides.get(kind, stride))
        return rate * (at.fitted.link if self.link_share else 1)

    def tensor_parallel(self, at: Case) -> float:
        """Seconds of a micro-batch's all-reduces."""
        t, own = at.plan.tp, [sum(each) for each in at.plan.layers(at.model)]
        shares = {"all": sum(own), "the mean": sum(own) / len(own)}
        layers = shares.get(self.of_layers, max(own))
        if t == 1:
            return 0.0
        count = self.all_reduces
        count += 2 if at.plan.checkpoint == "full" and self.again else 0
        sent = self.ring * ((t - 1) / t if self.ring_share else 1)
        sent *= self.tokens(at) * at.model.d_model * (2 if self.two_bytes else at.size)
        wait = at.cluster.latency if self.latency else 0.0
        return layers * count * (sent / self.link(at, self.tp_link, t, 1) + wait)

    def pipeline(self, at: Case) -> float:
        """Seconds of a micro-batch's vectors and gradients."""
        p = at.plan.pp
        if p == 1:
            return 0.0
        sent = self.tokens(at) * at.model.d_model * (2 if self.two_bytes else at.size)
        sent /= at.plan.tp if self.pp_parts else 1
        rate = self.link(at, self.pp_link, p, at.plan.num_gpus // p)
        wait = at.cluster.latency if self.latency else 0.0
        return self.ways * (at.plan.chunks if self.chunks else 1) * (sent / rate + wait)

    def waiting(self, at: Case) -> float:
        """The bubble as a share of the work."""
        p, m, v = at.plan.pp, at.plan.num_micro_batches, at.plan.chunks
        slots = 2 * (v * m + p - 1)  # of a table of lesson 15, of which 2 v m are work
        return {
            "(p - 1) / (v m)": slots / (2 * v * m) - 1,
            "(p - 1) / m": (p - 1) / m,
            "(p - 1) / (m + p - 1)": (p - 1) / (m + p - 1),
            "p / (v m)": p / (v * m),
            "(p - 1) / p": (p - 1) / p,
            "of the whole": 1 - 2 * v * m / slots,
        }[self.bubble]

    def data_parallel(self, at: Case, compute: float) -> float:
        """Seconds of a step's messages of gradients and parameters that nothing hides."""
        n, plan, m = at.plan.dp, at.plan, at.plan.num_micro_batches
        if n == 1:
            return 0.0
        one = plan if self.dp_parts else replace(plan, tp=1, pp=1, chunks=1, cut=None)
        ranks = [self.dp_numbers.items(at.model, one, rank) for rank in range(one.pp)]
        sizes = [sum(k // one.tp if cut else k for k, cut in items) for items in ranks]
        most = sum(sizes) / one.pp if self.mean_rank else max(sizes)
        rate = self.link(at, self.dp_link, n, plan.tp)
        byte = self.dp_ring * (n - 1) / n * most / rate
        weight = gradient = 2 if plan.precision == "mixed" or self.two_bytes else 4
        behind = {
            "one backward": 2 / 3 * compute,
            "one micro-batch": compute,
            "all backwards": 2 / 3 * compute * m,
            "everything": float("inf"),
            "nothing": 0.0,
        }[self.hidden]
        whole = compute if self.zero3_one else 1.5 * behind * self.zero3_hides
        hides = plan.overlap or not self.overlap
        behind = behind if hides else 0.0
        whole = whole if hides or self.hides_anyway else 0.0
        least = -float("inf") if self.below_0 else 0.0
        zero = plan.zero if self.zero else 0
        if zero == 0:
            times = m if self.every_batch else 1
            return times * max(least, (1 + self.dp_twice) * gradient * byte - behind)
        if zero == 3:
            return m * max(least, (self.zero3_gathers * weight + gradient) * byte - whole)
        times = m if (zero == 2 and self.zero2_every) or self.every_batch else 1
        if zero in self.hides_parameters:
            return times * max(least, (gradient + weight / times) * byte - behind)
        if zero == 2 and self.zero2_hides_once:
            return max(least, times * gradient * byte - behind) + weight * byte
        return times * max(least, gradient * byte - behind) + weight * byte

    def numbers(self, *case) -> Numbers:
        """All kinds by name."""
        at = Case(*case)
        at = at if self.fitted else replace(at, fitted=FITTED)
        m = at.plan.num_micro_batches if self.batches else 1
        one = self.compute(at)
        work = [m * one, m * self.tensor_parallel(at), m * self.pipeline(at)]
        whole = work[0] if self.bubble_of == "compute" else sum(work)
        apart = self.data_parallel(at, one)
        whole += apart if self.bubble_of == "the step" else 0.0
        bubble = self.waiting(at) * whole
        layer, _ = layer_flops(at.model)
        a_token = at.model.num_layers * layer + 2 * at.model.vocab_size * at.model.d_model
        done = 3 * a_token
        if self.again_counts and at.plan.checkpoint == "full":
            done += at.model.num_layers * layer
        done *= (
            at.model.seq_len
            * (at.plan.batch if self.of_batch else 1)
            / (at.plan.num_gpus if self.a_gpu else 1)
        )
        return dict(zip(KINDS, (*work, bubble, apart, done), strict=True))

    def of(self, *kinds: str) -> Callable[..., Numbers]:
        """The numbers of some kinds."""
        return lambda *case: {kind: self.numbers(*case)[kind] for kind in kinds}


RIGHT_SECONDS = Seconds()


def total(*case) -> float:
    """Seconds of a step."""
    numbers = RIGHT_SECONDS.numbers(*case)
    return sum(numbers[kind] for kind in KINDS if kind != "model_flops")
