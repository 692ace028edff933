"""Recipes: frozen values that say how the three GEMMs of a linear layer are quantized.

    fprop  y[M,N]  = x[M,K] @ w[N,K].T      roles input, weight
    dgrad  dx[M,K] = dy[M,N] @ w[N,K]       roles grad_output, weight
    wgrad  dw[N,K] = dy[M,N].T @ x[M,K]     roles grad_output, input

To add a recipe, derive from `Recipe` and give each role its quantizer.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import ClassVar, Literal

from lowp.errors import fail, require
from lowp.formats import ElementFormat
from lowp.quantizers import Float8CurrentScalingQuantizer, Quantizer
from lowp.values import Value

Role = Literal["input", "weight", "grad_output"]
BackwardOverride = Literal["high_precision", "dequantized"]

Gemm = Literal["fprop", "dgrad", "wgrad"]

ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


class Format(enum.Enum):
    """Element formats of a recipe: (forward, gradients)."""

    E4M3 = (ElementFormat.E4M3, ElementFormat.E4M3)
    E5M2 = (ElementFormat.E5M2, ElementFormat.E5M2)
    HYBRID = (ElementFormat.E4M3, ElementFormat.E5M2)

    def __repr__(self) -> str:
        return f"Format.{self.name}"

    @property
    def forward(self) -> ElementFormat:
        """Format of inputs and weights."""
        return self.value[0]

    @property
    def gradients(self) -> ElementFormat:
        """Format of output gradients."""
        return self.value[1]


@dataclass(frozen=True, kw_only=True)
class QParams(Value):
    """How one role's scale is made.

    Attributes:
        power_2_scale: round the multiplier down to a power of two.
        amax_epsilon: lower bound of amax, finite and >= 0.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MMParams(Value):
    """How one GEMM accumulates.

    Attributes:
        use_split_accumulator: add partial sums in fp32 outside the tensor core; slower, more exact.
    """

    use_split_accumulator: bool = True


class Recipe(Value):
    """Base of all recipes.

    A derived frozen dataclass has the fields `fp8_gemm_fprop`, `fp8_gemm_dgrad`, `fp8_gemm_wgrad` (`MMParams`) and
    `backward_override`, and ends its `__post_init__` with `freeze`.
    """

    first_capability: ClassVar[tuple[int, int]] = (8, 9)
    """The first CUDA compute capability whose tensor cores take the recipe's operands: per-tensor FP8 came with Ada."""

    backward_override: BackwardOverride | None
    _quantizers: dict[Role, Quantizer]

    def quantizer(self, role: Role) -> Quantizer:
        """The quantizer spec of a role.

        Args:
            role: "input", "weight" or "grad_output".

        Raises:
            ValueError: no such role.
        """
        if role not in ROLES:
            fail(f"{type(self).__name__}.quantizer", f"role must be one of {ROLES}", got=repr(role))
        return self._quantizers[role]

    def gemm(self, name: Gemm) -> MMParams:
        """How a GEMM accumulates.

        Args:
            name: "fprop", "dgrad" or "wgrad".

        Raises:
            ValueError: no such GEMM.
        """
        if name not in GEMMS:
            fail(f"{type(self).__name__}.gemm", f"name must be one of {GEMMS}", got=repr(name))
        return getattr(self, f"fp8_gemm_{name}")

    def __str__(self) -> str:
        """The class and what differs from its defaults."""
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        changed = ", ".join(f"{name}={value!r}" for name, value, default in fields if value != default)
        return f"{type(self).__name__}({changed})"

    def freeze(self, quantizers: dict[Role, Quantizer]) -> None:
        """Check the recipe and keep its quantizers and its string, so that traced code only reads them.

        Args:
            quantizers: the spec of each role.

        Raises:
            ValueError: an unknown backward override.
            TypeError: a field holds something that can't cross into a registered operator.
        """
        object.__setattr__(self, "_quantizers", quantizers)
        require(
            self.backward_override in BACKWARD_OVERRIDES,
            type(self).__name__,
            f"backward_override must be one of {BACKWARD_OVERRIDES}",
            got=repr(self.backward_override),
        )
        Value.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale a tensor, computed from the tensor's own amax.

    Attributes:
        fp8_format: `Format.HYBRID` (E4M3 forward, E5M2 gradients) or `Format.E4M3`.
        use_power_2_scales: the default `power_2_scale` of all roles.
        amax_epsilon: the default `amax_epsilon` of all roles.
        fp8_quant_fwd_inp: how the input is scaled, instead of the two defaults above.
        fp8_quant_fwd_weight: how the weight is scaled, likewise.
        fp8_quant_bwd_grad: how the output gradient is scaled, likewise.
        fp8_gemm_fprop: how fprop accumulates; fast by default.
        fp8_gemm_dgrad: how dgrad accumulates; split by default.
        fp8_gemm_wgrad: how wgrad accumulates; split by default.
        backward_override: None: dgrad and wgrad run quantized. "high_precision": the original operands are saved and
            the backward GEMMs run unquantized. "dequantized": the operands quantized for fprop are saved, and
            dequantized to the compute dtype in backward.

    Raises:
        ValueError: pure E5M2; an amax epsilon that is negative or not finite; an unknown backward override.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    backward_override: BackwardOverride | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        require(
            self.fp8_format in (Format.HYBRID, Format.E4M3),
            "Float8CurrentScaling",
            "fp8_format must be Format.HYBRID or Format.E4M3",
            got=self.fp8_format,
            hint="E5M2 has too few mantissa bits for the forward pass.",
        )
        default = QParams(power_2_scale=self.use_power_2_scales, amax_epsilon=self.amax_epsilon)

        def spec(fmt: ElementFormat, params: QParams | None) -> Float8CurrentScalingQuantizer:
            params = params or default
            return Float8CurrentScalingQuantizer(
                fmt=fmt, power_2_scale=params.power_2_scale, amax_epsilon=params.amax_epsilon
            )

        self.freeze(
            {
                "input": spec(self.fp8_format.forward, self.fp8_quant_fwd_inp),
                "weight": spec(self.fp8_format.forward, self.fp8_quant_fwd_weight),
                "grad_output": spec(self.fp8_format.gradients, self.fp8_quant_bwd_grad),
            }
        )


def _check_types(recipe: Float8CurrentScaling) -> None:
    kinds: dict[str, tuple[type, ...]] = {"use_power_2_scales": (bool,)}
    kinds |= {f"fp8_gemm_{name}": (MMParams,) for name in GEMMS}
    kinds |= dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), (QParams, type(None)))
    kinds["amax_epsilon"] = (int, float)
    for name, allowed in kinds.items():
        value = getattr(recipe, name)
        if not isinstance(value, allowed):
            rule = f"{name} must be {' or '.join(kind.__name__ for kind in allowed)}"
            fail("Float8CurrentScaling", rule, got=repr(value), error=TypeError)
