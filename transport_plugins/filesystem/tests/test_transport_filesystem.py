"""The filesystem transport: the kit of its kind, the files it leaves, damage of every sort."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from prime_rl_transport_filesystem import Filesystem
from prime_rl_transport_filesystem.config import FilesystemConfig
from safetensors.torch import load_file

from prime_rl.api import NamedTensor
from prime_rl.configs.load import load_run
from prime_rl.configs.run import RLConfig
from prime_rl.errors import ConfigError, WeightTransferError
from prime_rl.plugins import scan
from prime_rl.testing.weight_transport import (
    WeightTransportConformance,
    awkward_tensors,
    differences,
)


class TestFilesystem(WeightTransportConformance):
    """The kit of its kind."""

    plugin_name = "filesystem"
    carries_dtypes = ("float32", "bfloat16", "float16", "float64")
    finds_flipped_bits = True


class TestFilesystemSHA256(WeightTransportConformance):
    """The same with the slower checksum and without syncing."""

    plugin_name = "filesystem"
    settings = {"checksum": "sha256", "sync_to_disk": False}
    finds_flipped_bits = True


def send(directory: Path, tensors: list[NamedTensor], version: int = 3, **settings: object) -> None:
    Filesystem(FilesystemConfig(**settings)).sender(0, 1).send(version, directory, iter(tensors))


def receive(directory: Path, version: int = 3) -> dict[str, torch.Tensor]:
    receiver = Filesystem(FilesystemConfig()).receiver(0, 1)
    return {name: tensor.clone() for name, tensor in receiver.receive(version, directory)}


def test_files_are_ordinary_safetensors_without_leftovers(tmp_path: Path) -> None:
    sent = awkward_tensors()
    send(tmp_path, sent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "weights"]
    (file,) = (tmp_path / "weights").iterdir()
    assert differences(dict(sent), load_file(file)) == []


def test_large_sets_are_cut_into_files_in_the_order_sent(tmp_path: Path) -> None:
    sent = [NamedTensor(f"layers.{n}.w", torch.full((300, 300), float(n))) for n in range(9)]
    send(tmp_path, sent, shard_mib=1)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    # 360 kB each: three reach 1 MiB
    assert [len(file["tensors"]) for file in manifest["files"]] == [3, 3, 3]
    receiver = Filesystem(FilesystemConfig()).receiver(0, 1)
    assert [name for name, _ in receiver.receive(3, tmp_path)] == [item.name for item in sent]
    assert differences(dict(sent), receive(tmp_path)) == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    Filesystem(FilesystemConfig()).sender(1, 2).send(1, tmp_path, iter(awkward_tensors()))
    assert list(tmp_path.iterdir()) == []


def test_another_version_in_the_directory_is_refused(tmp_path: Path) -> None:
    send(tmp_path, awkward_tensors(), version=3)
    with pytest.raises(WeightTransferError, match="is of version 3, expected 4"):
        receive(tmp_path, version=4)


def change_manifest(directory: Path, change) -> None:
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"][0].update(name="../other"), "no plain file name"),
        (lambda m: m["files"][0].update(name="gone.safetensors"), "cannot be read"),
        (lambda m: m["files"][0].update(size=5), "the manifest says 5"),
        (lambda m: m["files"][0].update(digest="00000000"), "is damaged"),
        (lambda m: m["files"][0]["tensors"].pop(), "differ in tensors"),
        (lambda m: m["files"][0]["tensors"].append("extra"), "differ in tensors"),
        (lambda m: m.update(format=2), "format 2"),
        (lambda m: m.update(checksum="md5"), "cannot be used"),
        (lambda m: m.update(unknown=1), "cannot be used"),
        (lambda m: m.pop("version"), "cannot be used"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, change, message: str) -> None:
    send(tmp_path, awkward_tensors())
    change_manifest(tmp_path, change)
    with pytest.raises(WeightTransferError, match=message):
        receive(tmp_path)


def test_a_version_still_being_written_is_refused(tmp_path: Path) -> None:
    send(tmp_path, awkward_tensors())
    (tmp_path / "manifest.json").rename(tmp_path / "manifest.json.tmp")
    with pytest.raises(WeightTransferError, match="was not completed"):
        receive(tmp_path)


def test_a_failing_write_exhausts_the_iterator_and_says_where(tmp_path: Path) -> None:
    taken = []

    def tensors():
        for item in awkward_tensors():
            taken.append(item.name)
            yield item

    with pytest.raises(WeightTransferError, match="cannot be written"):
        Filesystem(FilesystemConfig()).sender(0, 2).send(1, tmp_path / "missing", tensors())
    assert len(taken) == len(awkward_tensors())


def test_the_same_name_twice_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    twice = [NamedTensor("a", torch.ones(2)), NamedTensor("a", torch.ones(2))]
    with pytest.raises(WeightTransferError, match="sent twice"):
        send(tmp_path, twice)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightTransferError, match="complex64"):
        send(tmp_path, [NamedTensor("a", torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    "key, present",
    [("timeout", "weight_broadcast_timeout_s"), ("quantize_in_weight_transfer", "weight_rounding")],
)
def test_old_names_are_answered(tmp_path: Path, key: str, present: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[weight_broadcast]\ntype = "filesystem"\n{key} = 1\n')
    with pytest.raises(ConfigError) as caught:
        load_run([str(recipe)], scan())
    found = str(caught.value).partition(f"recipe.toml:3: weight_broadcast.{key}: unknown key; ")[2]
    assert present in found.splitlines()[0]
    assert present in RLConfig.model_fields
