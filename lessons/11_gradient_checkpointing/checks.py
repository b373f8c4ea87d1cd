"""Lesson 11: what tells a right answer from a wrong one.

The oracles are the same layers without checkpointing, and all 2^n choices of a plan.
"""

import random
from functools import partial

import torch
from torch import nn

from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
    wrong,
)
from shared.exercises.on_ranks import on_ranks
from shared.exercises.seeds import fresh_seed, seed_all
from shared.laboratories import lesson11 as lab
from shared.measuring.activations import LayerCost, counting_saved, peak_bytes

ENGINE = "torch.utils.checkpoint does the work: this one is to be built by hand"

exercise_11_1 = checks_for(
    "11.1",
    name="checkpoint",
    difficulty=4,
    minutes=40,
    hints=[
        "A torch.autograd.Function. forward: note the random states and autocast, "
        "ctx.save_for_backward(the tensors), return function(*args).",
        "backward: detach the saved tensors, run the function under torch.enable_grad(), then "
        "torch.autograd.backward(outputs, grads), and return the .grad of the detached ones.",
    ],
)


def backward_of(output: torch.Tensor) -> None:
    """Go back from a sum that weighs every number differently."""
    try:
        (output * torch.arange(1, output.numel() + 1).view_as(output)).sum().backward()
    except RuntimeError as error:
        if "second time" not in str(error) and "require grad" not in str(error):
            raise
        second = "second time" in str(error)
        wrong(
            "the second run starts from inputs that are not detached, and its backward goes on "
            "into the graph that made them"
            if second
            else "the second run has no graph: gradients are switched off inside backward",
            expected="one more run from detached inputs, under torch.enable_grad()",
            seen=f"RuntimeError: {str(error)[:90]}",
        )


def expect_same_gradients(got: nn.Module, want: nn.Module) -> None:
    """Each parameter's gradient is the twin's."""
    for (name, mine), theirs in zip(got.named_parameters(), want.parameters(), strict=True):
        lost = mine.grad is None
        recognise(
            {"the weights get no gradient: autograd.grad returns those of the inputs alone": lost},
            expected=f"a gradient of {name}, as without checkpointing",
            seen="None",
            hint="torch.autograd.backward adds gradients to every leaf on the way",
        )
        twice = {"the weights get their gradient twice": 2 * theirs.grad}
        expect_close(mine.grad, theirs.grad, what=f"the gradient of {name}", looks_like=twice)


@exercise_11_1.check("values and gradients of a plain run")
def same_gradients(checkpoint) -> None:
    for dtype in (torch.float64, torch.float32):
        block, twin = lab.block_and_twin(dtype=dtype)
        x = lab.batch(5, 6, dtype=dtype)
        y = x.detach().clone().requires_grad_()
        hidden, plain = x.sin(), y.sin()
        got, want = checkpoint(block, hidden), twin(plain)
        recognise(
            {
                ENGINE: block.by_engine,
                "a tuple comes back where the function returned a tensor": isinstance(got, tuple),
                "the result has no graph": not getattr(got, "requires_grad", False),
            },
            expected="function(x), with a graph",
            seen=f"{type(got).__name__}, requires_grad {getattr(got, 'requires_grad', '-')}",
        )
        expect_close(got, want, what="the result")
        backward_of(hidden + got)
        backward_of(plain + want)
        expect_same_gradients(block, twin)
        lost = {"the function's part of the input's gradient is lost": x.detach().cos()}
        weights = torch.arange(1, 31, dtype=dtype).view(5, 6)
        lost = {words: value * weights for words, value in lost.items()}
        expect_close(x.grad, y.grad, what="the gradient of the input", looks_like=lost)


