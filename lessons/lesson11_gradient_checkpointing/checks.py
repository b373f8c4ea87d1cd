"""Lesson 11: what tells a right answer from a wrong one.

The oracles are the same layers without checkpointing, and all 2^n choices of a plan.
"""

import contextlib
import random
import weakref
from functools import partial

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lessons.lesson11_gradient_checkpointing.laboratory import noted_calls as lab
from lessons.lesson11_gradient_checkpointing.laboratory import plans
from lessons.lesson11_gradient_checkpointing.laboratory.noted_calls import (
    backward_of,
    expect_same_gradients,
)
from shared.exercises.checks import checks_for
from shared.exercises.expecting import alike, expect_close, expect_equal, expect_raises, recognise
from shared.exercises.on_ranks import on_ranks
from shared.exercises.seeds import fresh_seed
from shared.exercises.wrong import Wrong
from shared.measuring.activations import LayerCost, counting_saved, peak_bytes
from shared.measuring.live import count_live_bytes
from shared.ranks.failures import Failure

ENGINE = "torch.utils.checkpoint does the work: this one is to be built by hand"

exercise_11_1 = checks_for(
    "11.1",
    name="checkpoint",
    difficulty=4,
    minutes=40,
    hint=(
        "A torch.autograd.Function. forward: note the random states and autocast, "
        "ctx.save_for_backward(the tensors), return function(*args)."
    ),
    forbidden=("torch.utils.checkpoint.checkpoint",),
)


@exercise_11_1.check("values and gradients of a plain run")
def same_gradients(checkpoint) -> None:
    for dtype in (torch.float64, torch.float32):
        block, twin = lab.block_and_twin(dtype=dtype)
        x, y = lab.batch_and_twin(5, 6, dtype=dtype)
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
        backward_of(hidden + checkpoint(torch.sin, got))
        backward_of(plain + want.sin())
        last = "the function of the last checkpoint serves all: it is not kept on ctx"
        sign = block.calls == 1 and block.first.weight.grad is None
        recognise({last: sign}, expected="a second call of each function", seen="one")
        expect_same_gradients(block, twin)
        expect_close(x.grad, y.grad, what="the gradient of the input")


@exercise_11_1.check("what is kept: the inputs, and nothing else")
def memory(checkpoint) -> None:
    block, twin = lab.block_and_twin(rate=0.5)
    x = lab.batch(9, 6)
    with counting_saved(twin.parameters()) as plain:
        twin(x)
    with counting_saved(block.parameters()) as saved:
        got = checkpoint(block, x)
        state = torch.get_rng_state().nbytes
        recognise(
            {
                "a random state is among the saved tensors: it belongs on ctx, since all that "
                "save_for_backward is given is counted": saved.now == x.nbytes + state,
                "everything is kept: the first run has a graph": saved.now >= plain.peak,
                "the input is kept, but not by ctx.save_for_backward, which alone notices that it "
                "was changed": saved.now == 0,
                "the result is kept beside the input": saved.now == x.nbytes + got.nbytes,
            },
            expected=f"{x.nbytes} bytes until backward, those of the input",
            seen=f"{saved.now}; without checkpointing it is {plain.peak}",
        )
        seen = block.calls, saved.now
        expect_equal(seen, (1, x.nbytes), what="calls and bytes kept before backward")
        got.sum().backward()
    expect_equal((block.calls, saved.now), (2, 0), what="calls and bytes kept after backward")
    with counting_saved(block.parameters()) as saved:
        checkpoint(block, x)
    cycle = "the result is kept on ctx: it holds its own graph, and the two keep each other alive"
    expected = "nothing kept once the result is dropped without a backward"
    recognise({cycle: saved.now > 0}, expected=expected, seen=f"{saved.now} bytes")
    with torch.no_grad(), counting_saved() as saved:
        got = checkpoint(block, x)
    seen = block.calls, saved.now, got.requires_grad
    what = "calls, bytes kept and requires_grad under torch.no_grad()"
    expect_equal(seen, (4, 0, False), what=what)
    hidden = 2 * lab.batch(50, 40).T  # larger than a random state, and not contiguous
    alive = weakref.ref(hidden)
    with count_live_bytes(already=[hidden]) as live:
        got = checkpoint(torch.sin, hidden)
        made = live.now() - hidden.nbytes
    del hidden
    loss = got.sum()
    size, result = got.nbytes, StorageWeakRef(got.untyped_storage())
    del got  # its graph is still there
    again = "the result is kept on ctx, detached: backward makes it again, and needs none"
    expected = f"the arguments kept until backward, and not the result's {size} bytes"
    signs = {again: not result.expired()}
    recognise(signs, expected=expected, seen="the result as well, after it was dropped")
    loss.backward()
    beside = "the arguments are kept by ctx or a closure as well, and backward does not free those"
    copied = "a copy of the argument or of the result is kept"
    expected = f"{size} bytes made in forward, the argument freed after backward"
    seen = f"{made} bytes; freed: {alive() is None}"
    signs = {copied: made >= 2 * size, beside: alive() is not None}
    recognise(signs, expected=expected, seen=seen)


