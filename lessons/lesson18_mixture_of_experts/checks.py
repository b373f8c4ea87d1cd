"""Lesson 18: what tells a right answer from a wrong one.

The oracle is softmax and topk in one process, a loop over the tokens, or the whole layer on all
ranks' rows. Messages are counted below Python; groups are not always all ranks.
"""

import torch
import torch.nn.functional as F

from lessons.lesson18_mixture_of_experts.laboratory import layers as lab
from lessons.lesson18_mixture_of_experts.laboratory import messages as message_lab
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
    without_group,
    wrong,
)
from shared.exercises.seeds import fresh_generator
from shared.mixture_of_experts.routing import Routing


def say(calls) -> str:
    """Operations as a reader wants them."""
    return ", ".join(f"{call.op} of {call.num_bytes} bytes" for call in calls) or "no message"


exercise_18_1a = checks_for(
    "18.1a",
    name="top_k_router",
    difficulty=2,
    minutes=20,
    hint=(
        "Softmax over all experts, in float32 at the least; topk of probability plus bias gives "
        "the experts; gather takes their probabilities; divide by the sum only where k > 1."
    ),
)


@exercise_18_1a.check("who is chosen, and by which weights")
def routes(top_k_router) -> None:
    draw = fresh_generator()
    for experts, k in ((5, 2), (4, 1), (3, 3), (7, 4)):
        logits = torch.randn(11, experts, dtype=torch.float64, generator=draw).requires_grad_()
        routing = top_k_router(logits, k)
        whole = logits.softmax(-1).detach()
        top = whole.topk(k, -1)
        recognise(
            {
                "the most probable expert does not come first": (
                    routing.experts.shape == top.indices.shape
                    and not torch.equal(routing.experts, top.indices)
                    and torch.equal(routing.experts.sort(-1).values, top.indices.sort(-1).values)
                ),
            },
            expected="the experts by probability, the highest first",
            seen=f"{routing.experts[0].tolist()} for {[round(p, 2) for p in whole[0].tolist()]}",
        )
        expect_equal(routing.experts.tolist(), top.indices.tolist(), what=f"top {k} of {experts}")
        expect_close(routing.probabilities, whole, what="the probabilities of all experts")
        weights = top.values / top.values.sum(-1, keepdim=True) if k > 1 else top.values
        expect_close(
            routing.weights,
            weights,
            what=f"the weights (k = {k})",
            looks_like={
                "with k = 1 the weight is always 1: no gradient would reach the router": (
                    torch.ones_like(top.values)
                ),
                "the weights of a token do not add up to 1": top.values,
            },
        )
        expect(
            routing.weights.requires_grad,
            mistake="no gradient reaches the logits through the weights",
            expected="weights with a graph",
            seen="none",
        )
        expect(
            routing.probabilities.requires_grad,
            mistake="the probabilities have no graph: no balancing loss can be made of them",
            expected="probabilities with a graph",
            seen="none",
        )
        upstream = torch.randn(weights.shape, dtype=torch.float64, generator=draw)
        (got,) = torch.autograd.grad(routing.weights, logits, upstream, retain_graph=True)
        twin = logits.detach().clone().requires_grad_()
        mine = twin.softmax(-1).gather(-1, top.indices)
        mine = mine / mine.sum(-1, keepdim=True) if k > 1 else mine
        (want,) = torch.autograd.grad(mine, twin, upstream)
        expect_close(got, want, what="the gradient of the logits")