@exercise_11_1.check("what is kept: the inputs, and nothing else")
def memory(checkpoint) -> None:
    block, twin = lab.block_and_twin(rate=0.5)
    x = lab.batch(9, 6)
    with counting_saved(twin.parameters()) as plain:
        kept = twin(x)
    with counting_saved(block.parameters()) as saved:
        got = checkpoint(block, x)
        recognise(
            {
                "everything is kept: the first run has a graph": saved.now >= plain.now,
                "the input is kept, but not by ctx.save_for_backward, which alone notices that it "
                "was changed": saved.now == 0,
                "the result is kept beside the input": saved.now == x.nbytes + got.nbytes,
            },
            expected=f"{x.nbytes} bytes until backward, those of the input",
            seen=f"{saved.now}; without checkpointing it is {plain.now}",
        )
        expect_equal(saved.now, x.nbytes, what="the bytes that are kept")
        expect_equal(block.calls, 1, what="the number of calls before backward")
        got.sum().backward()
    expect_equal(block.calls, 2, what="the number of calls after backward")
    expect_equal(saved.now, 0, what="the bytes that are kept after backward")
    with counting_saved(block.parameters()) as saved:
        got = checkpoint(block, x)
        del got
        recognise(
            {
                "the result is kept on ctx: it holds its own graph, and the two keep each other "
                "alive": saved.now > 0
            },
            expected="nothing kept once the result is dropped without a backward",
            seen=f"{saved.now} bytes",
        )
    with torch.no_grad(), counting_saved() as saved:
        got = checkpoint(block, x)
        seen = block.calls, saved.now, got.requires_grad
    what = "calls, bytes kept and requires_grad under torch.no_grad()"
    expect_equal(seen, (4, 0, False), what=what)
    del kept


@exercise_11_1.check("dropout: the same random numbers again")
def random_state(checkpoint) -> None:
    block, twin = lab.block_and_twin(rate=0.5)
    x, seed = lab.batch(5, 6), fresh_seed()
    y = x.detach().clone().requires_grad_()
    seed_all(seed)
    torch.rand(1)
    want, other = twin(y), torch.rand(3)
    seed_all(seed)
    torch.rand(1)  # the seed alone does not say where the generator stands
    got, drawn = checkpoint(block, x), torch.rand(3)
    one = "the first run draws other numbers than the function by itself would"
    recognise(
        {
            one: not torch.equal(block.masks[0], twin.masks[0]),
            "the random state of before the first run is put back after it: the next dropout "
            "draws the same numbers": not torch.equal(drawn, other),
        },
        expected="random numbers as without checkpointing, in the function and after it",
        seen="others",
    )
    before = torch.get_rng_state()
    backward_of(got)
    backward_of(want)
    left = torch.get_rng_state()
    recognise(
        {
            "the second run draws other numbers: dropout drops other values than in the first, "
            "and the gradient is that of another network": not torch.equal(*block.masks),
            "backward leaves another random state behind than it found": not torch.equal(
                before, left
            ),
        },
        expected="the same mask in both runs, and afterwards the random state of before",
        seen="another",
        hint="torch.get_rng_state() in forward; torch.random.fork_rng() around the second run",
    )
    expect_same_gradients(block, twin)
    expect_close(x.grad, y.grad, what="the gradient of the input")


@exercise_11_1.check("autocast: the same settings again")
def autocast(checkpoint) -> None:
    for outer, inner in (((True, torch.float16), False), ((False, torch.bfloat16), True)):
        noting = lab.Noting(lambda x: 2 * x, lab.autocast_now)
        enabled, dtype = outer
        with torch.autocast("cpu", dtype, enabled):
            got = checkpoint(noting, lab.batch(2, 3))
        with torch.autocast("cpu", torch.bfloat16, inner):
            backward_of(got)
            left = torch.is_autocast_enabled("cpu")
        first, second = noting.seen
        recognise(
            {
                "the second run is not under the autocast of the first: its activations have "
                "another dtype": enabled and not second[0],
                "the second run is under autocast, and the first was not": second[0] > enabled,
                "autocast has another dtype in the second run": second != first,
                "backward leaves autocast switched": left != inner,
            },
            expected=f"autocast (on, dtype) {first} in both runs, {inner} afterwards",
            seen=f"{second}, {left}",
            hint="torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu')",
        )


