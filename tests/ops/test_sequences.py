"""Random pipelines: planned as a whole they give what their operations give one by one, eager and compiled."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.ops.pipelines import BOUNDARIES, compiled, rules, same, same_or_absent, step_of
from tests.ops.sequences import Sample, is_epilogue, sequences

few = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
fewer = settings(few, max_examples=25)


def check(sample, chosen):
    """The pipeline planned with the chosen rules, against its operations one by one."""
    with rules(chosen):
        pipeline = sample.pipeline()
    note(pipeline.plan)
    reference = step_of(sample.alone, sample.module, sample.tensors, sample.grads)
    for _ in range(3):  # the second step is recorded, the third replayed
        assert same(step_of(pipeline, sample.module, sample.tensors, sample.grads), reference)


@few
@given(drawn=sequences(exact=True))
def test_planned_equals_one_by_one_where_sums_are_exact(device, drawn):
    check(Sample(drawn, device, exact=True), lambda rule: True)


@few
@given(drawn=sequences(exact=True), direction=st.sampled_from(["forward", "backward"]))
def test_the_directions_are_planned_independently(device, drawn, direction):
    """Fused in one direction only: whoever writes the contexts, whoever reads them."""
    check(Sample(drawn, device, exact=True), lambda rule: rule.direction == direction)


@few
@given(drawn=sequences(exact=False))
def test_planned_equals_one_by_one_on_any_values(device, drawn):
    """All that isn't a GEMM's epilogue has the bits of the operations one by one."""
    check(Sample(drawn, device, exact=False), lambda rule: not is_epilogue(rule))


@fewer
@given(drawn=sequences(exact=False), boundary=st.sampled_from(BOUNDARIES))
def test_compiled_equals_eager(device, drawn, boundary):
    torch.compiler.reset()
    sample = Sample(drawn, device, exact=False)
    pipeline = sample.pipeline()
    note(pipeline.plan)
    run = compiled(pipeline, boundary=boundary)
    for _ in range(2):
        results = step_of(run, sample.module, sample.tensors, sample.grads)
        assert same_or_absent(results, step_of(pipeline, sample.module, sample.tensors, sample.grads))
