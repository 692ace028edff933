"""What begins LayerNormLinear and LayerNormMLP: a norm, whose output the module may return too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lowp.distributed.shapes import Split
from lowp.errors import require
from lowp.modules.options import Factory
from lowp.ops.basic.collectives import AllGather
from lowp.ops.basic.layer_norm import LayerNorm
from lowp.ops.basic.make_extra_output import MakeExtraOutput
from lowp.ops.basic.rms_norm import RMSNorm
from lowp.ops.basic_op import BasicOperation

NormName = Literal["LayerNorm", "RMSNorm"]
NORMS = ("LayerNorm", "RMSNorm")


@dataclass(frozen=True)
class NormOptions:
    """The norm of a module.

    Attributes:
        normalization: "LayerNorm" or "RMSNorm".
        eps: under the root.
        zero_centered_gamma: the weight is stored as its difference from 1.
        returned: the module returns the norm's output too.
        gathered: that of all ranks, where tokens are split.
    """

    normalization: NormName
    eps: float
    zero_centered_gamma: bool
    returned: bool
    gathered: bool

    def check(self, op: str) -> None:
        """Raise unless the options fit together.

        Raises:
            ValueError: an unknown norm, or a gathered output that isn't returned.
        """
        require(self.normalization in NORMS, op, f"normalization must be one of {NORMS}", got=self.normalization)
        rule = "return_layernorm_output_gathered needs return_layernorm_output"
        require(self.returned or not self.gathered, op, rule)

    def operations(self, features: int, factory: Factory, split: Split) -> tuple[list[BasicOperation], Split]:
        """The operations up to the first linear layer.

        Args:
            features: K.
            factory: of the parameters.
            split: of the linear layer that reads the norm's output.

        Returns:
            the operations; how that layer is split then.
        """
        options: dict[str, Any] = {"eps": self.eps, "device": factory.device, "dtype": factory.dtype}
        options |= {"zero_centered_gamma": self.zero_centered_gamma, "sequence_parallel": split.sequence_parallel}
        norm = (LayerNorm if self.normalization == "LayerNorm" else RMSNorm)(features, **options)
        operations: list[BasicOperation] = [norm]
        if self.gathered and split.sequence_parallel:
            operations.append(AllGather(split.group))
            split = replace(split, communicates=False)
        if self.returned:
            operations.append(MakeExtraOutput())
        return operations, split
