"""The processes of a run: how they are started, how they find one another, and how they agree.

Owns process groups and their mesh (replicas x expert-parallel ranks), the launch through torch elastic, and the few exchanges
that are not part of a layer or a gradient. Every exchange is entered by every rank; what only rank 0 does (printing, writing
metrics) contains none. Knows nothing of what is trained. Read next: `mok/train/watch.py`, `mok/train/reduction.py`.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mok.checkpoint import Collective
from mok.determinism.fingerprint import prepare_cuda
from mok.errors import Interrupted, MokError, RankError
from mok.gradients import Exchange
from mok.grid import Layout
from mok.model.transformer import Group
from mok.topology.own_gpu import own_gpu, ranks_of_a_gpu, share_memory_of_one_gpu
from mok.topology.ranks import launched_ranks
from mok.train.device import choose_device
from mok.train.ranks import OneRank, Ranks
from mok.train.reduction import OrderedReduction
from mok.train.run_folder import Start
from mok.train.transport import settle_transport
from mok.train.watch import Watch
from mok.transport.collective import CollectiveTransport, all_gather
from mok.transport.progress import Progress

__all__ = ["LaunchedRanks", "assemble", "join", "launch", "launched_ranks", "met", "use_private_triton_cache"]


T = TypeVar("T")


class LaunchedRanks:
    """See `mok.train.ranks.Ranks`: this rank of a launch of several, once all have met.

    device: this rank's. mesh: dims "ep" and "replica", in the order in which dense tensors are cut over them; rank =
    replica * ep + member. control: a gloo group of all ranks for small facts, whatever the device. progress: where this rank
    is; watch: shows it to the others.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        mesh: DeviceMesh,
        control: dist.ProcessGroup,
        progress: Progress,
        watch: Watch,
    ) -> None:
        self.layout, self.device, self.mesh = layout, device, mesh
        self.progress, self.watch = progress, watch
        self._control = control
        positions, lanes = mesh.get_group("ep"), mesh.get_group("replica")
        self.expert_group = positions
        self.group = Group(layout.ep, layout.member, CollectiveTransport(positions, progress) if layout.ep > 1 else None)
        self.exchange: Exchange | None = OrderedReduction(layout, positions, lanes, progress)
        self.collective = Collective(control, progress)

    def sharded(self, shard_N: Tensor, experts: bool) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard  # half a second, which a launch of one rank does not pay

        mesh = self.mesh["replica"] if experts else self.mesh
        return DTensor.from_local(shard_N, mesh, [Shard(0)] * mesh.ndim, run_check=False)

    def gather(self, value: T, stage: str = "agreement") -> list[T]:
        """The value of every rank, in rank order; small and picklable."""
        values: list[T] = [value] * self.layout.world_size
        with self.progress.waiting(stage):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def gather_numbers(self, numbers_N: Tensor) -> Tensor:
        gathered = numbers_N.new_empty(self.layout.world_size * numbers_N.numel())
        with self.progress.waiting("agreement"):
            all_gather(gathered, numbers_N)
        return gathered.view(self.layout.world_size, -1)

    def enter(self, stage: str, step: int | None = None) -> None:
        self.progress.enter(stage, step)

    def agree(self, problem: str, stage: str) -> None:
        """Nobody goes on until all have come here, and then all or none do: call it after a set-up that may fail on one rank.

        problem: why this rank cannot go on, "" if it can. Raises RankError with the first problem, on every rank.
        """
        for rank, found in enumerate(self.gather(problem, stage)):
            if found:
                raise RankError(f"rank {rank} failed at step {self.progress.step}, stage {stage}: {found}")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around all that a rank does. An error inside ends all ranks and says which was first, at which step and stage."""
        try:
            yield
        except Interrupted:
            # All ranks stop after the same step.
            ignore_sigterm()
            self.gather(None, "end")
            raise
        except Exception as error:
            ignore_sigterm()
            if self.progress.waits and (lost := self.watch.explain(error)) is not None:
                raise lost from error
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            self.watch.failed(first_line if isinstance(error, MokError) else f"{type(error).__name__}: {first_line}")
            raise
        finally:
            self.watch.stop()
        dist.destroy_process_group()


def join(layout: Layout, device: torch.device, timeout_s: float) -> LaunchedRanks:
    """Meet the other ranks that the launcher started, in the layout that all of them computed.

    device: this rank's; where ranks share a GPU, groups run on gloo, since NCCL wants a GPU for each. timeout_s: how long a
    rank waits for another, here and later. Raises RankError, on every rank, if one of them cannot take part or was started with
    another layout.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Sums inside the switch have no fixed order. None is asked for here, and none can be chosen behind our back.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        share_memory_of_one_gpu()
    # The watch ends a rank that waits too long and says for whom; the groups' own limit only backs it up.
    limit = datetime.timedelta(seconds=2 * timeout_s + 30)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and ranks_of_a_gpu() == 1 else "gloo"
    try:
        dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {layout.rank} could not meet the others at step 0, stage start: {error}") from error
    return assemble(layout, device, timeout_s)


