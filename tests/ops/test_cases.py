"""Faults that users of libraries of this kind met, as small inputs. Each test is named after the case's number."""

import itertools

import pytest
import torch

import lowp
from lowp import ops
from lowp.kernels.gemm import scaled_gemm
from tests.ops import oracle
from tests.ops.exact import exact, exact_
from tests.ops.graphs import CountOps, Graphs
from tests.ops.pipelines import BOUNDARIES, compiled, linear_bias, same, step

BF16 = torch.bfloat16
FP8 = ["hybrid", "e4m3", "high_precision", "dequantized"]
CALLS = ["eager", "aot_eager"]


def call_of(function, call):
    return function if call == "eager" else compiled(function)


def relative_l2(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check_near_high_precision(module, x, recipe):
    """Output and gradients within what the formats' steps allow; gradients in the parameters' dtypes."""
    dy = torch.randn(*x.shape[:-1], module[0].out_features, device=x.device).to(x.dtype)
    module.recipe = oracle.RECIPES[recipe]
    results = step(module, module, x, dy)
    module.recipe = None
    gradients = "E4M3" if recipe == "e4m3" else "E5M2"
    eps = {"E4M3": lowp.recipe.Format.E4M3.forward.eps, "E5M2": lowp.recipe.Format.HYBRID.gradients.eps}
    for result, reference, fmt in zip(
        results, step(module, module, x, dy), ("E4M3", gradients, gradients, gradients), strict=True
    ):
        assert result.isfinite().all()
        assert relative_l2(result, reference) <= eps[fmt] / 2, "half a step is the largest error of one operand"


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize(("K", "N"), [(712, 896), (767, 3072)])
def test_case_01_features_that_are_no_multiples_of_16(K, N, recipe, device):
    module = linear_bias(K, N, device=device)
    x = torch.randn(2048 if device == "cuda" else 64, K, device=device, dtype=BF16, requires_grad=True)
    check_near_high_precision(module, x, recipe)


@pytest.mark.parametrize("recipe", FP8)
def test_case_02_tokens_that_are_no_multiple_of_16(recipe, device):
    K, N = (4096, 16384) if device == "cuda" else (256, 1024)
    module = linear_bias(K, N, device=device)
    x = torch.randn(50, K, device=device, dtype=BF16, requires_grad=True)
    check_near_high_precision(module, x, recipe)
    module.recipe = oracle.RECIPES[recipe]
    module(x).sum().backward()


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize(("K", "N"), [(32, 15), (16, 1)])
def test_case_04_few_and_odd_features(K, N, recipe, device):
    module = linear_bias(K, N, device=device)
    check_near_high_precision(module, torch.randn(2, K, device=device, dtype=BF16, requires_grad=True), recipe)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_07_no_rows(call, recipe, device):
    module = linear_bias(4096, 16, device=device, recipe=oracle.RECIPES[recipe])
    fired = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(tuple(p.grad.shape)))
    x = torch.empty(0, 4096, device=device, dtype=BF16, requires_grad=True)
    y, dx, dw, db = step(call_of(module, call), module, x)
    assert y.shape == (0, 16)
    assert dx.shape == (0, 4096)
    assert not dw.any()
    assert not db.any()
    assert sorted(fired) == [(16,), (16, 4096)]


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_09_zeros_stay_zeros(call, recipe, device):
    module = linear_bias(128, 64, device=device, recipe=oracle.RECIPES[recipe])
    run = call_of(module, call)
    x = torch.randn(64, 128, device=device, dtype=BF16)
    x[3] = 0
    for value in (x, torch.zeros_like(x)):
        y, *grads = step(run, module, value.requires_grad_())
        assert torch.equal(y[3], module[1].bias.detach())
        assert all(result.isfinite().all() for result in (y, *grads))
    y, dx, dw, db = step(run, module, x.detach().requires_grad_(), torch.zeros_like(y))
    assert not any(grad.any() for grad in (dx, dw, db))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_case_10_a_weight_of_zeros(recipe, device):
    """The second half of a low-rank adapter starts at zero."""
    down, up = (ops.BasicLinear(*sizes, device=device, dtype=BF16) for sizes in ((4096, 16), (16, 64)))
    torch.nn.init.zeros_(up.weight)
    adapter = ops.Sequential(down, up, recipe=oracle.RECIPES[recipe])
    x = torch.randn(32, 4096, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(32, 64, device=device, dtype=BF16)
    y, dx, d_down, d_up = step(adapter, adapter, x, dy)
    assert not y.any()
    assert not dx.any()
    assert not d_down.any()
    hidden = ops.Sequential(down, recipe=adapter.recipe)(x)
    oracle.linear(hidden, up.weight, None, dy, adapter.recipe).dw.check(d_up, "d_up")


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", ["eager", "operation", "kernel"])
def test_case_14_what_is_not_finite_stays_visible(call, recipe, device):
    """A row of the input with an Inf gives a row that is not finite; all others keep their values."""
    module = linear_bias(32, 48, device=device, recipe=oracle.RECIPES[recipe])
    exact_(module[0].weight)
    with torch.no_grad():
        module[0].weight[:, 0] = 1.75
    run = module if call == "eager" else compiled(module, boundary=call)
    x = exact(16, 32, device=device)
    x[1, 1] = 1.75  # another row has the amax
    clean = step(run, module, x.clone().requires_grad_())
    for value in (float("inf"), float("-inf"), float("nan")):
        spoiled = x.clone()
        spoiled[3, 0] = value
        y, dx, dw, db = step(run, module, spoiled.requires_grad_())
        others = torch.arange(16, device=device) != 3
        assert not y[3].isfinite().any()
        assert torch.equal(y[others], clean[0][others])
        assert torch.equal(dx, clean[1])
        assert not dw[:, 0].isfinite().any()
        assert torch.equal(dw[:, 1:], clean[2][:, 1:])
        assert torch.equal(db, clean[3])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("power_2", [False, True])
def test_case_19_scales_are_bit_equal_when_compiled(power_2, backend, device):
    x = torch.randn(16, 16, 768, device=device, dtype=BF16)
    spec = lowp.recipe.Float8CurrentScaling(use_power_2_scales=power_2).quantizer("input")

    def quantized(x):
        return lowp.quantize(x * 1.0, spec, row=True, column=True)

    eager, fast = quantized(x), torch.compile(quantized, backend=backend, fullgraph=True)(x)
    for a, b in zip(eager, fast, strict=True):
        bits = {1: torch.uint8, 4: torch.int32}[a.element_size()]
        assert torch.equal(a.view(bits), b.view(bits))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_case_22_strided_inputs(recipe, device):
    module = linear_bias(64, 48, device=device, recipe=oracle.RECIPES[recipe])
    views = [
        torch.randn(4, 4, 4, 64, device=device, dtype=BF16).contiguous(memory_format=torch.channels_last),
        torch.randn(64, 24, device=device, dtype=BF16).t(),
        torch.randn(24, 128, device=device, dtype=BF16)[:, ::2],
        torch.randn(25, 64, device=device, dtype=BF16)[1:],
        torch.randn(24 * 64 + 1, device=device, dtype=BF16)[1:].view(24, 64),
    ]
    for x in views:
        assert torch.equal(module(x), module(x.contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "K", "recipe"),
    [
        (2**23 + 16, 256, "hybrid"),
        (2**23 + 16, 256, "none"),
        (65537, 32768, "hybrid"),
        (65537, 32768, "none"),
    ],
)
def test_case_30_more_than_2_31_elements(M, K, recipe):
    """Only the last row is not zero."""
    linear = ops.BasicLinear(K, 16, device="cuda", dtype=BF16)
    exact_(linear.weight)
    x = torch.zeros(M, K, device="cuda", dtype=BF16)
    x[-1] = exact(K, device="cuda")
    pipeline = ops.Sequential(linear, recipe=oracle.RECIPES[recipe])
    x.requires_grad_()
    y = pipeline(x)
    assert torch.equal(y[-1].double(), linear.weight.detach().double() @ x[-1].detach().double())
    assert not y[:-1].any()
    dy = torch.zeros_like(y)
    dy[-1] = exact(16, device="cuda")
    y.backward(dy)
    assert torch.equal(linear.weight.grad.double(), torch.outer(dy[-1], x[-1].detach()).double())
    assert torch.equal(x.grad[-1].double(), dy[-1].double() @ linear.weight.detach().double())
    assert not x.grad[:-1].any()


@pytest.mark.gpu
def test_case_31_rows_that_are_no_multiple_of_256():
    M, N, C = 8352, 1536, 4096
    a, b = (torch.randint(-1, 2, shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((M, C), (N, C)))
    one = torch.ones((), device="cuda")
    for dtype, fast in itertools.product((torch.float32, BF16), (True, False)):
        y = scaled_gemm(a, one, b, one, dtype=dtype, fast_accumulation=fast)
        assert torch.equal(y, (a.float() @ b.float().t()).to(dtype))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_34_repeated_layers_and_microbatches(call, recipe, device):
    """Exact inputs, in the second layer too: sums of gradients have one value."""
    layer = ops.Sequential(ops.BasicLinear(16, 16, device=device), recipe=oracle.RECIPES[recipe])
    weight = layer[0].weight
    with torch.no_grad():
        weight.copy_(torch.eye(16).roll(1, 0))
        weight[0, 15] = 1.75
    run = call_of(lambda x: layer(layer(x)), call)
    total = torch.zeros(16, 16, dtype=torch.float64, device=device)
    for _ in range(3):
        x, dy = (exact(8, 16, dtype=torch.float32, device=device).clamp(-1, 1) for _ in range(2))
        x[0, 3] = dy[0, 3] = 1.75
        run(x).backward(dy)
        w, x, dy = weight.detach().double(), x.double(), dy.double()
        total += dy.t() @ (x @ w.t()) + (dy @ w).t() @ x
    assert torch.equal(weight.grad.double(), total)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_35_no_state_is_left_over(call, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    run = call_of(module, call)
    x = torch.randn(24, 32, device=device, dtype=BF16, requires_grad=True)
    first = step(run, module, x)
    assert same(step(run, module, x), first)
    with torch.no_grad():
        assert torch.equal(run(x), first[0])
    assert torch.equal(run(x).detach(), first[0])
    assert same(step(run, module, x), first)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_42_only_affected_rows_are_not_finite(call, recipe, device):
    module = linear_bias(32, 48, device=device, recipe=oracle.RECIPES[recipe])
    with torch.no_grad():
        module[0].weight.fill_(1.75)
    x = exact(16, 32, device=device)
    x[3] = 1
    x.requires_grad_()
    dy = exact(16, 48, device=device)
    dy[5, 7] = 1.75
    run = call_of(module, call)
    _, clean_dx, clean_dw, clean_db = step(run, module, x, dy)
    dy[3, 0] = float("inf")
    _, dx, dw, db = step(run, module, x, dy)
    rows, features = (torch.arange(n, device=device) for n in (16, 48))
    assert not dx[3].isfinite().any()
    assert torch.equal(dx[rows != 3], clean_dx[rows != 3])
    assert not dw[0].isfinite().any()
    assert torch.equal(dw[features != 0], clean_dw[features != 0])
    assert not db[0].isfinite()
    assert torch.equal(db[features != 0], clean_db[features != 0])


DTYPES = [
    (torch.float32, BF16, None),
    (BF16, torch.float32, None),
    (torch.float32, torch.float32, BF16),
    (torch.float32, torch.float32, torch.float16),
    (BF16, BF16, torch.float16),
    (torch.float16, BF16, None),
]
"""Of the parameters, of the input, of torch.autocast."""


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize(("weight_dtype", "input_dtype", "autocast_dtype"), DTYPES, ids=str)
def test_case_49_mixed_dtypes(weight_dtype, input_dtype, autocast_dtype, recipe, device):
    linear = ops.Sequential(ops.BasicLinear(32, 48, device=device, dtype=weight_dtype), recipe=oracle.RECIPES[recipe])
    module = ops.Sequential(*linear, ops.Bias(48, device=device, dtype=weight_dtype), recipe=linear.recipe)
    x = torch.randn(8, 32, device=device, dtype=input_dtype, requires_grad=True)

    def within():
        return torch.autocast(device, dtype=autocast_dtype or BF16, enabled=autocast_dtype is not None)

    y, *_ = step(linear, linear, x, within=within())
    product = autocast_dtype or input_dtype
    assert y.dtype == product
    results = step(module, module, x, within=within())
    assert [r.dtype for r in results] == [
        torch.promote_types(product, weight_dtype),
        input_dtype,
        weight_dtype,
        weight_dtype,
    ]
    reference = torch.nn.functional.linear(x.detach().double(), *(p.detach().double() for p in module.parameters()))
    eps = oracle.HYBRID.quantizer("input").fmt.eps / 2 if recipe != "none" else 4 * torch.finfo(BF16).eps
    assert relative_l2(results[0], reference) <= eps


@pytest.mark.parametrize(("weight_dtype", "input_dtype", "autocast_dtype"), DTYPES, ids=str)
def test_case_49_mixed_dtypes_compiled(weight_dtype, input_dtype, autocast_dtype, device):
    module = linear_bias(device=device, dtype=weight_dtype, recipe=oracle.HYBRID)
    x = torch.randn(8, 32, device=device, dtype=input_dtype, requires_grad=True)
    results = []
    for function in (module, compiled(module)):
        within = torch.autocast(device, dtype=autocast_dtype or BF16, enabled=autocast_dtype is not None)
        results.append(step(function, module, x, within=within))
    assert same(*results)


def test_case_49_numbers_that_are_no_floating_point(device):
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match="BasicLinear: the input must have a floating-point dtype, got"):
            ops.BasicLinear(32, 48, device=device)(torch.zeros(4, 32, device=device, dtype=dtype))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_50_inference_mode(call, recipe, device):
    rows, width = (512, 1024) if device == "cuda" else (16, 64)
    recipe = oracle.RECIPES[recipe]
    model = ops.Sequential(
        *linear_bias(width, 4 * width, device=device), torch.nn.GELU(), *linear_bias(4 * width, width, device=device)
    )
    model.recipe = recipe
    x = torch.randn(4, rows, width, device=device, dtype=BF16)
    run = call_of(model, call)
    with torch.no_grad():
        expected = run(x)
    with torch.inference_mode():
        assert torch.equal(run(x), expected)
        assert run(x).is_inference()


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("call", ["eager", "aot_eager", "inductor"])
def test_case_51_first_used_in_inference_mode(call, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    run = module if call == "eager" else compiled(module, call)
    x = torch.randn(24, 32, device=device, dtype=BF16, requires_grad=True)
    with torch.inference_mode():
        run(x)
    results = step(run, module, x)
    assert all(result is not None for result in results)
    assert same(results, step(module, module, x))


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_case_53_frozen_weights(call, wanted, device):
    """All of: the weight frozen, a bias, the input's gradient wanted."""
    frozen, with_bias, wanted_x = wanted
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    if not with_bias:
        del module[1]
    module[0].weight.requires_grad_(not frozen)
    x = torch.randn(24, 32, device=device, dtype=BF16).requires_grad_(wanted_x)
    run = call_of(module, call)
    if frozen and not with_bias and not wanted_x:
        assert not run(x).requires_grad
        return
    _, dx, dw, *db = step(run, module, x)
    assert (dx is not None) == wanted_x
    assert (dw is None) == frozen
    assert all(grad is not None for grad in db)


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_case_54_an_input_without_gradient(recipe, device):
    module = linear_bias(device=device, dtype=torch.float32, recipe=oracle.RECIPES[recipe])
    x = torch.randn(24, 32, device=device)
    y = module(x)
    with CountOps() as counted:
        y.sum().backward()
    assert counted.counts["gemm"] + counted.counts["scaled_gemm"] == 1, "wgrad alone"
    reference = oracle.linear(x, module[0].weight, module[1].bias, torch.ones_like(y), module.recipe)
    reference.dw.check(module[0].weight.grad, "dw")


PASSING = {
    "bypassed quantize": ops.Quantize,
    "identity": ops.Identity,
    "reshape": lambda: ops.Reshape((-1, 8)),
    "pipeline of views": lambda: ops.Sequential(ops.Identity(), ops.Reshape((-1, 8)), ops.Identity()),
    "gradient only": lambda: ops.Sequential(ops.Quantize(False, True), recipe=oracle.HYBRID),
}


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("call", CALLS)
def test_case_56_operations_that_pass_their_input_through(call, name, device):
    module = PASSING[name]()
    leaf = torch.tensor([[1.0, 2, 4, 8, 1, 2, 4, 7]], device=device).expand(4, 8).clone().requires_grad_()

    def function(leaf):
        x = leaf * 2
        return module(x) * x

    y = call_of(function, call)(leaf)
    y.sum().backward()
    assert torch.equal(y, 4 * leaf.square())
    reference = 8 * leaf.detach()
    if name == "gradient only":  # its gradient is quantized on the way
        through = oracle.dequantized(leaf.detach() * 2, oracle.HYBRID, "grad_output").float()
        reference = 2 * (leaf.detach() * 2 + through)
    assert torch.equal(leaf.grad, reference)


@pytest.mark.parametrize("call", CALLS)
def test_case_56_no_rows(call, device):
    module = linear_bias(8, 8, device=device, dtype=torch.float32, recipe=oracle.HYBRID)
    leaf = torch.empty(0, 8, device=device, requires_grad=True)

    def function(leaf):
        x = leaf * 2
        return module(x) * x

    call_of(function, call)(leaf).sum().backward()
    assert leaf.grad.shape == (0, 8)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_57_backward_twice(call, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = torch.randn(24, 32, device=device, dtype=BF16, requires_grad=True)
    y = call_of(module, call)(x).sum()
    leaves = [x, *module.parameters()]
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert same(list(torch.autograd.grad(y, leaves, retain_graph=True)), list(first))
    if call == "eager":
        (dx, *_) = torch.autograd.grad(y, leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiate twice|does not require grad"):
            dx.sum().backward()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_case_69_scales_are_tensors(boundary, device):
    """No number of a tensor becomes a constant of the graph, or stops it."""
    module = linear_bias(device=device, dtype=torch.float32, recipe=oracle.HYBRID)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    graphs = Graphs()
    run = graphs.compile(module)
    with lowp.compile_boundary(boundary):
        for power in (0, 10, -10):
            x = torch.randn(24, 32, device=device).mul(2.0**power).requires_grad_()
            results = step(run, module, x)
            assert same(results, step(module, module, x))
            assert all(result.isfinite().all() for result in results)
            optimizer.step()
    assert graphs.frames == 1


@pytest.mark.parametrize("call", CALLS)
def test_case_75_the_override_is_not_defeated(call, device):
    """wgrad reads the dequantized operand, not the original one, however the input came."""
    module = linear_bias(device=device, recipe=oracle.DEQUANTIZED_BACKWARD)
    x = torch.randn(24, 32, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(24, 48, device=device, dtype=BF16)
    _, dx, dw, _ = step(call_of(module, call), module, x, dy)
    dx_reference, dw_reference = oracle.override_gradients(x, module[0].weight, dy, module.recipe)
    assert torch.equal(dx, dx_reference)
    assert torch.equal(dw, dw_reference)
    handed = ops.Sequential(ops.Quantize(), *module, recipe=module.recipe)
    _, dx, dw, _ = step(call_of(handed, call), handed, x, dy)
    assert torch.equal(dx, dx_reference)
    assert torch.equal(dw, dw_reference)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_77_gradients_that_go_to_main_grad(call, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe], accumulate_into_main_grad=True)
    exact_(module[0].weight)
    weight, fired = module[0].weight, []
    weight.main_grad = torch.zeros(48, 32, device=device)
    weight.grad_added_to_main_grad = False
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad_added_to_main_grad))
    x, dy = exact(24, 32, device=device, requires_grad=True), exact(24, 48, device=device)
    call_of(module, call)(x).backward(dy)
    assert torch.equal(weight.main_grad.double(), dy.double().t() @ x.detach().double())
    assert fired == [True]
    assert weight.grad is None


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_case_78_the_bias_gradient_sums_all_leading_axes(call, recipe, device):
    module = linear_bias(8, 8, device=device, recipe=oracle.RECIPES[recipe])
    x, dy = exact(2, 3, 8, device=device, requires_grad=True), exact(2, 3, 8, device=device)
    *_, db = step(call_of(module, call), module, x, dy)
    assert db.shape == (8,)
    assert torch.equal(db.double(), dy.double().sum((0, 1)))