@exercise_11_1.check("dropout: the same random numbers again")
def random_state(checkpoint) -> None:
    block, twin = lab.block_and_twin(rate=0.5)
    function = lambda x: block(x)  # noqa: E731 (has no weights of its own to ask for)
    (x, y), seed = lab.batch_and_twin(5, 6), fresh_seed()
    lab.draw_after(seed)
    want, other = twin(twin(y)), torch.rand(3)
    lab.draw_after(seed)
    got, drawn = checkpoint(function, checkpoint(function, x)), torch.rand(3)
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
    left = not torch.equal(before, torch.get_rng_state())
    first, second, second_again, first_again = block.masks
    same = torch.equal(second, second_again), torch.equal(first, first_again)
    recognise(
        {
            "the random state of the last checkpoint serves all: it is not kept on ctx": same[0]
            and torch.equal(first_again, second),
            "the second run draws other numbers: dropout drops other values than in the first, "
            "and the gradient is that of another network": not all(same),
            "backward leaves another random state behind than it found": left,
        },
        expected="the same mask in both runs, and afterwards the random state of before",
        seen="another",
        hint="torch.get_rng_state() in forward; torch.random.fork_rng() around the second run",
    )
    expect_same_gradients(block, twin, lost="a lambda has none to ask for, unlike a module")
    expect_close(x.grad, y.grad, what="the gradient of the input")

    got = checkpoint(lab.Noting(nn.functional.dropout, raise_at=2), lab.batch(3))
    before = torch.get_rng_state()
    with contextlib.suppress(InterruptedError):
        got.sum().backward()
    stays = "the random state stays as the second run had it where the function raises"
    expected, left = "the state of before backward", not torch.equal(before, torch.get_rng_state())
    recognise({stays: left}, expected=expected, seen="another")


@exercise_11_1.check("autocast: the same settings again")
def autocast(checkpoint) -> None:
    settings = (True, torch.float16, True), (False, torch.bfloat16, True), (True, None, False)
    for enabled, dtype, cache in settings:
        noting = lab.Noting(lab.in_full_precision, lab.autocast_now)
        x, y = lab.batch_and_twin(4, 3, dtype=torch.float32)
        with torch.autocast("cpu", dtype, enabled, cache):
            got, want = checkpoint(noting, x), lab.in_full_precision(y)
        with torch.autocast("cpu", torch.bfloat16, not enabled):
            backward_of(got)
            backward_of(want)
        first, second = noting.seen
        recognise(
            {
                "the second run is not under the autocast of the first: its activations have "
                "another dtype": enabled and not second[0],
                "the second run is under autocast, and the first was not": second[0] > enabled,
                "autocast has another dtype in the second run": second[1] != first[1],
                "autocast keeps its casts of weights in the second run, which it did not in the "
                "first (cache_enabled)": second != first,
                "the way back is under the autocast of the first run as well: only the run itself "
                "should be": not torch.equal(x.grad, y.grad),
            },
            expected=f"autocast (on, dtype, cache) {first} in both runs",
            seen=f"{second}",
            hint="torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu')",
        )


