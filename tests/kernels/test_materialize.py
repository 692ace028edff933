from __future__ import annotations

import pytest
import torch

from lowp.formats import HIGH_PRECISION
from lowp.kernels import materialize as kernel
from lowp.kernels.materialize import materialize
from lowp.kernels.sources import PLAIN, produce_ref
from tests.kernels.layouts import LAYOUTS, bits
from tests.kernels.sources import SOURCES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_a_tensor_is_copied(device, layout, dtype):
    x = LAYOUTS[layout](torch.randn(200, 150).to(device, dtype))
    out = materialize(x)
    assert out.is_contiguous()
    assert out.dtype == dtype
    assert out.data_ptr() != x.data_ptr()
    assert torch.equal(bits(out), bits(x.contiguous()))


@pytest.mark.parametrize("name", SOURCES)
def test_the_values_are_row_major(device, name):
    source = SOURCES[name](33, 70, device, torch.float16)
    out = materialize(source)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (source.shape, torch.float16)
    assert not out.isnan().any()
    assert out.data_ptr() not in [x.data_ptr() for x in source.tensors]


@pytest.mark.parametrize("name", SOURCES)
def test_compiled(device, name):
    torch.compiler.reset()
    source = SOURCES[name](33, 70, device, torch.bfloat16)
    compiled = torch.compile(materialize, fullgraph=True, backend="aot_eager")
    assert torch.equal(bits(compiled(source)), bits(materialize(source)))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [kernel.Config(*c) for c in ((1, 1024, 4), (32, 32, 2), (8, 512, 8))], ids=str)
@pytest.mark.parametrize("name", ["tensor", "gradient of swiglu", "LayerNorm", "dropout"])
def test_every_configuration_gives_the_same_bits(name, config):
    source = SOURCES[name](77, 264, "cuda", torch.bfloat16)
    out = kernel._materialize_launch(source.tensors, source.spec.bundle, config)
    assert torch.equal(bits(out), bits(materialize(source)))


@pytest.mark.gpu2
def test_case_32_second_device():
    x = torch.randn(100, 100)
    with torch.cuda.device(0):
        out = materialize(x.to("cuda:1"))
    assert torch.equal(out.cpu(), x)


def test_the_reference_of_a_tensor_is_the_tensor():
    x = torch.randn(3, 4)
    assert PLAIN[x.dtype].produce_ref((x,)) is x
    source = SOURCES["gelu"](3, 4, "cpu", torch.float32)
    assert torch.equal(materialize(source), produce_ref(source))
