"""Checkpoint files: read exactly, written atomically, damage is named."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prime_rl.api.layout import whole
from prime_rl.errors import CheckpointError, WeightError
from prime_rl.models.save import save_checkpoint
from prime_rl.models.tensor_files import TensorFiles


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(6, 5, 4, generator=generator)
    return {
        "a.weight": drawn,
        "b.half": drawn[0].bfloat16(),
        "c.counts": torch.arange(7),
        "d.scalar": torch.tensor(2.5),
        "e.eight": drawn[1].to(torch.float8_e4m3fn),
        "f.scale": torch.arange(118, 122, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "g.empty": torch.zeros(0, 3),
        "h.flags": torch.tensor([True, False]),
        "i.bytes": torch.arange(-4, 4, dtype=torch.int8).view(2, 4),
    }


def same(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(one.contiguous().flatten().view(torch.uint8).numpy())
        == bytes(other.contiguous().flatten().view(torch.uint8).numpy())
    )


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten()[None] if tensor.dim() == 0 else tensor


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert set(files.names()) == set(tensors())
    for name, tensor in tensors().items():
        assert files.info(name) == (tuple(tensor.shape), tensor.dtype)
        found = files.read(name, whole(tuple(tensor.shape)))
        assert same(as_bytes(found), as_bytes(tensor)), name
    assert {name for name, _ in files.iterate()} == set(tensors())


def test_reads_boxes(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path / "model.safetensors")
    full = tensors()["a.weight"]
    assert files.read("a.weight", ((2, 5), (0, 5), (0, 4))).equal(full[2:5])
    assert files.read("a.weight", ((5, 6), (1, 3), (2, 4))).equal(full[5:6, 1:3, 2:4])
    assert files.read("a.weight", ((3, 3), (0, 5), (0, 4))).shape == (0, 5, 4)
    assert files.read("c.counts", ((6, 7),)).tolist() == [6]


@pytest.mark.parametrize("shard_bytes", [1, 200, 10**9])
def test_what_is_written_is_read(shard_bytes: int, tmp_path: Path) -> None:
    save_checkpoint(
        tmp_path / "out", tensors().items(), {"model_type": "x"}, shard_bytes=shard_bytes
    )
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    if shard_bytes == 10**9:
        assert names == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors())
        sizes = sum(tensor.numel() * tensor.element_size() for tensor in tensors().values())
        assert index["metadata"]["total_size"] == sizes
        assert set(index["weight_map"].values()) == {n for n in names if "-of-" in n}
        for file, count in ((n, n.split("-of-")[1]) for n in names if "-of-" in n):
            assert count == f"{len([n for n in names if '-of-' in n]):05d}.safetensors", file
    files = TensorFiles(tmp_path / "out")
    for name, tensor in tensors().items():
        found = files.read(name, whole(tuple(tensor.shape)))
        assert same(as_bytes(found), as_bytes(tensor)), name
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_views_of_one_tensor_are_written_apart(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(4, 3)
    save_checkpoint(tmp_path / "out", [("top", base[:2]), ("turned", base.t())], {})
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded["top"].equal(base[:2]) and loaded["turned"].equal(base.t())


def test_replaces_an_older_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", [("old", torch.zeros(1))], {"step": 1})
    save_checkpoint(tmp_path / "out", [("new", torch.ones(1))], {"step": 2})
    assert set(TensorFiles(tmp_path / "out").names()) == {"new"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", [("old", torch.zeros(1))], {})

    def broken():  # type: ignore[no-untyped-def]
        yield "new", torch.zeros(1)
        raise RuntimeError("gathering failed")

    with pytest.raises(RuntimeError, match="gathering failed"):
        save_checkpoint(tmp_path / "out", broken(), {})
    assert set(TensorFiles(tmp_path / "out").names()) == {"old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_ranks_that_do_not_write_still_exhaust(tmp_path: Path) -> None:
    seen = []
    named = ((name, tensor) for name, tensor in tensors().items() if not seen.append(name))
    save_checkpoint(tmp_path / "out", named, {}, write=False)
    assert seen == list(tensors()) and not (tmp_path / "out").exists()


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        save_checkpoint(tmp_path / "out", [], {}, source)
    assert not (tmp_path / "out").exists()
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("not a tokenizer file")
    save_checkpoint(tmp_path / "out", [], {}, source)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(WeightError, match="holds no weights"):
        TensorFiles(tmp_path)
    save_file(tensors(), path)
    whole_file = path.read_bytes()
    for keep in (0, 4, 20, len(whole_file) - 1):
        path.write_bytes(whole_file[:keep])
        with pytest.raises(WeightError, match="model.safetensors"):
            TensorFiles(tmp_path)
    path.write_bytes((10**12).to_bytes(8, "little") + whole_file[8:])
    with pytest.raises(WeightError, match="cut short"):
        TensorFiles(tmp_path)
    header_bytes = int.from_bytes(whole_file[:8], "little")
    header = json.loads(whole_file[8 : 8 + header_bytes])
    for change in ({"shape": [99, 5, 4]}, {"dtype": "F99"}, {"data_offsets": [-4, 476]}, None):
        entry = {**header["a.weight"], **change} if change else 7
        raw = json.dumps({**header, "a.weight": entry}).encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + whole_file[8 + header_bytes :])
        with pytest.raises(WeightError, match="bad header"):
            TensorFiles(tmp_path)


def test_index_must_be_kept(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", tensors().items(), {}, shard_bytes=1)
    index_path = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    first = sorted(index["weight_map"].values())[0]
    index["weight_map"]["not.there"] = first
    index_path.write_text(json.dumps(index))
    with pytest.raises(WeightError, match="not.there is listed for"):
        TensorFiles(tmp_path / "out")
    index["weight_map"]["not.there"] = "../../outside.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(WeightError, match="no plain file name"):
        TensorFiles(tmp_path / "out")
    del index["weight_map"]["not.there"]
    index_path.write_text(json.dumps(index))
    os.remove(tmp_path / "out" / first)
    with pytest.raises(WeightError, match="is missing"):
        TensorFiles(tmp_path / "out")
    index_path.write_text("[]")
    with pytest.raises(WeightError, match="index.json cannot be used"):
        TensorFiles(tmp_path / "out")