@exercise_11_1.check("arguments of all kinds")
def arguments(checkpoint) -> None:
    x, fixed, z = lab.batch(3, 4), lab.batch(4, grad=False), lab.batch(3, 1)
    tokens, options = torch.tensor([2, 0, 1]), {"power": 2}

    def function(x, scale, fixed, nothing, tokens, options, z):
        assert nothing is None, "None came as something else"
        return scale * x[tokens] ** options["power"] * fixed * z

    noting = lab.Noting(function, lab.needs_of)
    args = 3, fixed, None, tokens, options
    twins = [each.detach().clone().requires_grad_() for each in (x, z)]
    backward_of(checkpoint(noting, x, *args, z))
    backward_of(function(twins[0], *args, twins[1]))
    needs = [True, None, False, None, False, None, True]
    recognise(
        {
            "arguments that need no gradient are given one in the second run, which is computed "
            "for nothing": noting.seen[-1].count(True) > 2,
            "an argument that needs no gradient is given one": fixed.grad is not None,
        },
        expected=f"requires_grad of the tensors in the second run: {needs}",
        seen=f"{noting.seen[-1]}",
    )
    expect_equal(noting.seen[-1], needs, what="requires_grad of the arguments in the second run")
    for name, mine, twin in zip("xz", (x, z), twins, strict=True):
        expect(mine.grad is not None, expected=f"a gradient of argument {name}", seen="None")
        expect_close(mine.grad, twin.grad, what=f"the gradient of argument {name}")

    x = lab.batch(3, 4)
    y = x.detach().clone().requires_grad_()
    backward_of(checkpoint(lambda a, b: a.sin() * b, x, x))
    backward_of(y.sin() * y)
    what = "the gradient of a tensor that is given as two arguments"
    twice = {"each of the two places gets the gradient of both": 2 * y.grad}
    expect_close(x.grad, y.grad, what=what, looks_like=twice)


@exercise_11_1.check("several results, some of them unused")
def several_results(checkpoint) -> None:
    def function(x, y):
        return x * y, x.sum(), x.argmax(), "a word", None, y.detach() * 2, y.cos()

    for used in ((0, 1), (6,), (0, 6)):
        args = [lab.batch(2, 3), lab.batch(2, 3)]
        twins = [each.detach().clone().requires_grad_() for each in args]
        results = checkpoint(function, *args), function(*twins)
        kinds = [[type(each).__name__ for each in result] for result in results]
        expect_equal(kinds[0], kinds[1], what="the types of the results")
        for result in results:
            sum(result[i].sum() for i in used).backward()
        for mine, twin in zip(args, twins, strict=True):
            want = torch.zeros_like(mine) if twin.grad is None else twin.grad
            got = torch.zeros_like(mine) if mine.grad is None else mine.grad
            what = f"a gradient where results {used} of {len(results[1])} are used"
            expect_close(got, want, what=what)


@exercise_11_1.check("no argument needs a gradient, but the weights do")
def weights_alone(checkpoint) -> None:
    block, twin = lab.block_and_twin()
    for each in (*block.parameters(), *twin.parameters()):
        each.grad = torch.ones_like(each)
    x = lab.batch(5, 6, grad=False)
    got = checkpoint(block, x)
    recognise(
        {
            "the weights get no gradient where no argument needs one: a Function whose inputs "
            "need none has no backward": not got.requires_grad
        },
        expected="a result with a graph: the weights inside need their gradients",
        seen="requires_grad is False",
        hint="give the Function one more input that needs a gradient: "
        "torch.empty(0, requires_grad=True)",
    )
    backward_of(got)
    backward_of(twin(x))
    expect_same_gradients(block, twin)

    with counting_saved(block.parameters()) as saved:
        got = checkpoint(block, x)
        what = "the bytes that are kept where no argument needs a gradient"
        plain = {"the function is just called, without a checkpoint": saved.now > 2 * x.nbytes}
        recognise(plain, expected=f"{what}: {x.nbytes}", seen=f"{saved.now}")
        expect_equal(saved.now, x.nbytes, what=what)
    del got

    for each in (block, twin):
        each.zero_grad()
    x = lab.batch(5, 6)
    backward_of(checkpoint(lambda x: block(x), x))
    backward_of(twin(x))
    asked = "the weights are those that the function has as a module; a lambda has none to ask for"
    recognise(
        {asked: block.first.weight.grad is None},
        expected="gradients of the weights that a lambda uses",
        seen="None",
        hint="torch.autograd.backward adds gradients to every leaf on the way",
    )
    expect_same_gradients(block, twin)


