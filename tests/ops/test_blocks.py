"""A whole block, of every kind of operation: sizes, modes, copies, recomputation, export."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import Graphs
from tests.ops.pipelines import BOUNDARIES, compiled, same, same_or_absent, step_of

BF16 = torch.bfloat16
K = 32


def block(device, recipe="hybrid", dropout=0.25):
    """A residual stream's MLP: x + fc2(dropout(swiglu(fc1(norm(x)))))."""
    options = {"device": device, "dtype": BF16}
    module = ops.Sequential(
        ops.MakeExtraOutput(),
        ops.RMSNorm(K, **options),
        ops.BasicLinear(K, 96, **options),
        ops.Bias(96, **options),
        ops.SwiGLU(),
        ops.Dropout(dropout),
        ops.BasicLinear(48, K, **options),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(),
        ops.LayerNorm(K, **options),
        recipe=oracle.RECIPES[recipe],
    )
    torch.nn.init.normal_(module[3].bias)
    return module


def batch(device, *leading):
    return [torch.randn(*(leading or (6,)), K, device=device, dtype=BF16, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_one_graph_for_all_sizes(boundary, recipe, device):
    module, graphs = block(device, recipe), Graphs()
    run = graphs.compile(module, dynamic=True)
    with lowp.compile_boundary(boundary):
        for rows in (30, 2, 77, 16):
            tensors = batch(device, rows)
            assert same_or_absent(step_of(run, module, tensors), step_of(module, module, tensors))
    assert graphs.frames == 1


def test_no_recompilation_between_steps(device):
    module, graphs = block(device), Graphs()
    run = graphs.compile(module)
    for _ in range(3):
        tensors = batch(device)
        assert same_or_absent(step_of(run, module, tensors), step_of(module, module, tensors))
        for parameter in module.parameters():
            parameter.data.add_(0.01)
    assert graphs.frames == 1


def test_training_and_evaluation(device):
    module, graphs = block(device), Graphs()
    run = graphs.compile(module)
    tensors = batch(device)
    for mode in (True, False, True, False):
        module.train(mode)
        assert same_or_absent(step_of(run, module, tensors), step_of(module, module, tensors))
    assert graphs.frames == 2


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_compiled(recipe, boundary, device):
    module = block(device, recipe)
    tensors = batch(device, 2, 3)
    for leaf in (tensors[1], module[1].weight, module[3].bias):
        leaf.requires_grad_(False)
    run = compiled(module, boundary=boundary)
    assert same_or_absent(step_of(run, module, tensors), step_of(module, module, tensors))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_inductor(boundary, device):
    module, tensors = block(device), batch(device)
    run = compiled(module, "inductor", boundary)
    assert same_or_absent(step_of(run, module, tensors), step_of(module, module, tensors))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_recomputed(recipe, use_reentrant, device):
    module, tensors = block(device, recipe), batch(device)

    def recomputed(x, extra):
        return checkpoint(module, x, extra, use_reentrant=use_reentrant)

    assert same(step_of(recomputed, module, tensors), step_of(module, module, tensors))


def test_recomputed_and_compiled(device):
    module, tensors = block(device), batch(device)

    def recomputed(x, extra):
        return checkpoint(module, x, extra, use_reentrant=False)

    run = compiled(recomputed)
    assert same_or_absent(step_of(run, module, tensors), step_of(module, module, tensors))


def test_offloaded(device):
    module, tensors = block(device), batch(device)

    def offloaded(*given):
        with torch.autograd.graph.save_on_cpu():
            return module(*given)

    assert same(step_of(offloaded, module, tensors), step_of(module, module, tensors))


def test_backward_twice(device):
    module, (x, extra) = block(device), batch(device)
    y, residual = module(x, extra)
    leaves = [x, extra, *module.parameters()]
    grads = [torch.randn_like(y), torch.randn_like(residual)]
    first = torch.autograd.grad([y, residual], leaves, grads, retain_graph=True)
    second = torch.autograd.grad([y, residual], leaves, grads)
    assert same(list(first), list(second))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"]
)
def test_copies(how, device):
    module, tensors = block(device), batch(device)
    expected = step_of(module, module, tensors)
    other = how(module)
    assert same(step_of(other, other, tensors), expected)
    assert other.plan == module.plan
    assert other[1].weight is not module[1].weight


def test_meta():
    module = block("meta").eval()
    y, extra = module(torch.empty(5, K, device="meta", dtype=BF16), torch.empty(5, K, device="meta", dtype=BF16))
    assert (y.shape, extra.shape, y.dtype) == ((5, K), (5, K), BF16)
    module = module.to_empty(device="cpu")
    for op in module:
        op.reset_parameters()
    assert torch.equal(module[1].weight, torch.ones(K, dtype=BF16))


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_export_with_a_dynamic_batch(recipe, device):
    module, tensors = block(device, recipe).eval(), [t.detach() for t in batch(device)]
    dynamic = {0: torch.export.Dim("rows", min=2, max=1024)}
    program = torch.export.export(module, tuple(tensors), dynamic_shapes={"input": dynamic, "extra_inputs": (dynamic,)})
    tensors = [t.detach() for t in batch(device, 17)]
    with torch.no_grad():
        assert same(list(program.module()(*tensors)), list(module(*tensors)))


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_no_rows(recipe, device):
    module, tensors = block(device, recipe), batch(device, 0)
    y, extra, dx, d_extra, *grads = step_of(module, module, tensors)
    assert y.shape == extra.shape == dx.shape == d_extra.shape == (0, K)
    assert all(not g.any() for g in grads)
    assert same_or_absent(step_of(compiled(module), module, tensors), [y, extra, dx, d_extra, *grads])


def test_hooks_of_operations_fire(device):
    """Each is then called on its own: nothing is handed over quantized, and every value is the same."""
    module, tensors = block(device, dropout=0.0), batch(device)
    with torch.no_grad():
        module[3].bias.zero_()  # added in a GEMM's epilogue, a bias would be rounded once less
    fired, grads = [], [torch.randn_like(t) for t in tensors]
    expected = step_of(module, module, tensors, grads)
    module[4].register_forward_hook(lambda *_: fired.append("forward"))
    module[1].register_full_backward_hook(lambda *_: fired.append("backward"))
    results = step_of(module, module, tensors, grads)
    assert fired == ["forward", "backward"]
    for result, other in zip(results, expected, strict=True):  # other epilogues round once less too
        assert (result.double() - other.double()).norm() <= 2.0**-3 * other.double().norm()
