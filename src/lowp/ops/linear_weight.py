"""The weight of a linear layer: its size on this rank, how it is split, and what it starts from.

Shape legend: N = out features, K = in features of the whole layer; T = ranks of the tensor-parallel group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lowp.distributed.groups import GroupHandle
from lowp.distributed.shapes import PARALLEL_MODES, Parallel, Split, local_size, rank_count
from lowp.distributed.sharding import Initialization, Sharding, init_sharded_
from lowp.errors import fail, require
from lowp.ops.basic_op import BasicOperation


class LinearWeight(BasicOperation):
    """A weight `[N, K]`, or this rank's part of it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        split: Split,
        initialization: Initialization,
    ) -> None:
        super().__init__()
        name, sizes = type(self).__name__, (in_features, out_features)
        require(min(sizes) >= 0, name, "in_features and out_features must not be negative", got=sizes)
        rule = f"tensor_parallel_mode must be one of {PARALLEL_MODES}"
        require(split.mode in PARALLEL_MODES, name, rule, got=repr(split.mode))
        rule = "sequence_parallel needs a tensor_parallel_mode"
        require(split.mode is not None or not split.sequence_parallel, name, rule)
        self.in_features, self.out_features = in_features, out_features
        self.tensor_parallel_mode = split.mode
        self.sequence_parallel = split.sequence_parallel
        self._parts = split.parts
        self._communicates = split.communicates
        self._group = GroupHandle(split.group if split.mode else None)
        self._ranks = rank_count(name, split.group, split.size) if split.mode else 1
        self._initialization = initialization
        self.local_in_features, self.local_out_features = in_features, out_features
        if split.mode == "row":
            self.local_in_features = local_size(name, "in_features", in_features, self._ranks)
        elif split.mode == "column":
            local_size(name, "out_features", out_features // split.parts, self._ranks)
            self.local_out_features = out_features // self._ranks
        self.weight = nn.Parameter(
            torch.empty(self.local_out_features, self.local_in_features, device=device, dtype=dtype)
        )
        self.reset_parameters()

    @property
    def parallel(self) -> Parallel:
        """How the layer is split, as far as it communicates."""
        if not self._communicates:
            return Parallel(None, False, None)
        return Parallel(self.tensor_parallel_mode, self.sequence_parallel, self._group.group)

    def set_tensor_parallel_group(self, group: ProcessGroup | None) -> None:
        """Say which ranks the layer is split over, where only their number was known.

        Raises:
            ValueError: it has another number of ranks.
        """
        rank_count(type(self).__name__, group, self._ranks)
        self._group = GroupHandle(group if self.tensor_parallel_mode else None)

    def check_group(self) -> None:
        """Raise if the layer is split over ranks that are not known."""
        if self._ranks > 1 and self._group.group is None:
            hint = "Call set_tensor_parallel_group before the first forward."
            fail(type(self).__name__, f"a layer that is split over {self._ranks} ranks needs their group", hint=hint)

    def shardings(self) -> dict[str, Sharding]:
        """How each sharded parameter is split."""
        group = self._group.group
        if self.tensor_parallel_mode is None or (group is None and self._parts == 1):
            return {}
        return {"weight": Sharding(0 if self.tensor_parallel_mode == "column" else 1, group, self._parts)}

    def reset_parameters(self) -> None:
        """Initialise the weight; by default as nn.Linear: uniform in +-1 / sqrt(in_features)."""
        ranks = self._ranks if self.tensor_parallel_mode == "column" else 1
        for weight in self.pieces("weight"):
            whole = (weight.shape[0] * ranks, self.in_features)
            init_sharded_(weight, whole, self.shardings().get("weight"), self._initialization, _as_nn_linear)

    def extra_repr(self) -> str:
        """For `print`."""
        mode = f", tensor_parallel_mode={self.tensor_parallel_mode!r}" if self.tensor_parallel_mode else ""
        return f"in_features={self.in_features}, out_features={self.out_features}{mode}"


def _as_nn_linear(weight: Tensor) -> None:
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
