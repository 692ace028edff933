"""Linear: nn.Linear with its GEMMs in low precision.

y = x @ w.T + b
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lowp.ambient import current_recipe
from lowp.distributed.shapes import ParallelMode
from lowp.distributed.sharding import Initialization
from lowp.errors import require
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


class Linear(OperationGroup, nn.Linear):
    """A linear layer: an nn.Linear, whose state_dict it shares.

    Args:
        in_features: K, of the whole layer.
        out_features: N, of the whole layer.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        params_dtype: another name of `dtype`.
        recipe: of this layer; None: the one in force when it is called.
        return_bias: don't add the bias: return `(output, bias)`.
        parallel_mode: None, "column" (out features are split over the ranks) or "row" (in features are); local shapes
            are tabled in `lowp.distributed.shapes`.
        tp_group: the ranks.
        tp_size: their number, where `set_tensor_parallel_group` will name them later.
        sequence_parallel: tokens are split along the first axis where the layer is not.
        parameters_split: names of parameters of equal sizes, or names with sizes, that weight and bias are made of
            along the first axis: `("query", "key")` makes `query_weight`, `key_weight`, `query_bias`, `key_bias`. They
            are put together in each forward, which costs a copy.
        init_method: fills the weight in place, and the bias starts at zero; None: both as nn.Linear's.
        get_rng_state_tracker: gives an object with a context manager `fork()`, inside which split parameters are
            drawn; None: they are the same function of the seed on any number of ranks.
        fuse_wgrad_accumulation: backward adds the weight's gradient to `weight.main_grad` (or overwrites it where
            `weight.overwrite_main_grad` is true), and sets `weight.grad_added_to_main_grad`.
        delay_wgrad_compute: backward leaves the weight's gradient to `backward_dw()`. Until then `weight.grad` lacks
            it, and hooks of the weight see None: wrappers that reduce gradients in backward must be told.
        save_original_input: backward reads the input as it came, and not a quantized copy: no more memory where
            something else keeps the input too.
        **arguments: of Transformer Engine's Linear, refused where they ask for anything.

    Attributes:
        weight: `[out_features, in_features]`, this rank's part of it.
        bias: `[out_features]`, this rank's part of it, or None.

    Backward keeps the transposed quantized input and the weight; in high precision, the input and the weight; of a
    frozen weight's layer, the weight alone.

    Raises:
        ValueError: sizes that ranks or `parameters_split` don't divide; groups and sizes, or dtypes, that contradict
            each other; `parameters_split` with `fuse_wgrad_accumulation`.
        Unsupported: an argument of Transformer Engine's that lowp has no use for.
        TypeError: an unknown argument; a recipe that is none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
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
        save_original_input: bool = False,
        **arguments: Any,
    ) -> None:
        refuse("Linear", arguments)
        check_recipe("Linear", recipe)
        rule = "parameters_split and fuse_wgrad_accumulation exclude each other"
        require(parameters_split is None or not fuse_wgrad_accumulation, "Linear", rule)
        options = LinearOptions(
            factory_of("Linear", device, dtype, params_dtype),
            split_of("Linear", parallel_mode, tp_group, tp_size, sequence_parallel),
            Initialization(init_method, get_rng_state_tracker),
            fuse_wgrad_accumulation,
            delay_wgrad_compute,
            save_original_input,
        )
        pieces = pieces_of("Linear", parameters_split, out_features, options.split)
        linear = options.linear(in_features, out_features)
        add = options.bias(in_features, out_features) if bias else None
        super().__init__(
            [linear] if add is None else [linear, add], [linear] if add is None or return_bias else [linear, add]
        )
        self.in_features, self.out_features = in_features, out_features
        self.recipe = recipe
        self.return_bias = return_bias
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
        """`y = x @ w.T + b`.

        Args:
            input: `[..., K]`, floating point.
            is_first_microbatch: must be None.
            fp8_output: return y quantized, as a `lowp.QuantizedOutput`.

        Returns:
            y: `[..., N]` in torch.autocast's dtype where that is on, else in the input's. With `return_bias`, a tuple
            of it, without the bias, and the bias in its dtype, or None.

        Raises:
            ValueError: `fp8_output` without a recipe.
            Unsupported: `is_first_microbatch` is not None.
        """
        refuse_first_microbatch("Linear", is_first_microbatch)
        y = self._fuser(input, recipe=self.recipe)
        output = quantize_output("Linear", y, self.recipe or current_recipe()) if fp8_output else y
        if not self.return_bias:
            return output
        return output, self.basic_ops[1].parameter("bias").to(y.dtype) if len(self.basic_ops) > 1 else None

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.basic_ops[0].extra_repr()}, bias={len(self.basic_ops) > 1}"
