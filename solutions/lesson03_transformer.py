"""Lesson 03, the instructor's side: the Transformer.

Later lessons scale these blocks, so the answers live in `shared/model/`; this module gives them
their exercise names and says how to teach and to weigh them. The lesson's one idea: a Transformer
is a residual stream that sub-layers read from and add to, and where the norm stands decides
whether a deep one trains at all. The blocks themselves are short; what goes wrong is the wiring.

Points are the difficulty at the exercise (15 in all). The learner's EncoderLayer is built from the
learner's LayerNorm, and so on upwards: mend exercises in order, and grade a late one kindly when
an early one pulls it down.
"""

from shared.model.layers import DecoderLayer as DecoderLayer
from shared.model.layers import EncoderLayer as EncoderLayer
from shared.model.layers import LayerNorm as LayerNorm
from shared.model.layers import PositionwiseFeedForward as PositionwiseFeedForward
from shared.model.size import count_parameters as count_parameters
from shared.model.transformer import Transformer as Transformer

__all__ = [
    "DecoderLayer",
    "EncoderLayer",
    "LayerNorm",
    "PositionwiseFeedForward",
    "Transformer",
    "count_parameters",
]

NOTES = {
    "03.1": """
LayerNorm: 2 points, 15 minutes.
Look for: statistics over the last dim of each token alone; the biased variance; eps inside the
root; two nn.Parameter. Ask why there is no train/eval difference (no running averages, unlike
batch norm).
Weigh it: the formula 1 point, parameters and the constant vector 1 point.
Common mistakes: x.std() or x.var() with torch's default, which divides by D - 1 and is wrong by
2 % at D = 24 and invisible at D = 1024; (std + eps) for sqrt(var + eps), the same until a row is
nearly constant; .mean() without keepdim, which fails to broadcast, or worse, broadcasts when two
sizes happen to be equal; weight and bias as plain tensors, which never train and never move to
the GPU.
""",
    "03.2": """
PositionwiseFeedForward: 1 point, 10 minutes.
Look for: ReLU once, between the projections; dropout inside, at width d_ff. Two thirds of a
layer's parameters sit here: ask for the numbers (8 D^2 of 12 D^2 with d_ff = 4 D).
Common mistakes: no activation (two linear maps are one linear map); ReLU after the second
projection, so that a residual stream can only grow; the residual added here and again in the
layer.
""",
    "03.3": """
EncoderLayer: 3 points, 20 minutes.
Look for: one place where pre and post differ. The reference has it in ResidualBlock.residual;
an `if` with two pairs of lines is as good.
Weigh it: post-LN 1, pre-LN 1, masks and dropout 1.
Common mistakes: pre-LN that adds to norm(x) instead of x, which closes the path that pre-LN was
made to keep open, and still trains when shallow; norming the queries and not keys and values;
dropout around the sum; the mask passed as the fourth positional argument of something else;
`causal` accepted and ignored, which shows only when the layer becomes a language model.
""",
    "03.4": """
DecoderLayer: 3 points, 20 minutes.
Look for: queries from the target, keys and values from the memory; causal self-attention;
memory_mask in the cross-attention only. Ask why no target padding mask is needed (padding comes
last, and nothing looks ahead; the loss leaves padded positions out).
Weigh it: both norms 1, masks 1, causality by gradient 1.
Common mistakes: causal=True in the cross-attention as well, which trains, badly; the memory normed
again; both attentions one module; memory_mask given to the self-attention, which fails only when
source and target lengths differ.
""",
    "03.5": """
Transformer: 4 points, 40 minutes.
Look for: sqrt(D) before the positions are added; the source's mask used twice (encoder and
cross-attention); N different layers; one Parameter under three names when tied; a last norm after
each stack in pre-LN only.
Weigh it: logits 2, gradients and halves 1, parts and start values 1.
Common mistakes: [EncoderLayer(config)] * n; a Python list instead of ModuleList, which hides the
layers from the optimizer; tying by .data or by copying values, which holds until the first step;
softmax before the loss; nn.Embedding's own start values (variance 1), with which tied logits
start with a standard deviation of sqrt(D) and the first loss far above ln V.
""",
    "03.6": """
count_parameters: 2 points, 15 minutes.
Look for: a formula, not a model that is built and counted (the check cannot tell, the instructor
can). Ask for the leading term, 12 D^2 an encoder layer and 16 D^2 a decoder layer with d_ff = 4 D,
and at which vocabulary the embeddings outweigh the layers.
Common mistakes: tied matrices counted three times; the biases; the cross-attention; heads
multiplied with full-width matrices; last norms for post-LN, which torch.nn.Transformer has and
the paper has not.
""",
}
