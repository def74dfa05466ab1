"""Both launches of the megakernel over several ranks, and the kernels around them: what `cross_compile` compiles."""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mok.grid import CallGrid
from mok.kernels import ring
from mok.launch import mega, peer
from mok.launch.config import KernelConfig
from mok.shapes import WorkspaceShape
from mok.transport.peer import PeerTransport
from tests.kernels import litmus
from tests.kernels.cross_compile import NUM_SMS


def launch_all(arch: int) -> None:
    config = KernelConfig(programs=NUM_SMS[arch], tensor_memory=arch >= 100)
    for rank, tokens in enumerate((299, 300, 0)):
        launch_layer(config, rank=rank, tokens=tokens, hidden=7168, width=512, top_k=8)
    launch_litmus()


def launch_layer(config: KernelConfig, *, rank: int, tokens: int, hidden: int, width: int, top_k: int) -> None:
    ranks, num_experts = 4, 8
    shape = WorkspaceShape(300, top_k, hidden, width, ranks)
    memory = torch.zeros(shape.bytes, dtype=torch.uint8)
    transport = PeerTransport(shape, rank, memory, [0] * ranks, row_room=0.0, timeout_s=1.0)
    grid = CallGrid(ranks, ranks, (0,), ranks, rank)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    router = torch.zeros(tokens, top_k)
    gate, up = (torch.zeros(num_experts // ranks, width, hidden, dtype=torch.bfloat16) for _ in range(2))
    down = torch.zeros(num_experts // ranks, hidden, width, dtype=torch.bfloat16)
    weights = mega.Weights(gate, up, down)
    gradients = mega.Gradients(gate.float(), up.float(), down.float(), False)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    peers = peer.plan_over_ranks(
        ids, num_experts, hidden, width, config.forward_order, config.backward_order, transport, grid=grid
    )
    peer.send_tokens(peers, x=x, dy=x, weights=router)
    rows = x.new_empty(peers.rows.max_rows, hidden)
    peer.pull_rows(peers, "x", rows)
    peer.return_rows(peers, rows, torch.zeros(peers.rows.max_rows, shape.num_partials))
    peer.await_rows(peers)
    _, kept = mega.forward(x, router, weights, peers.own, config, clamp=0.0, keep=True, peers=peers)
    mega.backward(x, x, router, weights, kept, peers.own, gradients, config, clamp=0.0, peers=peers)


def launch_litmus() -> None:
    row, numbers = torch.zeros(litmus.WIDTH, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    boxes = TensorDescriptor.from_tensor(row.view(1, 8, 256), [1, 8, 256], ring.PLAIN_ROWS.value)
    bases = torch.zeros(2, dtype=torch.int64)
    litmus.plain[(1,)](bases, 4096, 4096, numbers, 0, 3, numbers, 5_000_000_000, WIDTH=litmus.WIDTH)
    for bulk in (False, True):
        litmus.mover[(1,)](row, boxes, numbers, numbers, numbers, 3, 0, BULK_STORE=bulk, num_warps=1)