@exercise_11_1.check("changes in place, a checkpoint in a checkpoint, a second backward")
def edges(checkpoint) -> None:
    block, twin = lab.block_and_twin()
    hidden = 3 * lab.batch(5, 6)  # exp() keeps its result, and would itself notice the change
    got = checkpoint(block, hidden)
    with torch.no_grad():
        hidden.mul_(2)
    unseen = "an input that is changed in place before backward"
    expect_raises(RuntimeError, got.sum().backward, what=unseen, hint="ctx.save_for_backward")

    x = lab.batch(5, 6)
    y = x.detach().clone().requires_grad_()
    block.zero_grad()
    got, want = checkpoint(partial(checkpoint, block), x), twin(y)
    for _ in range(2):
        got.sum().backward(retain_graph=True)
        want.sum().backward(retain_graph=True)
    expect_same_gradients(block, twin)
    expect_close(x.grad, y.grad, what="the gradient after two backwards")


@exercise_11_1.check("the random state of a GPU, where there is one")
def on_a_gpu(checkpoint) -> None:
    if not torch.cuda.is_available():
        return
    x = lab.batch(64, 64).cuda().detach().requires_grad_()
    got = checkpoint(partial(nn.functional.dropout, p=0.5), x)
    before = torch.cuda.get_rng_state()
    got.sum().backward()
    expect_equal(bool(((x.grad > 0) == (got != 0)).all()), True, what="the same mask on the GPU")
    same = torch.equal(before, torch.cuda.get_rng_state())
    expect_equal(same, True, what="whether the GPU's random state is as before backward")


exercise_11_2 = checks_for(
    "11.2",
    name="checkpoint_sequential",
    difficulty=2,
    minutes=20,
    hints=[
        "divmod(n, segments): so many segments have one layer more than the others.",
        "checkpoint(functools.partial(run, layers[start:end]), x). What a lambda names in a loop "
        "is looked up when it is called, which is in backward.",
    ],
)


@exercise_11_2.check("values, gradients and the layers of each segment")
def segments(checkpoint_sequential) -> None:
    for num_layers, count in ((7, None), (11, None), (7, 2), (10, 4), (5, 5), (4, 1), (1, None)):
        chain, x = lab.Chain(num_layers, rate=0.3), lab.batch(4, 5)
        y, seed = x.detach().clone().requires_grad_(), fresh_seed()
        seed_all(seed)
        got = checkpoint_sequential(chain.layers, x, *([] if count is None else [count]))
        seed_all(seed)
        want = chain.run(y)
        forward, _ = chain.passes()
        what = f"the layers in forward, {num_layers} layers in {count or 'about sqrt(n)'} segments"
        expect_equal(forward, list(range(num_layers)), what=what)
        expect_close(got, want, what="the result")
        backward_of(got)
        mine = [p.grad for p in chain.modules.parameters()]
        cut = num_layers > 1 and mine[0] is None and chain.passes()[1] == []
        recognise(
            {"the last segment's input is detached: no gradient reaches the ones before": cut},
            expected="a gradient of every layer's weights",
            seen="None, and no layer was run again",
        )
        chain.modules.zero_grad()
        backward_of(want)
        look_at_segments(chain, count)
        for grad, theirs in zip(mine, lab.gradients(chain.modules), strict=True):
            lost = grad is None
            expect(not lost, expected="a gradient of every layer's weights", seen="None")
            expect_close(grad, theirs, what="a layer's gradient")
        expect_close(x.grad, y.grad, what="the gradient of the input")


def look_at_segments(chain: lab.Chain, count: int | None) -> None:
    """Hold the segments that were run again against the contract."""
    forward, again = chain.passes()
    total = len(forward)
    near = count or round(total**0.5)
    sizes = lab.segments_of(again, total)
    calls = [again.count(number) for number in range(total)]
    start = total // near * (near - 1) + min(total % near, near - 1)  # of the last segment
    many = near > 1
    recognise(
        {
            ENGINE: chain.by_engine,
            "the first segment is left alone and the last is run again: backward begins with the "
            "last": many and max(calls) == 1 and calls[0] == 0 and calls[-1] == 1,
            "in backward every segment runs the last segment's layers: the function looks its "
            "layers up when it is called": many and again != [] and min(again) >= start - 1 > 0,
            "nothing is checkpointed": many and not again,
            "a layer is run more than twice: there are checkpoints in checkpoints": max(calls) > 1,
            "the last segment is run again as well: backward begins with it, so that nothing is "
            "gained": total > 1 and 0 < near <= len(sizes) - 1 and sizes[-1] == 0,
            "every layer is a segment of its own": 1 < near < total == len(sizes),
            "the remainder is all in one segment": len(sizes) == near
            and max(sizes) - min(sizes) > 1,
            "the number of segments is sqrt(n) rounded down": count is None
            and len(sizes) == near - 1,
            "the number of segments is sqrt(n) rounded up": count is None
            and len(sizes) == near + 1,
        },
        expected=f"{total} layers in {near} segments whose sizes differ by at most one, of which "
        "the last is not run again",
        seen=f"sizes {sizes}; layers run again: {again}",
    )
    expect_equal(len(sizes), near, what=f"the number of segments of {total} layers")