@exercise_18_1a.check("a bias chooses and does not weigh")
def biases(top_k_router) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.8]], dtype=torch.float64)
    whole = logits.softmax(-1)  # 0.67, 0.24, 0.09 and 0.60, 0.22, 0.18
    bias = torch.tensor([-0.6, 0.0, 0.3], dtype=torch.float64)
    routing = top_k_router(logits, 2, bias)
    top = (whole + bias).topk(2, -1).indices
    recognise(
        {
            "the bias does not change who is chosen": torch.equal(
                routing.experts, whole.topk(2, -1).indices
            ),
            "the bias is added to the logits, not to the probabilities": torch.equal(
                routing.experts, (logits + bias).topk(2, -1).indices
            ),
            "ordered by probability alone: the largest with its bias comes first": torch.equal(
                routing.experts, top.gather(-1, whole.gather(-1, top).argsort(-1, descending=True))
            ),
        },
        expected=f"{top.tolist()} by probability plus bias",
        seen=str(routing.experts.tolist()),
    )
    expect_equal(routing.experts.tolist(), top.tolist(), what="the experts with a bias")
    weights = whole.gather(-1, top)
    score = (whole + bias).gather(-1, top)
    expect_close(
        routing.weights,
        weights / weights.sum(-1, keepdim=True),
        what="the weights with a bias",
        looks_like={"the bias is in the weights": score / score.sum(-1, keepdim=True)},
    )
    expect_close(routing.probabilities, whole, what="the probabilities, which have no bias in them")


@exercise_18_1a.check("16 bits, and a k that cannot be")
def narrow_routes(top_k_router) -> None:
    logits = torch.randn(9, 6, generator=fresh_generator()).bfloat16()
    routing = top_k_router(logits, 2)
    recognise(
        {
            "16-bit logits are summed in 16 bits": (
                routing.probabilities.dtype == torch.bfloat16
                or torch.equal(routing.probabilities, routing.probabilities.bfloat16().float())
            ),
        },
        expected="probabilities in float32",
        seen=str(routing.probabilities.dtype),
    )
    expect_close(routing.probabilities, logits.float().softmax(-1), what="bfloat16's probabilities")
    for k in (0, 7):
        expect_raises(
            ValueError, top_k_router, logits, k, what=f"k = {k} of 6 experts", mentions=(k, 6)
        )


exercise_18_1b = checks_for(
    "18.1b",
    name="balance_loss",
    difficulty=2,
    minutes=20,
    hint=(
        "torch.bincount(routing.experts.flatten(), minlength=E) counts; all_reduce the counts if "
        "there is a process group of several ranks; divide by their sum; multiply by the mean "
        "probabilities, sum, times E."
    ),
)


@exercise_18_1b.check("by hand: even loads, and everything to one expert")
def balance_by_hand(balance_loss) -> None:
    even = torch.full((4, 4), 0.25, dtype=torch.float64).requires_grad_()
    loss = without_group(
        balance_loss,
        Routing(torch.arange(4)[:, None], even[:, :1], even),
        mistake="it asks for a process group where there is none",
        expected="this process alone",
        hint="dist.is_initialized()",
    )
    found = float(loss.detach())
    recognise(
        {
            "even loads give 1 / E: the factor E is missing": abs(found - 0.25) < 1e-9,
            "no gradient reaches the probabilities": not loss.requires_grad,
        },
        expected="1 for even loads, with a gradient",
        seen=f"{found:.3f}",
    )
    sure = F.one_hot(torch.zeros(5, dtype=torch.int64), 4).double().requires_grad_()
    experts = torch.zeros(5, 1, dtype=torch.int64)
    loss = balance_loss(Routing(experts, sure[:, :1], sure))
    expect_close(loss, torch.tensor(4.0).double(), what="the loss of one expert for all, of four")


