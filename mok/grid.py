"""The grid of a step: which slice belongs to which lane, position, segment, rank and call.

Owns integers only: the mapping of the ordered list of a step's slices onto lanes and positions (a fact of the recipe), and
of those onto ranks and calls (a fact of the launch). Knows nothing of tensors, models or processes and needs no torch.
The words are those of `docs/numerics.md`. Read next: `mok/gradients.py`, which adds gradients in the order laid down here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mok.config import Recipe
from mok.errors import UsageError

__all__ = ["Call", "CallGrid", "Grid", "Layout", "split_ranks"]


@dataclass(frozen=True)
class CallGrid:
    """What one call sends through a MoE layer: the order of its slices over all ranks of the expert-parallel group.

    num_slices: slices C of the call over all ranks, in the order of the step.
    segment: consecutive slices whose rows lie together in an expert; slice i is in segment i // segment.
    lane_of_segment: for each segment, an index into the lanes that this rank owns.
    ranks, rank: slice i is computed by rank i % ranks. This rank's tokens are its slices (rank, rank + ranks, ...) one after
        the other, each with the same number of tokens.

    Example: CallGrid(4, 2, (0, 1), ranks=2, rank=1) holds slices 0 1 | 2 3 in two segments, one for each of two lanes;
    rank 1 computes slices 1 and 3.
    """

    num_slices: int = 1
    segment: int = 1
    lane_of_segment: tuple[int, ...] = (0,)
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.num_slices < 1 or self.segment < 1 or self.num_slices % self.segment:
            raise UsageError(
                f"call of {self.num_slices} slices: not whole segments of {self.segment}; use a multiple of the segment"
            )
        if self.num_slices % self.ranks:
            raise UsageError(
                f"call of {self.num_slices} slices: cannot be dealt to {self.ranks} ranks evenly; use a multiple of the ranks"
            )
        if not 0 <= self.rank < self.ranks:
            raise UsageError(f"rank {self.rank} of a group of {self.ranks}: ranks count from 0")
        if len(self.lane_of_segment) != self.num_segments:
            raise UsageError(
                f"lane_of_segment names {len(self.lane_of_segment)} lanes for {self.num_segments} segments; name one for each"
            )

    @property
    def num_segments(self) -> int:
        return self.num_slices // self.segment

    @property
    def num_lanes(self) -> int:
        """Lanes this rank needs accumulators for: one more than the largest index named."""
        return max(self.lane_of_segment) + 1

    @property
    def local_slices(self) -> range:
        """The slices of the call that this rank computes, as indices into the call."""
        return range(self.rank, self.num_slices, self.ranks)


@dataclass(frozen=True)
class Grid:
    """The grid that a recipe lays over each step; the same for every launch of that recipe.

    The `num_slices` slices of a step, each of `slice_sequences` sequences, are dealt to `lanes` lanes in equal contiguous
    blocks. Slice i of a lane has position i % `slices`.
    """

    lanes: int
    slices: int
    segment: int
    slice_sequences: int
    num_slices: int

    @classmethod
    def of(cls, recipe: Recipe, replicas: int = 1, ep: int = 1) -> Grid:
        """The grid of `recipe`; what it leaves at 0 is taken from this, the first, launch.

        Raises UsageError where the batch does not fill whole slices of every cell of the grid.
        """
        distributed, batch = recipe.distributed, recipe.train.batch_size
        lanes, slices = distributed.lanes or replicas, distributed.slices or ep
        segment = distributed.segment or slices
        if slices % segment:
            raise UsageError(
                f"distributed.segment = {segment} does not divide distributed.slices = {slices}; use a divisor of slices"
            )
        cells = lanes * slices
        # Where the recipe leaves the size of a slice open, any multiple of the cells will do.
        fixed = distributed.slice_sequences or 1
        if batch < cells * fixed or batch % (cells * fixed):
            raise UsageError(
                f"train.batch_size = {batch} does not fill a grid of {lanes} lanes x {slices} positions x {fixed} "
                f"sequences; use a multiple of {cells * fixed}, or change [distributed]"
            )
        sequences = distributed.slice_sequences or batch // cells
        return cls(lanes, slices, segment, sequences, batch // sequences)

    @property
    def slices_per_lane(self) -> int:
        return self.num_slices // self.lanes

    @property
    def sequences(self) -> int:
        """Sequences of one step over all ranks."""
        return self.num_slices * self.slice_sequences


@dataclass(frozen=True)
class Call:
    """One pass of this rank through the model.

    grid: what the MoE layers need to know.
    slices: this rank's slices of the call, as indices into the step, in the order of its tokens.
    cells: for each of them the cell (owned lane, owned position) that its dense gradients are added to, as one index
        `lane * owned positions + position`.
    """

    grid: CallGrid
    slices: tuple[int, ...]
    cells: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a grid is mapped onto ranks: `replicas` expert-parallel groups of `ep` ranks; rank = replica * ep + member.

    Replica d owns the lanes l with l % replicas == d, member r of its group owns the positions q with q % ep == r.
    Raises UsageError for a mapping that would show in the bits.
    """

    grid: Grid
    replicas: int = 1
    ep: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name, cells, key, parts in (
            ("replicas", self.grid.lanes, "distributed.lanes", self.replicas),
            ("expert-parallel ranks", self.grid.slices, "distributed.slices", self.ep),
        ):
            share, rest = divmod(cells, parts)
            if rest or share & (share - 1) or share < 1:
                allowed = [cells >> power for power in range(cells.bit_length(), -1, -1) if cells % (1 << power) == 0]
                raise UsageError(
                    f"{key} = {cells} does not fit {parts} {name}: the quotient must be a power of two; "
                    f"launch with {', '.join(map(str, allowed))} {name}"
                )
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size}: ranks count from 0")

    @property
    def world_size(self) -> int:
        return self.replicas * self.ep

    @property
    def replica(self) -> int:
        return self.rank // self.ep

    @property
    def member(self) -> int:
        """Place in the expert-parallel group."""
        return self.rank % self.ep

    @property
    def dense_shard(self) -> int:
        """Which of the `world_size` shards of the dense parameters this rank keeps: cut over members, then over replicas."""
        return self.member * self.replicas + self.replica

    @property
    def lanes(self) -> range:
        """The lanes this rank owns."""
        return range(self.replica, self.grid.lanes, self.replicas)

    @property
    def positions(self) -> range:
        """The positions this rank owns."""
        return range(self.member, self.grid.slices, self.ep)

    @property
    def num_slices(self) -> int:
        """Slices of a step that this rank computes."""
        return self.grid.num_slices // self.world_size

    @property
    def fewest_slices_per_call(self) -> int:
        """The fewest slices of a rank that a call can hold: whole segments over the ranks of the group."""
        return math.lcm(self.grid.segment, self.ep) // self.ep

    def tokens_of_call(self, recipe: Recipe) -> int:
        """Tokens of this rank in one call on GPUs, where calls hold as few slices as they may."""
        slices = recipe.distributed.slices_per_call or self.fewest_slices_per_call
        return slices * self.grid.slice_sequences * recipe.train.sequence_length

    def calls(self, slices_per_call: int = 0) -> tuple[Call, ...]:
        """The calls of a step, in order.

        slices_per_call: slices of one lane that this rank takes at once; 0 for all slices of all its lanes in one call.
        A call holds whole segments, so a number too small is refused with the smallest that fits.
        """
        grid = self.grid
        per_lane = grid.slices_per_lane
        if slices_per_call == 0:
            return (self._call(tuple((lane, 0, per_lane) for lane in range(len(self.lanes)))),)
        width = slices_per_call * self.ep
        if width % grid.segment or per_lane % width:
            fewest = self.fewest_slices_per_call
            most = per_lane // self.ep
            fits = [n for n in range(fewest, most + 1, fewest) if most % n == 0]
            raise UsageError(
                f"{slices_per_call} slices per call on {self.ep} expert-parallel ranks: a call must hold whole segments of "
                f"{grid.segment} slices and divide the {per_lane} slices of a lane; use {', '.join(map(str, fits))}"
            )
        return tuple(
            self._call(((lane, start, start + width),))
            for lane in range(len(self.lanes))
            for start in range(0, per_lane, width)
        )

    def _call(self, blocks: tuple[tuple[int, int, int], ...]) -> Call:
        """The call that holds slices start..stop of each (owned lane, start, stop) in `blocks`."""
        grid, per_lane = self.grid, self.grid.slices_per_lane
        lane_of_segment: list[int] = []
        slices: list[int] = []
        cells: list[int] = []
        for lane, start, stop in blocks:
            lane_of_segment += [lane] * ((stop - start) // grid.segment)
            for i in range(start + self.member, stop, self.ep):
                slices.append(self.lanes[lane] * per_lane + i)
                cells.append(lane * len(self.positions) + (i % grid.slices) // self.ep)
        num_slices = sum(stop - start for _, start, stop in blocks)
        call = CallGrid(num_slices, grid.segment, tuple(lane_of_segment), self.ep, self.member)
        return Call(call, tuple(slices), tuple(cells))


def split_ranks(recipe: Recipe, world_size: int) -> tuple[int, int]:
    """(replicas, ranks of an expert-parallel group) of a launch. moe.ep = auto takes the largest group that shares the experts
    evenly. Raises UsageError where the ranks are no multiple of the group."""
    ep = recipe.moe.ep
    if not isinstance(ep, int):
        ep = math.gcd(recipe.moe.num_experts, world_size)
    if world_size % ep:
        raise UsageError(
            f"moe.ep = {ep} ranks share the experts, so the ranks of a launch must be a multiple of {ep}, and {world_size} are "
            f"not; use {-(-world_size // ep) * ep}, or another moe.ep"
        )
    return world_size // ep, ep
