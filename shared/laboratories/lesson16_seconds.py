"""Lesson 16: seconds of a step, message by message, and what they are where one is overlooked.

`Seconds` has a field for each thing that people overlook or take for another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.laboratories.lesson16_bytes import RIGHT, layer_items
from shared.planner.outcomes import Fitted
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
    again: bool = True
    head: bool = True
    tp_shares: bool = True
    slowest: bool = True
    batches: bool = True
    matmul: bool = True
    achievable: bool = True
    memory: bool = True
    # messages
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
    every_batch: bool = False
    zero: bool = True
    # FLOPs
    again_counts: bool = False
    a_gpu: bool = True

    def compute(self, at: Case) -> float:
        """Seconds of compute of one micro-batch."""
        (layer, scores), plan, passes, again = layer_flops(at.model), at.plan, self.passes, 0
        kept, score_bytes = (
            RIGHT.kept(at.model, replace(plan, checkpoint=each))[i]
            for each, i in (("none", 0), ("selective", 1))
        )
        bytes_moved = 2 * kept
        if self.again and plan.checkpoint == "full":
            again, bytes_moved = layer, 3 * kept
        if self.again and plan.checkpoint == "selective" and score_bytes:
            again, bytes_moved = scores, 2 * kept + score_bytes
        rate = at.cluster.peak_flops * (plan.tp if self.tp_shares else 1)
        rate *= at.fitted.matmul if self.matmul else 1
        rate *= at.cluster.achievable if self.achievable else 1
        one = at.tokens * (passes * layer + again) / rate
        one += self.memory * at.fitted.traffic * bytes_moved / at.cluster.memory_bandwidth
        head = self.head * passes * at.tokens * 2 * at.model.vocab_size * at.model.d_model / rate
        stages = [sum(each) * one for each in plan.layers(at.model)]
        stages[-1] += head
        return max(stages) if self.slowest else sum(stages) / len(stages)

    def link(self, at: Case, kind: str, size: int, stride: int) -> float:
        """Bytes/s."""
        links = {"inner": at.cluster.inner, "outer": at.cluster.outer}
        rate = links.get(kind) or at.cluster.link(size, stride)
        return rate * (at.fitted.link if self.link_share else 1)

    def tensor_parallel(self, at: Case) -> float:
        """Seconds of a micro-batch's all-reduces."""
        t, layers = at.plan.tp, max(sum(each) for each in at.plan.layers(at.model))
        if t == 1:
            return 0.0
        count = self.all_reduces
        count += 2 if at.plan.checkpoint == "full" and self.again else 0
        sent = self.ring * ((t - 1) / t if self.ring_share else 1)
        sent *= at.tokens * at.model.d_model * at.size
        wait = at.cluster.latency if self.latency else 0.0
        return layers * count * (sent / self.link(at, self.tp_link, t, 1) + wait)

    def pipeline(self, at: Case) -> float:
        """Seconds of a micro-batch's vectors and gradients."""
        p = at.plan.pp
        if p == 1:
            return 0.0
        sent = at.tokens * at.model.d_model * at.size / (at.plan.tp if self.pp_parts else 1)
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
            "(p - 1) / p": (p - 1) / p,
            "of the whole": 1 - 2 * v * m / slots,
        }[self.bubble]

    def data_parallel(self, at: Case, compute: float) -> float:
        """Seconds of a step's messages of gradients and parameters that nothing hides."""
        n, plan, m = at.plan.dp, at.plan, at.plan.num_micro_batches
        if n == 1:
            return 0.0
        one = plan if self.dp_parts else replace(plan, tp=1, pp=1, chunks=1, cut=None)
        ranks = [RIGHT.items(at.model, one, rank) for rank in range(one.pp)]
        most = max(sum(k // one.tp if cut else k for k, cut in items) for items in ranks)
        rate = self.link(at, self.dp_link, n, plan.tp)
        byte = self.dp_ring * (n - 1) / n * most / rate
        weight, gradient = (2, 2) if plan.precision == "mixed" else (4, 4)
        behind = {
            "one backward": 2 / 3 * compute,
            "all backwards": 2 / 3 * compute * m,
            "everything": float("inf"),
            "nothing": 0.0,
        }[self.hidden]
        behind = behind if plan.overlap else 0.0
        zero = plan.zero if self.zero else 0
        if zero == 0:
            times = m if self.every_batch else 1
            return times * max(0.0, (1 + self.dp_twice) * gradient * byte - behind)
        if zero == 3:
            return m * max(0.0, (2 * weight + gradient) * byte - 1.5 * behind)
        times = m if zero == 2 or self.every_batch else 1
        return times * max(0.0, gradient * byte - behind) + weight * byte

    def numbers(self, *case) -> Numbers:
        """All kinds by name."""
        at = Case(*case)
        m = at.plan.num_micro_batches if self.batches else 1
        one = self.compute(at)
        work = [m * one, m * self.tensor_parallel(at), m * self.pipeline(at)]
        whole = sum(work) if self.bubble_of == "all" else work[0]
        bubble, apart = self.waiting(at) * whole, self.data_parallel(at, one)
        layer, _ = layer_flops(at.model)
        a_token = at.model.num_layers * layer + 2 * at.model.vocab_size * at.model.d_model
        done = 3 * a_token
        if self.again_counts and at.plan.checkpoint == "full":
            done += at.model.num_layers * layer
        done *= at.model.seq_len * at.plan.batch / (at.plan.num_gpus if self.a_gpu else 1)
        return dict(zip(KINDS, (*work, bubble, apart, done), strict=True))

    def of(self, *kinds: str) -> Callable[..., Numbers]:
        """The numbers of some kinds."""
        return lambda *case: {kind: self.numbers(*case)[kind] for kind in kinds}


RIGHT_SECONDS = Seconds()


def total(*case) -> float:
    """Seconds of a step."""
    numbers = RIGHT_SECONDS.numbers(*case)
    return sum(numbers[kind] for kind in KINDS if kind != "model_flops")


WRONG = {
    "compute": {
        "backward is left out: it takes twice the forward": Seconds(passes=1),
        "backward counts as one forward: it takes two": Seconds(passes=2),
        "what backward computes again is not counted": Seconds(again=False),
        "the output matrix is left out": Seconds(head=False),
        "compute is not shared over tp": Seconds(tp_shares=False),
        "the mean of the stages is taken: a pipeline goes at the pace of the slowest": (
            Seconds(slowest=False)
        ),
        "one micro-batch is counted, not the step's": Seconds(batches=False),
        "the fitted share of the peak is not used": Seconds(matmul=False),
        "achievable is not used": Seconds(achievable=False),
        "the traffic of the GPU's memory is left out": Seconds(memory=False),
    },
    "tensor_parallel": {
        "backward's all-reduces are left out": Seconds(all_reduces=2),
        "an all-reduce sends everything twice: a reduce-scatter, then an all-gather": (
            Seconds(ring=1.0)
        ),
        "a rank sends itself its own part as well: (t - 1) / t is missing": (
            Seconds(ring_share=False)
        ),
        "tensor parallelism goes over the link between nodes": Seconds(tp_link="outer"),
        "what is computed again sends nothing: its all-reduces come on top": Seconds(again=False),
        "the latency of messages is left out": Seconds(latency=False),
        "the share of the link that collectives reach is not used": Seconds(link_share=False),
        "the messages of one micro-batch are counted, not the step's": Seconds(batches=False),
    },
    "pipeline": {
        "the gradients that travel back are left out": Seconds(ways=1),
        "stages are taken for neighbours inside a node: they stand furthest apart": (
            Seconds(pp_link="inner")
        ),
        "every rank of tp sends whole vectors: each sends a part": Seconds(pp_parts=False),
        "vectors pass a rank once: with several stages a rank they pass it several times": Seconds(
            chunks=False
        ),
    },
    "bubble": {
        "(p - 1) / p is no bubble: more micro-batches make it smaller": (
            Seconds(bubble="(p - 1) / p")
        ),
        "the bubble is taken as a share of the whole step: (p - 1) / (v m) is one of work": (
            Seconds(bubble="of the whole")
        ),
        "interleaving is left out: v stages a rank make the bubble smaller": Seconds(
            bubble="(p - 1) / m"
        ),
        "the bubble is of compute alone: messages are waited for as well": Seconds(
            bubble_of="compute"
        ),
    },
    "model_flops": {
        "what is computed again counts as useful work": Seconds(again_counts=True),
        "the FLOPs are those of all GPUs together": Seconds(a_gpu=False),
    },
    "data_parallel": {
        "the gradients of the whole model travel: a rank has those of its part": (
            Seconds(dp_parts=False)
        ),
        "what one message does is counted twice": Seconds(dp_ring=2.0),
        "an all-reduce counts as one reduce-scatter: an all-gather follows": Seconds(
            dp_twice=False
        ),
        "the ranks of dp are taken for neighbours inside a node: they stand tp apart": (
            Seconds(dp_link="inner")
        ),
        "nothing is hidden: gradients travel while backward computes": Seconds(hidden="nothing"),
        "everything is hidden: what takes longer than backward shows": (
            Seconds(hidden="everything")
        ),
        "gradients hide behind all backwards of a step: they are known in the last alone": (
            Seconds(hidden="all backwards")
        ),
        "gradients travel with every micro-batch: they do so with ZeRO-2 and 3 alone": Seconds(
            every_batch=True
        ),
        "ZeRO changes nothing: it gathers parameters, and stages 2 and 3 send more often": Seconds(
            zero=False
        ),
    },
}