@exercise_11_2.check("what is kept")
def kept_by_segments(checkpoint_sequential) -> None:
    chain, x = lab.Chain(9), lab.batch(4, 5)
    with counting_saved(chain.modules.parameters()) as plain:
        last = chain.run(x)
    with counting_saved(chain.modules.parameters()) as saved:
        result = checkpoint_sequential(nn.ModuleList(chain.modules), x, 3)
    # Each tanh keeps its result, which is the next layer's input.
    want, what = 6 * x.nbytes, "inputs of three segments and the last one's activations"
    recognise(
        {"as much is kept as without checkpointing": saved.now == plain.now},
        expected=f"{what}: {want} bytes",
        seen=f"{saved.now} bytes, without checkpointing {plain.now}",
    )
    expect_equal(saved.now, want, what=f"the bytes of the {what}")
    del last, result


@exercise_11_2.check("segments that cannot be")
def impossible_segments(checkpoint_sequential) -> None:
    chain, x = lab.Chain(4), lab.batch(4, 5)
    for count in (0, -1, 5):
        act = partial(checkpoint_sequential, chain.layers, x, count)
        expect_raises(ValueError, act, what=f"{count} segments of 4 layers", mentions=[count, 4])
    expect_raises(ValueError, checkpoint_sequential, [], x, what="no layers")


exercise_11_3 = checks_for(
    "11.3",
    name="plan",
    difficulty=4,
    minutes=35,
    hints=[
        "Backward is at layer i: alive are what layers 0 to i-1 hold, and costs[i].saved, whether "
        "kept or made again. So going through the layers in order, held + saved <= budget.",
        "All that the later layers need to know of the earlier ones is how much they hold. Of two "
        "beginnings, drop the one that holds more and has recomputed more.",
    ],
)
LIMIT = 6.0  # seconds for a plan of 40 layers, which needs a hundredth of one


def as_choice(choice, count: int) -> list[bool]:
    """The choice as a list of bools, or a finding."""
    listed = list(choice) if isinstance(choice, list | tuple) else choice
    fits = isinstance(listed, list) and all(each in (False, True) for each in listed)
    numbers = isinstance(listed, list) and len(listed) != count
    recognise(
        {"numbers of layers are returned, where a bool for each layer is asked for": numbers},
        expected=f"a list of {count} bools, True for a layer to checkpoint",
        seen=f"{choice!r}",
    )
    expect(fits, expected=f"a list of {count} bools", seen=f"{choice!r}")
    return [bool(each) for each in listed]


@exercise_11_3.check("no layer where all fit, the budget at its worst moment")
def the_moment(plan) -> None:
    costs = [LayerCost(100, 10, 7), LayerCost(60, 20, 5), LayerCost(90, 30, 6)]
    for budget in (1000, 250):
        none = as_choice(plan(costs, budget), 3)
        recognise(
            {
                "layers are checkpointed although everything fits": any(none) and budget == 1000,
                "a peak of exactly the budget is refused": any(none),
            },
            expected=f"no layer checkpointed: 250 bytes, the budget is {budget}",
            seen=f"{none}",
        )
    got = as_choice(plan(costs, 180), 3)  # the first: 10 + 60 + 90 at the last layer
    peak, held = peak_bytes(costs, got), lab.held_bytes(costs, got)
    recognise(
        {
            "the last layer is recomputed: backward begins with it, so that frees nothing": got[2]
            and peak <= 180,
            "only what is held at the end of forward is counted: in backward a checkpointed "
            "layer's activations are there again": peak > 180 >= held,
            "the budget is exceeded": peak > 180,
        },
        expected="the second layer: 100 + 20 + 90 is too much, the first: 10 + 60 + 90",
        seen=f"{got}: {peak} bytes at the worst moment of a budget of 180",
    )
    expect_equal(got, [True, False, False], what="the plan of three layers under 180 bytes")
    costs = [costs[1], costs[0], costs[2]]  # the second: 60 + 10 + 90 at the last layer
    earlier = (
        "the plan of an earlier call comes back, which had the same budget but other layers: "
        "something is remembered between calls"
    )
    what = "the plan of the same layers in another order, under 180 bytes again"
    got = as_choice(plan(costs, 180), 3)
    expect_equal(got, [False, True, False], what=what, looks_like={earlier: [True, False, False]})