def assemble(layout: Layout, device: torch.device, timeout_s: float) -> LaunchedRanks:
    """Groups, watch and agreement on the layout, for ranks whose default process group exists."""
    limit = datetime.timedelta(seconds=2 * timeout_s + 30)
    progress = Progress()
    store = cast(Any, dist.distributed_c10d._get_default_store()).clone()
    watch = Watch(store, layout.rank, layout.world_size, progress, timeout_s)
    watch.start()
    control = dist.new_group(backend="gloo", timeout=limit) if device.type == "cuda" else dist.group.WORLD
    assert control is not None
    order = torch.arange(layout.world_size).view(layout.replicas, layout.ep)
    mesh = DeviceMesh(device.type, order.t(), mesh_dim_names=("ep", "replica"))
    ranks = LaunchedRanks(layout, device, mesh, control, progress, watch)
    layouts = ranks.gather((layout.grid, layout.replicas, layout.ep), "start")
    odd = next((rank for rank, found in enumerate(layouts) if found != layouts[0]), None)
    if odd is not None:
        raise RankError(f"rank {odd} was started with another layout than rank 0: {layouts[odd]} against {layouts[0]}")
    return ranks


def ignore_sigterm() -> None:
    """From here on this rank ends by itself, and has something to say first: a launcher sends SIGTERM to all ranks as soon as
    one of them is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def met(start: Start, replicas: int, ep: int, device_name: str) -> Iterator[tuple[Start, Ranks, torch.device]]:
    """Around the work of this process of a launch: (how the run begins, the ranks, this rank's device).

    start: as this rank planned it; rank 0's is taken by all. replicas, ep: the launch. device_name: auto, cpu or cuda; on CUDA
    each rank of a machine takes its own, or they share what there are. Raises RankError where the ranks cannot meet or one of
    them is lost.
    """
    use_private_triton_cache()
    launched = launched_ranks()
    rank = launched[0] if launched else 0
    device = choose_device(device_name)
    if device.type == "cuda":
        prepare_cuda()
        device = own_gpu()
    layout = Layout(start.grid, replicas, ep, rank)
    if layout.world_size == 1:
        yield start, OneRank(layout), device
        return
    ranks = join(layout, device, start.recipe.distributed.timeout_s)
    with ranks.guard():
        # A default folder has the time in its name, and only rank 0 may look at a folder before it writes there.
        agreed = ranks.gather(start, "start")[0]
        ranks.group = settle_transport(agreed.recipe, ranks, device)
        yield agreed, ranks, device


def use_private_triton_cache() -> str:
    """Give this rank a folder of its own for compiled kernels: shared ones, on network file systems above all, lose files while
    others look at them. Returns the folder. Must run before triton is imported."""
    base = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton", "cache")
    launched = launched_ranks()
    if launched is not None and launched[1] > 1:
        base = os.path.join(base, f"{socket.gethostname()}-rank{launched[0]}")
        os.environ["TRITON_CACHE_DIR"] = base
    return base


def launch(module: str, arguments: Sequence[str], nproc: int) -> int:
    """Run `python -m MODULE ARGUMENTS` as `nproc` ranks of this machine under torch elastic; returns the exit code for all.

    A rank that ends with an error ends the others. Raises RankError if one was ended by a signal from outside, and Interrupted
    if this process was asked to stop by Ctrl-C or SIGTERM and let the ranks stop in good order.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its tracebacks and signal reports would bury the ranks' own first line. Each of its modules has a level of its own.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    # Ranks that were asked to stop write a checkpoint first, and end by themselves (torch 2.11 kills them after 30 s).
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException as stopped:
        raise Interrupted(f"stopped by {signal.Signals(stopped.sigval).name}") from None
    except ChildFailedError as failed:
        failures = sorted(failed.failures.items(), key=lambda item: item[1].timestamp)
        codes = [failure.exitcode for _, failure in failures]
        if Interrupted.exit_code in codes:
            return Interrupted.exit_code  # rank 0 has said what was saved
        reported = next((code for code in codes if code > 0), None)
        if reported is None:
            rank, failure = failures[0]
            raise RankError(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}") from None
        return reported
    return 0
