"""A byte-level byte-pair tokenizer, one vocabulary for both languages.

Byte-pair encoding (Sennrich et al. 2016) starts from single symbols and merges the most frequent
neighbours until the vocabulary is full: frequent words become one token, rare German compounds a
few. Byte-level (Radford et al. 2019) means that the first symbols are the 256 bytes of UTF-8, so
every text can be written and none is unknown.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Parallel threads of the tokenizers package do not survive a fork: ranks in a notebook and
# DataLoader workers are forks, and would each print a warning or wait for threads that are gone.
# Two cores lose half a second on 60,000 sentences; set it to "true" for millions.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from shared.errors import InputError

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
SMALLEST_VOCABULARY = len(SPECIALS) + 256


class Tokenizer:
    """Text to token ids and back: `decode(encode(text)) == text` for any text.

    Ids 0 to 3 are pad, bos, eos and unk. No text can produce them, not even one that holds
    "<pad>": they are set by collate alone. A space is put before the text, and taken away by
    decode, so that a word at the beginning of a sentence and the same word inside it share their
    token.
    """

    def __init__(self, engine: tokenizers.Tokenizer) -> None:
        self._engine = engine
        self._engine.encode_special_tokens = True  # read "<pad>" in a text as five characters

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn the merges from texts; the same texts give the same tokenizer.

        A small corpus may have fewer merges to learn than asked for: `vocab_size` of the result
        says how many there are.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise InputError(
                f"vocab_size is {vocab_size}; it must be at least {SMALLEST_VOCABULARY}: "
                "4 special tokens and the 256 bytes"
            )
        engine = tokenizers.Tokenizer(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=2,
            show_progress=False,
        )
        engine.train_from_iterator((" " + text for text in texts), trainer)
        return cls(engine)

    @property
    def vocab_size(self) -> int:
        """Number of ids, the four special ones included."""
        return self._engine.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without bos and eos; an empty text has none."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, several times faster than one by one."""
        try:
            encodings = self._engine.encode_batch_fast([" " + text for text in texts])
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError(_not_text(texts)) from error
        return [e.ids if text else [] for e, text in zip(encodings, texts, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens are left out."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of many rows of token ids; special tokens are left out."""
        size = self.vocab_size
        for number, row in enumerate(rows):
            for token in row:
                if not 0 <= token < size:
                    raise InputError(
                        f"token id {token} in row {number} is outside the vocabulary of {size}; "
                        "was the text encoded with another tokenizer?"
                    )
        texts = self._engine.decode_batch([list(row) for row in rows], skip_special_tokens=True)
        return [text.removeprefix(" ") for text in texts]

    def pieces(self, text: str) -> list[str]:
        """The tokens of a text as readable strings, for figures."""
        return [self._engine.decode([token]) for token in self.encode(text)]

    def to_json(self) -> str:
        """The tokenizer as text, to be stored beside a model's weights."""
        return self._engine.to_str()

    @classmethod
    def from_json(cls, text: str, origin: str = "this text") -> "Tokenizer":
        """The reverse of to_json; `origin` says in errors where the text came from."""
        try:
            content = json.loads(text)
            engine = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises plain Exception on a foreign JSON
            raise InputError(f"{origin} holds no tokenizer; train and save one") from error
        if not _is_ours(content, engine):
            raise InputError(
                f"{origin} holds a tokenizer of another kind; expected byte-level BPE with ids "
                f"0..3 for {', '.join(SPECIALS)}: train and save one with shared.data.tokenizer"
            )
        return cls(engine)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through JSON: the engine's own pickle forgets that "<pad>" in a text is just text.
        return Tokenizer.from_json, (self.to_json(),)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as JSON: aside first, then renamed, so no half file is left."""
        path = Path(path)
        aside = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(self.to_json(), encoding="utf-8")
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer that `save` wrote."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} holds no tokenizer but binary data") from error
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{path}: the tokenizer cannot be read: {reason}") from error
        return cls.from_json(text, origin=str(path))


def _is_ours(content: dict[str, Any], engine: tokenizers.Tokenizer) -> bool:
    byte_level = (content.get("pre_tokenizer") or {}).get("type") == "ByteLevel"
    bpe = (content.get("model") or {}).get("type") == "BPE"
    return byte_level and bpe and [engine.id_to_token(i) for i in range(len(SPECIALS))] == SPECIALS


def _not_text(texts: Sequence[Any]) -> str:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {number} is {text!r} of type {type(text).__name__}; expected a string"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return (
                f"text {number} holds half of a surrogate pair at character {error.start}, "
                "which is no Unicode text; was it decoded with surrogateescape?"
            )
    return "the tokenizer refused the texts"
