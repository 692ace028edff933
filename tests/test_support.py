"""`recipe_support`: native, emulated or unavailable, and why."""

import pytest
import torch

import lowp
from lowp import support
from lowp.cli.recipes import RECIPES
from lowp.recipe import Float8CurrentScaling


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(capability, triton=True)` pretends that there is such an NVIDIA GPU."""

    def pretend(capability, triton=True):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: object() if triton else None)

    return pretend


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_on_a_cpu(name):
    status, reason = lowp.recipe_support(RECIPES[name], "cpu")
    assert status == "emulated"
    assert "fp32" in reason


def test_torchs_default_device_is_the_default():
    assert lowp.recipe_support(lowp.recipe.Float8CurrentScaling()).status == "emulated"


@pytest.mark.parametrize(
    ("capability", "status"),
    [((8, 0), "unavailable"), ((8, 6), "unavailable"), ((8, 9), "native"), ((9, 0), "native"), ((10, 0), "native")],
)
def test_current_scaling_needs_fp8_tensor_cores(gpu, capability, status):
    gpu(capability)
    found = lowp.recipe_support(lowp.recipe.Float8CurrentScaling(), "cuda")
    assert found.status == status
    assert f"{capability[0]}.{capability[1]}" in found.reason
    assert "8.9" in found.reason


def test_triton_compiles_the_kernels(gpu):
    gpu((9, 0), triton=False)
    found = lowp.recipe_support(lowp.recipe.Float8CurrentScaling(), "cuda")
    assert found.status == "unavailable"
    assert "Triton" in found.reason


def test_no_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = lowp.recipe_support(lowp.recipe.Float8CurrentScaling(), "cuda")
    assert found == ("unavailable", "this torch finds no CUDA device")


def test_other_devices_have_no_kernels():
    found = lowp.recipe_support(lowp.recipe.Float8CurrentScaling(), "meta")
    assert found.status == "unavailable"
    assert "meta" in found.reason


def test_recipes_only():
    with pytest.raises(TypeError, match="recipe must be a lowp"):
        lowp.recipe_support("current", "cpu")


def test_a_recipe_says_what_it_needs(gpu):
    class Later(Float8CurrentScaling):
        first_capability = (10, 0)

    gpu((9, 0))
    assert lowp.recipe_support(Later(), "cpu").status == "emulated"
    assert lowp.recipe_support(Later(), "cuda") == (
        "unavailable",
        "capability 9.0; its tensor cores need 10.0 or newer",
    )
