"""The launchers hand Triton what it takes: its own binder and compiler run, up to the launch, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowp.formats import E5M2
from lowp.kernels import _triton, amax, bias_grad, cast, cast_kernel, materialize, norm, norm_config, norm_grad
from lowp.quantizers import Float8CurrentScalingQuantizer
from tests.kernels.sources import SOURCES, relayout, transposed

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

QUANTIZER = Float8CurrentScalingQuantizer(fmt=E5M2).bundle
LARGEST = torch.ones(3)

CALLS = {
    "amax": lambda source: amax.amax_launch(source.tensors, source.spec.bundle),
    "bias_grad": lambda source: bias_grad._bias_grad_launch(source.tensors, source.spec.bundle, torch.float16),
    "materialize": lambda source: materialize._materialize_launch(source.tensors, source.spec.bundle),
    "cast": lambda source: cast._cast_launch(source.tensors, source.spec.bundle, LARGEST, QUANTIZER, True, False),
    "cast, amax found": lambda source: cast._cast_launch(
        source.tensors, source.spec.bundle, None, QUANTIZER, True, True
    ),
    "cast_bias_grad, amax found": lambda source: cast._cast_bias_grad_launch(
        source.tensors, source.spec.bundle, None, QUANTIZER, True, False, torch.bfloat16
    ),
    "cast_bias_grad": lambda source: cast._cast_bias_grad_launch(
        source.tensors, source.spec.bundle, LARGEST, QUANTIZER, True, True, torch.float32
    ),
}


class Hopper:
    """Stands in for a device that is not there."""

    def get_current_device(self) -> str:
        return "stand-in"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The kernels that are launched, by name, compiled instead."""
    kernels: dict[str, Any] = {}

    def launch(kernel: Any, programs: Any, args: Any, constants: Any, **options: Any) -> None:
        assert isinstance(args[0], Tensor)  # its device is the launch's
        hash((constants, *[_triton._specialized(arg) for arg in args]))
        grid = programs if isinstance(programs, tuple) else (programs,)
        kernels[kernel.__name__] = kernel.warmup(*args, *constants, grid=grid, **options)

    for module in (amax, bias_grad, cast_kernel, materialize, norm, norm_grad):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    return kernels


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["tensor", "gradient of clamped_swiglu", "LayerNorm", "dropout"])
def test_kernels_compile_from_a_launch(compiled, name, call):
    CALLS[call](SOURCES[name](64, 48, "cpu", torch.bfloat16))
    assert compiled
    for kernel, result in compiled.items():
        assert result.metadata.enable_fp_fusion == (kernel == "_total_kernel")  # equal bits need equal roundings


def test_other_layouts_and_one_row(compiled):
    source = SOURCES["gradient of swiglu"](1, 33, "cpu", torch.float32)
    for moved in (source, relayout(source, transposed)):
        for call in CALLS.values():
            call(moved)


NORMS = "layer 1 1", "rms 33 21", "layer 64 768", "rms 1 12288", "layer 3 20000", "l2 0 16", "layer 4 0"


@pytest.mark.parametrize("case", NORMS)
def test_norms(compiled, case):
    kind, M, K = case.split()[0], *map(int, case.split()[1:])
    x, w = torch.randn(M, 2 * K)[:, ::2], torch.randn(K, dtype=torch.bfloat16)
    mean, rstd = torch.zeros(M) if kind == "layer" else None, torch.ones(M)
    for output, with_amax in ((True, False), (False, True), (True, True), (False, False)):
        norm._norm_forward_launch(x, w, w, kind, 1e-5, True, torch.float16, output, with_amax)
    for residual, grad_input, bias_dtype in ((None, True, torch.float32), (x, True, None), (None, False, None)):
        norm_grad._norm_backward_launch(x, x, mean, rstd, w, residual, kind, True, grad_input, True, bias_dtype)
    norm_grad._norm_backward_launch(x, x, mean, rstd, None, x, kind, False, True, False, None)
    long = K > norm_config.LONGEST
    expected = {"norm_long_kernel", "norm_grad_long_kernel"} if long else {"norm_kernel"}
    assert compiled.keys() == expected | {"norm_grad_kernel", "_total_kernel"}
    assert all(result.metadata.enable_fp_fusion == (name == "_total_kernel") for name, result in compiled.items())


def test_what_a_launch_is_kept_under():
    x = torch.zeros(8, 3)
    kinds = [_triton._specialized(arg) for arg in ((x, 3, 1), (x, 16, 1), (x, None, 1), (x.half(), 3, 1))]
    assert len(set(kinds)) == 4
    assert _triton._specialized((x, 5, 1)) == kinds[0]


class Stub:
    """A compiled kernel, or its launcher, that notes which way a launch takes."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self.run = self
        self.function, self.packed_metadata = 7, (4, 1, 0)
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False

    def launch(self, *args: Any) -> None:
        self.ways.append("short")
        self.args = args

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args, stream: self.ways.append("triton")


def test_other_versions_of_triton_launch_themselves(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    stub = Stub()
    _triton.Launcher(stub)(3, (2, 1, 1), 11)
    function, before, after = _triton.Launcher(stub).way((2, 1, 1))
    function(*before, 3, *after, 11)
    assert stub.ways == ["triton", "triton"]


def test_a_launch_takes_the_short_way_unless_a_hook_hears_of_it(monkeypatch):
    """Triton's chains of hooks are there when they are empty too."""
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    stub = Stub()
    launch = _triton.Launcher(stub)
    launch(3, (2, 1, 1), 11, (12, 13))
    assert stub.args[:5] == (2, 1, 1, 3, 7)
    assert stub.args[-2:] == (11, (12, 13))
    function, before, after = launch.way((2, 1, 1))
    assert (*before, 3, *after, 11, (12, 13)) == stub.args
    assert function == stub.launch
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        heard = []
        chain.add(heard.append)
        try:
            launch(3, (2, 1, 1), 11, (12, 13))
        finally:
            chain.remove(heard.append)
    launch(3, (2, 1, 1), 11, (12, 13))
    assert stub.ways == ["short", "triton", "triton", "short"]


@pytest.mark.gpu
def test_both_ways_give_the_same():
    x = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)
    expected = amax.amax(x)
    heard = []
    chain = triton.knobs.runtime.launch_enter_hook
    chain.add(heard.append)
    try:
        assert torch.equal(amax.amax(x), expected)
    finally:
        chain.remove(heard.append)
    assert len(heard) == 1
    assert torch.equal(amax.amax(x), expected)
    assert torch.equal(expected.max(), x.abs().max().float())
