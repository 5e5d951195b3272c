"""The tokenizer of a GGUF file: the same tokens as llama.cpp's, by the tokenizers package."""

from __future__ import annotations

from collections import Counter
from typing import Any

from latte.conversion.gguf.documents import (
    BYTE,
    CONTROL,
    SPLIT,
    TAKES_WORDS,
    UNKNOWN,
    USER_DEFINED,
    adds_token,
    document_ends,
    is_sentencepiece,
    special_token,
    token_types,
)
from latte.conversion.gguf.file import GgufFile
from latte.errors import LatteError, one_line

MODEL, MERGES = "tokenizer.ggml.model", "tokenizer.ggml.merges"
SPACE = "▁"  # in SentencePiece's vocabularies
NO_TEXT = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)  # types of tokens that are never merged from text
# How byte-level tokenizers split text. Transformers does not know the digits of the last one.
PLAIN_SPLITS, DIGIT_SPLITS = ("gpt-2", "gpt2"), ("smollm", "starcoder", "refact", "codeshell")


def gguf_tokenizer(file: GgufFile) -> Any:
    """The tokenizer of a file's model, with its chat template.

    Raises:
        LatteError: There is no tokenizer, it is of another kind, or its parts do not fit.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens = file.tokens
    if not tokens:
        raise LatteError(f"{file.path} has no tokenizer")
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise LatteError(f"{file.path}: tokenizer.ggml.tokens has {twice!r} twice; expected once")
    types, ends = token_types(file), document_ends(file)
    try:
        backend = (_sentencepiece if is_sentencepiece(file) else _byte_level)(file)
    except LatteError:
        raise
    except Exception as error:  # the tokenizers package raises bare Exception
        raise LatteError(
            f"the tokenizer of {file.path} cannot be read: {one_line(error)}"
        ) from None
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        added = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]
        backend.add_tokens([AddedToken(each, normalized=False, special=special) for each in added])
    named = {"bos": ends.bos, "eos": ends.eos}
    named |= {"unk": special_token(file, "unknown"), "pad": special_token(file, "padding")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        # As Transformers' classes of these vocabularies.
        padding_side="left" if is_sentencepiece(file) else "right",
        add_bos_token=adds_token(file, "bos"),
        add_eos_token=adds_token(file, "eos"),
        **{f"{name}_token": tokens[i] for name, i in named.items() if i is not None},
    )
    is_one = list(ends.templates) == ["default"]
    tokenizer.chat_template = ends.templates["default"] if is_one else ends.templates or None
    return tokenizer


def _sentencepiece(file: GgufFile) -> Any:
    """Pairs are merged by the score of the token that they make, the highest first."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    key, tokens = "tokenizer.ggml.scores", file.tokens
    given = file.metadata.get(key)
    if not isinstance(given, list) or len(given) < len(tokens):
        file.refuse(key, f"one number for each of the {len(tokens)} tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = zip(tokens, token_types(file), strict=True)
    apart = {token for token, kind in pairs if kind in NO_TEXT}
    merges = generate_merges(vocabulary, dict(zip(tokens, given, strict=False)), apart)
    made = {left + right for left, right in merges}
    if len(made) > 1 and len({given[vocabulary[token]] for token in made}) == 1:
        file.refuse(key, "different scores: they decide which tokens a text has")
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = special_token(file, "unknown")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # A text and what follows a special token begin with a space, also if they have one already.
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend(SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _byte_level(file: GgufFile) -> Any:
    """Text is split into words, whose bytes are merged in the order of the file's pairs."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if file.text(MODEL) != "gpt2":
        file.refuse(MODEL, "'llama' (SentencePiece) or 'gpt2' (byte-level BPE)")
    split = file.text(SPLIT)
    known = (*PLAIN_SPLITS, *DIGIT_SPLITS, *GGUF_PRE_TOKENIZER_SPLITS)
    if split not in known:
        file.refuse(SPLIT, f"one of {', '.join(known)}")
    if MERGES not in file.metadata:
        file.refuse(MERGES, "the pairs of a byte-level vocabulary")
    vocabulary = {token: i for i, token in enumerate(file.tokens)}
    merges = []
    for pair in file.texts(MERGES):
        at = pair.find(" ", 1)
        left, right = pair[:at], pair[at + 1 :]
        if at < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise LatteError(f"{file.path}: {MERGES} has {pair!r}; expected a pair of tokens")
        merges.append((left, right))
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            ignore_merges=split in TAKES_WORDS,
        )
    )
    plain = split in PLAIN_SPLITS or split in DIGIT_SPLITS
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=plain)
    if split in DIGIT_SPLITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.Sequence([digits, words])
    elif not plain:
        pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[split])
        words = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), words])
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend
