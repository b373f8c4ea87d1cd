"""Lesson 16: bytes on a rank, item by item, and what they are where one thing is overlooked.

Parameters are counted matrix by matrix, activations tensor by tensor as in Korthikanti et al. 2022
(arXiv 2205.05198, section 4.1); `Bytes` has a field for each thing that people overlook.
"""

import functools
from dataclasses import dataclass

from shared.pipeline.schedules import interleaved_schedule, one_f_one_b_schedule
from shared.planner.specs import ModelSpec, Plan

States = tuple[int, ...]  # bytes of parameters, gradients, optimizer
KINDS = ("parameters", "gradients", "optimizer")
Items = list[tuple[int, bool]]  # numbers of a parameter, and whether tp cuts it


def layer_items(model: ModelSpec) -> Items:
    """The parameters of one layer."""
    d, f, kv = model.d_model, model.d_ff, model.d_model // model.num_heads * model.kv_heads
    up = [d * f, d * f] if model.gated else [d * f]
    items = [(each, True) for each in (d * d, d * kv, d * kv, d * d, *up, f * d)]
    if model.bias:
        items += [(each, True) for each in (d, kv, kv, *(f for _ in up))]
        items += [(d, False), (d, False)]  # after the sums over tp
    return items + [(d, False)] * (4 if model.norm == "layer" else 2)


def first_items(model: ModelSpec) -> Items:
    """The parameters before the first layer."""
    return [(model.vocab_size * model.d_model, True), (model.num_positions * model.d_model, False)]


def last_items(model: ModelSpec) -> Items:
    """The parameters behind the last layer."""
    norm = [(model.d_model, False)] * (2 if model.norm == "layer" else 1)
    return [*norm, (model.vocab_size * model.d_model, True)]


def whole_parameters(model: ModelSpec) -> int:
    """All parameters; a tied matrix counts once."""
    items = first_items(model) + last_items(model) + layer_items(model) * model.num_layers
    return sum(size for size, _ in items) - model.tied * model.vocab_size * model.d_model


