"""A tokenizer for the tiny models, made here: vLLM's grammars need the text of each token."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from kvsm.vllm.tiny_model import VOCABULARY

SPECIAL = ("<pad>", "<s>", "</s>")
"""The first tokens. The models' configuration says which of them begins and ends a text."""

_LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}":,'


def words() -> list[str]:
    """The text of each token: every printable character, then pairs of letters."""
    printable = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    pairs = ["".join(pair) for pair in product(_LETTERS, repeat=2)]
    return [*SPECIAL, *printable, *pairs][:VOCABULARY]


def text_of(tokens: list[int]) -> str:
    """The text of an answer, without the token that ends it."""
    known = words()
    return "".join(known[token] for token in tokens if token >= len(SPECIAL))


def write_tokenizer(directory: Path) -> str:
    """Write the files that Hugging Face's loader reads. Returns the directory, for vLLM's `tokenizer`."""
    from tokenizers import Tokenizer, decoders, models

    directory.mkdir()
    pad, begin, end = SPECIAL
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words())}, unk_token=pad))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    told = {"bos_token": begin, "eos_token": end, "unk_token": pad, "pad_token": pad}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **told})
    )
    # Without a type vLLM would look for it in the network.
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(directory)
