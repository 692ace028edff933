"""Results that are handed to the neighbour quantized, as it asks, straight from their source.

An operation whose neighbour reads its result quantized doesn't write the result: it quantizes the values of a source
(see `lowp.kernels.sources`). The codes are those of the result as a tensor, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowp.kernels.materialize import materialize
from lowp.kernels.sources import Source
from lowp.ops.linear_gemms import with_leading
from lowp.quantization import Quantized, QuantizeRequest, cast_operand
from lowp.quantizers import Quantizer


@dataclass(kw_only=True)
class Handover:
    """Base of the arguments of an operation that hands its result over.

    Attributes:
        quantizer: how it is quantized; None: it is not.
        row, column: the copies that the neighbour reads.
    """

    quantizer: Quantizer | None = None
    row: bool = False
    column: bool = False


def wants_quantized(request: QuantizeRequest | None) -> bool:
    """Whether the neighbour is handed quantized values: one that needs them as they are too quantizes them itself."""
    return request is not None and not request.high_precision and (request.row or request.column)


def copies(request: QuantizeRequest | None, size: int) -> tuple[Quantizer | None, bool, bool]:
    """The fields of `Handover` for what the neighbour asks for, if `size` elements along the last axis fit it."""
    if request is None or not wants_quantized(request) or request.size != size:
        return None, False, False
    return request.quantizer, request.row, request.column


def hand_over(
    source: Source, args: Handover, leading: tuple[int, ...], statistics: Tensor | None = None
) -> Tensor | Quantized:
    """The values of a source as `args` says.

    Args:
        source: of `[M, K]`.
        args: whether they are quantized, and how.
        leading: the axes that M stands for.
        statistics: of the quantizer; None: they are not known.

    Returns:
        The values `[..., K]`, or the copies asked for.
    """
    if args.quantizer is None:
        return with_leading(materialize(source), leading)
    return shaped(cast_operand(source, statistics, args.quantizer, row=args.row, column=args.column), leading)


def shaped(x: Quantized, leading: tuple[int, ...]) -> Quantized:
    """`x` with the leading axes that M stands for; the column copy has none."""
    return x if x.row_data is None else x._replace(row_data=with_leading(x.row_data, leading))
