"""The episode stream, its index, annotations and metrics survive kills, restarts and two writers."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.traces import (
    AnnotationWriter,
    EpisodeStream,
    LineFollower,
    MetricsWriter,
    StreamInUse,
    fold_annotations,
    read_episode,
    read_episodes,
    read_index,
    read_metrics,
)
from prime_rl.traces.rounding import round_decimals, round_stream


def episode(number: int, source: str = "words") -> dict:
    return {
        "id": f"e{number}",
        "source": source,
        "step": number,
        "reward": 0.5,
        "traces": [{"id": f"t{number}", "text": "läng \n über"}],
    }


def write_episodes(directory, numbers) -> None:
    stream = EpisodeStream(directory)
    for number in numbers:
        stream.append(episode(number))
    stream.close()


def test_index_points_at_every_record(tmp_path):
    write_episodes(tmp_path, range(3))
    entries = read_index(tmp_path)
    assert [entry.record for entry in entries] == [0, 1, 2]
    assert entries[2].trace_ids == ["t2"] and entries[2].step == 2
    assert read_episode(tmp_path, entries[1]) == episode(1)
    assert [record["id"] for record in read_episodes(tmp_path)] == ["e0", "e1", "e2"]
    assert list(read_episodes(tmp_path, source="other")) == []


def test_a_restart_keeps_everything_and_numbers_on(tmp_path):
    write_episodes(tmp_path, range(2))
    write_episodes(tmp_path, range(2, 4))
    assert [entry.record for entry in read_index(tmp_path)] == [0, 1, 2, 3]
    assert [record["id"] for record in read_episodes(tmp_path)] == ["e0", "e1", "e2", "e3"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_record_is_cut_and_never_glued(tmp_path, cut):
    write_episodes(tmp_path, range(2))
    path = tmp_path / "stream.jsonl"
    torn = json.dumps(episode(2)).encode()[:cut]
    path.write_bytes(path.read_bytes() + torn)
    write_episodes(tmp_path, [3])
    assert [record["id"] for record in read_episodes(tmp_path)] == ["e0", "e1", "e3"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_record_without_its_index_line_is_indexed_at_the_next_start(tmp_path):
    write_episodes(tmp_path, range(3))
    index = tmp_path / "stream.index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    for damaged in [lines[:2], [], [*lines[:2], lines[2][:7]], [lines[0], b"{}\n", lines[2]]]:
        index.write_bytes(b"".join(damaged))
        write_episodes(tmp_path, [])
        assert index.read_bytes() == b"".join(lines)


def test_an_index_beyond_the_stream_is_not_believed(tmp_path):
    write_episodes(tmp_path, range(3))
    path = tmp_path / "stream.jsonl"
    end_of_first = read_index(tmp_path)[0].end
    path.write_bytes(path.read_bytes()[: end_of_first + 5])
    assert len(read_index(tmp_path)) == 1
    write_episodes(tmp_path, [7])
    assert [record["id"] for record in read_episodes(tmp_path)] == ["e0", "e7"]
    assert [entry.record for entry in read_index(tmp_path)] == [0, 1]


def test_opening_a_stream_removes_no_finished_record(tmp_path):
    write_episodes(tmp_path, range(3))
    before = (tmp_path / "stream.jsonl").read_bytes()
    EpisodeStream(tmp_path).close()
    assert (tmp_path / "stream.jsonl").read_bytes() == before


def test_two_writers_are_refused(tmp_path):
    stream = EpisodeStream(tmp_path)
    with pytest.raises(StreamInUse):
        EpisodeStream(tmp_path)
    stream.append(episode(0))
    stream.close()
    writer = AnnotationWriter(tmp_path, "trainer")
    with pytest.raises(StreamInUse):
        AnnotationWriter(tmp_path, "trainer")
    AnnotationWriter(tmp_path, "orchestrator").close()
    writer.close()


def test_following_a_file_never_reads_half_a_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    follower = LineFollower(path)
    assert follower.poll() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert follower.poll() == [{"a": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    assert follower.poll() == [{"a": 2}]
    assert follower.poll() == []


def test_annotations_fold_by_producer_and_newest(tmp_path):
    orchestrator = AnnotationWriter(tmp_path, "orchestrator")
    trainer = AnnotationWriter(tmp_path, "trainer")
    trainer.write("t", 0, 1, {"entropies": [None, 0.5, 0.25], "is_masked": [None, True, False]})
    orchestrator.write("t", 0, 1, {"advantages": [0.0, 1.0, 1.0], "entropies": [9.0, 9.0, 9.0]})
    trainer.write("t", 0, 2, {"entropies": [None, 0.125, None]})
    trainer.write("t", 1, 2, {"entropies": [1.0]})
    trainer.close()
    orchestrator.close()
    assert fold_annotations(tmp_path) == {
        "t": {
            0: {
                "advantages": [0.0, 1.0, 1.0],
                "entropies": [9.0, 0.125, 0.25],
                "is_masked": [None, True, False],
            },
            1: {"entropies": [1.0]},
        }
    }


def test_annotations_are_rounded_to_six_digits_and_stay_json(tmp_path):
    writer = AnnotationWriter(tmp_path, "trainer")
    writer.write("t", 0, 1, {"mismatch_kl": [1.23456789e-9, 1 / 3, math.nan, math.inf, None]})
    writer.close()
    stored = fold_annotations(tmp_path)["t"][0]["mismatch_kl"]
    assert stored == [1.23457e-9, 0.333333, None, None, None]


def test_annotations_after_a_kill_are_not_glued(tmp_path):
    writer = AnnotationWriter(tmp_path, "trainer")
    writer.write("a", 0, 1, {"entropies": [1.0]})
    writer.close()
    path = tmp_path / "annotations" / "trainer.jsonl"
    path.write_bytes(path.read_bytes() + b'{"version":1,"trace_id":"b","bra')
    writer = AnnotationWriter(tmp_path, "trainer")
    writer.write("c", 0, 1, {"entropies": [2.0]})
    writer.close()
    assert sorted(fold_annotations(tmp_path)) == ["a", "c"]


def test_metrics_read_back_with_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics" / "trainer.jsonl"
    assert read_metrics(path) == []
    writer = MetricsWriter(path)
    writer.write(1, {"loss/mean": 0.5})
    writer.write(2, {"loss/mean": math.nan})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 3, "los')
    first, second = read_metrics(path)
    assert first["step"] == 1 and first["loss/mean"] == 0.5 and first["time"] > 0
    assert math.isnan(second["loss/mean"])
    writer = MetricsWriter(path)
    writer.write(3, {"loss/mean": 0.25})
    writer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_long_streams_round_like_short_ones(values):
    long = round_stream((values * 64)[:64])
    short = [round_stream([value])[0] for value in (values * 64)[:64]]
    for fast, slow in zip(long, short, strict=True):
        assert (fast is None) == (slow is None)
        assert fast == slow or math.isclose(fast, slow, rel_tol=1.1e-5)


def test_usual_numbers_have_no_noise_behind_the_sixth_digit():
    values = [-0.1234567891, 1 / 3, 12.3456789, 1e-9 / 7, 0.0, -2.0, 123456.789] * 20
    assert round_stream(values)[:7] == [-0.123457, 0.333333, 12.3457, 1.42857e-10, 0, -2, 123457]
    assert round_stream([True, None, False] * 40) == [True, None, False] * 40


def test_rounding_of_long_streams_is_that_of_single_numbers():
    draw = random.Random(0)
    logprobs = [-draw.expovariate(1.0) for _ in range(500)] + [0.0, -1e-9, -123.45678]
    assert round_decimals(logprobs, 4) == [round(value, 4) for value in logprobs]
    odd = round_decimals([*logprobs, float("nan"), float("-inf"), 1e308], 4)
    assert math.isnan(odd[-3]) and math.isinf(odd[-2])
    few = [None if index % 3 else 0.123456789 for index in range(200)]
    assert round_stream(few) == [None if index % 3 else 0.123457 for index in range(200)]
    assert round_stream([float("nan"), *few])[0] is None
