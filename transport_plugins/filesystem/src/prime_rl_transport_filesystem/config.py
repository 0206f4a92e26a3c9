"""Settings of the filesystem transport."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.configs.base import PluginConfig


class FilesystemConfig(PluginConfig):
    """How weights are written."""

    former = {
        "timeout": "write `weight_broadcast_timeout_s` instead",
        "quantize_in_weight_transfer": "remove it: engines quantise what they get; "
        "`weight_rounding` says how weights are rounded for them",
    }

    type: Literal["filesystem"] = "filesystem"
    shard_mib: int = Field(1024, ge=1)
    """Size at which a file is closed and the next one begun."""
    checksum: Literal["crc32", "sha256"] = "crc32"
    """Digest of every file, checked before an engine takes a tensor. crc32 finds damage; sha256
    also finds intent and is several times slower."""
    sync_to_disk: bool = True
    """Force files to the disk before the version is published. Off is faster; a machine that loses
    power may then keep an incomplete version, which readers refuse."""
