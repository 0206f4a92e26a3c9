"""Builds a small tokenizer on the spot and saves it in Hugging Face format, with a ChatML template."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

KINDS = ("bytes", "letters")
"""`bytes`: every byte is a token, so any text works. `letters`: lower-case text, compactly."""

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Tokens that never come out of ordinary text; decoding with `skip_special_tokens` drops them."""
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Whole tokens that belong to the text of a message: reasoning and tool calls."""

UNKNOWN = "<unk>"
LETTER_ALPHABET = "\n " + string.ascii_lowercase + string.digits + ".,:;?!'\"()-<>|_/"
ROLE_WORDS = ("system", "user", "assistant", "tool")
"""`letters` holds these as one token each, so that a turn's header is short."""

CHATML_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(kind: str, directory: Path) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; return the vocabulary size.

    `bytes`: ids 0-255 are the bytes of the UTF-8 text, nothing is merged, every text round-trips.
    `letters`: one token per character of `LETTER_ALPHABET`, one per role word, `<unk>` for the
    rest. Neither adds a start token: the template writes every control token itself. A turn's end
    token is the tokenizer's end token; padding is `<|endoftext|>`.

    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(
            f"unknown tokenizer kind {kind!r}; expected one of {', '.join(KINDS)}: "
            "'bytes' takes any text, 'letters' lower-case text only"
        )
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    if kind == "bytes":
        tokenizer = _byte_tokenizer()
    else:
        tokenizer = _letter_tokenizer()
        special["unk_token"] = UNKNOWN
    directory.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    fast.chat_template = CHATML_TEMPLATE
    fast.save_pretrained(directory)
    return len(fast)


def _byte_tokenizer() -> Any:
    """Byte-level pairs without merges: the id of a byte is its value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_shared_tokens(tokenizer)
    return tokenizer


def _byte_symbols() -> list[str]:
    """The character by which byte-level tokenizers write each byte.

    A byte that is printable in Latin-1 stands for itself; the others take the code points from
    256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, next_free = [], 256
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else next_free))
        next_free += byte not in printable
    return symbols


def _letter_tokenizer() -> Any:
    """One token per character of the alphabet; every other character becomes `<unk>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate((UNKNOWN, *LETTER_ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    _add_shared_tokens(tokenizer)
    tokenizer.add_tokens(
        [AddedToken(word, single_word=True, normalized=False) for word in ROLE_WORDS]
    )
    return tokenizer


def _add_shared_tokens(tokenizer: Any) -> None:
    """Append the control and markup tokens after the alphabet, in a fixed order."""
    from tokenizers import AddedToken

    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    )