@exercise_18_1b.check("on 1, 3 and 2 x 2 ranks, each with tokens of its own")
def balance_on_ranks(balance_loss) -> None:
    for world in message_lab.BALANCES:
        seen = message_lab.balances(balance_loss)(world)
        for rank, one in enumerate(seen):
            looks_like, n = {}, world.experts

            def loss_of(counts, probabilities, n=n):
                mean = probabilities.mean(0)
                return n * (counts.to(mean.dtype) / counts.sum() * mean).sum()

            def count(ranks, column=slice(None), seen=seen, n=n):
                chosen = [seen[r].routing.experts[:, column].flatten() for r in ranks]
                return torch.bincount(torch.cat(chosen), minlength=n)

            mine = one.routing.probabilities.requires_grad_()
            counts = count(world.members(rank))
            want = loss_of(counts, mine)
            mean = mine.mean(0)
            if len(world.members(rank)) > 1:
                looks_like["the shares are this rank's alone"] = loss_of(count([rank]), mine)
                each = [count([r]) / count([r]).sum() for r in world.members(rank)]
                looks_like["the mean of the ranks' shares: a rank with more tokens counts more"] = (
                    n * (torch.stack(each).mean(0).to(mean.dtype) * mean).sum()
                )
            if world.groups > 1:
                everyone = range(world.ranks)
                looks_like["the counts are of all ranks, not of the group"] = loss_of(
                    count(everyone), mine
                )
            looks_like |= {
                "first choices alone are counted": loss_of(
                    count(world.members(rank), slice(0, 1)), mine
                ),
                "the shares are mean probabilities: what was chosen is not in it": n
                * (mean * mean).sum(),
                "the shares are of tokens, not of choices: k times too much": world.k * want,
            }
            what = f"rank {rank}'s loss ({len(world.members(rank))} ranks in the group)"
            # Shares of two counts of whole numbers are float32, torch's default: no mistake.
            expect_close(one.loss, want, what=what, looks_like=looks_like, rtol=1e-6)
            (gradient,) = torch.autograd.grad(want, mine)
            expect(one.gradient is not None, expected="a gradient", seen="None")
            expect_close(
                one.gradient, gradient, what="the gradient of the probabilities", rtol=1e-6
            )


exercise_18_2 = checks_for(
    "18.2",
    name="MoELayer",
    difficulty=3,
    minutes=35,
    hint=(
        "Flatten x to (T, D) and route. experts.flatten().argsort(stable=True) brings the T k "
        "choices together by expert; the token of choice i is i // k. Split the rows by the "
        "counts, call each expert, cat, multiply by the weights in the same order, index_add."
    ),
)


@exercise_18_2.check("outputs, rows and gradients beside a loop over the tokens")
def layers_of_experts(answer) -> None:
    for shape in lab.SHAPES:
        one = lab.layer_seen(answer, shape)
        words = f"{shape.experts} experts, k = {shape.k}"
        router = one.layer.router
        recognise(
            {
                "the router has a bias of its own": getattr(router, "bias", None) is not None,
                "the shape of x is lost": one.y.shape != one.x.shape,
                "an expert computes rows that nobody sent to it": any(
                    sum(calls) > wanted
                    for calls, wanted in zip(one.rows, one.wanted_rows, strict=True)
                ),
                "copies of the experts are kept, not the experts": not any(one.rows),
                "an expert is called more than once: its rows go through it together": any(
                    len(calls) > 1 for calls in one.rows
                ),
                "an expert without rows is not called: its parameters have no gradient": any(
                    not calls for calls in one.rows
                ),
                "routing has no graph: no loss can be made of it": not one.has_graph,
            },
            expected=f"each expert called once, with its rows: {one.wanted_rows}",
            seen=f"outputs of shape {tuple(one.y.shape)}, rows by call {one.rows}",
        )
        expect_close(
            one.y,
            one.wanted,
            what=f"the output ({words})",
            rtol=1e-11,
            atol=1e-12,
            looks_like={
                "the outputs are added up without their weights": one.unweighted,
                "a token keeps one of its experts' outputs: they are written, not added": one.last,
                "rows lie in the order of experts, their weights in that of tokens": one.crossed,
            },
        )
        for name, want in one.wanted_gradients.items():
            got = one.gradients[name]
            expect(got is not None, expected=f"a gradient of {name} ({words})", seen="None")
            expect_close(
                got, want, what=f"the gradient of {name} ({words})", rtol=1e-10, atol=1e-11
            )


