"""One new token in each of the first slots of a small float32 model on a CPU, in fixed buffers.

The sums of decode_layer.py without an allocation between them. At this size a step waits for
memory, and numpy's operations touch far less of it than torch's do.
R requests, H hidden size, N query heads, K key heads, M = N + K, G = N / K, D head size, I
intermediate size, L cached positions that are read, B = R * K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy
import torch
from numpy import ndarray
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from prime_rl_model_qwen3.decode_layer import AttentionWeights, LayerMath, MLPWeights
from prime_rl_model_qwen3.model import Block

Operation = Callable[[], object]

LARGEST_ROW_PRODUCT = 2**17
"""Multiply-adds up to which numpy multiplies a row by a matrix. Beyond about twice that its BLAS
uses threads, which cost milliseconds whenever something else runs on their cores."""
LARGEST_HEAD_PRODUCT = 2**14
"""Multiply-adds per key head up to which numpy is the faster one; far from its threads, too."""


LARGEST_PLAIN_SCORE = 40.0
"""Scores up to this size are exponentiated as they are: the sums stay far inside float32."""


class StepLayer(NamedTuple):
    """A block and its weights; `mlp` is None for experts."""

    block: Block
    attention: AttentionWeights
    mlp: MLPWeights | None
    cache: Tensor
    """Keys and values, [2, slots, K, L, D]."""


class StepModel(NamedTuple):
    """What steps of all sizes share."""

    math: LayerMath
    layers: Sequence[StepLayer]
    embedding: Tensor
    final_norm: Tensor
    rotation_L21D: Tensor


class PlainStep:
    """The operations for `rows` requests at positions below `length`."""

    def __init__(self, model: StepModel, rows: int, length: int) -> None:
        math = model.math
        self.rows, self.length = rows, length
        self.heads, self.key_heads = math.heads, math.key_heads
        size, key_heads, normed = math.head_dim, math.key_heads, math.heads + math.key_heads
        self.embedding = model.embedding.detach().numpy()
        self.rotation_L21D = model.rotation_L21D.numpy()
        self.final_norm = model.final_norm.numpy()
        self.slots = numpy.arange(rows)
        strip = _buffer(2 * length)
        strip[length:] = -numpy.inf
        # By position, what to add to the scores: 0 up to it, -inf beyond.
        self.masks_LL = sliding_window_view(strip, length)[length - 1 :: -1]
        hidden = self.embedding.shape[1]
        self.normal_RH, self.added_RH = _buffer(rows, hidden), _buffer(rows, hidden)
        # One more column, so that its length is the one that the norm divides by.
        wider = _buffer(rows, hidden + 1)
        wider[:, hidden] = math.norm.least.item()
        self.x_RH, self.x_length = wider[:, :hidden], _Length(wider)
        self.fused = _buffer(rows, (normed + key_heads) * size)
        fused = self.fused.reshape(rows, -1, size)
        self.normed_RMD = fused[:, :normed]
        self.keys_RKD = fused[:, self.heads : normed]
        self.stored_R2KD = fused[:, self.heads :].reshape(rows, 2, key_heads, size)
        self.head_length = _Length(self.normed_RMD)
        self.least_square = numpy.float32(math.head_norm.least.item() ** 2)
        self.turned_RMD, self.crossed_RMD = (_buffer(rows, normed, size) for _ in range(2))
        halves = (rows, normed, 2, size // 2)
        self.crossed_halves = self.crossed_RMD.reshape(halves)
        self.swapped_halves = self.turned_RMD.reshape(halves)[:, :, ::-1]
        group = self.heads // key_heads
        self.queries_BGD = _buffer(rows * key_heads, group, size)
        self.queries_RND = self.queries_BGD.reshape(rows, -1, size)
        self.scores_BGL = _buffer(rows * key_heads, group, length)
        self.scores_RNL = self.scores_BGL.reshape(rows, -1, length)
        self.mixed_BGD = _buffer(rows * key_heads, group, size)
        wide = max((layer.mlp.down.shape[0] for layer in model.layers if layer.mlp), default=0)
        self.active_RI = _buffer(rows, wide)
        self.gate_up = _buffer(rows, 2 * wide)
        self.gate_RI, self.up_RI = self.gate_up[:, :wide], self.gate_up[:, wide:]
        # The scale of the scores is taken in by the queries.
        scales_M1 = numpy.ones((normed, 1), numpy.float32)
        scales_M1[: self.heads] = math.scale
        self.layers = [self._prepare(layer, scales_M1) for layer in model.layers]

    def __call__(self, tokens: list[int], positions: list[int]) -> Tensor:
        """[R, H], final hidden states."""
        with numpy.errstate(all="ignore"):  # of numbers that are none, and exp(-x) of silu
            return self._run(tokens, positions)

    def _run(self, tokens: list[int], positions: list[int]) -> Tensor:
        x_RH, normal_RH = self.x_RH, self.normal_RH
        x_RH[:] = self.embedding[tokens]
        positions_R = numpy.array(positions)
        rotation_R21D = self.rotation_L21D[positions_R]
        cos_R1D = rotation_R21D[:, 0]
        sin_halves = rotation_R21D[:, 1].reshape(self.rows, 1, 2, -1)
        mask_R1L = self.masks_LL[positions_R][:, None]
        for layer in self.layers:
            numpy.divide(x_RH, self.x_length(), out=normal_RH)
            layer.project()
            if layer.bias is not None:
                self.fused += layer.bias
            self._rotate(layer.head_norm_MD, cos_R1D, sin_halves)
            layer.places[self.slots, positions_R] = self.stored_R2KD
            self._attend(layer, mask_R1L)
            layer.project_out()
            numpy.add(x_RH, self.added_RH, out=x_RH)
            if layer.out_bias is not None:
                numpy.add(x_RH, layer.out_bias, out=x_RH)
            numpy.divide(x_RH, self.x_length(), out=normal_RH)
            self._feed_forward(layer)
            numpy.add(x_RH, self.added_RH, out=x_RH)
        return torch.from_numpy(x_RH * self.final_norm / self.x_length())

    def _rotate(self, head_norm_MD: ndarray, cos_R1D: ndarray, sin_halves: ndarray) -> None:
        """Queries and keys normalised and turned, each into where they are read."""
        turned_RMD, crossed_RMD, heads = self.turned_RMD, self.crossed_RMD, self.heads
        numpy.divide(head_norm_MD, self.head_length(self.least_square), out=turned_RMD)
        numpy.multiply(turned_RMD, self.normed_RMD, out=turned_RMD)
        numpy.multiply(self.swapped_halves, sin_halves, out=self.crossed_halves)
        numpy.multiply(turned_RMD, cos_R1D, out=turned_RMD)
        numpy.add(turned_RMD[:, :heads], crossed_RMD[:, :heads], out=self.queries_RND)
        numpy.add(turned_RMD[:, heads:], crossed_RMD[:, heads:], out=self.keys_RKD)

    def _attend(self, layer: _Operations, mask_R1L: ndarray) -> None:
        scores_BGL = self.scores_BGL
        layer.score()
        numpy.add(self.scores_RNL, mask_R1L, out=self.scores_RNL)
        if not layer.has_small_scores:
            largest_BG1 = numpy.maximum.reduce(scores_BGL, -1, keepdims=True)
            numpy.subtract(scores_BGL, largest_BG1, out=scores_BGL)
        numpy.exp(scores_BGL, out=scores_BGL)
        layer.mix()
        total_BG1 = numpy.add.reduce(scores_BGL, -1, keepdims=True)
        numpy.divide(self.mixed_BGD, total_BG1, out=self.mixed_BGD)

    def _feed_forward(self, layer: _Operations) -> None:
        if layer.project_up is None or layer.project_down is None:
            normal_RH = torch.from_numpy(self.normal_RH * layer.mlp_norm)
            self.added_RH[:] = layer.block.feed_forward(normal_RH).numpy()
            return
        layer.project_up()
        active_RI = self.active_RI
        numpy.negative(self.gate_RI, out=active_RI)
        numpy.exp(active_RI, out=active_RI)
        numpy.add(active_RI, 1.0, out=active_RI)
        numpy.divide(self.gate_RI, active_RI, out=active_RI)
        numpy.multiply(active_RI, self.up_RI, out=active_RI)
        layer.project_down()

    def _prepare(self, layer: StepLayer, scales_M1: ndarray) -> _Operations:
        attention, mlp = layer.attention, layer.mlp
        read = layer.cache[:, : self.rows, :, : self.length]
        keys_BLD, values_BLD = read.view(2, -1, *read.shape[3:]).unbind(0)
        mixed_RF = self.mixed_BGD.reshape(self.rows, -1)
        # Norms bound queries and keys, and these the scores.
        head_norm_MD = attention.head_norm.numpy() * scales_M1
        query, key = (abs(part).max() for part in numpy.split(head_norm_MD, [self.heads]))
        qkv, out = layer.block.attention.qkv, layer.block.attention.out
        return _Operations(
            block=layer.block,
            project=_row_product(self.normal_RH, attention.qkv, self.fused),
            bias=_array(qkv.bias),
            head_norm_MD=head_norm_MD,
            has_small_scores=query * key <= LARGEST_PLAIN_SCORE,
            places=layer.cache.permute(1, 3, 0, 2, 4).numpy(),
            score=_head_product(self.queries_BGD, keys_BLD.transpose(1, 2), self.scores_BGL),
            mix=_head_product(self.scores_BGL, values_BLD, self.mixed_BGD),
            project_out=_row_product(mixed_RF, attention.out, self.added_RH),
            out_bias=_array(out.bias),
            mlp_norm=_array(attention.mlp_norm),
            project_up=_row_product(self.normal_RH, mlp.gate_up, self.gate_up) if mlp else None,
            project_down=_row_product(self.active_RI, mlp.down, self.added_RH) if mlp else None,
        )


class _Operations(NamedTuple):
    """What a layer does with the buffers."""

    block: Block
    project: Operation
    bias: ndarray | None
    head_norm_MD: ndarray
    places: ndarray
    """The cache by slot and position, [slots, L, 2, K, D]."""
    has_small_scores: bool
    """Their exponentials need no shift."""
    score: Operation
    mix: Operation
    project_out: Operation
    out_bias: ndarray | None
    mlp_norm: ndarray | None
    """None: part of the next matrix."""
    project_up: Operation | None
    """None: experts."""
    project_down: Operation | None


class _Length:
    """|x|, or sqrt(|x|^2 + more), over the last dimension of a buffer; kept."""

    def __init__(self, x: ndarray) -> None:
        self.length = _buffer(*x.shape[:-1], 1)
        self.square = partial(
            numpy.matmul, x[..., None, :], x[..., :, None], out=self.length[..., None]
        )

    def __call__(self, more: numpy.float32 | None = None) -> ndarray:
        self.square()
        if more is not None:
            numpy.add(self.length, more, out=self.length)
        return numpy.sqrt(self.length, out=self.length)


def _row_product(left: ndarray, right: Tensor, out: ndarray) -> Operation:
    """left @ right into out. Several rows are torch's: numpy's BLAS is slow at few of them."""
    if left.shape[0] == 1 and right.numel() <= LARGEST_ROW_PRODUCT:
        return partial(numpy.dot, left, right.numpy(), out=out)
    return partial(torch.mm, torch.from_numpy(left), right, out=torch.from_numpy(out))


def _head_product(left: ndarray, right: Tensor, out: ndarray) -> Operation:
    """left @ right into out, for each key head."""
    if left[0].size * out.shape[2] <= LARGEST_HEAD_PRODUCT:
        return partial(numpy.matmul, left, right.numpy(), out=out)
    return partial(torch.bmm, torch.from_numpy(left), right, out=torch.from_numpy(out))


def _buffer(*shape: int) -> ndarray:
    return numpy.zeros(shape, numpy.float32)


def _array(tensor: Tensor | None) -> ndarray | None:
    return None if tensor is None else tensor.detach().numpy()
