"""Random pipelines, drawn by hypothesis from a table of operations, and what every one of them keeps to.

To test a new operation in them, add a `Kind` to `KINDS`.

Shape legend: F = features, the same everywhere unless a kind says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lowp import ops
from lowp import recipe as recipes
from lowp.ops import plan as planning
from lowp.ops.op import computes_as
from tests.ops import oracle

F = 16


@dataclass(frozen=True)
class Kind:
    """One entry of the table.

    Attributes:
        type: of the operation.
        build: `(in features, options) -> operation`.
        exact: small integers stay small integers, in both directions.
        features: out features for given in features; None: it can't follow.
    """

    type: type[ops.BasicOperation]
    build: Callable[..., ops.BasicOperation]
    exact: bool = True
    features: Callable[[int], int | None] = lambda size: size


KINDS: dict[str, Kind] = {
    "linear": Kind(ops.BasicLinear, lambda size, **options: ops.BasicLinear(size, F, **options), features=lambda _: F),
    "bias": Kind(ops.Bias, ops.Bias),
    "add": Kind(ops.AddExtraInput, lambda size, **options: ops.AddExtraInput()),
    "fork": Kind(ops.MakeExtraOutput, lambda size, **options: ops.MakeExtraOutput()),
    "scale": Kind(ops.ConstantScale, lambda size, **options: ops.ConstantScale(-2.0)),
    "quantize": Kind(ops.Quantize, lambda size, **options: ops.Quantize(forward=True, backward=True)),
    "quantize_backward": Kind(ops.Quantize, lambda size, **options: ops.Quantize(forward=False, backward=True)),
    "identity": Kind(ops.Identity, lambda size, **options: ops.Identity()),
    "reshape": Kind(ops.Reshape, lambda size, **options: ops.Reshape((-1, size))),
    "dropout": Kind(ops.Dropout, lambda size, **options: ops.Dropout(0.5)),
    "layer_norm": Kind(ops.LayerNorm, ops.LayerNorm, exact=False),
    "rms_norm": Kind(ops.RMSNorm, partial(ops.RMSNorm, zero_centered_gamma=True), exact=False),
    "l2": Kind(ops.L2Normalization, lambda size, **options: ops.L2Normalization(), exact=False),
}
"""Operations by name."""


def _halved(size: int) -> int | None:
    return None if size % 2 else size // 2


for _class in ops.ACTIVATION_CLASSES:
    KINDS[_class.__name__] = Kind(
        _class,
        lambda size, _class=_class, **options: _class(),
        exact=_class is ops.ReLU,
        features=_halved if _class().gated else lambda size: size,
    )

PATTERNS = [rule.fused.fuses for rule in planning._RULES]
"""Operations that a rule fuses: drawn together, since single draws seldom give them."""

EPILOGUES = ("Linear",)
"""Parts of the names of fusions into a GEMM's epilogue, which round once where the unfused operations round twice."""


@dataclass(frozen=True)
class Drawn:
    """One random pipeline and one random step of it.

    Attributes:
        names: of the operations.
        recipe: name in `RECIPES`.
        dtype: of inputs and parameters.
        rows: the leading axes.
        wanted: whether each of the tensors that could get a gradient does; used in turn.
        used: whether each output is used; in turn, the last one always.
        seed: of the values.
    """

    names: tuple[str, ...]
    recipe: str
    dtype: torch.dtype
    rows: tuple[int, ...]
    wanted: tuple[bool, ...]
    used: tuple[bool, ...]
    seed: int


RECIPES = {
    "none": None,
    "hybrid": oracle.HYBRID,
    "power_2": recipes.Float8CurrentScaling(use_power_2_scales=True),
    "high_precision": oracle.HIGH_PRECISION_BACKWARD,
    "dequantized": recipes.Float8CurrentScaling(use_power_2_scales=True, backward_override="dequantized"),
}
EXACT_RECIPES = ("none", "power_2", "dequantized")
"""The recipes that leave integers multiples of a power of two."""


