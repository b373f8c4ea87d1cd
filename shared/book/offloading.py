"""States of the picture of offloading: where bytes lie, and what crosses the bus in a step."""

from shared.book.planned import State, panel
from shared.plots import BLUE, GREY, MEANING, SKY, VERMILION
from shared.training.quiet_deepspeed import import_deepspeed

PLACES = {"all on the GPU": (False, False), "optimizer": (True, False), "all states": (True, True)}

UNITS = 32  # of a model that is fetched unit by unit, as many as a 7B has blocks


def offload(place: str, ranks: int, billions: float, bus: int) -> State:
    """What ZeRO-3 keeps on a GPU and in host memory, and what crosses in a step.

    The flow is that of ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840, section 4): gradients
    leave in 16 bits, the processor updates, and weights come back in 16 bits. Bytes are counted as
    in `zero`; DeepSpeed's estimate, which leaves gradients out, stands beside them.
    """
    import_deepspeed("cuda")  # where there is one
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as estimate

    optimizer, weights = PLACES[place]
    unit = int(billions * 1e9) // UNITS
    given = {"cpu_offload": optimizer, "cpu_offload_params": weights}
    host, gpu, _ = estimate(unit * UNITS, unit, ranks, 1, **given, additional_buffer_factor=1.0)
    share = 2 * billions / ranks  # GB of a rank's part in 16 bits, weights or gradients
    up = share * (2 if weights else 1) if optimizer else 0.0  # for forward and for backward
    down = share if optimizer else 0.0
    below = share * (8 if weights else 6) if optimizer else 0.0
    above = 2 * unit / 1e9 if weights else 8 * share - below
    kept = "weights, gradients" + ("" if optimizer else ", optimizer states")
    there = "16-bit weights and gradients, " if weights else ""
    places = {"on a GPU": [above], "in host memory": [below]}
    estimated = (gpu / 1e9, host / ranks / 1e9 * optimizer)
    return {
        "panels": [panel("GB a GPU", "GB", {"states": BLUE}, places.items(), line=80)],
        **_flow(share, optimizer, weights),
        "numbers": {
            "on a GPU": f"one of {UNITS} units, in 16 bits" if weights else kept,
            "in host memory": f"{there}float32 weights and moments" if optimizer else "nothing",
            "DeepSpeed's estimate": " and ".join(f"{each:.1f} GB" for each in estimated),
            "over the bus a step, up and down": f"{up:.2f} and {down:.2f} GB",
            f"seconds of that at {bus} GB/s": f"{(up + down) / bus:.2f}",
        },
    }


def _flow(share: float, optimizer: bool, weights: bool) -> State:
    """A step's four parts, one a frame: what goes up, what comes down, who computes."""
    gb, nothing = f"{share:.2f} GB", ["", "transparent"]
    up, down = [gb, VERMILION], [gb, MEANING["gradients"]]
    updates = ["updates", MEANING["optimizer states"]]
    computes, idle = ["computes", SKY], ["waits", GREY]
    fetched = up if weights else nothing
    table = {
        "forward": (fetched, nothing, computes, nothing),
        "backward": (fetched, down if optimizer else nothing, computes, nothing),
        "update": (nothing, nothing, *((idle, updates) if optimizer else (updates, nothing))),
        "publish": (up if optimizer and not weights else nothing, nothing, idle, nothing),
    }
    columns = list(table.values())
    return {
        "rows": ["weights up", "gradients down", "GPU", "processor"],
        "columns": list(table),
        "frames": [
            [list(row) for row in zip(*columns[: n + 1], strict=True)] for n in range(len(columns))
        ],
        "says": [f"{name}: {_what_crosses(name, optimizer, weights)}" for name in table],
    }


def _what_crosses(step: str, optimizer: bool, weights: bool) -> str:
    if not optimizer:
        own = "; the GPU updates its own part" if step == "update" else ""
        return f"nothing crosses to host memory{own}."
    return {
        "forward": "each rank's part of the weights goes up, and is gathered from there."
        if weights
        else "the weights are on the GPUs; nothing crosses.",
        "backward": "the mean of each part's gradients goes down"
        + (", and the weights come up once more." if weights else "."),
        "update": "the processor updates this rank's part; the GPU has nothing to do, unless the"
        " update runs beside the next step.",
        "publish": "the updated weights stay in host memory until the next forward."
        if weights
        else "the updated part goes up in 16 bits.",
    }[step]
