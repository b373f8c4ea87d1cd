"""The mesh as nodes with their cards, for a drawing: its groups, and how fast a link is."""

from shared.book import planned
from shared.book.planned import State
from shared.parallel3d.mesh import build_mesh
from shared.planner.models import MODELS, h100

WIDEST = 5.0  # of a link inside a node, in the drawing's units; the other's is in proportion
# GPT-3 as in lesson 16, "The idea": micro-batches of a sequence of 2,048 tokens, 16 bits
GPT3, MICRO_BATCHES = MODELS["gpt3-175b"], 32


def sent_along(axis: str, dp: int, tp: int, pp: int) -> float:
    """Bytes that a rank (in a pipeline a middle one, if any) sends along an axis in a step."""
    vectors = 2 * GPT3.seq_len * GPT3.d_model
    if axis == "tp":
        return 4 * GPT3.num_layers / pp * MICRO_BATCHES * 2 * (tp - 1) / tp * vectors
    if axis == "pp":
        return min(2, pp - 1) * MICRO_BATCHES * vectors / tp
    return 2 * (dp - 1) / dp * 2 * 12 * GPT3.num_layers * GPT3.d_model**2 / (tp * pp)


def mesh(dp: int, tp: int, pp: int, node: int, axis: str) -> State:
    """The planner's mesh and its groups' members; links as fast as those of H100s."""
    state, cluster = planned.mesh(dp, tp, pp, node, axis), h100(8)
    if state.get("refused"):
        return state
    speeds = {"NVLink": cluster.inner, "between nodes": cluster.outer}
    fastest = max(speeds.values())
    leave = [
        f"{name} {planned.num_across(groups, node)} of {len(groups)}"
        for name, groups in build_mesh(dp, tp, pp).items()
    ]
    sent = f"{sent_along(axis, dp, tp, pp) / 1e9:,.1f}"
    return state | {
        "numbers": state["numbers"]
        | {"GPT-3's layers": GPT3.num_layers // pp, "GB each sends": sent},
        "legend": "A link is as wide as it is fast; point at a rank to light its group."
        f" Groups that leave a node: {', '.join(leave)}.",
        "links": [
            (f"{name}, {speed / 1e9:.0f} GB/s a GPU (H100)", WIDEST * speed / fastest)
            for name, speed in speeds.items()
        ],
    }
