"""How many steps a demo trains: a rung of the ladder that fits, whatever the number of recipes."""

import pytest
import torch

from lowp.cli.demo.plan import CPU, GPU, LADDER, size_for, steps_within


def seconds(size, steps, step_seconds):
    return (steps + size.validation_windows / size.batch / 3) * sum(step_seconds)


@pytest.mark.parametrize("size", [CPU, GPU], ids=lambda size: size.name)
@pytest.mark.parametrize("runs", [2, 4, 8])
@pytest.mark.parametrize("step_s", [0.001, 0.05, 0.1])
def test_the_largest_rung_that_fits(size, runs, step_s):
    budget, times = 60.0, [step_s] * runs
    steps = steps_within(budget, size, times)
    assert steps in LADDER
    assert steps <= size.max_steps
    if steps > LADDER[0]:
        assert seconds(size, steps, times) <= budget
    larger = [rung for rung in LADDER if steps < rung <= size.max_steps]
    assert all(seconds(size, rung, times) > budget for rung in larger)


def test_no_time_left_means_the_lowest_rung():
    assert steps_within(-5.0, CPU, [0.1, 0.1]) == LADDER[0]


def test_a_little_noise_changes_nothing():
    assert steps_within(60.0, CPU, [0.08, 0.08]) == steps_within(60.0, CPU, [0.085, 0.075])


def test_the_model_is_larger_on_a_gpu():
    assert size_for(torch.device("cpu")) is CPU
    assert size_for(torch.device("cuda", 0)) is GPU
    for size in (CPU, GPU):
        assert size.max_steps in LADDER
        assert size.validation_windows % size.batch == 0
        assert size.width % (2 * size.heads) == 0
