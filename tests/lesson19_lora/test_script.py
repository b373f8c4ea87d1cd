"""The script: methods, engines and ranks; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson19_lora" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu", "--steps", "3")


@pytest.fixture(scope="module")
def on_one(launch_on):
    """Folder and metrics of LoRA under DDP on one rank."""
    return launch_on(SCRIPT, (1,), *TINY)[1]


def test_one_rank_leaves_table_figure_and_exact_bytes(on_one):
    out, metrics = on_one
    assert metrics["memory"]["predicted"] == metrics["memory"]["counted"]
    assert {path.name for path in out.iterdir()} == {"metrics.json", "lora.png"}


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        pytest.param(2, ("--method", "lora"), marks=pytest.mark.full),  # the notebook has its bytes
        (2, ("--method", "qlora", "--engine", "fsdp2")),
        pytest.param(2, ("--method", "full"), marks=pytest.mark.full),
        pytest.param(3, ("--method", "lora", "--engine", "fsdp2"), marks=pytest.mark.full),
        pytest.param(4, ("--method", "qlora"), marks=pytest.mark.full),
    ],
)
def test_methods_and_engines_have_predicted_bytes_and_one_curve(ranks, args, on_one, launch_on):
    metrics = launch_on(SCRIPT, (ranks,), *TINY, *args)[ranks][1]
    assert metrics["memory"]["predicted"] == metrics["memory"]["counted"]
    if "fsdp2" not in args:  # once each, though two engines were around the parameters
        assert metrics["handed_in"]["all_reduce"] == metrics["memory"]["counted"]["gradients"]
    if "lora" in args:
        assert metrics["losses"] == pytest.approx(on_one[1]["losses"], abs=1e-4)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--rank", "0"), "LoRA rank 0 on a layer of 32 x 32: 1 to 32 would do"),
        (("--rank", "33"), "LoRA rank 33 on a layer of 32 x 32"),
        (("--names", "w_q", "q_proj"), "no linear layer is called 'q_proj': there are w_q"),
        (("--method", "prefix"), "invalid choice"),
        (("--alpha", "0"), "must be a number above 0"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
