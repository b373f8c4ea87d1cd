"""The capstone's weights in transformers, and transformers' in the capstone: the same logits."""

import json

import pytest
import torch

from shared.capstone.config import ModelTable
from shared.capstone.hugging_face import main, read_hugging_face, write_hugging_face
from shared.capstone.resuming import RUN
from shared.capstone.tasks import build_model
from shared.errors import InputError
from shared.training.named_checkpoint import ModuleLayout, save_named

TABLES = {
    "gpt": ModelTable("gpt", 32, 2, 4, 0, 64, 101, 24),
    "modern": ModelTable("modern", 32, 2, 4, 2, 48, 101, 24),
}
TOKENS = torch.arange(40).view(2, 20) * 7 % 101


def random_model(table: ModelTable):
    torch.manual_seed(0)
    model = build_model(table, 101)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains, too
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("kind", TABLES)
def test_transformers_computes_the_same_with_the_same_weights(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = random_model(TABLES[kind])
    notes = {"model": {k: v for k, v in vars(TABLES[kind]).items() if k != "fused"}}
    text = json.dumps({**notes, "vocab_size": 101})
    save_named(ModuleLayout(model), None, tmp_path / "step_00000004", {RUN: text})
    main(str(tmp_path), str(tmp_path / "theirs"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert type(theirs).__name__ == {"gpt": "GPT2LMHeadModel", "modern": "LlamaForCausalLM"}[kind]
    with torch.no_grad():
        assert torch.allclose(theirs(TOKENS).logits, model(TOKENS), atol=2e-5)
    again = read_hugging_face(tmp_path / "theirs").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again[name], value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", TABLES)
def test_a_model_of_transformers_is_read(kind, tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    if kind == "gpt":
        config = transformers.GPT2Config(
            vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=24,
            activation_function="relu", tie_word_embeddings=tied,
        )  # fmt: skip
        theirs = transformers.GPT2LMHeadModel(config).eval()
    else:
        config = transformers.LlamaConfig(
            vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24,
            rms_norm_eps=1e-5, tie_word_embeddings=tied,
        )  # fmt: skip
        theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        found = read_hugging_face(tmp_path)(TOKENS)
        assert torch.allclose(found, theirs(TOKENS).logits, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gpt", {"activation_function": "gelu_new"}, "'gelu_new', where the course has 'relu'"),
        ("gpt", {"model_type": "opt"}, "model_type 'opt', not gpt2 or llama"),
        ("modern", {"rope_scaling": {"factor": 2.0}}, "rope_scaling"),
        ("modern", {"num_hidden_layers": 3}, r"has no model\.layers\.2"),
        ("modern", None, "cannot be read"),
    ],
)
def test_what_the_course_does_not_compute_is_refused_by_name(kind, change, words, tmp_path):
    write_hugging_face(random_model(TABLES[kind]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = "{" if change is None else json.dumps({**config, **change})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_hugging_face(tmp_path)
