"""Special tokens of a GGUF file: what begins and ends documents and turns, and is not text."""

from __future__ import annotations

from dataclasses import dataclass

from latte.conversion.gguf.file import GgufFile

# Tokens that begin or end a document, by all names that these model families use.
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")
DOCUMENT_STARTS = ("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>")
# Tokens that end a turn of a chat. As in llama.cpp names count too, because older files lack ids.
TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
SPLIT = "tokenizer.ggml.pre"  # how a byte-level vocabulary splits text
# Splits that take a word as one token if it is one, and begin every text with a bos token.
TAKES_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
               "lfm2", "jina-v5-nano", "tekken")  # fmt: skip
# The ids of SentencePiece's vocabularies, where a file does not give them.
DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclass(frozen=True)
class Ends:
    """The tokens around documents, the stop tokens, and templates with their own tokens.

    Attributes:
        stops: One token, a list, or None.
        templates: Chat templates by their names; the usual one is `default`.
    """

    bos: int | None
    eos: int | None
    stops: int | list[int] | None
    templates: dict[str, str]


def is_sentencepiece(file: GgufFile) -> bool:
    return bool(file.metadata.get("tokenizer.ggml.model") == "llama")


def special_token(file: GgufFile, name: str) -> int | None:
    """The id of a special token, such as `bos`; None if there is none.

    Raises:
        LatteError: The vocabulary has no such token.
    """
    key, count = f"tokenizer.ggml.{name}_token_id", len(file.tokens)
    if key not in file.metadata or not count:
        default = DEFAULT_IDS.get(name, count) if is_sentencepiece(file) else count
        return default if default < count else None
    found = file.metadata[key]
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < count:
        file.refuse(key, f"the number of a token, 0 to {count - 1}")
    return found


def adds_token(file: GgufFile, name: str) -> bool:
    """Whether `bos` or `eos` is added to every text.

    Raises:
        LatteError: It is, and there is no such token.
    """
    begins = is_sentencepiece(file) or file.metadata.get(SPLIT) in TAKES_WORDS
    adds = file.flag(f"tokenizer.ggml.add_{name}_token", name == "bos" and begins)
    if adds and special_token(file, name) is None:
        file.refuse(f"tokenizer.ggml.{name}_token_id", "a token: it is added to every text")
    return adds


def token_types(file: GgufFile) -> list[int]:
    """The type of each token. A mark that ends turns is CONTROL, whatever the file says of it."""
    key, count = "tokenizer.ggml.token_type", len(file.tokens)
    found = file.metadata.get(key, [NORMAL] * count)
    if not isinstance(found, list) or len(found) < count:
        file.refuse(key, f"one type for each of the {count} tokens")
    pairs = zip(file.tokens, found, strict=False)
    return [CONTROL if token in TURN_ENDS else kind for token, kind in pairs]


def document_ends(file: GgufFile) -> Ends:
    """The tokens that begin and end documents in pretraining.

    A tuned model's file names the marks of a chat's turns instead.
    """
    tokens, prefix = file.tokens, "tokenizer.chat_template"
    templates = {
        key[len(prefix) + 1 :] or "default": file.text(key)
        for key in file.metadata
        if key == prefix or key.startswith(f"{prefix}.")
    }
    bos, eos = special_token(file, "bos"), special_token(file, "eos")
    marks = {tokens[i]: i for i, kind in enumerate(token_types(file)) if kind == CONTROL}
    end = next((marks[name] for name in DOCUMENT_ENDS if name in marks), None)
    stops = [eos, special_token(file, "eot"), special_token(file, "eom")]
    stops += [marks[name] for name in (*DOCUMENT_ENDS, *TURN_ENDS) if name in marks]

    def is_of_chat(token: int | None) -> bool:
        name = None if token is None else tokens[token]
        known = (*DOCUMENT_ENDS, *DOCUMENT_STARTS)
        return name is not None and name not in known and any(name in x for x in templates.values())

    if end is not None and bos is not None and is_of_chat(bos) and not adds_token(file, "bos"):
        templates, bos = _with_token(templates, "bos_token", tokens[bos]), end
    if end is not None and eos is not None and is_of_chat(eos):
        templates, eos = _with_token(templates, "eos_token", tokens[eos]), end
        stops.insert(0, end)
    unique = list(dict.fromkeys(stop for stop in stops if stop is not None))
    return Ends(bos, eos, unique if len(unique) > 1 else next(iter(unique), None), templates)


def _with_token(templates: dict[str, str], variable: str, token: str) -> dict[str, str]:
    """Templates with a variable whose value does not follow the tokenizer's."""
    fixed = f"{{%- set {variable} = {token!r} -%}}"
    return {name: fixed * (variable in text) + text for name, text in templates.items()}
