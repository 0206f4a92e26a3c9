"""Builds a small tokenizer on the spot and saves it in Hugging Face format, with a ChatML template."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

KINDS = ("bytes", "letters")
"""`bytes`: every byte is a token, so any text works. `letters`: lower-case words only."""

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
"""Whole tokens that belong to the text of a reply: reasoning and tool calls."""

LETTER_ALPHABET = "\n " + string.ascii_lowercase + string.digits + ".,:;?!'\"()-<>|_/"
UNKNOWN = "<unk>"

CHATML_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(kind: str, directory: Path) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; return the vocabulary size.

    `bytes` has 256 byte tokens and no merges, so every text round-trips. `letters` has one token
    per character of `LETTER_ALPHABET` and maps anything else to `<unk>`. Neither adds a start
    token: the template writes every control token itself. The end token of a turn is both the
    tokenizer's end token and the one a reply is sampled up to; padding is `<|endoftext|>`.

    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(
            f"unknown tokenizer kind {kind!r}; expected one of {', '.join(KINDS)}: "
            "'bytes' takes any text, 'letters' lower-case words only"
        )
    from transformers import PreTrainedTokenizerFast

    tokenizer = _byte_tokenizer() if kind == "bytes" else _letter_tokenizer()
    _add_special_tokens(tokenizer)
    special: dict[str, Any] = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    if kind == "letters":
        special["unk_token"] = UNKNOWN
    directory.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    fast.chat_template = CHATML_TEMPLATE
    fast.save_pretrained(directory)
    return len(fast)


def _byte_tokenizer() -> Any:
    """Byte-level tokenizer without merges: ids 0-255 are the bytes in the usual printable order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letter_tokenizer() -> Any:
    """One token per character of the alphabet; every other character becomes `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate((UNKNOWN, *LETTER_ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _add_special_tokens(tokenizer: Any) -> None:
    """Append the control and markup tokens after the alphabet, in a fixed order."""
    from tokenizers import AddedToken

    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    )
