"""What the modules' arguments have in common, checked once and grouped by what travels together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lowp.distributed.shapes import ParallelMode, Split, local_size, rank_count
from lowp.distributed.sharding import Initialization
from lowp.errors import Unsupported, fail, require
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.recipe import Recipe

InitMethod = Callable[[Tensor], Any]
ParameterSplit = Sequence[str] | dict[str, int]

_REFUSED = {
    "name": "modules are named by their place in the model",
    "seq_length": "nothing is tuned for a length",
    "micro_batch_size": "nothing is tuned for a batch size",
    "symmetric_ar_type": "collectives are torch.distributed's own",
    "ub_name": "collectives overlap with GEMMs without user buffers",
}
"""Arguments of Transformer Engine that lowp has no use for, and why."""


@dataclass(frozen=True)
class Factory:
    """Where parameters are made, and in which dtype; None: torch's defaults."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def factory_of(
    op: str, device: torch.device | str | None, dtype: torch.dtype | None, params_dtype: torch.dtype | None
) -> Factory:
    """`dtype` and `params_dtype` are two names of one thing.

    Raises:
        ValueError: both are given, and differ.
    """
    if dtype is not None and params_dtype not in (None, dtype):
        fail(op, f"params_dtype is another name of dtype, which is {dtype}", got=params_dtype)
    return Factory(device, dtype or params_dtype)


@dataclass(frozen=True)
class LinearOptions:
    """What the linear layers of a module share.

    Attributes:
        factory: of the parameters.
        split: over ranks.
        initialization: of the weight.
        fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input: as for `BasicLinear`, where the first one is
            `accumulate_into_main_grad`.
    """

    factory: Factory
    split: Split
    initialization: Initialization
    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    save_original_input: bool = False

    def linear(self, in_features: int, out_features: int) -> BasicLinear:
        """The product."""
        return BasicLinear(
            in_features,
            out_features,
            device=self.factory.device,
            dtype=self.factory.dtype,
            split=self.split,
            initialization=self.initialization,
            accumulate_into_main_grad=self.fuse_wgrad_accumulation,
            delay_wgrad_compute=self.delay_wgrad_compute,
            save_original_input=self.save_original_input,
        )

    def bias(self, in_features: int, out_features: int) -> Bias:
        """What is added to it: initialised as nn.Linear's, or with zeros where the weight has a method of its own."""
        initialization = replace(self.initialization, method=nn.init.zeros_)
        if self.initialization.method is None:
            bound = 1 / math.sqrt(in_features) if in_features else 0.0
            initialization = replace(self.initialization, method=functools.partial(nn.init.uniform_, a=-bound, b=bound))
        device, dtype = self.factory.device, self.factory.dtype
        bias = Bias(out_features, device=device, dtype=dtype, split=self.split, initialization=initialization)
        bias.promotes = False  # the layer's output has the product's dtype, as nn.Linear's has
        return bias


def split_of(
    op: str,
    mode: ParallelMode | None,
    group: ProcessGroup | None,
    size: int,
    sequence_parallel: bool,
) -> Split:
    """How a layer is split.

    Args:
        op: whose argument they are.
        mode: None, "column" or "row".
        group: the ranks.
        size: their number, where the group is not known yet; else 1, or the group's.
        sequence_parallel: tokens are split where the layer is not.

    Raises:
        ValueError: group and size contradict each other, or there is no mode for several ranks.
    """
    ranks = rank_count(op, group, None if group is not None and size == 1 else size)
    require(mode is not None or ranks == 1, op, f"{ranks} ranks need a parallel mode")
    return Split(mode, group, ranks, sequence_parallel)


def pieces_of(op: str, parts: ParameterSplit | None, out_features: int, split: Split) -> dict[str, int] | None:
    """The parameters that weight and bias are split into, by the stems of their names, and their sizes on this rank.

    Args:
        op: whose argument it is.
        parts: stems of equal sizes, or stems with sizes of the whole layer; None: one parameter.
        out_features: of the whole layer.
        split: of the layer.

    Raises:
        ValueError: sizes don't add up, or the ranks don't divide one.
    """
    if parts is None:
        return None
    sizes = dict(parts) if isinstance(parts, dict) else {}
    if not isinstance(parts, dict):
        count = len(parts)
        require(count > 0, op, "parameters_split must name a parameter")
        rule = f"out_features must be divisible by the {count} names of parameters_split"
        require(out_features % count == 0, op, rule, got=out_features)
        sizes = dict.fromkeys(parts, out_features // count)
    rule = f"the sizes of parameters_split must add up to out_features, {out_features}"
    require(sum(sizes.values()) == out_features, op, rule, got=sizes)
    ranks = rank_count(op, split.group, split.size) if split.mode == "column" else 1
    return {stem.rstrip("_"): local_size(op, f"parameters_split[{stem!r}]", n, ranks) for stem, n in sizes.items()}


def names_of(parameter: str, parts: dict[str, int] | None) -> str | dict[str, int]:
    """What a module calls a parameter, or its pieces with their sizes."""
    return parameter if parts is None else {f"{stem}_{parameter}": size for stem, size in parts.items()}


def check_recipe(op: str, recipe: Recipe | None) -> None:
    """Raise unless it is a recipe or None.

    Raises:
        TypeError: it is not.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        fail(op, "recipe must be a lowp.recipe.Recipe", got=type(recipe).__name__, error=TypeError)


def refuse(op: str, arguments: dict[str, Any]) -> None:
    """Raise for arguments that a module doesn't have, unless they ask for nothing.

    Raises:
        Unsupported: an argument of Transformer Engine's that asks for something.
        TypeError: an argument that nobody has.
    """
    for name, value in arguments.items():
        reason = _REFUSED["ub_name"] if name.startswith("ub_") else _REFUSED.get(name)
        if reason is None:
            fail(op, "no such argument", got=name, error=TypeError)
        if value is not None and value is not False:
            fail(op, f"{name} is not supported: {reason}", got=repr(value), hint="Leave it out.", error=Unsupported)


def refuse_first_microbatch(op: str, is_first_microbatch: bool | None) -> None:
    """Raise if quantized weights should be kept from one microbatch to the next.

    Raises:
        Unsupported: they should.
    """
    if is_first_microbatch is not None:
        hint = "Leave it out: the weight is cast in each forward."
        rule = "quantized weights are not kept over microbatches"
        fail(op, rule, got=f"is_first_microbatch={is_first_microbatch}", hint=hint, error=Unsupported)
