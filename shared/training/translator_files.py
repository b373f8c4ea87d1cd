"""A trained translator in one file: weights, configuration and tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.training.checkpoint_files import (
    read_checkpoint,
    refuse_what_cannot_be_read,
    write_atomically,
)


def save_translator(path: Path, model: Transformer, tokenizer: Tokenizer, **notes: Any) -> None:
    """Write weights, configuration and tokenizer into one file: what translating needs.

    `notes` are plain values to keep with it, such as the step or the score. A run that is to be
    continued needs more (optimizer, schedule, random states): lesson 08. Raises InputError for a
    note that could not be read back, a numpy number say.
    """
    refuse_what_cannot_be_read(notes, "notes")
    content = {
        "config": dataclasses.asdict(model.config),
        "weights": model.state_dict(),
        "tokenizer": tokenizer.to_json(),
        "notes": notes,
    }
    write_atomically(path, content)


def load_translator(path: Path) -> tuple[Transformer, Tokenizer, dict[str, Any]]:
    """Return model (in eval mode, on the CPU), tokenizer and notes of a `save_translator` file.

    Raises InputError as `read_checkpoint` does, and when parts are missing or do not fit.
    """
    content = read_checkpoint(path)
    missing = [name for name in ("config", "weights", "tokenizer", "notes") if name not in content]
    if missing:
        raise InputError(f"{path} holds no translator: {', '.join(missing)} missing in it")
    tokenizer = Tokenizer.from_json(content["tokenizer"], origin=str(path))
    try:
        model = Transformer(TransformerConfig(**content["config"]))
        model.load_state_dict(content["weights"])
    except (TypeError, RuntimeError) as error:
        first_line = str(error).splitlines()[0]
        raise InputError(f"{path}: configuration and weights do not fit: {first_line}") from error
    if tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model embeds "
            f"{model.config.vocab_size}: they are not from one run"
        )
    return model.eval(), tokenizer, content["notes"]
