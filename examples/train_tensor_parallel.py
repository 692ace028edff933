"""Train a byte-level language model like the demo's with tensor and sequence parallelism, on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py              NCCL where there are GPUs, else gloo
    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py --compile --recipe bf16 --save checkpoint

    h = h + proj(attention(qkv(norm(h))))       h = h + down(gelu(up(norm(h))))       logits = head(norm(h))

`qkv` and `up` are column-parallel: they gather the sequence and split heads or hidden features. `proj` and `down` are
row-parallel: they sum over the ranks and scatter the sequence. Everything else sees this rank's part of the sequence,
so the gradients of its parameters are partial. Modules that are told of sequence parallelism mark theirs; embedding and
head are marked here, and one call completes all of them after backward.

Shape legend: T = ranks, S = bytes of a sequence, B = sequences, D = width, H = heads, E = D / H. Activations are
[S / T, B, D]: sequence parallelism splits the first axis.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.distributed import reduce_sequence_parallel_grads, sharded_state
from lowp.recipe import Float8CurrentScaling, Recipe

BYTES = 256
RECIPES: dict[str, Recipe | None] = {"fp8": Float8CurrentScaling(), "bf16": None}


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch; the ranks must divide `heads`, `hidden` and `sequence`."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    hidden: int = 1024
    sequence: int = 256
    batch: int = 8


def rotary_angles(size: Size, device: torch.device) -> Tensor:
    """Angles of rotary positions, `[S, 1, 1, E / 2]`."""
    half = size.width // size.heads // 2
    frequency_E = 10_000.0 ** (-torch.arange(half, device=device) / half)
    return torch.outer(torch.arange(size.sequence, device=device), frequency_E)[:, None, None, :]


def rotate(x_SBHE: Tensor, angle: Tensor) -> Tensor:
    """Rotary positions, in fp32."""
    a, b = x_SBHE.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).to(x_SBHE.dtype)


class Block(nn.Module):
    """One decoder layer. The rows of `qkv` are ordered by head, so that a rank's part is whole heads."""

    def __init__(self, size: Size, group: Any, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "tp_group": group, "sequence_parallel": True}
        normalized = options | {"normalization": "RMSNorm"}
        self.head_width = size.width // size.heads
        self.qkv = lowp.LayerNormLinear(size.width, 3 * size.width, parallel_mode="column", **normalized)
        self.proj = lowp.Linear(size.width, size.width, parallel_mode="row", **options)
        self.mlp = lowp.LayerNormMLP(size.width, size.hidden, set_parallel_mode=True, **normalized)

    def forward(self, h: Tensor, angle: Tensor) -> Tensor:
        """Both residual branches on this rank's part of the sequence, `[S / T, B, D]`."""
        h = h + self.proj(self._attention(self.qkv(h), angle))
        return h + self.mlp(h)

    def _attention(self, qkv: Tensor, angle: Tensor) -> Tensor:
        """Causal attention of this rank's heads over the whole sequence."""
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head_width)).unbind(-2)
        heads_first = [x.permute(1, 2, 0, 3) for x in (rotate(q, angle), rotate(k, angle), v)]
        return F.scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3).flatten(-2)


class Model(nn.Module):
    """A byte-level decoder, of which each rank has a part."""

    def __init__(self, size: Size, group: Any, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.embedding = nn.Embedding(BYTES, size.width, device=device)
        self.blocks = nn.ModuleList(Block(size, group, device) for _ in range(size.layers))
        self.head = lowp.LayerNormLinear(size.width, BYTES, normalization="RMSNorm", device=device)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("angle", rotary_angles(size, device), persistent=False)
        for parameter in (*self.embedding.parameters(), *self.head.parameters()):
            parameter.sequence_parallel = True  # it sees a part of the tokens

    def forward(self, bytes_SB: Tensor) -> Tensor:
        """This rank's part of the mean cross entropy of each byte after the first.

        Args:
            bytes_SB: `[S + 1, B]` int64, the same on all ranks.

        Returns:
            `[]` fp32, in nats; the sum over the ranks is the loss.
        """
        ranks, rank = self.group.size(), self.group.rank()
        inputs, targets = (part.chunk(ranks)[rank] for part in (bytes_SB[:-1], bytes_SB[1:]))
        h = self.embedding(inputs)
        for block in self.blocks:
            h = block(h, self.angle)
        logits = self.head(h)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / ranks


def batches(size: Size, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Windows `[S + 1, B]` of the source text of the running Python's standard library, alike on all ranks."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    places = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - size.sequence, (size.batch,), generator=places)
        yield text[starts[None, :] + torch.arange(size.sequence + 1)[:, None]].long().to(device)


def train(
    group: Any,
    device: torch.device,
    *,
    size: Size,
    steps: int,
    recipe: Recipe | None,
    compile_backend: str | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> tuple[Model, list[float]]:
    """Train a new model.

    Args:
        group: the ranks.
        device: this rank's.
        size: of model and batch.
        steps: how many.
        recipe: of the linear layers; None: bf16.
        compile_backend: of torch.compile, which compiles each block; None: eager.
        learning_rate: of AdamW.
        seed: of parameters and batches.

    Returns:
        the model; the loss of every step, in bits a byte.
    """
    torch.manual_seed(seed)  # alike on all ranks: each takes its part of the same initial parameters
    model = Model(size, group, device)
    if compile_backend is not None:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=compile_backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    losses = []
    for _, batch in zip(range(steps), batches(size, seed, device), strict=False):
        with torch.autocast(device.type, torch.bfloat16), lowp.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(batch)
        loss.backward()
        reduce_sequence_parallel_grads(model, group)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(float(total) / torch.log(torch.tensor(2.0)).item())
        if group.rank() == 0 and (len(losses) % 10 == 0 or len(losses) == 1):
            print(f"step {len(losses):4}  {losses[-1]:.3f} bits a byte", flush=True)  # noqa: T201
    return model, losses


def main() -> None:
    """Train, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--recipe", choices=RECIPES, default="fp8")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--save", metavar="FOLDER", help="save a checkpoint that loads on any number of ranks")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = vars(parser.parse_args())
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    model, _ = train(
        dist.group.WORLD,
        device,
        size=Size(**{field.name: options[field.name] for field in dataclasses.fields(Size)}),
        steps=options["steps"],
        recipe=RECIPES[options["recipe"]],
        compile_backend="inductor" if options["compile"] else None,
    )
    if options["save"]:
        dcp.save(sharded_state(model), checkpoint_id=options["save"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
