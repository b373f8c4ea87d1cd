"""The capstone's weights in transformers, and transformers' in the capstone: the same logits."""

import json
import runpy

import pytest
import torch
from safetensors.torch import load_file

from shared.capstone import hugging_face
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
DROP = "left out"
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
        ("modern", [], "holds no object"),
        ("modern", {"rope_parameters": None, "rope_theta": 500000.0}, "'rope_theta': 500000.0"),
        ("modern", {"rms_norm_eps": DROP}, "rms_norm_eps 1e-06, where the course has 1e-05"),
        ("gpt", {"activation_function": DROP}, "'gelu_new', where the course has 'relu'"),
        ("modern", {"head_dim": 16}, "head_dim 16, where the course has 8"),
        ("modern", {"hidden_size": 64}, r"\(101, 32\), and \(101, 64\) by config.json"),
        ("modern", {"vocab_size": 100}, r"\(101, 32\), and \(100, 32\)"),
        ("modern", {"num_key_value_heads": None}, r"k_proj.weight is \(16, 32\), and \(32, 32\)"),
        ("modern", {"intermediate_size": DROP}, "intermediate_size must be a whole number from 1"),
    ],
)
def test_what_the_course_does_not_compute_is_refused_by_name(kind, change, words, tmp_path):
    write_hugging_face(random_model(TABLES[kind]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if isinstance(change, dict):
        change = {key: v for key, v in {**config, **change}.items() if v is not DROP}
    (tmp_path / "config.json").write_text("{" if change is None else json.dumps(change))
    with pytest.raises(InputError, match=words) as caught:
        read_hugging_face(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_config_of_transformers_4_is_read(tmp_path):
    """theta at the top, and as many heads of keys as of queries where it says nothing."""
    model = random_model(ModelTable("modern", 32, 1, 4, 4, 48, 101, 24))
    write_hugging_face(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
    assert torch.allclose(read_hugging_face(tmp_path)(TOKENS), model(TOKENS), atol=1e-5)


def test_an_embedding_in_16_bits_is_scaled_in_float32(tmp_path):
    write_hugging_face(random_model(TABLES["modern"]).bfloat16(), tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert theirs.dtype == torch.bfloat16
    ours = read_hugging_face(tmp_path).state_dict()["embedding.weight"]
    torch.testing.assert_close(ours * 32**0.5, theirs.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("given", "words"), [([], "usage: "), (["no_such", "out"], "error: no_such/run.json cannot")]
)
def test_what_the_command_cannot_use_is_said_without_a_traceback(given, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hugging_face", *given])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(hugging_face.__file__, run_name="__main__")
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
