"""Fusions into the GEMMs of a linear layer, against float64 with exact inputs, and against the unfused operations."""

import itertools

import pytest
import torch

from lowp import ops
from tests.ops import oracle
from tests.ops.exact import exact, exact_, same_as_double
from tests.ops.graphs import Graphs, lowp_ops
from tests.ops.pipelines import BOUNDARIES, compiled, rules, same_or_absent, step_of

K, N = 32, 48
SCALE = -2.0
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

PATTERNS = {
    "ForwardLinearBias": ("linear", "bias"),
    "ForwardLinearAdd": ("linear", "add"),
    "ForwardLinearBiasAdd": ("linear", "bias", "add"),
    "ForwardLinearScaleAdd": ("linear", "scale", "add"),
    "BackwardLinearAdd": ("fork", "linear"),
    "BackwardLinearScale": ("scale", "linear"),
    "both directions": ("fork", "linear", "bias", "add"),
    "everything": ("scale", "linear", "scale", "add", "fork", "linear2", "bias2", "add2"),
}
"""Operations by the name of the fusion."""


class Case:
    """A pipeline, its float64 formula, and the tensors of a step."""

    def __init__(self, pattern, device, dtype=torch.bfloat16, recipe=None, leading=(2, 15), **options):
        self.names = PATTERNS[pattern]
        where = {"device": device, "dtype": dtype}
        build = {
            "linear": lambda: ops.BasicLinear(K, N, **where, **options),
            "linear2": lambda: ops.BasicLinear(N, K, **where, **options),
            "bias": lambda: ops.Bias(N, **where),
            "bias2": lambda: ops.Bias(K, **where),
            "add": ops.AddExtraInput,
            "add2": ops.AddExtraInput,
            "fork": ops.MakeExtraOutput,
            "scale": lambda: ops.ConstantScale(SCALE),
        }
        self.module = ops.Sequential(*[build[name]() for name in self.names], recipe=oracle.RECIPES[recipe or "none"])
        for parameter in self.module.parameters():
            exact_(parameter)
        sizes = {"add": N, "add2": K}
        shapes = [(*leading, K), *[(*leading, sizes[name]) for name in self.names if name in sizes]]
        self.tensors = [exact(*shape, **where, requires_grad=True) for shape in shapes]
        with torch.no_grad():
            outputs = self.module(*self.tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.grads = [exact(*y.shape, **where, power=-2) for y in outputs]

    def wanted(self, wanted):
        """Ask for these gradients only, of the tensors and of the parameters, in turn."""
        for tensor, want in zip([*self.tensors, *self.module.parameters()], itertools.cycle(wanted), strict=False):
            tensor.requires_grad_(want)

    def reference(self):
        """The step in float64 by torch's own operations, laid out as `step_of` gives it."""
        tensors = [t.detach().double().requires_grad_(t.requires_grad) for t in self.tensors]
        parameters = [p.detach().double().requires_grad_(p.requires_grad) for p in self.module.parameters()]
        x, *extra_inputs = tensors
        left, extra_outputs = iter(parameters), []
        for name in self.names:
            if name.startswith("linear"):
                x = x @ next(left).t()
            elif name.startswith("bias"):
                x = x + next(left)
            elif name.startswith("add"):
                x = x + extra_inputs.pop(0)
            elif name == "scale":
                x = x * SCALE
            else:
                extra_outputs.append(x.view_as(x))
        used = [
            (y, dy.double())
            for y, dy in zip([x, *extra_outputs], self.grads, strict=True)
            if dy is not None and y.requires_grad
        ]
        if used:
            torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
        return [y.detach() for y in (x, *extra_outputs)] + [t.grad for t in (*tensors, *parameters)]

    def check(self, results):
        """Compare with float64; gradients that nobody asked for are None."""
        for result, reference in zip(results, self.reference(), strict=True):
            if reference is None:
                assert result is None or not result.any()
            else:
                assert same_as_double(result, reference)
        wanted = [t.requires_grad for t in (*self.tensors, *self.module.parameters())]
        gradients = results[len(self.grads) :]
        assert all(gradient is None for gradient, want in zip(gradients, wanted, strict=True) if not want)

    def step(self, call=None):
        return step_of(call or self.module, self.module, self.tensors, self.grads)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_plan_has_the_fusion(pattern):
    if pattern[0].isupper():
        assert f" {pattern}[0..{len(PATTERNS[pattern]) - 1}]" in Case(pattern, "cpu").module.plan


SIMPLE = [pattern for pattern in PATTERNS if pattern != "everything"]
"""The patterns whose every step is exact under a recipe with scales that are no powers of two."""


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", SIMPLE)
def test_exact(pattern, dtype, recipe, device):
    for leading in ((30,), (2, 15), ()):
        case = Case(pattern, device, dtype, recipe, leading)
        case.check(case.step())


WANTED = [wanted for wanted in itertools.product([True, False], repeat=3) if any(wanted)]


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("pattern", SIMPLE)
def test_gradients_on_and_off(pattern, recipe, device):
    for wanted in WANTED:
        case = Case(pattern, device, recipe=recipe)
        case.wanted(wanted)
        case.check(case.step())


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("pattern", ["BackwardLinearAdd", "both directions"])
@pytest.mark.parametrize("call", ["eager", "operation"])
@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_one_of_two_outputs_used(used, call, pattern, recipe, device):
    case = Case(pattern, device, recipe=recipe)
    case.grads = [dy if use else None for dy, use in zip(case.grads, used, strict=True)]
    case.check(case.step(None if call == "eager" else compiled(case.module, boundary=call)))


COMPILED = [("operation", "none"), ("operation", "hybrid"), ("kernel", "hybrid"), ("kernel", "dequantized")]


@pytest.mark.parametrize(("boundary", "recipe"), COMPILED)
@pytest.mark.parametrize("pattern", SIMPLE)
def test_compiled(pattern, recipe, boundary, device):
    case = Case(pattern, device, recipe=recipe)
    call = compiled(case.module, boundary=boundary)
    case.check(case.step(call))
    for parameter in case.module.parameters():
        parameter.data.normal_()
    case.tensors = [torch.randn_like(t).requires_grad_() for t in case.tensors]
    assert same_or_absent(case.step(call), case.step())


@pytest.mark.parametrize(("boundary", "recipe"), [("operation", "hybrid"), ("kernel", "none")])
def test_inductor(boundary, recipe, device):
    case = Case("everything", device, recipe=recipe)
    call = compiled(case.module, "inductor", boundary)
    assert same_or_absent(case.step(call), case.step())


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_nodes(recipe, device):
    case, graphs = Case("everything", device, recipe=recipe), Graphs()
    case.step(graphs.compile(case.module))
    assert lowp_ops(graphs.forward[0]) == [
        "ConstantScale_forward", "ForwardLinearScaleAdd_forward", "ForwardLinearBiasAdd_forward"
    ]  # fmt: skip
    assert lowp_ops(graphs.backward[0]) == [
        "Bias_backward", "BackwardLinearAdd_backward", "ConstantScale_backward", "BackwardLinearScale_backward"
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_near_the_unfused_operations(pattern, dtype, recipe, device):
    """Rounding once instead of twice moves single elements; quantized later on, by a step of the format."""
    case = Case(pattern, device, dtype, recipe)
    for tensor in (*case.tensors, *case.module.parameters()):
        tensor.data.normal_()
    with rules(lambda rule: False):
        unfused = ops.Sequential(*case.module, recipe=case.module.recipe)
    eps = torch.finfo(dtype).eps if recipe == "none" or pattern != "everything" else 2.0**-3
    for result, reference in zip(case.step(), case.step(unfused), strict=True):
        assert (result.double() - reference.double()).norm() <= 2 * eps * reference.double().norm()


MAIN_GRAD = [
    *[(pattern, "eager", recipe) for pattern in SIMPLE for recipe in oracle.RECIPES],
    *[(pattern, "operation", "hybrid") for pattern in SIMPLE],
    ("BackwardLinearAdd", "kernel", "none"),
    ("BackwardLinearScale", "kernel", "dequantized"),
    ("both directions", "inductor", "hybrid"),
]


@pytest.mark.parametrize(
    ("pattern", "call", "recipe", "overwrite"),
    [(*case, overwrite) for case in MAIN_GRAD for overwrite in (False, True) if case[1] == "eager" or not overwrite],
)
def test_main_grad(pattern, call, recipe, overwrite, device):
    case = Case(pattern, device, recipe=recipe, accumulate_into_main_grad=True)
    (weight,) = [p for p in case.module.parameters() if p.ndim == 2]
    weight.main_grad = torch.ones(N, K, device=device)
    weight.overwrite_main_grad = overwrite
    backend, boundary = ("inductor", "operation") if call == "inductor" else ("aot_eager", call)
    run = case.module if call == "eager" else compiled(case.module, backend, boundary)
    reference = case.reference()
    at = len(case.grads) + len(case.tensors) + [id(p) for p in case.module.parameters()].index(id(weight))
    for count in (1, 2):
        results = case.step(run)
        assert results[at] is None
        for index, (result, expected) in enumerate(zip(results, reference, strict=True)):
            assert index == at or same_as_double(result, expected)
        total = reference[at] if overwrite else 1 + count * reference[at]
        assert torch.equal(weight.main_grad.double(), total)
    assert weight.grad_added_to_main_grad


@pytest.mark.parametrize("call", ["eager", *BOUNDARIES])
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_the_extra_gradient_is_left_alone(call, recipe, device):
    case = Case("both directions", device, recipe=recipe)
    kept = [dy.clone() for dy in case.grads]
    run = case.module if call == "eager" else compiled(case.module, boundary=call)
    first = case.step(run)
    assert all(torch.equal(dy, old) for dy, old in zip(case.grads, kept, strict=True))
    assert same_or_absent(case.step(run), first)


@pytest.mark.parametrize(("autocast", "extra_dtype"), [(None, torch.float32), (torch.bfloat16, torch.float32)])
def test_an_extra_input_that_promotes_is_not_fused(autocast, extra_dtype, device):
    """The product is bf16, the sum fp32: rounded to bf16 in between, as unfused."""
    dtype = torch.bfloat16 if autocast is None else torch.float32
    module = ops.Sequential(ops.BasicLinear(K, N, device=device, dtype=dtype), ops.AddExtraInput())
    x = torch.randn(4, K, device=device, dtype=dtype)
    extra = torch.randn(4, N, device=device, dtype=extra_dtype)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast is not None):
        y = module(x, extra)
        assert torch.equal(y, module[0](x) + extra)
    assert y.dtype == torch.float32
    (group,) = module._groups
    (reason,) = group.plan(dtype, autocast, None, [(), (extra_dtype,)])[1].declined
    assert reason.endswith(
        "without ForwardLinearAdd[0]: the sum of torch.bfloat16 and torch.float32 has another dtype than the product"
    )


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_a_gradient_of_the_input_in_a_wider_dtype(recipe, device):
    """Under torch.autocast dgrad's operands are bf16 and its result, with what is added to it, fp32."""
    case = Case("BackwardLinearAdd", device, torch.float32, recipe)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, extra = case.module(*case.tensors)
        assert (y.dtype, extra.dtype) == (torch.bfloat16, torch.float32)
        torch.autograd.backward([y, extra], [case.grads[0].bfloat16(), case.grads[1]])
    dx = case.reference()[2]
    assert same_as_double(case.tensors[0].grad, dx)
