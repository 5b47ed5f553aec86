"""Rebuilds a tokenizer from the vocabulary in a GGUF header: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Called by serving.text.tokens only. The pre-tokenizer is chosen by the name in the file from a table; an unknown name is an
error, because a wrong one gives plausible but wrong ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trireme.errors import ModelError
from trireme.model.gguf_header import GgufFile, read_gguf
from trireme.serving.text.encoders import ADDED, INERT, PLAIN, SPECIAL, LibraryEncoder, SpmEncoder, TextEncoder

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_OF_KIND = {_UNKNOWN: SPECIAL, _CONTROL: SPECIAL, _USER_DEFINED: ADDED, _UNUSED: INERT}

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITAL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED}|{_CAPITAL}|\p{{N}}|{_REST}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = rf"{_CASED}{_SHORT}|{_CAPITAL}{_SHORT}|\p{{N}}{{1,3}}|{_REST}"

# tokenizer.ggml.pre -> how text is cut before merging: "gpt2", "digits" (each digit alone, then gpt2), or a pattern
_PRE: dict[str, str] = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "phi-2": "gpt2",
    "olmo": "gpt2",
    "jina-en": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "codeshell": "digits",
    "exaone": "digits",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "gpt-4o", "llama4"}
_NFC = {"qwen2", "deepseek-r1-qwen", "stablelm2"}


def tokenizer_from_gguf(path: Path) -> tuple[TextEncoder, dict[str, str], str | None]:
    """The encoder, its named special tokens (bos_token, ...), and the chat template of a GGUF file."""
    file = read_gguf(path)
    if "tokenizer.ggml.model" not in file.metadata:
        raise ModelError(f"{path} carries no tokenizer", hint="--tokenizer DIR names a directory with tokenizer.json")
    kind = file.text("tokenizer.ggml.model")
    tokens = file.texts("tokenizer.ggml.tokens")
    special = _named_tokens(file, tokens)
    encoder: TextEncoder
    if kind == "gpt2":
        encoder = _byte_level(file, tokens, special)
    elif kind == "llama":
        encoder = _sentencepiece(file, tokens, special)
    else:
        raise ModelError(
            f"{path} has a tokenizer of kind {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece) can be rebuilt",
            hint="--tokenizer DIR names a directory with tokenizer.json",
        )
    template = file.metadata.get("tokenizer.chat_template")
    return encoder, special, template if isinstance(template, str) else None


def _byte_level(file: GgufFile, tokens: list[str], special: dict[str, str]) -> LibraryEncoder:
    pre = file.text("tokenizer.ggml.pre", "default")
    rule = _PRE.get(pre)
    if rule is None:
        raise ModelError(
            f"{file.path} names the pre-tokenizer {pre!r}; known are {', '.join(sorted(_PRE))}",
            hint="--tokenizer DIR names a directory with tokenizer.json",
        )
    merges = []
    has_merges = "tokenizer.ggml.merges" in file.metadata
    for line in file.texts("tokenizer.ggml.merges") if has_merges else ():
        left, space, right = line[1:].partition(" ")  # a piece may itself begin with a space
        if not space or not right:
            raise ModelError(f"{file.path}: the merge {line!r} is not two pieces")
        merges.append((line[0] + left, right))
    tokenizer = Tokenizer(_build(file, tokens, merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    prefix = file.flag("tokenizer.ggml.add_space_prefix", False)
    if rule == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    elif rule == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(rule), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, file, tokens)
    _add_ends(tokenizer, file, special)
    return LibraryEncoder(tokenizer, vocab_size=len(tokens))


def _sentencepiece(file: GgufFile, tokens: list[str], special: dict[str, str]) -> SpmEncoder:
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    of_file = np.array(_kinds(file, tokens))
    unknown = np.nonzero(of_file == _UNKNOWN)[0]
    kinds = np.full(len(tokens), PLAIN, dtype=np.uint8)
    for number, kind in _OF_KIND.items():
        kinds[of_file == number] = kind
    try:
        encoder = SpmEncoder(
            tokens,
            scores,
            kinds,
            unknown=int(unknown[0]) if len(unknown) else None,
            adds_space=file.flag("tokenizer.ggml.add_space_prefix", True),
        )
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}", hint=error.hint) from error
    begin, end = _ends(file, special, bos_by_default=True)
    encoder.begin, encoder.end = ([tokens.index(text)] if text else [] for text in (begin, end))
    return encoder


def _build(file: GgufFile, tokens: list[str], merges: list[tuple[str, str]], *, ignore_merges: bool) -> models.BPE:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelError(f"{file.path}: the token {repeated!r} appears twice in the vocabulary")
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path}: the vocabulary and merges do not fit together: {error}") from error


def _kinds(file: GgufFile, tokens: list[str]) -> list[int]:
    if "tokenizer.ggml.token_type" not in file.metadata:
        return [1] * len(tokens)
    kinds = list(map(int, file.numbers("tokenizer.ggml.token_type")))
    if len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    return kinds


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    by_kind: dict[int, list[str]] = {_UNKNOWN: [], _CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, _kinds(file, tokens), strict=True):
        if kind in by_kind:
            by_kind[kind].append(token)
    # one list in id order: the library gives new ids to tokens it does not find in the vocabulary, and all are in it
    special = by_kind[_UNKNOWN] + by_kind[_CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    user = by_kind[_USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        key = f"tokenizer.ggml.{key}_token_id"
        if key in file.metadata:
            token = file.whole(key)
            if not 0 <= token < len(tokens):
                raise ModelError(f"{file.path}: {key} is {token}; the vocabulary has {len(tokens)} tokens")
            special[name] = tokens[token]
    return special


def _ends(file: GgufFile, special: dict[str, str], *, bos_by_default: bool) -> tuple[str | None, str | None]:
    """BOS and EOS around a text, as the file's flags say (a Llama vocabulary has BOS unless told otherwise)."""
    pre = file.metadata.get("tokenizer.ggml.pre")
    begin = file.flag(
        "tokenizer.ggml.add_bos_token", bos_by_default or pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    )
    end = file.flag("tokenizer.ggml.add_eos_token", False)
    return special.get("bos_token") if begin else None, special.get("eos_token") if end else None


def _add_ends(tokenizer: Tokenizer, file: GgufFile, special: dict[str, str]) -> None:
    bos, eos = _ends(file, special, bos_by_default=False)
    if bos is None and eos is None:
        return
    single = " ".join(part for part in (f"{bos}:0" if bos else "", "$A:0", f"{eos}:0" if eos else "") if part)
    pair = " ".join(part for part in (single, f"{bos}:1" if bos else "", "$B:1", f"{eos}:1" if eos else "") if part)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(text, _id_of(tokenizer, text)) for text in dict.fromkeys((bos, eos)) if text],
    )


def _id_of(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None
    return token
