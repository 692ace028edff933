"""The pipeline's autograd.Function: memory, gradients, hooks, modules and weights used several times, strides."""

import copy
import weakref
from functools import partial

import pytest
import torch

from lowp import ops
from tests.ops import oracle
from tests.ops.pipelines import compiled, linear_bias, same, step

DTYPE = torch.bfloat16
CALLS = ["eager", "aot_eager"]
WAYS = ["none", "hybrid", "dequantized"]


def call_of(function, call, **kwargs):
    return function if call == "eager" else compiled(function, **kwargs)


def batch(device, rows=30, features=32, requires_grad=True):
    return torch.randn(rows, features, device=device, dtype=DTYPE, requires_grad=requires_grad)


@pytest.fixture
def gradients_quantized(monkeypatch):
    """Weak references to the column copy of every quantized gradient that a backward makes."""
    from lowp.ops import linear_gemms

    made = []
    original = linear_gemms.quantize_operand

    def recorded(*args, **kwargs):
        result = original(*args, **kwargs)
        made.append(weakref.ref(result.column_data))
        return result

    monkeypatch.setattr(linear_gemms, "quantize_operand", recorded)
    return made


@pytest.mark.parametrize("in_custom_op", [False, True])
def test_what_wgrad_alone_reads_is_released_before_dgrad(in_custom_op, gradients_quantized, monkeypatch, device):
    from lowp.ops import linear_gemms

    alive = []
    dgrad = linear_gemms.dgrad

    def watched(*args):
        alive.append(gradients_quantized[-1]() is not None)
        return dgrad(*args)

    monkeypatch.setattr(linear_gemms, "dgrad", watched)
    backward_compute = ops.BasicLinear.backward_compute
    monkeypatch.setattr(ops.BasicLinear, "backward_compute", partial(backward_compute, in_custom_op=in_custom_op))
    module = ops.Sequential(ops.BasicLinear(32, 48, device=device, dtype=DTYPE), recipe=oracle.HYBRID)
    y = module(batch(device))
    gradients_quantized.clear()
    y.backward(torch.ones_like(y))
    assert alive == [in_custom_op]


def test_an_operation_called_directly_is_not_in_a_custom_op(monkeypatch, device):
    seen = []
    for name in ("forward_compute", "backward_compute"):
        original = getattr(ops.BasicLinear, name)

        def recorded(args, *, in_custom_op=False, original=original):
            seen.append(in_custom_op)
            return original(args, in_custom_op=in_custom_op)

        monkeypatch.setattr(ops.BasicLinear, name, staticmethod(recorded))
    ops.BasicLinear(32, 48, device=device, dtype=DTYPE)(batch(device)).sum().backward()
    assert seen == [False, False]


