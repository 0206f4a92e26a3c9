"""Fine-tuning data: rows, what is trained of them, their order over restarts, packing over ranks."""

from __future__ import annotations

import json
import random
import sys
import types

import numpy as np
import pytest

from prime_rl.configs.run import SFTDataConfig
from prime_rl.errors import CheckpointError, ConfigError
from prime_rl.models.renderers import load_renderer
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.trainer.feed import packed_batches
from prime_rl.trainer.sft_data import SampleOrder, pack_in_order, sft_streams
from prime_rl.trainer.sft_render import Sample, SampleCache, check_renderer
from prime_rl.trainer.sft_rows import Conversation, as_conversation, load_rows

USER, REPLY = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer("letters", directory)
    return directory


@pytest.fixture(scope="module")
def renderer(tokenizer_dir):
    return load_renderer(tokenizer_dir, "chatml")


def sample_of(renderer, messages, seq_len=100):
    return SampleCache([Conversation(messages)], renderer, seq_len)[0]


def trained_text(renderer, sample):
    return renderer._tokenizer.decode(sample.token_ids[sample.mask].tolist())


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_exactly_what_a_model_samples_is_trained(tokenizer_dir, name):
    """Content and end token of each reply; no header, no newline behind the end, one start token."""
    renderer = load_renderer(tokenizer_dir, name)
    sample = sample_of(renderer, [USER, REPLY, USER, {"role": "assistant", "content": "c"}])
    text = trained_text(renderer, sample).replace("<think>\n\n</think>\n\n", "")
    assert text == "ba<|im_end|>c<|im_end|>"
    starts = (sample.token_ids == renderer._tokenizer.convert_tokens_to_ids("<|im_start|>")).sum()
    assert starts == 4
    assert sample.mask[-1], "tokens behind the last trained one teach nothing"


def test_trained_positions_are_predicted_by_the_state_before(renderer):
    """P P P R R: states 2 and 3 predict the reply."""
    sample = Sample(np.arange(5, dtype=np.int32), np.array([0, 0, 0, 1, 1], bool))
    streams = sft_streams([sample])
    assert (streams.scored - 1).tolist() == [2, 3]
    assert streams.totals.ce == sample.mask.sum() == 2


def test_row_is_cut_at_the_sequence_length(renderer):
    whole = sample_of(renderer, [USER, REPLY])
    cut = sample_of(renderer, [USER, REPLY], seq_len=len(whole.token_ids) - 1)
    assert cut.token_ids.tolist() == whole.token_ids[:-1].tolist() and cut.trains
    assert not sample_of(renderer, [USER, REPLY], seq_len=5).trains


def test_conversation_ending_with_the_user_trains_the_reply_before(renderer):
    sample = sample_of(renderer, [USER, REPLY, USER])
    assert trained_text(renderer, sample) == "ba<|im_end|>"


def test_renderer_without_attribution_is_refused(tokenizer_dir):
    with pytest.raises(ConfigError, match="does not tell sampled tokens"):
        check_renderer(load_renderer(tokenizer_dir, "default"))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, REPLY]},
        {"prompt": "ab", "completion": "ba"},
        {"prompt": [USER], "completion": [REPLY]},
        {"messages": [{**USER, "name": None}, {**REPLY, "tool_calls": None}], "tools": None},
    ],
)
def test_every_form_of_a_row(row):
    assert as_conversation(row, "here") == Conversation([USER, REPLY])


def test_nulls_stay_in_arguments_of_calls():
    call = {"function": {"name": "f", "arguments": {"x": None}, "strict": None}}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": '[{"a": 1}]'}
    found = as_conversation(row, "here")
    assert found.messages[1]["tool_calls"] == [
        {"function": {"name": "f", "arguments": {"x": None}}}
    ]
    assert found.tools == [{"a": 1}]


@pytest.mark.parametrize(
    "row",
    [5, {}, {"prompt": "a"}, {"messages": []}, {"messages": [1]}, {"messages": [{"content": "x"}]}],
)
def test_unusable_row_is_named(row):
    with pytest.raises(ConfigError, match="here"):
        as_conversation(row, "here")


