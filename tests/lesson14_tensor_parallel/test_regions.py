"""What a region does with what is given by keyword, and an error inside of it."""

import copy

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.nn.functional as F
from torch import nn

from shared.errors import InputError
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.model.layers import EncoderLayer
from shared.ranks.forked import run_ranks
from shared.tensor_parallel.blocks import parallel_block
from shared.tensor_parallel.conjugates import copy_to_ranks, gather_sequence
from shared.tensor_parallel.marks import mark_partial
from shared.tensor_parallel.models import make_mesh, parallel_model, sum_partial_gradients
from shared.tensor_parallel.regions import own_random_numbers, split_region
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

CONFIG = TransformerConfig(
    vocab_size=24, d_model=16, num_heads=4, num_layers=2, d_ff=32, dropout=0.1, max_len=12
)


class Product(nn.Module):
    """Two vectors and a number, by position or by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, other, times=1.0):
        return self.dropout(x * other * times)


def by_keyword(rank: int) -> list[list[torch.Tensor]]:
    found = []
    for keywords in ((), ("other",), ("x", "other")):
        torch.manual_seed(0)
        module = Product()
        split_region(module, None, copy_to_ranks)
        given = {name: torch.ones(64, requires_grad=True) for name in ("x", "other")}
        args = [x for name, x in given.items() if name not in keywords]
        module(*args, **{name: given[name] for name in keywords}, times=2.0).sum().backward()
        found.append([x.grad for x in given.values()])
    return found


def test_vectors_given_by_keyword_enter_as_those_given_by_position():
    first, second = run_ranks(by_keyword, 2, timeout=30)
    for place in range(3):
        for mine, other, want in zip(first[place], second[place], first[0], strict=True):
            torch.testing.assert_close(mine, other)  # summed over the ranks
            torch.testing.assert_close(mine, want)
        assert set(first[place][0].tolist()) == {0.0, 4.0, 8.0}  # each rank dropped its own


def after_an_error(rank: int, sequence_parallel: bool) -> list[list[torch.Tensor]]:
    """Weights after a step: the first one's, then of those before which one failed at a place."""
    torch.manual_seed(0)
    whole, results = LanguageModel(CONFIG), []
    for where in ("", "forward", "backward"):
        model = copy.deepcopy(whole)
        parallel_model(model, make_mesh("cpu", tp=2), sequence_parallel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if where:
            handle = raise_at(model.layers[1], where)
            with pytest.raises(ZeroDivisionError):
                backward(model)
            handle.remove()
        torch.manual_seed(1)
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    return results


def backward(model: nn.Module) -> None:
    tokens = torch.randint(24, (2, 9), generator=torch.Generator().manual_seed(2))
    losses = vocab_parallel_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    F.relu(losses).mean().backward()
    sum_partial_gradients(model)


def raise_at(layer: nn.Module, where: str):
    def raises(*_):
        raise ZeroDivisionError

    if where == "forward":
        return layer.get_submodule("self_attention").w_o.register_forward_pre_hook(raises)
    return layer.register_forward_hook(lambda *a: a[-1].register_hook(raises) and None)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_error_and_zero_grad_are_as_if_the_step_had_not_been(sequence_parallel):
    for good, *others in run_ranks(after_an_error, 2, sequence_parallel, timeout=60):
        for after in others:
            torch.testing.assert_close(after, good, rtol=0, atol=0)


def outer_hooks(rank: int) -> list:
    """How often hooks outside of a region were asked for the gathered sequence's part."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, requires_grad=True)
    module, saved = nn.Linear(4, 4), []
    split_region(module, None, gather_sequence)

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    y.square().sum().backward()
    return [saved, x.grad, module.weight.grad]


def test_hooks_that_are_set_outside_of_a_region_see_what_it_keeps():
    # Through torch._C._autograd._top_saved_tensors_default_hooks, which is private to torch.
    for saved, x_grad, weight_grad in run_ranks(outer_hooks, 2, timeout=30):
        assert (1, 2, 4) in saved  # the part
        assert (1, 4, 4) not in saved[:-1]  # the whole: y alone, of the square outside
        assert x_grad is not None
        assert weight_grad is not None


def refused(rank: int) -> tuple[str, bool]:
    """What parallel_block says of d_ff 33 on 2 ranks, and whether the layer is as it was."""
    layer = EncoderLayer(TransformerConfig(**{**vars(CONFIG), "d_ff": 33}))
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    with pytest.raises(InputError) as error:
        parallel_block(layer, make_mesh("cpu", tp=2))
    after = layer.state_dict()
    return str(error.value), all(x.equal(after[name]) for name, x in before.items())


def test_a_layer_that_cannot_be_cut_is_left_as_it_was():
    said = "d_ff 33 cannot be shared out evenly over 2 ranks"
    assert run_ranks(refused, 2, timeout=30) == [(said, True)] * 2


def drawn(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    state, found = torch.get_rng_state(), []
    for _ in range(2):  # as a recomputation draws again
        torch.set_rng_state(state)
        with own_random_numbers():
            found.append(torch.randn(4))
    return [*found, torch.randn(4)]


def test_ranks_draw_their_own_numbers_inside_the_same_again_and_common_ones_afterwards():
    (a, a_again, a_after), (b, b_again, b_after) = run_ranks(drawn, 2, timeout=30)
    assert a.equal(a_again)
    assert b.equal(b_again)
    assert not a.equal(b)
    assert a_after.equal(b_after)


def partial_sums(rank: int) -> tuple[int, list[torch.Tensor]]:
    """Messages of sum_partial_gradients over two dtypes, and its sums; one has no gradient here."""
    module = nn.ParameterList(
        nn.Parameter(torch.zeros(2, dtype=t)) for t in (torch.float32, torch.float32, torch.float64)
    )
    for number, parameter in enumerate(module):
        mark_partial(parameter)
        if (rank, number) != (1, 0):
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
    with count_traffic() as traffic:
        sum_partial_gradients(module)
    return traffic.count("all_reduce"), [parameter.grad for parameter in module]


def test_partial_gradients_are_summed_in_one_message_a_dtype():
    for messages, sums in run_ranks(partial_sums, 2, timeout=30):
        assert messages == 2
        assert [x.tolist() for x in sums] == [[1.0, 1.0], [3.0, 3.0], [3.0, 3.0]]