@exercise_11_1.check("what draws in backward")
def drawn_in_backward(checkpoint) -> None:
    seed = fresh_seed()
    lab.draw_after(seed)
    got = checkpoint(lab.Drawing.apply, lab.batch(3))
    lab.draw_after(seed + 1)
    got.sum().backward()
    lab.draw_after(seed + 1)
    around = "what draws in backward draws the first run's numbers: the state is for the call only"
    recognise(
        {around: not torch.equal(lab.Drawing.drawn[-1], torch.rand(3))},
        expected="the inner backward under the random state of the outer one",
        seen="another",
        hint="leave fork_rng() before torch.autograd.backward(outputs, grads)",
    )


@exercise_11_1.check("arguments of all kinds")
def arguments(checkpoint) -> None:
    (x, y), (z, twin_of_z) = lab.batch_and_twin(3, 4), lab.batch_and_twin(3, 1)
    fixed, tokens, options = lab.batch(4, grad=False), torch.tensor([2, 0, 1]), [{"power": 2}]

    def function(x, scale, fixed, nothing, tokens, options, z):
        same = nothing is None and options is args[-1]
        other = {"an argument that is no tensor arrives as another object": not same}
        recognise(other, expected="the caller's own objects", seen=f"{nothing!r}, {options}")
        return scale * x[tokens] ** options[0]["power"] * fixed * z * options[1]

    options.append(torch.ones(3, 1, dtype=x.dtype))  # in a list: no argument of its own
    noting = lab.Noting(function, lab.needs_of)
    args = 3, fixed, None, tokens, options
    backward_of(checkpoint(noting, x, *args, z))
    backward_of(function(y, *args, twin_of_z))
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
    expect_close(x.grad, y.grad, what="the gradient of the first argument")
    expect_close(z.grad, twin_of_z.grad, what="the gradient of the last argument")

    x, y = lab.batch_and_twin(3, 4)
    backward_of(checkpoint(lambda a, b: a.sin() * b, x, x))
    backward_of(y.sin() * y)
    what = "the gradient of a tensor that is given as two arguments"
    twice = {"each of the two places gets the gradient of both": 2 * y.grad}
    expect_close(x.grad, y.grad, what=what, looks_like=twice)


@exercise_11_1.check("several results, some of them unused")
def several_results(checkpoint) -> None:
    def function(x, y):
        return x * y, x.sum(), x.argmax(), "a word", None, y.detach() * 2, y.cos()

    alone = checkpoint(lambda x: (x.sin(),), lab.batch(2))
    apart = {
        "a tuple of results comes back as a list": isinstance(alone, list),
        "a tuple of one result is taken apart": not isinstance(alone, tuple),
    }
    recognise(apart, expected="a tuple, as the function returns", seen=type(alone).__name__)
    for used in ((0, 1), (6,), (0, 6)):
        args, twins = zip(lab.batch_and_twin(2, 3), lab.batch_and_twin(2, 3), strict=True)
        results = checkpoint(function, *args), function(*twins)
        kinds = [[type(each).__name__ for each in result] for result in results]
        expect_equal(kinds[0], kinds[1], what="the types of the results")
        sum(results[1][i].sum() for i in used).backward()
        sent = (
            "what needs no gradient (a number, None, a detached tensor) is sent back with the rest"
        )
        try:
            sum(results[0][i].sum() for i in used).backward()
        except (AssertionError, RuntimeError) as error:
            seen = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise Wrong(sent, "a backward as without checkpointing", seen) from None
        for mine, twin, other in zip(args, twins, reversed(args), strict=True):
            want = torch.zeros_like(mine) if twin.grad is None else twin.grad
            got = torch.zeros_like(mine) if mine.grad is None else mine.grad
            what = f"a gradient where results {used} of {len(results[1])} are used"
            first = {"only the first result's gradient goes back": other.detach() * (0 in used)}
            expect_close(got, want, what=what, looks_like=first)