def test_file_and_function(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n\n")
    assert len(load_rows(SFTDataConfig(source=str(path)))) == 1
    module = types.ModuleType("made_up_rows")
    module.rows = lambda count: [{"prompt": "a", "completion": "b"}] * count
    monkeypatch.setitem(sys.modules, "made_up_rows", module)
    config = SFTDataConfig(source="made_up_rows:rows", arguments={"count": 3})
    assert len(load_rows(config)) == 3


@pytest.mark.parametrize(
    ("source", "arguments", "named"),
    [
        ("absent.jsonl", {}, "cannot read"),
        ("no_such_module_:rows", {}, "cannot be loaded"),
        ("json:no_such_function", {}, "cannot be loaded"),
        ("json", {}, "module:function"),
        ("json:dumps", {"no": 1}, "data.arguments"),
        ("builtins:list", {}, "has no rows"),
    ],
)
def test_unusable_source_is_named(source, arguments, named):
    with pytest.raises(ConfigError, match=named):
        load_rows(SFTDataConfig(source=source, arguments=arguments))


def test_broken_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt"')
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        load_rows(SFTDataConfig(source=str(path)))


class Numbered:
    """Samples that tell their index; the given ones train nothing."""

    def __init__(self, count, useless=()):
        self.count, self.useless = count, useless

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        mask = np.array([False, index not in self.useless])
        return Sample(np.array([index, index], np.int32), mask)


def indices(samples):
    return [int(sample.token_ids[0]) for sample in samples]


def test_every_pass_has_every_sample_once_in_an_order_of_its_own():
    order = SampleOrder(Numbered(10), seed=3, shuffle=True)
    first, second = indices(order.take(10)), indices(order.take(10))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    again = SampleOrder(Numbered(10), seed=3, shuffle=True)
    assert indices(again.take(10)) == first
    assert indices(SampleOrder(Numbered(4), 0, shuffle=False).take(6)) == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("taken", [0, 3, 7, 10, 23])
def test_order_continues_where_it_stopped(taken):
    whole = SampleOrder(Numbered(10, useless=(4,)), seed=1, shuffle=True)
    if taken:
        whole.take(taken)
    state = json.loads(json.dumps(whole.state()))
    resumed = SampleOrder(Numbered(10, useless=(4,)), seed=1, shuffle=True)
    resumed.restore(state)
    assert indices(whole.take(15)) == indices(resumed.take(15))


def test_samples_that_train_nothing_are_passed_over():
    order = SampleOrder(Numbered(4, useless=(1, 2)), seed=0, shuffle=False)
    assert indices(order.take(4)) == [0, 3, 0, 3]
    with pytest.raises(ConfigError, match="no row of data.source has a token to train"):
        SampleOrder(Numbered(3, useless=(0, 1, 2)), 0, True).take(1)


def test_position_stays_after_a_failed_take():
    order = SampleOrder(Numbered(3, useless=(0, 1, 2)), 0, True)
    before = order.state()
    with pytest.raises(ConfigError):
        order.take(1)
    assert order.state() == before


def test_other_data_is_refused():
    order = SampleOrder(Numbered(3), 0, True)
    with pytest.raises(CheckpointError, match="4 rows of data, found 3"):
        order.restore({"epoch": 0, "cursor": 0, "rows": 4})


def sizes(lengths, rows):
    return [sum(lengths[index] for index in row) for row in rows]


@pytest.mark.parametrize(
    ("lengths", "seq_len", "multiple", "expected"),
    [
        ([8], 8, 1, [8]),
        ([8, 8], 8, 1, [8, 8]),
        ([3, 3, 3, 3], 8, 1, [6, 6]),
        ([5, 1, 1, 1], 8, 1, [8]),
        ([5, 1, 1, 1], 8, 2, [5, 3]),
        ([4, 4, 4], 8, 4, [4, 4, 4, 0]),
        ([2], 8, 3, [2, 0, 0]),
    ],
)
def test_packing_by_hand(lengths, seq_len, multiple, expected):
    assert sizes(lengths, pack_in_order(lengths, seq_len, multiple)) == expected


def test_packing_loses_nothing_and_keeps_the_bound():
    chance = random.Random(0)
    for _ in range(200):
        lengths = [chance.randint(1, 20) for _ in range(chance.randint(1, 40))]
        seq_len, multiple = chance.randint(20, 60), chance.choice([1, 2, 3, 4, 8])
        rows = pack_in_order(lengths, seq_len, multiple)
        assert [index for row in rows for index in row] == list(range(len(lengths)))
        assert len(rows) % multiple == 0 and max(sizes(lengths, rows)) <= seq_len


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_one_batch_in_equal_numbers_of_rows(ranks):
    feeds = [
        packed_batches(SampleOrder(Numbered(9), 0, True), 1, 3, 5, 4, rank, ranks)
        for rank in range(ranks)
    ]
    for _ in range(3):
        batches = [next(feed) for feed in feeds]
        assert len({len(batch.rows) for batch in batches}) == 1
        assert len({json.dumps(batch.data_state) for batch in batches}) == 1
        rows = [row for batch in batches for row in batch.rows]
        assert sum(row.totals.documents for row in rows) == 5
        assert sum(row.totals.ce for row in rows) == 5
        assert all(row.totals.scored == 0 for row in rows if row.padding_tokens)


def test_only_a_newline_ends_a_row(tmp_path):
    """U+2028, U+0085 and a form feed are text: a file that holds them is not cut there."""
    text = "a\u2028b\x85c\u2029d"
    row = json.dumps({"prompt": text, "completion": "x"}, ensure_ascii=False)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{row}\r\n\n{row}", encoding="utf-8")
    rows = load_rows(SFTDataConfig(source=str(path)))
    assert [row.messages[0]["content"] for row in rows] == [text, text]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": "abc"},
        {"messages": [{"role": "assistant", "content": 3}]},
        {"messages": [{"role": "assistant", "content": {"text": "a"}}]},
        {"prompt": "a", "completion": [{"role": "assistant", "content": True}]},
    ],
)
def test_messages_of_another_form_are_named(row):
    with pytest.raises(ConfigError, match="rows, row 7: .*expected"):
        as_conversation(row, "rows, row 7")


def test_rows_that_train_nothing_are_told_once(renderer, caplog):
    rows = [Conversation([USER]), Conversation([USER, {"role": "assistent", "content": "x"}])]
    samples = SampleCache([*rows, Conversation([USER, REPLY])], renderer, 100)
    assert [samples[index].trains for index in range(3)] == [False, False, True]
    assert [record.message[:26] for record in caplog.records] == ["data row 1 is passed over,"]
