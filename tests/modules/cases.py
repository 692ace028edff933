"""The modules under test, by name, with what the oracle needs to know of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import lowp
from tests.modules import oracle
from tests.ops.pipelines import compiled

K, N, FFN = 32, 48, 64


@dataclass(frozen=True)
class Case:
    """A module.

    Attributes:
        build: makes one; takes any of its keyword arguments.
        out_features: of its output.
        settings: the oracle's arguments for it.
    """

    build: Callable[..., nn.Module]
    out_features: int
    settings: dict[str, Any] = field(default_factory=dict)


def _linear(**kwargs: Any) -> nn.Module:
    return lowp.Linear(K, N, **kwargs)


def _norm_linear(**kwargs: Any) -> nn.Module:
    return lowp.LayerNormLinear(K, N, **kwargs)


def _rms_linear(**kwargs: Any) -> nn.Module:
    return lowp.LayerNormLinear(K, N, **{"normalization": "RMSNorm", "zero_centered_gamma": True, **kwargs})


def _mlp(**kwargs: Any) -> nn.Module:
    return lowp.LayerNormMLP(K, FFN, **kwargs)


def _gated_mlp(**kwargs: Any) -> nn.Module:
    return lowp.LayerNormMLP(K, FFN, **{"normalization": "RMSNorm", "activation": "swiglu", "bias": False, **kwargs})


CASES: dict[str, Case] = {
    "linear": Case(_linear, N, {"normalization": None}),
    "norm_linear": Case(_norm_linear, N),
    "rms_linear": Case(_rms_linear, N, {"normalization": "RMSNorm", "zero_centered_gamma": True}),
    "mlp": Case(_mlp, K),
    "gated_mlp": Case(_gated_mlp, K, {"normalization": "RMSNorm", "activation": "swiglu"}),
}


def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Any:
    """A module whose parameters all matter: no bias is zero, no norm weight one."""
    module = CASES[name].build(device=device, dtype=dtype, **kwargs)
    randomize(module)
    return module


def randomize(module: nn.Module) -> None:
    """Draw biases and norm weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + (0.8 if parameter.mean() > 0.5 else 0.0))


def batch(
    *leading: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    features: int = K,
    requires_grad: bool = True,
) -> Tensor:
    """An input."""
    return torch.randn(*leading, features, dtype=dtype).to(device).requires_grad_(requires_grad)


def call_of(function: Any, call: str, **kwargs: Any) -> Any:
    """A function as it is ("eager"), or compiled by a backend, or at the "kernel" boundary."""
    if call == "eager":
        return function
    if call == "kernel":
        return compiled(function, boundary="kernel", **kwargs)
    return compiled(function, call, **kwargs)


def step(call: Any, module: nn.Module, x: Tensor, *dys: Tensor | None, within: Any = None) -> dict[str, Tensor | None]:
    """One forward and backward from cleared gradients: y0, y1, ..., dx and every parameter's gradient.

    Args:
        call: the module, or a compiled one.
        module: whose gradients are cleared and read.
        x: the input; its `requires_grad` is kept.
        dys: a gradient for each output; None: the output is not used. Outputs without one get ones.
        within: a context around the call.
    """
    x = x.detach().clone().requires_grad_(x.requires_grad)
    for parameter in module.parameters():
        parameter.grad = None
    with within or nullcontext():
        outputs = call(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = dys or tuple(None if y is None else torch.ones_like(y) for y in outputs)
    pairs = [(y, dy) for y, dy in zip(outputs, used, strict=False) if y is not None and dy is not None]
    pairs = [(y, dy) for y, dy in pairs if y.requires_grad]
    torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
    results = {f"y{index}": None if y is None else y.detach() for index, y in enumerate(outputs)}
    return {**results, "dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    """Equal bit for bit; None and zeros are equal."""
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        present = a if b is None else b
        return present is None or not present.count_nonzero()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def expected(name: str, module: nn.Module, x: Tensor, dy: Tensor | None, recipe: Any, **kwargs: Any) -> oracle.Results:
    """What the oracle says of a module."""
    settings = {**CASES[name].settings, **kwargs}
    d_norm = settings.pop("d_norm", None)
    return oracle.run(x, dy, d_norm, dict(module.named_parameters()), recipe, **settings)


BOUND = 1e-3
"""How far (relative L2) a result may be from the oracle's on a CPU: sums of another order round a few elements in a
thousand to the neighbouring value, 2^-9 off on average in bf16, and an FP8 code in a million by a step."""

CUDA_BOUND = 2.0**-8
"""On CUDA, where FP8 products are summed in 14 bits: one element in ten is a bf16 step off, and codes with it."""


def cuda_hidden_bound(step: float) -> float:
    """On CUDA, behind quantized values that a product gave, by the largest relative step of their format.

    One element in ten is off by 2^-8; that is a whole step after rounding with a chance of 2^-8 / step.
    """
    return math.sqrt(0.1 * 2.0**-8 * step)


def bound(x: Tensor, recipe: Any) -> float:
    """How far a result may be from the oracle's: in a small quantized operand, one code that is a step off shows."""
    code = 0.0 if recipe is None or not x.numel() else 2.0**-3 / math.sqrt(x.numel())
    return (BOUND if x.device.type == "cpu" else CUDA_BOUND) + code


def check(results: dict[str, Tensor | None], reference: oracle.Results, limit: float) -> None:
    """Assert that results are the oracle's; gradients that nobody wants must be None."""
    wanted = {"y0": reference.output, "dx": reference.dx, **reference.grads}
    for key, result in results.items():
        if key in wanted and result is not None:
            error = oracle.relative_l2(result, wanted[key])
            assert error <= limit, f"{key}: off by {error}"