@exercise_18_2.check("what it keeps, and a k that cannot be")
def layer_contract(answer) -> None:
    layer = answer([lab.Expert() for _ in range(3)], lab.WIDTH, 2)
    layer(torch.randn(5, lab.WIDTH, generator=fresh_generator()))
    expect_equal((len(layer.experts), layer.k), (3, 2), what="len(experts) and k")
    expect_equal(tuple(layer.routing.experts.shape), (5, 2), what="the shape of routing.experts")
    names = {name.split(".")[0] for name, _ in layer.named_parameters()}
    expect_equal(sorted(names), ["experts", "router"], what="where its parameters are")
    narrow = answer([lab.Expert() for _ in range(3)], lab.WIDTH, 3).bfloat16()
    x = torch.randn(5, lab.WIDTH, generator=fresh_generator()).bfloat16()
    try:
        y = narrow(x)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("scalar type", "dtypes match")):
            raise
        wrong(
            "weights that are float32 at least make float32 of 16-bit outputs",
            expected="an output in torch.bfloat16 for x in torch.bfloat16",
            seen=str(error),
            hint="bring the weights to the outputs' dtype before you multiply",
        )
    expect(y.dtype == x.dtype, expected=f"an output in {x.dtype} for such an x", seen=str(y.dtype))
    want = narrow.double()(x.double())
    expect_close(y.double(), want, what="the output in 16 bits", rtol=3e-2, atol=3e-2)
    experts = [lab.Expert() for _ in range(3)]
    expect_raises(ValueError, answer, experts, lab.WIDTH, 4, what="k = 4 of 3", mentions=(4, 3))


exercise_18_3a = checks_for(
    "18.3a",
    name="exchange",
    difficulty=2,
    minutes=20,
    hint=(
        "A torch.autograd.Function whose forward calls dist.all_to_all_single(came, rows, receive, "
        "send, group=group), and whose backward calls it with both lists swapped."
    ),
    forbidden=("torch.distributed.nn.", "torch.distributed._functional_collectives."),
)


def rounded(one) -> bool:
    """Whether what came has no more digits than float32 has."""
    return len(one.came) > 0 and torch.equal(one.came, one.came.float().to(one.came.dtype))


@exercise_18_3a.check("values, gradients and bytes on 1, 2, 3 and 2 x 2 ranks")
def exchanges(exchange) -> None:
    for world in message_lab.WORLDS:
        seen = message_lab.exchanges(exchange)(world)
        recognise(
            {"the rows travel in another dtype": any(map(rounded, seen))},
            expected="rows as they were, in float64",
            seen="float32's",
        )
        for rank, one in enumerate(seen):
            members = world.members(rank)
            me, n = members.index(rank), len(members)
            parts = [seen[r].rows.split(seen[r].table[i].tolist()) for i, r in enumerate(members)]
            want = torch.cat([part[me] for part in parts])
            what = f"what came to rank {rank} ({n} ranks in the group)"
            last_first = torch.cat([part[me] for part in reversed(parts)])
            looks_like = {"what came lies in another order than that of the ranks": last_first}
            expect_close(one.came, want, what=what, looks_like=looks_like)
            expect(
                one.gradient is not None,
                mistake="no gradient reaches the rows",
                expected="the message the other way in backward",
                seen="None",
                hint="all_to_all_single has no backward: write an autograd function around it",
            )
            back = [
                seen[r].upstream.split(seen[r].table[:, i].tolist())[me]
                for i, r in enumerate(members)
            ]
            expect_close(one.gradient, torch.cat(back), what=f"rank {rank}'s gradient")
            expect_bytes(one, n)


