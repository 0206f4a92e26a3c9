"""The weight layout: how runtime tensors relate to a Hugging Face checkpoint, written once.

A layout is a list of entries. An entry gives, for one runtime tensor, an expression over checkpoint
tensors. An expression does one thing: it cuts the runtime tensor into *pieces*, each the view that
holds one checkpoint tensor. Loading copies checkpoint tensors into the views, saving reads the same
views, so the two directions cannot disagree. Importing this loads no torch.
"""

from prime_rl.api.layout.expressions import Cat, Expression, Part, Permute, Squeeze, Stack
from prime_rl.api.layout.leaf import Leaf, Piece, Region, Scale, Shape, whole
from prime_rl.api.layout.rules import fuse, ignore, rename, split, stack_experts, tie
from prime_rl.api.layout.weights import Entry, Ignored, TableRow, WeightLayout

__all__ = [
    "Cat",
    "Entry",
    "Expression",
    "Ignored",
    "Leaf",
    "Part",
    "Permute",
    "Piece",
    "Region",
    "Scale",
    "Shape",
    "Squeeze",
    "Stack",
    "TableRow",
    "WeightLayout",
    "fuse",
    "ignore",
    "rename",
    "split",
    "stack_experts",
    "tie",
    "whole",
]