@exercise_11_1.check("no argument needs a gradient, but the weights do")
def weights_alone(checkpoint) -> None:
    block, twin = lab.block_and_twin()
    for each in (*block.parameters(), *twin.parameters()):
        each.grad = torch.ones_like(each)
    x = lab.batch(5, 6, grad=False)
    with counting_saved(block.parameters()) as saved:
        got = checkpoint(block, x)
        once, idle = saved.now, checkpoint(block.eval(), x)
    recognise(
        {
            "the weights get no gradient where no argument needs one: a Function whose inputs "
            "need none has no backward": not got.requires_grad,
            "the function is just called, without a checkpoint": once > 2 * x.nbytes,
            "a module in eval mode is just called: that mode is about dropout, and not about "
            "gradients": saved.now > once and idle.requires_grad,
        },
        expected=f"a result with a graph, for which {x.nbytes} bytes are kept",
        seen=f"requires_grad {got.requires_grad}, {once} bytes, {saved.now} with eval mode's",
        hint="give the Function one more input that needs a gradient: "
        "torch.empty(0, requires_grad=True)",
    )
    backward_of(got)
    backward_of(twin(x))
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

    x, y = lab.batch_and_twin(5, 6)
    block.zero_grad()
    got, want = checkpoint(partial(checkpoint, block), x), twin(y)
    for _ in range(2):
        got.sum().backward(retain_graph=True)
        want.sum().backward(retain_graph=True)
    expect_same_gradients(block, twin)
    expect_close(x.grad, y.grad, what="the gradient after two backwards")