def expect_bytes(one, n) -> None:
    """The rows and no more, once each way; nothing in a group of one."""
    calls = [*one.forward, *one.backward]
    sent = [sum(call.num_bytes for call in side) for side in (one.forward, one.backward)]
    want = [one.rows.nbytes, one.upstream.nbytes]
    recognise(
        {
            "a group of one rank sends to itself": n == 1 and bool(calls),
            "the rows are gathered: every rank gets everybody's": any(
                "gather" in call.op for call in calls
            ),
            "more bytes travel than the rows have: they are padded": n > 1
            and sum(sent) > sum(want),
        },
        expected=f"{want if n > 1 else [0, 0]} bytes forward and backward",
        seen=f"forward {say(one.forward)}; backward {say(one.backward)}",
    )
    if n > 1:
        expect_equal(sent, want, what="bytes handed in, forward and backward")
        expect(
            [len(one.forward), len(one.backward)] == [1, 1],
            expected="one message forward and one backward on every rank",
            seen=f"forward {say(one.forward)}; backward {say(one.backward)}",
        )


exercise_18_3b = checks_for(
    "18.3b",
    name="Dispatcher",
    difficulty=3,
    minutes=35,
    hint=(
        "counts.view(ranks, -1) is [to rank, its expert]; all_to_all_single of it gives "
        "[from rank, own expert]. Sums over dim 1 are both lists of exchange. A row's expert is in "
        "arange(own).repeat(ranks).repeat_interleave(those counts); a stable argsort of it "
        "regroups, and its inverse undoes it."
    ),
)


@exercise_18_3b.check("there and back on 1, 2, 3 and 2 x 2 ranks")
def dispatches(answer) -> None:
    for world in message_lab.WORLDS:
        seen = message_lab.dispatches(answer)(world)
        for rank, one in enumerate(seen):
            members = world.members(rank)
            me, n, own = members.index(rank), len(members), world.experts // len(members)
            mine = range(me * own, (me + 1) * own)
            arrived = {
                (e, r): seen[other].rows[seen[other].rows[:, 1] == e]
                for e in mine
                for r, other in enumerate(members)
            }
            want = one.counts[:, mine.start : mine.stop].sum(0)
            recognise(
                {
                    "counts has this rank's own rows, not those of all ranks": n > 1
                    and one.own_counts.tolist() != want.tolist()
                    and one.own_counts.tolist() == one.counts[me, mine.start : mine.stop].tolist(),
                    "counts has the rows by rank, not by own expert": n > 1
                    and one.own_counts.tolist() != want.tolist()
                    and one.own_counts.tolist()
                    == one.counts[:, mine.start : mine.stop].sum(1).tolist(),
                },
                expected=f"counts {want.tolist()}",
                seen=str(one.own_counts.tolist()),
            )
            expect_equal(one.own_counts.tolist(), want.tolist(), what="counts, by own expert")
            by_expert = torch.cat([arrived[e, r] for e in mine for r in range(n)])
            by_rank = torch.cat([arrived[e, r] for r in range(n) for e in mine])
            backwards = torch.cat([arrived[e, r] for e in mine for r in reversed(range(n))])
            expect_close(
                one.came,
                by_expert,
                what=f"what rank {rank} has got ({n} ranks in the group)",
                looks_like={
                    "the rows lie by rank: an expert's rows are apart": by_rank,
                    "among an expert's rows the ranks are out of order": backwards,
                },
            )
            factor = 2 + one.rows[:, 1:2]
            expect_close(
                one.back,
                one.rows * factor,
                what=f"what came back to rank {rank}",
                hint="outputs lie by expert, and travel by rank: undo the regrouping first",
            )
            expect(one.gradient is not None, expected="a gradient of the rows", seen="None")
            expect_close(one.gradient, factor.expand(-1, 3), what="the gradient of the rows")
            room = 8 * world.experts if n > 1 else 0
            opened = sum(call.num_bytes for call in one.opened)
            recognise(
                {
                    "every rank is told all ranks' counts": n > 1
                    and (opened > room or any("gather" in call.op for call in one.opened)),
                    "a group of one rank sends to itself": n == 1 and bool(one.opened),
                },
                expected=f"{room} bytes of counts, each to the rank that it is for",
                seen=say(one.opened),
            )