@st.composite
def sequences(draw: Any, exact: bool, kinds: Sequence[str] = (), longest: int = 6) -> Drawn:
    """Draw a pipeline.

    Args:
        draw: given by hypothesis.
        exact: only operations, recipes and dtypes for which every sum is exact, in any order.
        kinds: names to draw from; all that fit by default.
        longest: how many operations at most.
    """
    names: list[str] = []
    features = F
    pattern: list[type] = []
    count = draw(st.integers(1, longest))
    while len(names) < count or pattern:
        pattern = pattern or draw(st.one_of(st.just([None]), st.sampled_from(PATTERNS).map(list)))
        kind = pattern.pop(0)
        fitting = [
            name
            for name in kinds or KINDS
            if (kind is None or computes_as(KINDS[name].type, kind))
            and (KINDS[name].exact or not exact)
            and KINDS[name].features(features) is not None
            and not (exact and name == "linear" and names.count("linear") == 3)
        ]
        if not fitting:
            pattern = []
            count -= 1
            continue
        names.append(draw(st.sampled_from(fitting)))
        features = KINDS[names[-1]].features(features)  # type: ignore[assignment]
    booleans = st.lists(st.booleans(), min_size=3, max_size=3).map(tuple)
    return Drawn(
        tuple(names or ["identity", "bias"]),
        draw(st.sampled_from(EXACT_RECIPES if exact else sorted(RECIPES))),
        torch.float32 if exact else draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from([(5,), (2, 3), (16,), ()])),
        draw(booleans),
        draw(booleans),
        draw(st.integers(0, 2**16)),
    )


class Sample:
    """The operations of a drawn pipeline, and the tensors of its step."""

    def __init__(self, drawn: Drawn, device: str, *, exact: bool) -> None:
        self.recipe = RECIPES[drawn.recipe]
        generator = torch.Generator().manual_seed(drawn.seed)

        def values(shape: Sequence[int]) -> Tensor:
            if exact:
                signs = torch.randint(-1, 2, shape, generator=generator)
                return (signs * torch.randint(0, 2, shape, generator=generator)).to(device, drawn.dtype)
            return torch.randn(shape, generator=generator).to(device, drawn.dtype)

        torch.manual_seed(drawn.seed)
        self.ops: list[ops.BasicOperation] = []
        features = F
        for name in drawn.names:
            self.ops.append(KINDS[name].build(features, device=device, dtype=drawn.dtype))
            features = KINDS[name].features(features) or 0
        parameters = [parameter for op in self.ops for parameter in op.parameters()]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(values(parameter.shape))
        self.tensors = [values((*drawn.rows, F))]
        outputs = self._run_alone(self.tensors[0], None)
        self.tensors += [values(shape) for shape in self.extra_shapes]
        for index, tensor in enumerate([*self.tensors, *parameters]):
            tensor.requires_grad_(drawn.wanted[index % len(drawn.wanted)])
        self.grads: list[Tensor | None] = [
            values(y.shape).to(y.dtype) if drawn.used[index % len(drawn.used)] else None
            for index, y in enumerate(outputs)
        ]
        if not any(dy is not None for dy in self.grads):
            self.grads[-1] = values(outputs[-1].shape).to(outputs[-1].dtype)

    def pipeline(self) -> ops.Sequential:
        """The operations, planned together."""
        return ops.Sequential(*self.ops, recipe=self.recipe)

    def alone(self, *tensors: Tensor) -> Any:
        """The operations one by one, each a pipeline of its own: nothing is fused, nothing handed over quantized."""
        outputs = self._run_alone(tensors[0], list(tensors[1:]))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _run_alone(self, x: Tensor, extra_inputs: list[Tensor] | None) -> list[Tensor]:
        """Outputs; without extra inputs, zeros stand for them, and their shapes are noted."""
        self.extra_shapes: list[torch.Size] = []
        extra_outputs: list[Tensor] = []
        for op in self.ops:
            extra: list[Tensor] = []
            for _ in range(op.num_extra_inputs):
                self.extra_shapes.append(x.shape)
                extra.append(torch.zeros_like(x) if extra_inputs is None else extra_inputs[len(self.extra_shapes) - 1])
            result = ops.Sequential(op, recipe=self.recipe)(x, *extra)
            x, *more = result if isinstance(result, tuple) else (result,)
            extra_outputs += more
        return [x, *extra_outputs]

    @property
    def module(self) -> nn.ModuleList:
        """All parameters."""
        return nn.ModuleList(self.ops)


def is_epilogue(rule: planning.FusionRule) -> bool:
    """Whether the rule fuses into a GEMM's epilogue."""
    return any(part in rule.fused.__name__ for part in EPILOGUES)