@exercise_11_3.check("the best of all 2^n choices")
def the_best(plan) -> None:
    draw = random.Random(fresh_seed())
    cases = [lab.telling_case(fresh_seed(), 6) for _ in range(3)]
    for _ in range(6):
        costs = lab.random_costs(draw, draw.randrange(1, 10))
        cases.append((costs, draw.randrange(400, 2500)))
    for costs, budget in cases:
        best = lab.best_of_all(costs, budget)
        if best is None:
            continue
        got = as_choice(plan(costs, budget), len(costs))
        peak, held = peak_bytes(costs, got), lab.held_bytes(costs, got)
        recognise(
            {
                "only what is held at the end of forward is counted: in backward a checkpointed "
                "layer's activations are there again": peak > budget >= held,
                "the budget is exceeded": peak > budget,
            },
            expected=f"at most {budget} bytes at any moment of backward",
            seen=f"{peak} bytes, {held} at the end of forward",
        )
        others = lab.wrong_plans(costs, budget)
        prices = {words: lab.flops_of(costs, other) for words, other in others.items() if other}
        least = lab.flops_of(costs, best)
        what = f"the FLOPs that {len(costs)} layers under {budget} bytes compute again"
        expect_equal(lab.flops_of(costs, got), least, what=what, looks_like=prices)


@exercise_11_3.check("a budget that is too small")
def too_small(plan) -> None:
    draw = random.Random(fresh_seed())
    for _ in range(4):
        costs = lab.random_costs(draw, 5)
        least = max(c.saved + sum(d.inputs for d in costs[:i]) for i, c in enumerate(costs))
        got = as_choice(plan(costs, least), 5)
        expect_equal(peak_bytes(costs, got) <= least, True, what="whether the smallest budget fits")
        what = f"a budget of {least - 1} bytes, one below the smallest that can be met"
        expect_raises(ValueError, plan, costs, least - 1, what=what, mentions=[least - 1, least])
    # A layer that keeps less than its input is better left alone.
    costs = [LayerCost(5, 40, 1), LayerCost(50, 10, 1)]
    expect_equal(as_choice(plan(costs, 55), 2), [False, False], what="the plan of a cheap layer")
    try:
        plan(costs, 54)
    except ValueError as error:
        high = "the smallest budget is named too high: a layer may keep less than its input has"
        recognise({high: "55" not in str(error)}, expected="55 bytes", seen=str(error))


@exercise_11_3.check("forty layers in little time")
def many_layers(plan) -> None:
    too_long = "all 2^n choices are tried: 40 layers would take years"
    a_byte = "the time grows with the bytes of the budget: is there a table with a place for each?"
    alike = [LayerCost(90, 10, 3)] * 40, 2000
    for (costs, budget), apart in ((alike, too_long), (lab.kinds_of_layers(fresh_seed()), a_byte)):
        answer = lambda rank: plan(costs, budget)  # noqa: B023, E731 (a fork calls it, now)
        expected = "a plan within a second"
        (got,) = on_ranks(answer, 1, apart=apart, expected=expected, timeout=LIMIT)
        got = as_choice(got, 40)
        what = "whether a plan of 40 layers holds its budget"
        expect_equal(peak_bytes(costs, got) <= budget, True, what=what)
        what = "the FLOPs that 40 layers of a few kinds compute again"
        rules = {
            f"few layers are planned exactly, forty by {words.replace(':', ',')}": lab.flops_of(
                costs, other
            )
            for words, other in lab.greedy_plans(costs, budget)
        }
        least = lab.least_flops(costs, budget)
        rules = {words: flops for words, flops in rules.items() if flops != least}
        expect_equal(lab.flops_of(costs, got), least, what=what, looks_like=rules)
