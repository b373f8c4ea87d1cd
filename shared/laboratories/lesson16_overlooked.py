"""Lesson 16: what people overlook when they count bytes and seconds, in words for each."""

from shared.laboratories.lesson16_bytes import Bytes
from shared.laboratories.lesson16_seconds import Seconds

WRONG_STATES = {
    "the ends of the model, embeddings and head, are left out": Bytes(
        embeddings="none", head="none"
    ),
    "every rank has embeddings and head: they are on the first and on the last": (
        Bytes(embeddings="every", head="every")
    ),
    "of a matrix that is tied all is taken off, where a rank has 1 / tp of it": (
        Bytes(tied_part=False)
    ),
    "the output matrix is taken off where it is not tied as well": Bytes(tied_alone=False),
    "the layers of each rank's first stage alone count": Bytes(first_chunk=True),
    "the embeddings are left out": Bytes(embeddings="none"),
    "the head, norm and output matrix, is left out": Bytes(head="none"),
    "every rank has the embeddings: they are on the first": Bytes(embeddings="every"),
    "every rank has the head: it is on the last": Bytes(head="every"),
    "a matrix that is tied counts twice on a rank that has both ends": Bytes(tied_once=False),
    "the last stage has no output matrix: where the ends are on two ranks, each has the tied one": (
        Bytes(tied_copy=False)
    ),
    "tensor parallelism cuts everything: norms and the biases after its sums are whole": (
        Bytes(norms_whole=False)
    ),
    "tensor parallelism cuts all of a layer: its norms and the biases after its sums are whole": (
        Bytes(layers_whole=False)
    ),
    "tensor parallelism cuts nothing": Bytes(cut_by_tp=False),
    "every rank has all layers: a pipeline cuts the model": Bytes(stages=False),
    "every stage has num_layers // pp layers": Bytes(uneven=False),
    "everything is divided by the number of GPUs: what dp ranks have are copies": (
        Bytes(by_gpus=True)
    ),
    "ZeRO cuts nothing": Bytes(zero=False),
    "stage 1 of ZeRO cuts gradients as well": Bytes(zero_since=(3, 1, 1)),
    "stage 2 of ZeRO cuts parameters as well": Bytes(zero_since=(2, 2, 1)),
    "ZeRO is a stage ahead: 1 cuts the optimizer, 2 gradients as well, 3 parameters as well": (
        Bytes(zero_since=(2, 1, 1))
    ),
    "ZeRO is a stage behind: 1 cuts the optimizer, 2 gradients as well, 3 parameters as well": (
        Bytes(zero_since=(4, 3, 2))
    ),
    "ZeRO begins at the wrong end: its first stage cuts the optimizer, its last parameters": (
        Bytes(zero_since=(1, 2, 3))
    ),
    "ZeRO cuts over all GPUs: its parts lie over the dp ranks alone": Bytes(zero_over_dp=False),
    "the optimizer's float32 weights are left out": Bytes(masters=False),
    "gradients count in float32": Bytes(gradients_16=False),
    "the precision is not used": Bytes(precision=False),
}
WRONG_ACTIVATIONS = {
    "all micro-batches of a step are kept: 1F1B begins backwards earlier": Bytes(in_flight="m"),
    "one micro-batch is kept: there are more under way in a pipeline": Bytes(in_flight="1"),
    "more micro-batches are kept than a step has": Bytes(in_flight="p - s"),
    "with several stages a rank more is kept than by 1F1B: look at in_flight": (
        Bytes(in_flight="min(p - s, m)")
    ),
    "1F1B's min(p - s, m) is taken for every stage of a rank: interleaved, they differ": (
        Bytes(in_flight="min(p - s, m), once")
    ),
    "every stage keeps as many micro-batches as the first": Bytes(in_flight="min(p, m)"),
    "the last stage keeps most: stages are counted from the other end": (
        Bytes(in_flight="min(s + 1, m)")
    ),
    "sequence parallelism is not used": Bytes(sequence_parallel=False),
    "what is computed again takes no memory": Bytes(again="none"),
    "all layers are computed again at once": Bytes(again="all"),
    "what the head has kept is still there when layers are computed again": Bytes(
        head_freed="never"
    ),
    "a stage without a layer makes one again": Bytes(again="always"),
    "only the moments count when a layer is made again: more may be alive before": (
        Bytes(before=False)
    ),
    "the head is freed whichever stage of the last rank goes backward: it belongs to the last": (
        Bytes(head_freed="with any stage")
    ),
    "the first rank's in_flight is taken for every rank": Bytes(in_flight="of the first rank"),
    "what the embeddings keep counts once, not for each micro-batch that is alive": (
        Bytes(embedding_alive="once")
    ),
    "every rank keeps what the embeddings keep: they are on the first": (
        Bytes(embedding_once=False)
    ),
    "what the head keeps counts once, not for each micro-batch that is alive": (
        Bytes(head_alive="once")
    ),
    "what the embeddings keep counts for every stage of the first rank: the first has them": (
        Bytes(embedding_alive="all")
    ),
    "what the head keeps counts for every stage of the last rank: the last has it": (
        Bytes(head_alive="all")
    ),
    "everything that is alive counts as the rank's largest stage: stages differ": (
        Bytes(each_stage=False)
    ),
    "nothing is computed again: checkpoint is not used": Bytes(checkpoint=False),
    "what embeddings and head keep is left out": Bytes(act_ends=False),
}

