"""LayerNormMLP: a norm, a linear layer, an activation, and another linear layer.

    n = norm(x) * w_n + b_n      h = n @ w1.T + b1      a = act(h)      y = a @ w2.T + b2

Under a recipe the norm's output and the activated values are quantized where they are made, and never written in high
precision; neither is the gradient of h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lowp.ambient import autocast, current_recipe
from lowp.distributed.sharding import Initialization
from lowp.modules.normalized import NormName, NormOptions
from lowp.modules.options import (
    InitMethod,
    LinearOptions,
    check_recipe,
    factory_of,
    refuse,
    refuse_first_microbatch,
    split_of,
)
from lowp.ops.basic.activation import Activation
from lowp.ops.group import OperationGroup
from lowp.recipe import Recipe


class LayerNormMLP(OperationGroup):
    """Normalizes, then applies a multilayer perceptron.

    Args:
        hidden_size: K, of input and output.
        ffn_hidden_size: F, of the activated values, of the whole layer.
        eps: of the norm.
        bias: whether the two linear layers have one each.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm's weight is stored as its difference from 1.
        activation: a name of `lowp.kernels.activations.ACTIVATIONS`; a gated one multiplies the activated first half
            of h by the second.
        activation_params: the activation's parameters, where they differ from their defaults.
        return_bias: don't add the second bias: return it, after the output.
        return_layernorm_output: return the norm's output too, as the last of a tuple.
        return_layernorm_output_gathered: that of all ranks, where `sequence_parallel` splits the tokens.
        set_parallel_mode: split the first linear layer by "column" and the second one by "row" over `tp_group`.
        output_layer_init_method: `init_method` of the second linear layer.
        checkpoint: keep nothing but the input, and run forward again in backward, under the same recipe.
        device, dtype, params_dtype, recipe, tp_group, tp_size, sequence_parallel: as for `Linear`.
        init_method, get_rng_state_tracker, fuse_wgrad_accumulation, delay_wgrad_compute: as for `Linear`.
        **arguments: of Transformer Engine's LayerNormMLP, refused where they ask for anything.

    Attributes:
        layer_norm_weight: `[hidden_size]`.
        layer_norm_bias: `[hidden_size]`, or None under RMSNorm.
        fc1_weight: `[F, hidden_size]`, gated `[2 F, hidden_size]`, this rank's part of it (of either half).
        fc1_bias: as many as fc1_weight has rows, or None.
        fc2_weight: `[hidden_size, F]`, this rank's part of it.
        fc2_bias: `[hidden_size]`, or None.

    Backward keeps the input, the norm's statistics, h, the transposed quantized operands of both linear layers, and the
    weights; in high precision those operands as they are; of a frozen weight's layer neither.

    Raises:
        ValueError: as for `Linear`; an unknown norm or activation, or its parameters; a gathered output that isn't
            returned.
        Unsupported, TypeError: as for `Linear`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: NormName = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        set_parallel_mode: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        **arguments: Any,
    ) -> None:
        name = "LayerNormMLP"
        refuse(name, arguments)
        check_recipe(name, recipe)
        norm = NormOptions(
            normalization, eps, zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered
        )
        norm.check(name)
        factory = factory_of(name, device, dtype, params_dtype)
        act = Activation(activation, activation_params)
        parts = 2 if act.gated else 1
        column = split_of(name, "column" if set_parallel_mode else None, tp_group, tp_size, sequence_parallel)
        column = replace(column, parts=parts)
        row = split_of(name, "row" if set_parallel_mode else None, tp_group, tp_size, sequence_parallel)
        first, column = norm.operations(hidden_size, factory, column)
        initialization = Initialization(init_method, get_rng_state_tracker)
        options = LinearOptions(factory, column, initialization, fuse_wgrad_accumulation, delay_wgrad_compute)
        output_initialization = Initialization(output_layer_init_method, get_rng_state_tracker)
        output_options = replace(options, split=row, initialization=output_initialization)
        fc1 = options.linear(hidden_size, parts * ffn_hidden_size)
        bias1 = options.bias(hidden_size, parts * ffn_hidden_size) if bias else None
        fc2 = output_options.linear(ffn_hidden_size, hidden_size)
        bias2 = output_options.bias(ffn_hidden_size, hidden_size) if bias else None
        own = [op for op in (*first, fc1, bias1, act, fc2, bias2) if op is not None]
        super().__init__(own, [op for op in own if op is not bias2] if return_bias else own)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation, self.checkpoint = activation, checkpoint
        self.recipe, self.return_bias, self.use_bias = recipe, return_bias, bias
        first[0].bind(self, weight="layer_norm_weight", bias="layer_norm_bias")
        for prefix, linear, add in (("fc1", fc1, bias1), ("fc2", fc2, bias2)):
            linear.bind(self, weight=f"{prefix}_weight")
            if add is not None:
                add.bind(self, bias=f"{prefix}_bias")
            else:
                self.register_parameter(f"{prefix}_bias", None)
        self.mark_partial_gradients()

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        """Norm, linear layer, activation, linear layer.

        Args:
            input: `[..., K]`, bf16 | fp16 | fp32.
            is_first_microbatch: must be None.

        Returns:
            y: `[..., K]` in torch.autocast's dtype where that is on, else in the input's. A tuple of it, of the second
            bias with `return_bias`, and of the norm's output with `return_layernorm_output`, if one is asked for.

        Raises:
            Unsupported: `is_first_microbatch` is not None.
        """
        refuse_first_microbatch("LayerNormMLP", is_first_microbatch)
        if self.checkpoint and torch.is_grad_enabled():
            recipe = self.recipe or current_recipe()
            results = torch_checkpoint(self._run, input, recipe, use_reentrant=False, preserve_rng_state=False)
        else:
            results = self._fuser(input, recipe=self.recipe)
        if not self.return_bias:
            return results
        y, *norm_output = results if isinstance(results, tuple) else (results,)
        bias = self.basic_ops[-1].parameter("bias").to(y.dtype) if self.use_bias else None
        return (y, bias, *norm_output)

    def _run(self, input: Tensor, recipe: Recipe | None) -> Any:
        """The pipeline under a recipe, or, with None, in high precision."""
        if recipe is None and not torch.compiler.is_compiling():
            with autocast(enabled=False):
                return self._fuser(input)
        return self._fuser(input, recipe=recipe)

    def extra_repr(self) -> str:
        """For `print`."""
        return (
            f"{self.basic_ops[0].extra_repr()}, hidden_size={self.hidden_size},"
            f" ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation!r}"
        )
