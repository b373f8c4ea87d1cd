"""A checkpoint is whole or absent, and whatever else is found in its place is refused in words."""

import os

import pytest
import torch

from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.training.checkpoint_files import copy_weights, read_checkpoint, write_atomically
from shared.training.translator_files import load_translator, save_translator


@pytest.fixture
def translator():
    tokenizer = Tokenizer.train(["one two three"] * 3, 300)
    config = TransformerConfig(tokenizer.vocab_size, d_model=8, num_heads=2, num_layers=1, d_ff=8)
    torch.manual_seed(0)
    return Transformer(config), tokenizer


def test_what_is_saved_comes_back(translator, tmp_path):
    model, tokenizer = translator
    path = tmp_path / "deep" / "translator.pt"
    save_translator(path, model, tokenizer, steps=7)
    again, same_tokenizer, notes = load_translator(path)
    assert again.config == model.config
    assert notes == {"steps": 7}
    assert not again.training
    assert same_tokenizer.encode("two one") == tokenizer.encode("two one")
    for (name, a), (other, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
    assert os.listdir(path.parent) == ["translator.pt"]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9, 0.999])
def test_a_cut_file_is_refused_at_any_length(translator, tmp_path, share):
    path = tmp_path / "translator.pt"
    save_translator(path, *translator)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match=r"cut short|not a checkpoint") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_refused(translator, tmp_path):
    path = tmp_path / "translator.pt"
    save_translator(path, *translator)
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 400] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"translator\.pt.* is damaged"):
        load_translator(path)


def test_other_files_are_refused(translator, tmp_path):
    missing = tmp_path / "nothing.pt"
    with pytest.raises(InputError, match="no checkpoint at"):
        read_checkpoint(missing)
    with pytest.raises(InputError, match="is a folder"):
        read_checkpoint(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("dear diary\n" * 20)
    with pytest.raises(InputError, match="not a checkpoint"):
        read_checkpoint(text)
    weights = tmp_path / "weights.pt"
    torch.save(translator[0].state_dict(), weights)
    with pytest.raises(InputError, match="not one of this course's"):
        read_checkpoint(weights)
    other = tmp_path / "other.pt"
    write_atomically(other, {"weights": {}})
    with pytest.raises(InputError, match="config, tokenizer, notes missing"):
        load_translator(other)


class Trap:
    def __reduce__(self):
        return os.system, ("echo executed",)


def test_code_in_a_checkpoint_is_not_run(tmp_path, capfd):
    path = tmp_path / "trap.pt"
    torch.save({"mark": Trap()}, path)
    with pytest.raises(InputError):
        read_checkpoint(path)
    assert "executed" not in capfd.readouterr().out


def test_weights_and_configuration_must_fit(translator, tmp_path):
    model, tokenizer = translator
    path = tmp_path / "translator.pt"
    save_translator(path, model, tokenizer)
    content = read_checkpoint(path)
    content["config"]["d_ff"] = 16
    write_atomically(path, {k: v for k, v in content.items() if k != "mark"})
    with pytest.raises(InputError, match="do not fit"):
        load_translator(path)


def test_a_save_that_fails_leaves_the_old_file(translator, tmp_path, monkeypatch):
    path = tmp_path / "translator.pt"
    save_translator(path, *translator, steps=1)

    def full_disk(content, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(InputError, match="No space left"):
        save_translator(path, *translator, steps=2)
    monkeypatch.undo()
    assert load_translator(path)[2] == {"steps": 1}
    assert os.listdir(tmp_path) == ["translator.pt"]


def test_a_folder_that_cannot_be_written(translator, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        save_translator(tmp_path / "file" / "translator.pt", *translator)


def test_a_copy_of_weights_stays(translator):
    model, _ = translator
    copied = copy_weights(model)
    before = {name: value.clone() for name, value in copied.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(copied[name], before[name]) for name in before)