WRONG_SECONDS = {
    "compute": {
        "backward is left out: it takes twice the forward": Seconds(passes=1, head_passes=1),
        "backward counts as one forward: it takes two": Seconds(passes=2, head_passes=2),
        "a layer's backward is taken for one forward: it is two": Seconds(passes=2),
        "the output matrix counts in forward alone: its backward takes twice as much": (
            Seconds(head_passes=1)
        ),
        "the output matrix's backward is taken for one forward": Seconds(head_passes=2),
        "what backward computes again is not counted": Seconds(again=False),
        "what backward computes again is no work: its FLOPs are left out": (
            Seconds(again_flops=False)
        ),
        "a layer that is computed again is no work: its FLOPs are left out": (
            Seconds(full_flops=False)
        ),
        "a layer that is computed again costs nothing: it is a forward more": (
            Seconds(again_with=("selective",))
        ),
        "scores that are computed again cost nothing: they are FLOPs, and traffic of the memory": (
            Seconds(again_with=("full",))
        ),
        "what backward computes again does not go through the memory once more": (
            Seconds(again_bytes=False)
        ),
        "scores that are computed again do not go through the memory once more": (
            Seconds(score_bytes=False)
        ),
        "the output matrix is not shared over tp": Seconds(head_shared=False),
        "attention that is fused is computed again: selective recomputation is for scores": (
            Seconds(again_fused=True)
        ),
        "what a layer keeps goes through the memory once: forward writes, backward reads": (
            Seconds(trips=1)
        ),
        "the output matrix comes on top of the slowest stage: it is on the last": (
            Seconds(slowest="slowest, and the head")
        ),
        "the first stage is taken for the slowest": Seconds(slowest="first"),
        "the last stage is taken for the slowest": Seconds(slowest="last"),
        "all stages are added up: they work side by side": Seconds(slowest="all"),
        "the output matrix is left out": Seconds(head=False),
        "compute is not shared over tp": Seconds(tp_shares=False),
        "the mean of the stages is taken: a pipeline goes at the pace of the slowest": (
            Seconds(slowest="mean")
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
        "the layers of the whole model send: a rank sends for its own": Seconds(of_layers="all"),
        "the mean of the stages sends: some have a layer more": Seconds(of_layers="the mean"),
        "the messages of one micro-batch are counted, not the step's": Seconds(batches=False),
    },
    "pipeline": {
        "the gradients that travel back are left out": Seconds(ways=1),
        "stages are taken for neighbours inside a node: they stand furthest apart": (
            Seconds(pp_link="inner")
        ),
        "stages are taken to stand tp apart: dp lies between them as well": (
            Seconds(pp_link="tp apart")
        ),
        "the latency of the pipeline's messages is left out": Seconds(latency=False),
        "the share of the link is not used for the pipeline": Seconds(link_share=False),
        "the vectors of one micro-batch are counted, not the step's": Seconds(batches=False),
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
        "(p - 1) / (m + p - 1) is a share of the whole step, and v stages a rank are left out": (
            Seconds(bubble="(p - 1) / (m + p - 1)")
        ),
        "dp's messages wait in the bubble as well: they come once, when it is over": (
            Seconds(bubble_of="the step")
        ),
        "the bubble has one slot too many: p - 1 stages wait": Seconds(bubble="p / (v m)"),
        "interleaving is left out: v stages a rank make the bubble smaller": Seconds(
            bubble="(p - 1) / m"
        ),
        "the bubble is of compute alone: messages are waited for as well": Seconds(
            bubble_of="compute"
        ),
    },
    "model_flops": {
        "what is computed again counts as useful work": Seconds(again_counts=True),
        "the FLOPs are those of one sequence": Seconds(of_batch=False),
        "the FLOPs are those of all GPUs together": Seconds(a_gpu=False),
    },
    "data_parallel": {
        "the gradients of the whole model travel: a rank has those of its part": (
            Seconds(dp_parts=False)
        ),
        "the parameters of embeddings and head are left out": Seconds(
            dp_numbers=Bytes(embeddings="none", head="none")
        ),
        "a matrix that is tied counts twice on a rank that has both ends": Seconds(
            dp_numbers=Bytes(tied_once=False)
        ),
        "the mean rank's parameters travel: the one with the most takes longest": (
            Seconds(mean_rank=True)
        ),
        "what one message does is counted twice": Seconds(dp_ring=2.0),
        "an all-reduce counts as one reduce-scatter: an all-gather follows": Seconds(
            dp_twice=False
        ),
        "the ranks of dp are taken for neighbours inside a node: they stand tp apart": (
            Seconds(dp_link="inner")
        ),
        "the ranks of dp are taken for neighbours: they stand tp apart": (
            Seconds(dp_link="neighbours")
        ),
        "the share of the link is not used for dp": Seconds(link_share=False),
        "what is left can be below 0: no more can be hidden than there is": Seconds(below_0=True),
        "gradients hide behind a whole micro-batch: backward is 2/3 of it": (
            Seconds(hidden="one micro-batch", zero3_hides=2 / 3)
        ),
        "the parameters that ZeRO-1 and 2 gather are hidden: gradients alone are": (
            Seconds(hides_parameters=(1, 2))
        ),
        "the parameters that ZeRO-1 gathers are hidden: gradients alone are": (
            Seconds(hides_parameters=(1,))
        ),
        "ZeRO-3's messages are hidden without overlap as well": Seconds(hides_anyway=True),
        "ZeRO-3 gathers parameters once a micro-batch: it does in forward and in backward": (
            Seconds(zero3_gathers=1)
        ),
        "ZeRO-3's messages hide behind backward alone: they travel in forward as well": (
            Seconds(zero3_hides=2 / 3)
        ),
        "ZeRO-2 sends gradients once a step: it does with every micro-batch": (
            Seconds(zero2_every=False)
        ),
        "plan.overlap is not asked for: without it all of it shows": Seconds(overlap=False),
        "with ZeRO-2 gradients hide once a step: they do with each of its micro-batches": (
            Seconds(zero2_hides_once=True)
        ),
        "nothing is hidden: gradients travel while backward computes": Seconds(hidden="nothing"),
        "everything is hidden: what takes longer than backward shows": (
            Seconds(hidden="everything")
        ),
        "gradients hide behind all backwards of a step: they are known in the last alone": (
            Seconds(hidden="all backwards")
        ),
        "the gradients hide behind all backwards of a step: 2/3 of one micro-batch's compute is "
        "the most": Seconds(hidden="all backwards", zero3_one=True),
        "ZeRO-3's messages alone are hidden: gradients travel while backward computes": (
            Seconds(hidden="nothing", zero3_one=True)
        ),
        "gradients travel with every micro-batch: they do so with ZeRO-2 and 3 alone": Seconds(
            every_batch=True
        ),
        "ZeRO changes nothing: it gathers parameters, and stages 2 and 3 send more often": Seconds(
            zero=False
        ),
    },
}
# What any of the kinds may overlook.
WRONG_ANYWHERE = {
    "a micro-batch is taken for one sequence": Seconds(sequences=False),
    "the argument fitted is not used": Seconds(fitted=False),
    "a number has 2 bytes in float32 as well: there it has 4": Seconds(two_bytes=True),
}
