"""Leading axes under sequence parallelism."""

from __future__ import annotations

import pytest

from lowp.distributed.shapes import sp_inp_leading, sp_out_leading


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", [None, "column", "row"])
def test_the_inputs_leading_axes_are_the_inverse_of_the_outputs(mode, sequence_parallel):
    factor = {"column": 2.0, "row": 0.5}.get(mode, 1.0) if sequence_parallel else 1.0
    output = sp_out_leading((8, 3), mode, sequence_parallel, 2)
    assert output == (8 * factor, 3)
    assert sp_inp_leading(output, mode, sequence_parallel, 2) == (8, 3)
