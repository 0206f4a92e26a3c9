"""The small tokenizers: text round trips, chat rendering, no doubled start token, no lost end token."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest

from prime_rl.errors import ConfigError
from prime_rl.models.renderers import load_renderer, renderer_settings
from prime_rl.models.tokenizers import KINDS, LETTER_ALPHABET, build_tokenizer

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "reverse abc"},
    {"role": "assistant", "content": "cba"},
    {"role": "user", "content": "again"},
]
RENDERERS = ("chatml", "qwen3", "default")


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "tokenizer"
    build_tokenizer(request.param, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_byte_ids_are_the_bytes_and_any_text_round_trips(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert build_tokenizer("bytes", tmp_path) == 265  # 256 bytes + 3 control + 6 markup tokens
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("abc", " a  b\n\n", "zażółć ☃ 🙂", "\x00\x7f\t\r\n", "can't  do . it ?"):
        ids = tokenizer.encode(text)
        assert ids == list(text.encode()), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|im_end|>b") == [97, 258, 98]


def test_letters_have_one_token_each_and_the_rest_is_unknown(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # <unk> + the alphabet + 3 control + 6 markup + 4 role words
    assert build_tokenizer("letters", tmp_path) == 1 + len(LETTER_ALPHABET) + 13
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(string.ascii_lowercase) == list(range(3, 29))  # after <unk>, \n, space
    assert tokenizer.decode(tokenizer.encode("a b\nc, d?")) == "a b\nc, d?"
    assert tokenizer.encode("aÉb") == [3, tokenizer.unk_token_id, 4]
    assert len(tokenizer.encode("user")) == 1
    assert len(tokenizer.encode("users")) == 5  # a role word counts only as a whole word


def test_plain_text_gets_no_start_or_end_token(tokenizer: Any) -> None:
    bare = tokenizer.encode("abc", add_special_tokens=False)
    assert tokenizer.encode("abc", add_special_tokens=True) == bare
    assert len(bare) == 3
    assert tokenizer.bos_token is None


@pytest.mark.parametrize("name", RENDERERS)
def test_chat_has_one_start_per_turn_and_one_end_per_finished_turn(
    directory: Path, tokenizer: Any, name: str
) -> None:
    ids = load_renderer(directory, name).render_ids(CHAT, add_generation_prompt=True)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids.count(start) == len(CHAT) + 1
    assert ids.count(tokenizer.eos_token_id) == len(CHAT)
    assert (start, start) not in zip(ids, ids[1:], strict=False)
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"] == ids


@pytest.mark.parametrize("name", RENDERERS)
def test_a_sampled_reply_parses_back_to_its_text(
    directory: Path, tokenizer: Any, name: str
) -> None:
    renderer = load_renderer(directory, name)
    prompt = renderer.render_ids(CHAT[:2], add_generation_prompt=True)
    reply = tokenizer.encode("c b a")
    for completion in ([*reply, tokenizer.eos_token_id], reply):  # finished, and cut off
        assert renderer.parse_response(completion, prompt_ids=prompt).content == "c b a"
    assert tokenizer.eos_token_id in renderer.get_stop_token_ids()


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_only_what_a_model_samples_is_marked_sampled(
    directory: Path, tokenizer: Any, name: str
) -> None:
    rendered = load_renderer(directory, name).render(CHAT[:3])
    flags = zip(rendered.token_ids, rendered.sampled_mask, strict=True)
    text = tokenizer.decode([token for token, is_sampled in flags if is_sampled])
    assert text.endswith("cba<|im_end|>")
    assert "assistant" not in text and "<|im_start|>" not in text
    assert text.count("<|im_end|>") == 1


def test_chatml_rendering_by_hand(tmp_path: Path) -> None:
    build_tokenizer("bytes", tmp_path)
    rendered = load_renderer(tmp_path, "chatml").render(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    )
    start, end = 257, 258
    user = [start, *b"user\n", *b"hi", end, *b"\n"]
    assistant = [start, *b"assistant\n", *b"yo", end, *b"\n"]
    assert rendered.token_ids == user + assistant
    assert rendered.message_indices == [0] * len(user) + [1] * len(assistant)
    sampled = [0] * len(user) + [0] * 11 + [1, 1, 1, 0]
    assert rendered.sampled_mask == [bool(flag) for flag in sampled]
    content = [0] * 6 + [1, 1, 0, 0] + [0] * 11 + [1, 1, 1, 0]
    assert rendered.is_content == [bool(flag) for flag in content]


def test_chatml_next_turn_keeps_every_previous_token(tmp_path: Path) -> None:
    build_tokenizer("bytes", tmp_path)
    renderer = load_renderer(tmp_path, "chatml")
    prompt = renderer.render_ids(CHAT[:2], add_generation_prompt=True)
    whole = renderer.render_ids(CHAT, add_generation_prompt=True)
    finished = renderer.bridge_to_next_turn(prompt, [*b"cba", 258], CHAT[3:])
    assert finished.token_ids == whole  # the same tokens as rendering the whole conversation
    assert not any(finished.sampled_mask)
    cut_off = renderer.bridge_to_next_turn(prompt, list(b"cba"), CHAT[3:])
    assert cut_off.token_ids == whole  # the missing end token is put in
    assert renderer.bridge_to_next_turn(prompt, [*b"cba", 258], CHAT[2:]) is None
    assert whole[: len(prompt)] == prompt


def test_chatml_refuses_what_it_cannot_render(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from prime_rl.models.chatml import ChatMLRenderer

    build_tokenizer("letters", tmp_path)
    renderer = load_renderer(tmp_path, "chatml")
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ValueError, match="image_url"):
        renderer.render([{"role": "user", "content": image}])
    with pytest.raises(ValueError, match="no messages"):
        renderer.render([])
    with pytest.raises(ValueError, match="no tools"):
        renderer.render(CHAT, tools=[{"name": "search"}])
    from tokenizers import Tokenizer, models

    bare = Tokenizer(models.WordLevel({"<unk>": 0, "\n": 1}, unk_token="<unk>"))
    without = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>")
    with pytest.raises(ValueError, match="im_start"):
        ChatMLRenderer(without)


def test_unknown_kind_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'words'.*bytes, letters"):
        build_tokenizer("words", tmp_path)


def test_renderer_names() -> None:
    assert renderer_settings("qwen3") == {"name": "qwen3"}
    assert renderer_settings("glm-5.1") == {"name": "glm-5.1"}
    assert renderer_settings("chatml")["name"] == "custom"
    assert renderer_settings("mine.Renderer") == {"name": "custom", "import_path": "mine.Renderer"}


@pytest.mark.parametrize("broken", ["no folder", "no files", "no json", "other json"])
def test_a_tokenizer_that_cannot_be_used_is_an_error_for_the_user(
    tmp_path: Path, broken: str
) -> None:
    directory = tmp_path / "tokenizer"
    if broken != "no folder":
        build_tokenizer("letters", directory)
    if broken == "no files":
        for path in directory.iterdir():
            path.unlink()
    elif broken != "no folder":
        (directory / "tokenizer.json").write_text("{" if broken == "no json" else "{}")
    with pytest.raises(ConfigError) as caught:
        load_renderer(directory, "chatml")
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("name", ["chatm", "no_module.Class", "json.Nothing"])
def test_an_unknown_renderer_is_an_error_that_names_it(directory: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_renderer(directory, name)