@pytest.mark.parametrize("recipe", WAYS)
def test_nothing_outlives_the_step(recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = batch(device)
    held = weakref.ref(x)
    module(x).sum().backward()
    del x
    assert held() is None


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_retain_graph(call, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = batch(device)
    y = call_of(module, call)(x)
    dy, leaves = torch.randn_like(y), [x, *module.parameters()]
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy)
    assert same(list(first), list(second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_double_backward_is_an_error(recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = batch(device)
    (dx,) = torch.autograd.grad(module(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_double_backward_is_an_error_when_compiled(device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    x = batch(device)
    (dx,) = torch.autograd.grad(compiled(module)(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|differentiate twice"):
        dx.sum().backward()


def test_saved_tensors_are_checked_for_changes(device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    y = module(batch(device))
    with torch.no_grad():
        module[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_the_gradient_of_the_output_is_left_alone(recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = batch(device)
    dy = torch.randn(30, 48, device=device, dtype=DTYPE)
    kept = dy.clone()
    first, second = step(module, module, x, dy), step(module, module, x, dy)
    assert torch.equal(dy, kept)
    assert same(first, second)


@pytest.mark.parametrize("recipe", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_gradients_of_any_strides(call, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x, dy = batch(device), torch.randn(48, 30, device=device, dtype=DTYPE)
    run = call_of(module, call)
    reference = step(run, module, x, dy.t().contiguous())
    assert same(step(run, module, x, dy.t()), reference)
    ones = step(run, module, x, torch.ones(30, 48, device=device, dtype=DTYPE))
    assert same(step(run, module, x, torch.ones((), device=device, dtype=DTYPE).expand(30, 48)), ones)


@pytest.mark.parametrize("call", CALLS)
def test_parameter_and_tensor_hooks(call, device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    fired = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: fired.append((name, tuple(grad.shape))))
    x = batch(device)
    x.register_hook(lambda grad: fired.append(("x", tuple(grad.shape))))
    call_of(module, call)(x).sum().backward()
    assert sorted(fired) == [("0.weight", (48, 32)), ("1.bias", (48,)), ("x", (30, 32))]


def test_hooks_of_an_operation_inside_fire_once(device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    fired = []
    module[0].register_forward_pre_hook(lambda *_: fired.append("pre"))
    module[0].register_forward_hook(lambda *_: fired.append("forward"))
    module(batch(device))
    assert fired == ["pre", "forward"]


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_a_parametrized_weight_gets_gradients(recipe, device):
    """Its tensor is computed anew each time that it is looked up."""
    linear = torch.nn.utils.parametrizations.weight_norm(ops.BasicLinear(32, 48, device=device))
    module = ops.Sequential(linear, recipe=oracle.RECIPES[recipe])
    module(torch.randn(8, 32, device=device)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_module_hooks_fire_once(device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    fired = []
    module.register_forward_pre_hook(lambda *_: fired.append("pre"))
    module.register_forward_hook(lambda *_: fired.append("forward"))
    module.register_full_backward_hook(lambda *_: fired.append("backward"))
    module(batch(device)).sum().backward()
    assert fired == ["pre", "forward", "backward"]


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("call", CALLS)
def test_one_module_called_several_times(call, recipe, device):
    module = linear_bias(32, 32, device=device, recipe=oracle.RECIPES[recipe])

    def three_times(x):
        return module(module(x)) + module(x * 2)

    x = batch(device)
    assert same(step(call_of(three_times, call), module, x), step(three_times, module, x))
    twins = [copy.deepcopy(module) for _ in range(3)]
    y = twins[1](twins[0](x)) + twins[2](x * 2)
    y.backward(torch.ones_like(y))
    *_, dw, db = step(call_of(three_times, call), module, x)
    total = sum(twin[0].weight.grad.double() for twin in twins)
    bound = 4 * torch.finfo(DTYPE).eps
    assert (dw.double() - total).norm() <= bound * total.norm()
    total = sum(twin[1].bias.grad.double() for twin in twins)
    assert (db.double() - total).norm() <= bound * total.norm()


@pytest.mark.parametrize("call", CALLS)
def test_a_weight_shared_by_two_operations(call, device):
    first, second = (ops.BasicLinear(32, 32, device=device, dtype=torch.float32) for _ in range(2))
    second.weight = first.weight
    module = ops.Sequential(first, second, recipe=oracle.HYBRID)
    x = torch.randn(30, 32, device=device, requires_grad=True)
    assert len(list(module.parameters())) == 1
    apart = copy.deepcopy(module)
    apart[1].weight = torch.nn.Parameter(first.weight.detach().clone())
    _, dx, dw = step(call_of(module, call), module, x)
    _, dx_apart, *dws = step(apart, apart, x)
    assert torch.equal(dx, dx_apart)
    assert torch.equal(dw, dws[1] + dws[0])


@pytest.mark.parametrize("call", CALLS)
def test_a_parameter_assigned_anew_is_used(call, device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    run = call_of(module, call)
    x = batch(device)
    step(run, module, x)
    module[0].weight = torch.nn.Parameter(torch.randn(48, 32, device=device, dtype=DTYPE))
    module[1].bias = torch.nn.Parameter(torch.randn(48, device=device, dtype=DTYPE))
    results = step(run, module, x)
    assert same(results, step(module, module, x))
    dy = torch.ones(30, 48, device=device, dtype=DTYPE)
    oracle.linear(x, module[0].weight, module[1].bias, dy, oracle.HYBRID).y.check(results[0], "y")


VIEWS = {
    "transposed": lambda d: torch.randn(32, 24, device=d, dtype=DTYPE).t(),
    "every other column": lambda d: torch.randn(24, 64, device=d, dtype=DTYPE)[:, ::2],
    "misaligned": lambda d: torch.randn(24 * 32 + 1, device=d, dtype=DTYPE)[1:].view(24, 32),
    "rows from 1": lambda d: torch.randn(25, 32, device=d, dtype=DTYPE)[1:],
    "expanded": lambda d: torch.randn(1, 32, device=d, dtype=DTYPE).expand(24, 32),
    "channels last": lambda d: torch.randn(2, 3, 4, 32, device=d, dtype=DTYPE).contiguous(
        memory_format=torch.channels_last
    ),
    "permuted": lambda d: torch.randn(32, 4, 6, device=d, dtype=DTYPE).permute(1, 2, 0),
}


@pytest.mark.parametrize("recipe", WAYS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("view", VIEWS)
def test_strides_of_the_input_do_not_matter(view, call, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = VIEWS[view](device)
    run = call_of(module, call)
    y = run(x.detach().requires_grad_())
    assert y.is_contiguous()
    copied = step(module, module, x.contiguous().requires_grad_())
    strided = x.detach().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    y = run(strided)
    y.backward(torch.ones_like(y))
    assert same([y.detach(), strided.grad, *[p.grad for p in module.parameters()]], copied)
