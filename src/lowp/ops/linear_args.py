"""What the two passes of a linear layer read; the fields are the schemas of its registered operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lowp.distributed.shapes import Parallel, ParallelMode
from lowp.dynamo.schema import Mutable, Sizes
from lowp.quantization import Quantized
from lowp.quantizers import Quantizer
from lowp.recipe import BackwardOverride, Recipe


@dataclass
class LinearForwardArgs:
    """Arguments of fprop.

    Attributes:
        input: `[..., K]`.
        weight: `[N, K]`.
        bias: `[N]`, added in the GEMM's epilogue.
        addend: `[..., N]`, added in the GEMM's epilogue.
        factor: of the product, not of what is added.
        group: the tensor-parallel group.
        parallel_mode: as in `Parallel`.
        sequence_parallel: as in `Parallel`.
        dtype: of the output.
        input_quantizer, weight_quantizer: None: high precision.
        fast_accumulation: of the quantized GEMM.
        keep_column: return the input's column copy for wgrad.
        keep_row: return this rank's row copy of the input, which backward dequantizes, or gathers again.
        keep_statistics: return the statistics of the input, which backward casts again.
        keep_weight_statistics: return those of the weight, which dgrad casts again.
    """

    input: Tensor | Quantized
    weight: Tensor
    bias: Tensor | None
    group: ProcessGroup | None
    parallel_mode: ParallelMode | None
    sequence_parallel: bool
    dtype: torch.dtype
    input_quantizer: Quantizer | None
    weight_quantizer: Quantizer | None
    fast_accumulation: bool
    keep_column: bool
    keep_row: bool
    keep_statistics: bool = False
    keep_weight_statistics: bool = False
    addend: Tensor | None = None
    factor: float = 1.0

    @property
    def parallel(self) -> Parallel:
        """How the layer is split."""
        return Parallel(self.parallel_mode, self.sequence_parallel, self.group)


@dataclass
class LinearBackwardArgs:
    """Arguments of dgrad and wgrad.

    Attributes:
        grad_output: `[..., N]`; None: only an extra output before the layer was used.
        input: what forward kept of the input; None: wgrad doesn't run.
        weight: `[N, K]`; None: dgrad doesn't run.
        weight_statistics: of the weight's quantizer, from forward; None: they are found again.
        main_grad: `[N, K]`, where wgrad goes.
        ticket: of the store where backward leaves wgrad's operands, instead of multiplying them.
        leading: leading axes of the input.
        group, parallel_mode, sequence_parallel: as in forward.
        dtype: of the output.
        input_dtype: of the input and its gradient.
        weight_shape, weight_dtype: of the weight.
        weight_quantizer, grad_output_quantizer, override, fast_dgrad, fast_wgrad: as `backward_precision` gives them.
        input_quantizer: casts the input, which forward kept as it was; None: nothing to cast.
        input_statistics: of that quantizer, from forward; None: it has none.
        input_requires_grad, weight_requires_grad: whether dgrad and wgrad run.
        accumulate: add to `main_grad` instead of overwriting it.
        placeholder_grad: in eager mode, return a weight gradient of undefined content.
        addend: `[..., K]`, added in the epilogue of dgrad.
        factor: of dgrad's product, not of what is added.
    """

    grad_output: Tensor | Quantized | None
    input: Tensor | Quantized | None
    weight: Tensor | None
    weight_statistics: Tensor | None
    main_grad: Mutable
    ticket: Mutable
    leading: Sizes
    group: ProcessGroup | None
    parallel_mode: ParallelMode | None
    sequence_parallel: bool
    dtype: torch.dtype
    input_dtype: torch.dtype
    weight_shape: tuple[int, int]
    weight_dtype: torch.dtype
    weight_quantizer: Quantizer | None
    grad_output_quantizer: Quantizer | None
    override: BackwardOverride | None
    fast_dgrad: bool
    fast_wgrad: bool
    input_quantizer: Quantizer | None
    input_statistics: Tensor | None
    input_requires_grad: bool
    weight_requires_grad: bool
    accumulate: bool
    placeholder_grad: bool
    addend: Tensor | None = None
    factor: float = 1.0

    @property
    def parallel(self) -> Parallel:
        """How the layer is split."""
        return Parallel(self.parallel_mode, self.sequence_parallel, self.group)

    @property
    def is_quantized(self) -> bool:
        """Whether dgrad and wgrad multiply quantized operands."""
        return self.grad_output_quantizer is not None or isinstance(self.grad_output, Quantized)


def backward_precision(recipe: Recipe | None) -> dict[str, Any]:
    """What a recipe decides of `LinearBackwardArgs`: worked out in forward, so that backward needs no recipe.

    Args:
        recipe: None: high precision.

    Returns:
        weight_quantizer, grad_output_quantizer: None: high precision.
        override: the backward override.
        fast_dgrad, fast_wgrad: of the quantized GEMMs.
    """
    override = None if recipe is None else recipe.backward_override
    return {
        "weight_quantizer": None if recipe is None else recipe.quantizer("weight"),
        "grad_output_quantizer": None if recipe is None or override else recipe.quantizer("grad_output"),
        "override": override,
        "fast_dgrad": recipe is not None and not recipe.gemm("dgrad").use_split_accumulator,
        "fast_wgrad": recipe is not None and not recipe.gemm("wgrad").use_split_accumulator,
    }