@exercise_18_3b.check("combine gives rows back in their own order")
def combines(answer) -> None:
    for world in message_lab.WORLDS[:2]:
        for one in message_lab.dispatches(answer)(world):
            expect_close(one.back[:, :2], (one.rows * (2 + one.rows[:, 1:2]))[:, :2], what="rows")


@exercise_18_3b.check("experts that the ranks cannot share")
def dispatch_refuses(answer) -> None:
    said = message_lab.refusals(answer)
    recognise(
        {
            "5 experts on 2 ranks are accepted": said == "nothing",
            "5 experts on 2 ranks raise another error than ValueError": said.isidentifier(),
            "the error does not say how many experts and ranks there are": not (
                "5" in said and "2" in said
            ),
        },
        expected="a ValueError that names 5 and 2",
        seen=said,
    )


exercise_18_4 = checks_for(
    "18.4",
    name="within_capacity",
    difficulty=2,
    minutes=20,
    hint=(
        "Bring the choices in turn: experts.t().flatten(). one_hot and cumsum along dim 0 count "
        "how often each expert was chosen so far; a choice is kept while its own count is at "
        "most the capacity. Back to (T, k) at the end."
    ),
)


def kept_by_loop(experts, num_experts, capacity, columns_first=True):
    """The rule, choice by choice."""
    tokens, k = experts.shape
    taken, keep = [0] * num_experts, torch.zeros(tokens, k, dtype=torch.bool)
    turns = [(t, c) for c in range(k) for t in range(tokens)]
    if not columns_first:
        turns = [(t, c) for t in range(tokens) for c in range(k)]
    for t, c in turns:
        expert = int(experts[t, c])
        keep[t, c] = taken[expert] < capacity
        taken[expert] += 1
    return keep


@exercise_18_4.check("which choices are kept")
def capacities(answer) -> None:
    draw = fresh_generator()
    hand = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 2]])  # expert 0 is wanted four times
    cases = [(hand, 3, 2)]
    for num_experts, k, capacity in ((4, 2, 5), (5, 3, 4), (3, 1, 3), (4, 2, 0), (2, 2, 30)):
        scores = torch.rand(17, num_experts, generator=draw) * torch.arange(1, num_experts + 1)
        cases.append((scores.topk(k, -1).indices, num_experts, capacity))
    for experts, num_experts, capacity in cases:
        keep, k = answer(experts, num_experts, capacity), experts.shape[1]
        want = kept_by_loop(experts, num_experts, capacity)
        columns = torch.cat(
            [kept_by_loop(experts[:, c : c + 1], num_experts, capacity) for c in range(k)], 1
        )
        later = kept_by_loop(experts.flip(0, 1), num_experts, capacity).flip(0, 1)
        together = want.all(1, keepdim=True).expand_as(want)
        what = f"the choices of {len(experts)} tokens that {num_experts} experts of {capacity} keep"
        expect_close(
            keep,
            want,
            what=what,
            looks_like={
                "an expert keeps one choice more than its capacity": kept_by_loop(
                    experts, num_experts, capacity + 1
                ),
                "an expert keeps one choice less than its capacity": kept_by_loop(
                    experts, num_experts, max(0, capacity - 1)
                ),
                "each column is counted alone: an expert takes k times its capacity": columns,
                "a token's second choice comes before the next token's first": kept_by_loop(
                    experts, num_experts, capacity, columns_first=False
                ),
                "the last choices are kept, not the first": later,
                "a token loses all of its choices with one": together,
                "the marks lie by column: they were not turned back": want.t().reshape(want.shape),
            },
        )


@exercise_18_4.check("a capacity below 0")
def capacity_refuses(answer) -> None:
    experts = torch.tensor([[0], [1]])
    expect_raises(ValueError, answer, experts, 2, -1, what="a capacity of -1", mentions=(-1,))


