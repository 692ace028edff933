"""The model that `lowp demo` trains, in torch.nn alone: a byte-level decoder.

    h = h + proj(attention(qkv(norm(h))))       h = h + down(gelu(up(norm(h))))       logits = head(norm(h))

Parameters are kept in fp32 (the optimizer's master weights) and linear layers compute in bf16: `torch.autocast` sees to
that, inside `forward`. byte_model.diff turns this file's code into that of lowp's model, src/lowp/cli/demo/model.py.

Shape legend: B = sequences, S = bytes of a sequence, D = width, H = heads, E = D / H.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
_ROTARY_BASE = 10_000.0  # RoFormer's


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Sequential(nn.RMSNorm(width, eps=1e-5), nn.Linear(width, 3 * width))
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width, eps=1e-5), nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width)
        )

    def forward(self, h_BSD: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """Both residual branches."""
        h_BSD = h_BSD + self.proj(self._attention(self.qkv(h_BSD), rotate))
        return h_BSD + self.mlp(h_BSD)

    def _attention(self, qkv: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """Causal attention; in fp32 on a CPU, where bf16 attention is no faster."""
        with torch.autocast(qkv.device.type, enabled=False):
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
            q, k = rotate(q), rotate(k)
            if qkv.device.type == "cpu":
                v = v.float()
            else:
                q, k = q.to(v.dtype), k.to(v.dtype)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class ByteModel(nn.Module):
    """A byte-level decoder.

    Args:
        layers: how many blocks.
        width: D.
        heads: H, of attention.
        hidden: features inside an MLP.
        sequence: S, the longest.
    """

    def __init__(self, layers: int, width: int, heads: int, hidden: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(width, eps=1e-5), nn.Linear(width, BYTES))
        nn.init.normal_(self.embedding.weight, std=0.02)
        half = width // heads // 2
        frequency_E = _ROTARY_BASE ** (-torch.arange(half) / half)
        angle_SE = torch.outer(torch.arange(sequence), frequency_E)
        self.cos_SE: Tensor
        self.sin_SE: Tensor
        self.register_buffer("cos_SE", angle_SE.cos(), persistent=False)
        self.register_buffer("sin_SE", angle_SE.sin(), persistent=False)

    def _rotate(self, x_BHSE: Tensor) -> Tensor:
        """Rotary positions, in fp32."""
        a, b = x_BHSE.float().chunk(2, -1)
        return torch.cat((a * self.cos_SE - b * self.sin_SE, a * self.sin_SE + b * self.cos_SE), -1)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        """Mean cross entropy of each byte after the first.

        Args:
            bytes_BS: `[B, S + 1]` int64.

        Returns:
            `[]` fp32, in nats.
        """
        with torch.autocast(bytes_BS.device.type, dtype=torch.bfloat16):
            h_BSD = self.embedding(bytes_BS[:, :-1])
            for block in self.blocks:
                h_BSD = block(h_BSD, self._rotate)
            logits = self.head(h_BSD)
        return F.cross_entropy(logits.float().flatten(0, 1), bytes_BS[:, 1:].flatten())
