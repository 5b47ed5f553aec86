"""Number of token ids that a model's tokenizer knows. Its matrices may have more rows, padded to a round number: those ids mean
nothing and are never sampled.

Called by workers. Reads the tokenizer's files as data; none of their code is run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from trireme.config import ModelConfig
from trireme.errors import ModelError
from trireme.model.files import files_of
from trireme.model.gguf_header import read_gguf

_UNUSED = 5  # tokenizer.ggml.token_type


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Added(msgspec.Struct):
    id: int = -1


class _Tokenizer(msgspec.Struct):
    model: _TokenizerModel = msgspec.field(default_factory=_TokenizerModel)
    added_tokens: list[_Added] = []


_decoder = msgspec.json.Decoder(_Tokenizer)


def num_known_tokens(config: ModelConfig) -> int | None:
    """One more than the largest id that the tokenizer knows; None where its files do not tell. Frontends reject a model whose
    tokenizer they cannot read, with the reason."""
    source = files_of(config).path if config.tokenizer is None else Path(config.tokenizer).expanduser()
    try:
        return (_of_gguf(source) if source.suffix == ".gguf" else _of_json(source)) or None
    except (OSError, ModelError, msgspec.MsgspecError):
        return None


def begin_to_count(config: ModelConfig) -> Future[int | None]:
    """num_known_tokens in a thread: a large tokenizer.json takes as long to read as some weights."""
    pool = ThreadPoolExecutor(1, "vocabulary")
    counted = pool.submit(num_known_tokens, config)
    pool.shutdown(wait=False)
    return counted


def _of_json(path: Path) -> int:
    found = _decoder.decode((path / "tokenizer.json" if path.is_dir() else path).read_bytes())
    vocab = found.model.vocab
    last = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return 1 + max(last, *(entry.id for entry in found.added_tokens), -1)


def _of_gguf(path: Path) -> int:
    """num_known_tokens of a GGUF file: converters pad the token list to the matrices' size with unused tokens named by their
    id."""
    key = "tokenizer.ggml.tokens"
    count, last = read_gguf(path, arrays=False).strings.get(key, (0, ""))
    if not count or last != f"[PAD{count - 1}]":
        return count
    file = read_gguf(path)
    tokens, kinds = file.texts(key), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(kinds, list) and len(kinds) == count:
        while count and kinds[count - 1] == _UNUSED and tokens[count - 1] == f"[PAD{count - 1}]":
            count -= 1
    return count