@exercise_11_1.check("the random state of a GPU, where there is one")
def on_a_gpu(checkpoint) -> None:
    if not torch.cuda.is_available():  # so in a notebook, to-do list and grader: no GPU is visible
        return
    x = lab.batch(64, 64).cuda().detach().requires_grad_()
    on = lab.Noting(nn.functional.dropout, lambda x: torch.is_autocast_enabled("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        got = checkpoint(on, x)
    before = torch.cuda.get_rng_state()
    got.sum().backward()
    expect_equal(bool(((x.grad > 0) == (got != 0)).all()), True, what="the same mask on the GPU")
    same = torch.equal(before, torch.cuda.get_rng_state())
    expect_equal(same, True, what="whether the GPU's random state is as before backward")
    expect_equal(on.seen, [True, True], what="whether the GPU's autocast is on, in both runs")


exercise_11_2 = checks_for(
    "11.2",
    name="checkpoint_sequential",
    difficulty=2,
    minutes=20,
    hint="divmod(n, segments): so many segments have one layer more than the others.",
    forbidden=("torch.utils.checkpoint.checkpoint_sequential",),
)


@exercise_11_2.check("values, gradients and the layers of each segment")
def segments(checkpoint_sequential) -> None:
    by_default = [(total, None) for total in (7, 11, 3, 1)]
    for num_layers, count in (*by_default, (7, 2), (10, 4), (7, 4), (5, 5), (4, 1)):
        (x, y), seed = lab.batch_and_twin(4, 5), fresh_seed()
        chain = lab.Chain(num_layers, rate=0.3)
        lab.draw_after(seed)
        got = checkpoint_sequential(chain.layers, x, *([] if count is None else [count]))
        lab.draw_after(seed)
        want = chain.run(y)
        forward, _ = chain.passes()
        what = f"the layers in forward, {num_layers} layers in {count or 'about sqrt(n)'} segments"
        expect_equal(forward, list(range(num_layers)), what=what)
        expect_close(got, want, what="the result")
        held = chain.alive()
        backward_of(got)
        mine = lab.gradients(chain.modules)
        look_at_segments(chain, count, cut=mine[0] is None)
        look_at_outputs(chain, held)
        chain.modules.zero_grad()
        backward_of(want)
        for grad, theirs in zip(mine, lab.gradients(chain.modules), strict=True):
            expect_close(grad, theirs, what="a layer's gradient")
        expect_close(x.grad, y.grad, what="the gradient of the input")


def look_at_segments(chain: lab.Chain, count: int | None, cut: bool) -> None:
    """Hold the segments that were run again against the contract; `cut`: none reached the first."""
    forward, again = chain.passes()
    total = len(forward)
    near = count or round(total**0.5)
    sizes = lab.segments_of(again, total)
    calls = [again.count(number) for number in range(total)]
    start = total // near * (near - 1) + min(total % near, near - 1)  # of the last segment
    many, uneven = near > 1, len(sizes) == near and max(sizes) - min(sizes) > 1
    default = len(sizes) - near if count is None else 0
    recognise(
        {
            ENGINE: chain.by_engine,
            "the last segment's input is detached: no gradient reaches the ones before": many
            and cut
            and not again,
            "the first segment is left alone and the last is run again: backward begins with the "
            "last": many and max(calls) == 1 and calls[0] == 0 and calls[-1] == 1,
            "in backward every segment runs the last segment's layers: the function looks its "
            "layers up when it is called": many and again != [] and min(again) >= start - 1 > 0,
            "in backward a segment runs another segment's layers: the function looks its layers up "
            "when it is called": many and max(calls) > 1 and calls[0] == 0,
            "nothing is checkpointed": many and not again,
            "a layer is run more than twice: there are checkpoints in checkpoints": max(calls) > 1,
            "the last segment is run again as well: backward begins with it, so that nothing is "
            "gained": near < len(sizes) and sizes[-1] == 0,
            "every layer is a segment of its own": 1 < near < total == len(sizes),
            "the layers of a segment are checkpointed one by one, and each keeps its input": (
                near < len(sizes)
                and {*sizes[:-1]} == {1}
                and sizes[-1] in (total - start, -(-total // near))
            ),
            "sizes differ by more than one, as where the remainder is all in one segment": uneven,
            "the number of segments is sqrt(n) rounded down": default == -1,
            "the number of segments is sqrt(n) rounded up": default == 1,
        },
        expected=f"{total} layers in {near} segments whose sizes differ by at most one, of which "
        "the last is not run again",
        seen=f"sizes {sizes}; layers run again: {again}",
    )
    expect_equal(len(sizes), near, what=f"the number of segments of {total} layers")


def look_at_outputs(chain: lab.Chain, held: list[int]) -> None:
    """Ask which layers' outputs were `held` between forward and backward, and which still are."""
    forward, again = chain.passes()
    total, sizes = len(forward), lab.segments_of(again, len(forward))
    ends = [sum(sizes[:number]) - 1 for number in range(1, len(sizes))]
    inner = [number for number in held if number < total - sizes[-1] and number not in ends]
    left = chain.alive()
    recognise(
        {
            "outputs of layers inside of a segment are kept for backward, beside its input": (
                inner != []
            ),
            "outputs of layers are kept after backward: in a list, or by a closure": left
            != [total - 1],
        },
        expected=f"the outputs {ends} held until backward, besides those of the last segment, and "
        f"afterwards only the result's, {total - 1}",
        seen=f"{held} until backward, afterwards {left}",
    )


@exercise_11_2.check("layers that are modules: the caller's own, in the mode that they are in")
def own_layers(checkpoint_sequential) -> None:
    for training in (True, False):
        chain = lab.Chain(6, rate=0.3)
        modes = lab.noted_modes(chain.modules.train(training))
        backward_of(checkpoint_sequential(chain.modules, lab.batch(4, 5), 3))
        left = [each.training for each in chain.modules.modules()]
        grads = sum(grad is not None for grad in lab.gradients(chain.modules))
        recognise(
            {
                "copies of the layers are run: the caller's weights get no gradient": grads == 0,
                "the layers' mode is changed: dropout drops nothing in eval mode, and the mode is "
                "the caller's": {*modes, *left} != {training},
            },
            expected=f"gradients of all 12 parameters, and training = {training} in all calls, "
            "and afterwards",
            seen=f"{grads} gradients, {sorted(set(modes))} in the calls, {sorted(set(left))} after",
        )


@exercise_11_2.check("what is kept")
def kept_by_segments(checkpoint_sequential) -> None:
    chain, x = lab.Chain(9), lab.batch(4, 5, grad=False)
    with counting_saved(chain.modules.parameters()) as plain:
        last = chain.run(x)
    with counting_saved(chain.modules.parameters()) as saved:
        result = checkpoint_sequential(nn.ModuleList(chain.modules), x, 3)
    # Each tanh keeps its result, which is the next layer's input.
    want, what = 6 * x.nbytes, "inputs of three segments and the last one's activations"
    recognise(
        {
            "everything is kept where its input needs no gradient": saved.now == plain.now,
            "the input has been made to need a gradient: it is the caller's": x.requires_grad,
        },
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
        expect_numbers(act, f"{count} segments of 4 layers", {"segments": count, "layers": 4})
        expect_raises(ValueError, act, what=f"{count} segments of 4 layers", mentions=[count, 4])
    expect_raises(ValueError, checkpoint_sequential, [], x, what="no layers")


def expect_numbers(act, what: str, numbers: dict[str, int]) -> None:
    """Where the call raises ValueError, the error names each of these numbers."""
    try:
        act()
    except ValueError as error:
        words = str(error)
        recognise(
            {
                f"the error for {what} does not name the number of {name}, or names a wrong one": (
                    str(number) not in words
                )
                for name, number in numbers.items()
            },
            expected=", ".join(f"{number} {name}" for name, number in numbers.items()),
            seen=repr(words),
        )
    except Exception:  # of another kind: the caller says so
        return


exercise_11_3 = checks_for(
    "11.3",
    name="plan",
    difficulty=4,
    minutes=35,
    hint=(
        "Backward is at layer i: alive are what layers 0 to i-1 hold, and costs[i].saved, whether "
        "kept or made again. So going through the layers in order, held + saved <= budget."
    ),
)
SECONDS = 5.0  # of the processor, however busy it is; a hundredth of one is needed


def fitting(choice, costs: list[LayerCost], budget: int) -> list[bool]:
    """The choice as a list of bools, which keeps to the budget; or a finding."""
    several = isinstance(choice, list | tuple)
    fits = several and len(choice) == len(costs) and {*choice} <= {False, True}
    recognise(
        {
            "numbers of layers are returned, where bools are asked for": several and not fits,
            "no list is returned": not fits,
            "numbers are returned, where bools are asked for": fits
            and not all(isinstance(each, bool) for each in choice),
        },
        expected=f"a list of {len(costs)} bools, True for a layer to checkpoint",
        seen=f"{choice!r}",
    )
    choice = [bool(each) for each in choice]
    peak, held = peak_bytes(costs, choice), plans.held_bytes(costs, choice)
    recognise(
        {
            "only what is held at the end of forward is counted: in backward a checkpointed "
            "layer's activations are there again": peak > budget >= held,
            "the budget is exceeded": peak > budget,
        },
        expected=f"at most {budget} bytes at any moment of backward",
        seen=f"{choice}: {peak} bytes, {held} at the end of forward",
    )
    return choice


@exercise_11_3.check("no layer where all fit, the budget at its worst moment")
def the_moment(plan) -> None:
    costs = [LayerCost(100, 10, 7), LayerCost(60, 20, 5), LayerCost(90, 30, 6)]
    for budget in (1000, 250):
        none = fitting(plan(costs, budget), costs, budget)
        turned = all(none) and [*plan(costs, 180)] == [False, True, True]
        recognise(
            {
                "True and False are exchanged: True is a layer to checkpoint": turned,
                "a layer's input is counted beside `saved`, which has it": budget == 250
                and any(none)
                and any(plan(costs, 260)),
                "layers are checkpointed although everything fits": any(none) and budget == 1000,
                "a margin is left, or bytes are counted in coarse units: 251 are too few for "
                "250": any(none) and any(plan(costs, 251)),
                "a peak of exactly the budget is refused": any(none),
            },
            expected=f"no layer checkpointed: 250 bytes, the budget is {budget}",
            seen=f"{none}",
        )
    sizes = (130, 30, 7), (130, 20, 6), (110, 30, 9), (140, 30, 5)
    four, want = [LayerCost(*each) for each in sizes], [True, True, True, False]
    got = list(plan(four, 260))
    recognise(
        {
            "the choice is in the order of backward: the first bool is the first layer's": (
                got == want[::-1]
            ),
            "a checkpointed layer is not held against the budget: when backward is there, its "
            "activations are there again": got == [False, True, False, True],
        },
        expected=f"four layers under 260 bytes: {want}",
        seen=f"{got}",
    )
    # The first: 10 + 60 + 90 bytes at the last layer. The second: 100 + 20 + 90, too much.
    last = "the last layer is recomputed: backward begins with it, so that frees nothing"
    got = fitting(plan(costs, 180), costs, 180)
    what = "the plan of three layers under 180 bytes"
    dropped = "more is recomputed than needed: a beginning was dropped that others do not replace"
    known = {last: [True, False, True]}
    expect_equal(got, [True, False, False], what=what, mistake=dropped, looks_like=known)
    costs = [costs[1], costs[0], costs[2]]  # the second: 60 + 10 + 90 at the last layer
    earlier = "the plan of an earlier call comes back, which had the same budget but other layers"
    got = list(plan(costs, 180))
    what = "the plan of the same layers in another order, under 180 bytes again"
    expect_equal(got, [False, True, False], what=what, looks_like={earlier: [True, False, False]})


@exercise_11_3.check("the best of all 2^n choices")
def the_best(plan) -> None:
    for layers, budget in plans.RULES_DIFFER:
        costs = [LayerCost(*layer) for layer in layers]
        expect_least(plan, costs, budget, rules=plans.wrong_plans(costs, budget))
    swaps = "a choice that no change as small as a swap makes better, but other choices are better"
    grain = (
        "what fits to the byte is missed: bytes are rounded, a margin is left, or beginnings are "
        "dropped that hold fewer bytes"
    )
    for sizes, budget in plans.NO_SWAP_HELPS:
        costs = [LayerCost(saved, inputs, saved - inputs) for saved, inputs in sizes]
        expect_least(plan, costs, budget, mistake=swaps)
    for costs, budget in [plans.exact_case(fresh_seed()) for _ in range(5)]:
        expect_least(plan, costs, budget, mistake=grain)
    dearer = "of two beginnings that hold the same bytes the dearer one is kept"
    for flops in ((2, 9), (9, 2)):  # one of the two is enough, and both hold 110 bytes
        costs = [*(LayerCost(100, 10, each) for each in flops), LayerCost(90, 10, 5)]
        expect_least(plan, costs, 210, mistake=dearer)


def expect_least(plan, costs: list[LayerCost], budget: int, rules=None, mistake: str = "") -> None:
    """As few FLOPs again as the best choice; `rules` has other choices, by the words for them."""
    best = plans.best_of_all(costs, budget)
    assert best is not None, "a case that has a plan"
    got = fitting(plan(costs, budget), costs, budget)
    flops = partial(plans.flops_of, costs)
    what = f"the FLOPs that {len(costs)} layers under {budget} bytes compute again"
    rows = alike(tuple(got), rules or {})
    rows = {words: seen and flops(rules[words]) != flops(best) for words, seen in rows.items()}
    recognise(rows, expected=f"{what} = {flops(best)}", seen=f"{flops(got)}")
    if rules is not None and sum(got) == sum(rules[plans.FEWEST] or ()):
        mistake = plans.FEWEST
    expect_equal(flops(got), flops(best), what=what, mistake=mistake)


@exercise_11_3.check("a budget that is too small")
def too_small(plan) -> None:
    draw = random.Random(fresh_seed())
    for _ in range(4):
        costs = plans.random_costs(draw, 5)
        least = peak_bytes(costs, [True] * 5)
        last = "the last layer is recomputed at the smallest budget, for nothing"
        expect_least(plan, costs, least, mistake=last)
        what = f"a budget of {least - 1} bytes, one below the smallest that can be met"
        numbers = {"bytes that would do": least, "bytes in the budget": least - 1}
        expect_numbers(partial(plan, costs, least - 1), what, numbers)
        expect_raises(ValueError, plan, costs, least - 1, what=what, mentions=[least - 1, least])


@exercise_11_3.check("forty layers in little time")
def many_layers(plan) -> None:
    too_long = "all 2^n choices are tried: 40 layers would take years"
    a_byte = "the time grows with the bytes of the budget: is there a table with a place for each?"
    alike = [LayerCost(90, 10, 3)] * 40, 2000
    for (costs, budget), words in (
        (alike, too_long),
        (plans.kinds_of_layers(fresh_seed()), a_byte),
    ):
        limited = partial(plans.in_processor_time, SECONDS, plan, costs, budget)
        known = {Failure.DIED: (words, "")}
        (got,) = on_ranks(lambda _, act=limited: act(), 1, apart=words, known=known, timeout=120)
        flops = plans.flops_of(costs, fitting(got, costs, budget))
        rules = {
            words.replace("a greedy choice", "few layers are planned exactly, forty greedily"): (
                plans.flops_of(costs, other)
            )
            for words, other in plans.greedy_plans(costs, budget)
        }
        what, least = "the FLOPs that 40 layers compute again", plans.least_flops(costs, budget)
        expect_equal(flops, least, what=what, looks_like=rules)