exercise_18_5 = checks_for(
    "18.5",
    name="average_gradients",
    difficulty=3,
    minutes=30,
    hint=(
        "is_expert(p) tells the two kinds apart. Experts: sum_flat(gradients, "
        "mesh['dp'].get_group()); others: sum_flat(gradients). Both divided by "
        "mesh.size(). A None becomes zeros before."
    ),
    in_place=True,
)


@exercise_18_5.check("beside one process on 2 x 2, 1 x 2 and 2 x 1 ranks")
def averages(answer) -> None:
    for case in lab.MESHES:
        seen = lab.averages(answer)(case)
        where = f"dp {case.dp} x ep {case.ep}"
        for rank, one in enumerate(seen):
            ranks = len(seen)
            place, inside = rank // case.ep, rank % case.ep
            copies = [seen[d * case.ep + inside] for d in range(case.dp)]
            group = seen[place * case.ep : (place + 1) * case.ep]
            for name, want in one.wanted.items():
                if name not in one.after:
                    continue
                got, own = one.after[name], one.before.get(name)
                expect(
                    not bool(want.isnan().any()),
                    mistake="a frozen parameter is given a gradient",
                    expected=f"none for {name}",
                    seen="one",
                )
                looks_like = wrong_means(name, one, copies, group, seen, case, want)
                if case.missing and got is None:
                    expect(False, mistake=lab.NONE_LEFT_OUT, expected="a gradient", seen="None")
                expect(got is not None, expected=f"a gradient of {name}", seen="None")
                expect(own is not None, expected=name, seen="no such gradient")
                what = f"rank {rank}'s gradient of {name} ({where}, {ranks} ranks)"
                expect_close(got, want, what=what, looks_like=looks_like, rtol=1e-10, atol=1e-12)
        most = 2 * one.held
        expect(
            max(one.sent for one in seen) <= most,
            mistake="more is sent than the gradients have: each kind is summed once",
            expected=f"at most {most} bytes",
            seen=f"{max(one.sent for one in seen)}",
        )


def wrong_means(name, one, copies, group, seen, case, want) -> dict:
    """What usual mistakes give, by the words for them."""
    own, ranks = one.before[name], len(seen)
    experts = 4 // case.ep

    def of_place(each):
        """What a rank has at this place: its own expert, where ours is an expert."""
        _, dot, rest = name.partition("experts.")
        number, _, inner = rest.partition(".")
        found = (n for n in each.before if n == name)
        if dot:
            twins = {f"1.experts.{i}.{inner}" for i in range(int(number) % experts, 4, experts)}
            found = (n for n in each.before if n in twins)
        return each.before.get(next(found, ""), torch.zeros_like(own))

    def total(places):
        return torch.stack([of_place(each) for each in places]).sum(0)

    if name not in one.experts:
        some = sum(bool(each.before[name].any()) for each in seen)
        few = {"divided by the ranks that have a gradient: the others count as zeros": (
            total(seen) / max(some, 1)
        )}  # fmt: skip
        return (few if some < ranks else {}) | {
            "what all ranks have is left as each rank has it": own,
            "what all ranks have is averaged over dp alone": total(copies) / case.dp,
            "what all ranks have is averaged over ep alone": total(group) / case.ep,
            "the sum over all ranks is not divided": ranks * want,
        }
    return {
        "the copies of an expert keep gradients of their own": own,
        "the copies of an expert keep gradients of their own, divided": own / ranks,
        "an expert's gradient is not divided by all ranks: too large by the ranks of ep": (
            total(copies) / case.dp
        ),
        "an expert's gradient is divided by nothing": total(copies),
        "experts are averaged over all ranks: different experts are mixed": total(seen) / ranks,
        "experts are averaged over ep: different experts are mixed": total(group) / case.ep,
        "experts are summed over ep: different experts are mixed": total(group) / ranks,
    }