@dataclass(frozen=True)
class Bytes:
    """How bytes are counted: a field for each thing that may be overlooked, by default right."""

    norms_whole: bool = True
    cut_by_tp: bool = True
    stages: bool = True
    embeddings: str = "first"  # the pipeline ranks that have them: also "every" or "none"
    head: str = "last"
    tied_once: bool = True  # where both ends are on one rank
    tied_copy: bool = True  # where they are on two
    tied_part: bool = True  # 1 / tp of the matrix is taken off, not all of it
    tied_alone: bool = True  # nothing is taken off where nothing is tied
    first_chunk: bool = False  # of each rank
    uneven: bool = True
    zero: bool = True
    zero_since: States = (3, 2, 1)  # the stage that cuts parameters, gradients, optimizer
    layers_whole: bool = True  # norms and biases of a layer, apart from the ends
    zero_over_dp: bool = True
    masters: bool = True
    gradients_16: bool = True
    precision: bool = True
    rounded_up: bool = True
    by_gpus: bool = False
    # activations
    in_flight: str = "as in the table"
    again: str = "one layer"
    before: bool = True  # what is alive before a layer is made again
    head_freed: str = "with its stage"
    embedding_alive: str = "its stage"  # of which micro-batches it is kept: also "all", "once"
    head_alive: str = "its stage"
    embedding_once: bool = True  # on the first rank alone
    each_stage: bool = True  # not all that is alive times the rank's largest stage
    sequence_parallel: bool = True
    checkpoint: bool = True
    act_ends: bool = True

    def layers(self, model: ModelSpec, plan: Plan) -> list[int]:
        """Layers of each pipeline rank, one stage each."""
        if not self.stages:
            return [model.num_layers] * plan.pp
        if not self.uneven:
            return [model.num_layers // plan.pp] * plan.pp
        own = plan.layers(model)
        return [stages[0] if self.first_chunk else sum(stages) for stages in own]

    def items(self, model: ModelSpec, plan: Plan, rank: int) -> Items:
        """The parameters of a pipeline rank."""
        everywhere = not self.stages
        first = {"first": rank == 0 or everywhere, "every": True}.get(self.embeddings, False)
        last = {"last": rank == plan.pp - 1 or everywhere, "every": True}.get(self.head, False)
        a_layer = layer_items(model)
        if not self.layers_whole:
            a_layer = [(size, True) for size, _ in a_layer]
        items = a_layer * self.layers(model, plan)[rank]
        items += first_items(model) if first else []
        items += last_items(model) if last else []
        matrix = (model.vocab_size * model.d_model, True)
        every = everywhere or self.embeddings == self.head == "every"
        both = first and last and (plan.pp == 1 or every)
        shared = self.tied_once if both else not self.tied_copy  # what the embedding has
        if (model.tied or not self.tied_alone) and last and shared:
            items.remove(matrix)
            less = matrix[0] // plan.tp - matrix[0]
            items += [] if self.tied_part else [(less, False)]
        return items

    def states(self, model: ModelSpec, plan: Plan, rank: int) -> States:
        """Bytes of parameters, gradients and optimizer on a pipeline rank."""
        mixed = plan.precision == "mixed" or not self.precision
        sizes = (2, 2, 12) if mixed else (4, 4, 8)
        if mixed and not self.masters:
            sizes = (2, 2, 8)
        if mixed and not self.gradients_16:
            sizes = (2, 4, 12)
        numbers = 0
        for size, cut in self.items(model, plan, rank):
            cut = (cut or not self.norms_whole) and self.cut_by_tp
            numbers += size // plan.tp if cut else size
        if self.by_gpus:
            return tuple(size * (whole_parameters(model) // plan.num_gpus) for size in sizes)
        over = plan.dp if self.zero_over_dp else plan.num_gpus
        found = []
        for size, stage in zip(sizes, self.zero_since, strict=True):
            parts = over if self.zero and plan.zero >= stage else 1
            rest = 0 if not self.rounded_up else -numbers % parts
            found.append(size * ((numbers + rest) // parts))
        return tuple(found)

    # Activations

    def kept(self, model: ModelSpec, plan: Plan) -> tuple[int, int]:
        """Bytes that a layer keeps of a micro-batch, and those that are made once more."""
        n, d, a = plan.micro_batch * model.seq_len, model.d_model, model.num_heads
        size = 2 if plan.precision == "mixed" else 4
        sp = plan.tp if plan.sequence_parallel and self.sequence_parallel else 1
        kv, inner = d // a * model.kv_heads, 3 if model.gated else 2
        stream = [size * d] * 4 + [d] * (2 if model.dropout else 0)
        heads = [size * d, size * kv, size * kv, size * d] + [size * model.d_ff] * inner
        scores = [size * a * model.seq_len] * (2 if model.dropout else 1)
        scores += [a * model.seq_len] if model.dropout else []
        if model.fused_attention:
            heads, scores = [*heads, 4 * a], []
        everything = n * sum(stream) // sp + n * (sum(heads) + sum(scores)) // plan.tp
        if not self.checkpoint or plan.checkpoint == "none":
            return everything, 0
        entering, again = n * size * d // sp, n * sum(scores) // plan.tp
        if plan.checkpoint == "full":
            return entering, everything - entering
        return everything - again, again

    def ends_bytes(self, model: ModelSpec, plan: Plan) -> tuple[int, int]:
        """Bytes that the embeddings and the head keep of a micro-batch."""
        n, size = plan.micro_batch * model.seq_len, 2 if plan.precision == "mixed" else 4
        sp = plan.tp if plan.sequence_parallel and self.sequence_parallel else 1
        mask = n * model.d_model * model.dropout // sp
        head = n * 2 * size * model.d_model // sp + n * 4 * model.vocab_size // plan.tp
        return mask, head

    def moments(self, plan: Plan, rank: int) -> list[tuple[list[int], int]]:
        """Micro-batches of each of a rank's stages that wait when a backward begins, and whose."""
        p, m, v = plan.pp, plan.num_micro_batches, plan.chunks
        simple = {
            "m": m,
            "1": 1,
            "p - s": p - rank,
            "min(p - s, m)": min(p - rank, m),
            "min(p, m)": min(p, m),
            "min(s + 1, m)": min(rank + 1, m),
        }
        if self.in_flight == "min(p - s, m), once":
            return [([min(p - rank, m)] * v, v - 1)]
        if self.in_flight in simple:
            return [([simple[self.in_flight]] * v, chunk) for chunk in range(v)]
        return waiting(p, m, v, 0 if self.in_flight == "of the first rank" else rank)

    def activations(self, model: ModelSpec, plan: Plan, rank: int) -> int:
        """Bytes kept for backward at the worst moment."""
        kept, again = self.kept(model, plan)
        layers = plan.layers(model)[rank]
        embedding, head = self.ends_bytes(model, plan) if self.act_ends else (0, 0)
        head = head if rank == plan.pp - 1 else 0
        embedding = embedding if rank == 0 or not self.embedding_once else 0
        most = 0
        for alive, chunk in self.moments(plan, rank):
            now = kept * sum(n * count for n, count in zip(alive, layers, strict=True))
            now = now if self.each_stage else kept * sum(alive) * max(layers)
            now += embedding * {"its stage": alive[0], "all": sum(alive)}.get(
                self.embedding_alive, 1
            )
            now += head * {"its stage": alive[-1], "all": sum(alive)}.get(self.head_alive, 1)
            times = {"one layer": layers[chunk] > 0, "all": layers[chunk], "none": 0}
            its = self.head_freed == "with its stage" and chunk == plan.chunks - 1
            freed = head if its or self.head_freed == "with any stage" else 0
            then = now + times.get(self.again, 1) * again - freed
            most = max(most, then, now if self.before else 0)
        return most


@functools.cache
def waiting(p: int, m: int, v: int, rank: int) -> list[tuple[list[int], int]]:
    """The moments of lesson 15's tables: 1F1B, or interleaved where a rank has several stages."""
    table = interleaved_schedule(p, m, v) if v > 1 else one_f_one_b_schedule(p, m)
    alive, seen = [0] * v, []
    for cell in table[rank]:
        if cell is None:
            continue
        chunk = cell.stage // p
        if cell.kind == "B":
            seen.append((list(alive), chunk))
        alive[chunk] += 1 if cell.kind == "F" else -1
    return seen


RIGHT = Bytes()
