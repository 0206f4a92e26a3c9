"""Whether a tensor is sharded, without importing torch's distributed tensors to find out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """True for a DTensor. Nobody can have made one while its module is not loaded; loading it
    costs about 0.8 s, which a process of one rank need not pay."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
