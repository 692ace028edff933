"""LayerNormLinear: a norm, then a linear layer.

    n = norm(x) * w_n + b_n      y = n @ w.T + b

Under a recipe the norm's output is quantized where it is made, and never written in high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lowp.ambient import current_recipe
from lowp.distributed.shapes import ParallelMode
from lowp.distributed.sharding import Initialization
from lowp.errors import require
from lowp.modules.normalized import NormName, NormOptions
from lowp.modules.options import (
    InitMethod,
    LinearOptions,
    ParameterSplit,
    check_recipe,
    factory_of,
    names_of,
    pieces_of,
    refuse,
    refuse_first_microbatch,
    split_of,
)
from lowp.ops.group import OperationGroup
from lowp.ops.quantized_output import quantize_output
from lowp.recipe import Recipe


class LayerNormLinear(OperationGroup):
    """Normalizes, then applies a linear layer.

    Args:
        in_features: K, of the whole layer.
        out_features: N, of the whole layer.
        eps: of the norm.
        bias: whether the linear layer has one.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm's weight is stored as its difference from 1.
        return_layernorm_output: return the norm's output too, as the last of a tuple.
        return_layernorm_output_gathered: that of all ranks, where `sequence_parallel` splits the tokens.
        device, dtype, params_dtype, recipe, return_bias, tp_group, tp_size, sequence_parallel: as for `Linear`.
        parameters_split, init_method, get_rng_state_tracker: as for `Linear`.
        fuse_wgrad_accumulation, delay_wgrad_compute: as for `Linear`.
        parallel_mode: None or "column".
        **arguments: of Transformer Engine's LayerNormLinear, refused where they ask for anything.

    Attributes:
        layer_norm_weight: `[in_features]`.
        layer_norm_bias: `[in_features]`, or None under RMSNorm.
        weight: `[out_features, in_features]`, this rank's part of it.
        bias: `[out_features]`, this rank's part of it, or None.

    Backward keeps the input, the norm's statistics, the transposed quantized output of the norm, and the weights; in
    high precision that output as it is; of a frozen weight's layer neither.

    Raises:
        ValueError: as for `Linear`; an unknown norm; "row"; a gathered output that isn't returned.
        Unsupported, TypeError: as for `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: NormName = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        return_bias: bool = False,
        parallel_mode: ParallelMode | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        parameters_split: ParameterSplit | None = None,
        init_method: InitMethod | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        **arguments: Any,
    ) -> None:
        name = "LayerNormLinear"
        refuse(name, arguments)
        check_recipe(name, recipe)
        rule = 'parallel_mode must be None or "column": a norm reads all features'
        require(parallel_mode in (None, "column"), name, rule, got=repr(parallel_mode))
        rule = "parameters_split and fuse_wgrad_accumulation exclude each other"
        require(parameters_split is None or not fuse_wgrad_accumulation, name, rule)
        norm = NormOptions(
            normalization, eps, zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered
        )
        norm.check(name)
        factory = factory_of(name, device, dtype, params_dtype)
        split = split_of(name, parallel_mode, tp_group, tp_size, sequence_parallel)
        pieces = pieces_of(name, parameters_split, out_features, split)
        first, split = norm.operations(in_features, factory, split)
        initialization = Initialization(init_method, get_rng_state_tracker)
        options = LinearOptions(factory, split, initialization, fuse_wgrad_accumulation, delay_wgrad_compute)
        linear = options.linear(in_features, out_features)
        add = options.bias(in_features, out_features) if bias else None
        own = [*first, linear] if add is None else [*first, linear, add]
        super().__init__(own, [*first, linear] if return_bias else own)
        self.in_features, self.out_features = in_features, out_features
        self.recipe, self.return_bias, self.use_bias = recipe, return_bias, bias
        first[0].bind(self, weight="layer_norm_weight", bias="layer_norm_bias")
        linear.bind(self, weight=names_of("weight", pieces))
        if add is not None:
            add.bind(self, bias=names_of("bias", pieces))
        elif pieces is None:
            self.register_parameter("bias", None)
        if pieces is not None:
            self.reset_parameters()
        self.mark_partial_gradients()

    def forward(  # type: ignore[override]
        self, input: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """Norm, then linear layer.

        Args:
            input: `[..., K]`, bf16 | fp16 | fp32.
            is_first_microbatch: must be None.
            fp8_output: return y quantized, as a `lowp.QuantizedOutput`.

        Returns:
            y: `[..., N]` in torch.autocast's dtype where that is on, else in the input's. A tuple of it, of the bias
            with `return_bias`, and of the norm's output `[..., K]` with `return_layernorm_output`, if one is asked for.

        Raises:
            ValueError: `fp8_output` without a recipe.
            Unsupported: `is_first_microbatch` is not None.
        """
        refuse_first_microbatch("LayerNormLinear", is_first_microbatch)
        results = self._fuser(input, recipe=self.recipe)
        y, *norm_output = results if isinstance(results, tuple) else (results,)
        output = quantize_output("LayerNormLinear", y, self.recipe or current_recipe()) if fp8_output else y
        if not self.return_bias:
            return (output, *norm_output) if norm_output else output
        bias = self.basic_ops[-1].parameter("bias").to(y.dtype) if self.use_bias else None
        return (output, bias, *norm_output)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.basic_ops[0].extra_repr()}, in_features={self.in_features}, out_features={self.out_features}"
