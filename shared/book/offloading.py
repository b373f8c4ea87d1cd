"""States of the picture of offloading: where bytes lie, and what crosses the bus in a step."""

from shared.book.planned import State
from shared.plots import GREY, MEANING, SKY, VERMILION, YELLOW
from shared.training.quiet_deepspeed import import_deepspeed

PLACES = {"all on the GPU": (False, False), "optimizer": (True, False), "all states": (True, True)}

UNITS = 32  # of a model that is fetched unit by unit, as many as a 7B has blocks


def offload(place: str, ranks: int, billions: float, bus: int) -> State:
    """What ZeRO-3 keeps on a GPU and in host memory, and what crosses in a step.

    The flow is that of ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840, section 4): gradients
    leave in 16 bits for host memory, the processor updates, and weights come back in 16 bits. Bytes
    are counted as in `zero`, with the unit that is whole; DeepSpeed's estimate, which leaves the
    other units' gradients out, stands beside them.
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
    kept = _kept(share, 2 * unit / 1e9, optimizer, weights)
    most = max(80.0, *(sum(parts) for phase in kept for parts in phase))
    here = "16-bit weights, " + "gradients, optimizer states, " * (not optimizer) + "a whole unit"
    there = "16-bit weights, " * weights + "gradients, float32 weights, moments"
    estimated = (gpu / 1e9, host / ranks / 1e9 * optimizer)
    return {
        **_flow(share, optimizer, weights),
        "fills": {
            "title": "GB for each GPU; the line: 80 GB, a GPU's memory",
            "unit": "GB",
            "kinds": list(KEPT_KINDS.items()),
            "labels": ["on a GPU", "in host memory"],
            "line": 80,
            "most": float(f"{1.2 * most:.4g}"),
            "steps": [[[float(f"{p:.4g}") for p in parts] for parts in phase] for phase in kept],
        },
        "numbers": {
            "GB on a GPU and in host memory, at most": " and ".join(
                f"{max(sum(phase[place]) for phase in kept):.1f}" for place in (0, 1)
            ),
            "on a GPU": f"one of {UNITS} units, its weights and gradients" if weights else here,
            "in host memory": there if optimizer else "nothing",
            "DeepSpeed's estimate": " and ".join(f"{each:.1f} GB" for each in estimated),
            "over the bus a step, up and down": f"{up:.2f} and {down:.2f} GB",
            f"seconds of that at {bus} GB/s": f"{(up + down) / bus:.2f}",
        },
    }


def _kept(share: float, unit: float, optimizer: bool, weights: bool) -> list[list[list[float]]]:
    """GB of each kind in a step's four parts, on a GPU and in host memory.

    A unit's weights are gathered for forward and backward, and its gradient is whole before it is
    reduced and leaves.
    """
    phases = []
    for phase, whole in (("forward", 1), ("backward", 2), ("update", 0), ("publish", 0)):
        there = share * (phase in ("backward", "update"))  # gradients
        states = [share, there, 6 * share]
        gpu = [0.0 if weights else share, 0.0, 0.0] if optimizer else states
        host = [share * weights, *states[1:]] if optimizer else [0.0] * 3
        phases.append([[*gpu, whole * unit], [*host, 0.0]])
    return phases


KEPT_KINDS = {kind: MEANING[kind] for kind in ("parameters", "gradients", "optimizer states")}
KEPT_KINDS["a whole unit"] = YELLOW


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
    lanes = ["weights up", "gradients down", "GPU", "processor"]
    bars = [
        (lane, phase, phase + 1, text, (f"{lanes[lane]}: {text}", colour))
        for phase, column in enumerate(columns)
        for lane, (text, colour) in enumerate(column)
        if text
    ]
    return {
        "lanes": {
            "names": lanes,
            "bars": bars,
            "times": [1, 2, 3, 4],
            "end": 4,
            "says": f"{', '.join(table)}: in their order, not to scale",
        },
        "rows": lanes,
        "columns": list(table),
        "frames": [
            [list(row[: n + 1]) + [nothing] * (3 - n) for row in zip(*columns, strict=True)]
            for n in range(4)
        ],
        "begins": 1,
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
