"""The mover warp over several ranks: it pulls rows from the workspaces of others, and returns finished rows to them.

Owns the half of the peer-memory protocol (`mok/kernels/peer.py`) that runs inside the megakernel's launch, beside the tiles:
rows are pulled while earlier rows are computed, and go home as their tiles are done. What it waits for on other ranks is
bounded in time; see `await_token`. Read next: `mok/kernels/mover.py`, which calls it.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mok.kernels.gluon_compat import barrier, record, tma_load, tma_store
from mok.kernels.peer import STATUS_NO_ROWS, STATUS_RANK_SHIFT
from mok.kernels.ring import (
    MOVER_SLOT_ELEMENTS,
    MOVER_SLOTS,
    PLAIN_ROWS,
    fence_async_global,
    from_lane_0,
    stores_complete,
    wait_for,
)
from mok.kernels.tasks import ROW_BLOCK

# Places in the table of facts, int64 (`mok.transport.peer.PeerTransport.facts`).
FACT_RANK = gl.constexpr(0)
FACT_LIMIT = gl.constexpr(1)
FACT_FLAGS = gl.constexpr(2)
FACT_RETURNED = gl.constexpr(3)
FACT_PARTIALS = gl.constexpr(4)
FACT_X = gl.constexpr(5)
FACT_DY = gl.constexpr(6)


@record
class Peers:
    """The tables of `mok.launch.peer.PeerPlan`: where workspaces are, whose route each row holds, in which group it is done."""

    bases: gl.tensor
    facts: gl.tensor
    epoch: gl.tensor
    given_up: gl.tensor
    rank_of_row: gl.tensor
    place_of_row: gl.tensor
    route_of_row: gl.tensor
    row_of_route: gl.tensor
    group_of_block: gl.tensor
    rank_of_route: gl.tensor


@gluon.jit
def clock_ns(value):
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [value], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def load_acquire_system(pointers):
    """Partner: the flag that a mover of another rank stored after its fence."""
    return gl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointers.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_gpu(value):
    """What this warp has stored is ordered before the relaxed adds that follow: together a release."""
    return gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_system(value):
    """The same for flags that other GPUs read."""
    return gl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_up(status, given_up, reason):
    """Leave `reason` unless somebody was first. By each warp that gave up, since not all of a partition need see the same."""
    gl.inline_asm_elementwise(
        """{
        .reg .b32 before;
        atom.global.relaxed.gpu.cas.b32 before, [$1], 0, $3;
        atom.global.relaxed.gpu.or.b32 before, [$2], 1;
        mov.b32 $0, before;
        }""",
        "=r,l,l,r",
        [status.to(gl.int64), given_up.to(gl.int64), reason],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def workspace(peers, rank, FACT: gl.constexpr):
    """Address of a region in the workspace of `rank`."""
    return gl.load(peers.bases + rank) + gl.load(peers.facts + FACT)


@gluon.jit
def is_first(moves, peers, route):
    """Whether no earlier slot of the token has a row on this rank, so that this row brings the token; true of padding."""
    start = route // moves.top_k * moves.top_k
    earlier = gl.to_tensor(0)
    for k in range(moves.top_k):
        row = gl.load(peers.row_of_route + start + k, mask=(route >= 0) & (start + k < route), other=-1)
        earlier += (row >= 0).to(gl.int32)
    return from_lane_0(earlier) == 0


@gluon.jit
def fetch_tokens(
    moves, peers, unit, slot, boxes, FACT: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr
):
    """Start the copies of a unit's tokens from their ranks into a slot, 16 bytes a lane; zeros for padding."""
    LANES: gl.constexpr = 32 if moves.part >= 256 else moves.part // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [1, 1, 1], [2, 1, 0])
    part = gl.arange(0, moves.box_parts, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, moves.part, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    parts = (unit % PIECES) * moves.box_parts + part
    for r in gl.static_range(ROWS):
        row = (unit // PIECES) * ROWS + r
        rank = gl.load(peers.rank_of_row + row)
        if is_first(moves, peers, gl.load(peers.route_of_row + row)):
            token = gl.load(peers.place_of_row + row) // moves.top_k
            base = workspace(peers, gl.where(rank >= 0, rank, 0), FACT)
            source = gl.multiple_of(base.to(gl.pointer_type(gl.bfloat16)), 16) + token.to(gl.int64) * (moves.parts * moves.part)
            pointers = source + parts * moves.part + lane
            mask = (rank >= 0) & (parts < moves.parts) & (lane >= 0)
            async_copy.async_copy_global_to_shared(boxes.index(slot * BOXES + r), pointers, mask=mask)
    async_copy.commit_group()


@gluon.jit
def pull(
    job, destination, moves, peers, FACT: gl.constexpr, counter_of_row, BY_EXPERT: gl.constexpr, free_counter, free_target,
    free_starts, AFTER: gl.constexpr, FREE_BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """Bring the tokens of all rows, in units of ROWS rows x one of PIECES boxes; a token once, to all of its rows here.

    Each row and box adds 1 to the counter of the row's 64-row block, or BY_EXPERT to that of its expert. AFTER: nothing is
    written into an expert's rows before its counter at `free_counter` has reached `free_target` (times its blocks).
    Example, K = 2, rows 0 and 64 of one token: the unit of row 0 writes both, that of row 64 nothing.
    """
    BOX: gl.constexpr = moves.box_parts * moves.part
    BOXES: gl.constexpr = MOVER_SLOT_ELEMENTS // BOX
    ROWS: gl.constexpr = BOXES if BOXES < 8 else 8
    PIECES: gl.constexpr = (moves.parts + moves.box_parts - 1) // moves.box_parts
    boxes = moves.slots._reinterpret(gl.bfloat16, [MOVER_SLOTS * BOXES, 1, moves.box_parts, moves.part], PLAIN_ROWS)
    units = job.num_rows // ROWS * PIECES
    first = gl.program_id(0)
    slot = gl.to_tensor(0)
    if first < units:
        fetch_tokens(moves, peers, first, slot, boxes, FACT, ROWS, PIECES, BOXES)
    for unit in range(first, units, gl.num_programs(0)):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        for r in gl.static_range(ROWS):
            row = (unit // PIECES) * ROWS + r
            route = gl.load(peers.route_of_row + row)
            if is_first(moves, peers, route):
                start = route // moves.top_k * moves.top_k
                for k in range(moves.top_k):
                    target = gl.load(peers.row_of_route + start + k, mask=route >= 0, other=-1)
                    target = from_lane_0(gl.where((route < 0) & (k == 0), row, target))
                    if target >= 0:
                        if AFTER:
                            expert = gl.load(moves.expert_of_block + target // ROW_BLOCK)
                            goal = free_target
                            if FREE_BY_BLOCK:
                                goal = goal * ((gl.load(free_starts + expert + 1) - gl.load(free_starts + expert)) // ROW_BLOCK)
                            fence_async_global(wait_for(job.counters + free_counter + expert, goal, job.status, True))
                        tma_store(destination, [target, (unit % PIECES) * moves.box_parts, 0], boxes.index(slot * BOXES + r))
        ahead = unit + gl.num_programs(0)
        if ahead < units:
            # The other slot's stores were waited for below, one unit ago.
            fetch_tokens(moves, peers, ahead, slot ^ 1, boxes, FACT, ROWS, PIECES, BOXES)
        stores_complete(unit)
        barrier()
        fence_gpu(unit)
        for r in gl.static_range(ROWS):
            row = (unit // PIECES) * ROWS + r
            route = gl.load(peers.route_of_row + row)
            if is_first(moves, peers, route):
                start = route // moves.top_k * moves.top_k
                for k in range(moves.top_k):
                    target = gl.load(peers.row_of_route + start + k, mask=route >= 0, other=-1)
                    target = gl.where((route < 0) & (k == 0), row, target)
                    if target >= 0:
                        counter = target // ROW_BLOCK
                        if BY_EXPERT:
                            counter = gl.load(moves.expert_of_block + counter)
                        gl.atomic_add(job.counters + counter_of_row + counter, 1, sem="relaxed", scope="gpu")
        slot = slot ^ 1


@gluon.jit
def fetch_finished(source, moves, step, slot, boxes, ROWS: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr):
    mbarrier.expect(moves.full.index(slot), ROWS * moves.box_parts * moves.part * 2)
    for r in gl.static_range(ROWS):
        at = [(step // PIECES) * ROWS + r, (step % PIECES) * moves.box_parts, 0]
        tma_load(source, at, moves.full.index(slot), boxes.index(slot * BOXES + r))


@gluon.jit
def send_back(job, source, moves, peers, groups, at, partial, SUMS: gl.constexpr):
    """Return finished rows to the places of their routes, group by group, in units of ROWS rows; then raise their flags.

    SUMS: with each row its SUMS partial sums. Padding rows go nowhere.
    """
    BOX: gl.constexpr = moves.box_parts * moves.part
    BOXES: gl.constexpr = MOVER_SLOT_ELEMENTS // BOX
    ROWS: gl.constexpr = BOXES if BOXES < 8 else 8
    PIECES: gl.constexpr = (moves.parts + moves.box_parts - 1) // moves.box_parts
    LANES: gl.constexpr = 32 if moves.part >= 256 else moves.part // 8
    # One access of 16 bytes a lane at a time: the mover has few registers.
    CHUNK: gl.constexpr = 32 // LANES if moves.box_parts > 32 // LANES else moves.box_parts
    CHUNKS: gl.constexpr = moves.box_parts // CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [1, 1, 1], [2, 1, 0])
    part = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, moves.part, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    boxes = moves.slots._reinterpret(gl.bfloat16, [MOVER_SLOTS * BOXES, 1, moves.box_parts, moves.part], PLAIN_ROWS)
    chunks = moves.slots._reinterpret(gl.bfloat16, [MOVER_SLOTS * BOXES * CHUNKS, 1, CHUNK, moves.part], PLAIN_ROWS)
    H: gl.constexpr = moves.parts * moves.part
    steps = job.num_rows // ROWS * PIECES
    first = gl.program_id(0) * PIECES
    stride = gl.num_programs(0) * PIECES
    epoch = gl.load(peers.epoch)
    done = gl.to_tensor(0)
    for begin in range(first, steps, stride):
        group = gl.load(peers.group_of_block + (begin // PIECES) * ROWS // ROW_BLOCK)
        value = gl.to_tensor(0)
        while done <= group:
            value = wait_for(job.counters + groups.counter + done, gl.load(groups.target + done), job.status, True)
            done += 1
        fence_async_global(value)
        fetch_finished(source, moves, begin, at.slot, boxes, ROWS, PIECES, BOXES)
        for piece in gl.static_range(PIECES):
            after = at.next()
            if piece + 1 < PIECES:
                fetch_finished(source, moves, begin + piece + 1, after.slot, boxes, ROWS, PIECES, BOXES)
            mbarrier.wait(moves.full.index(at.slot), at.phase)
            for r in gl.static_range(ROWS):
                row = (begin // PIECES) * ROWS + r
                rank = gl.load(peers.rank_of_row + row)
                if rank >= 0:
                    place = gl.load(peers.place_of_row + row).to(gl.int64)
                    base = workspace(peers, rank, FACT_RETURNED)
                    target = gl.multiple_of(base.to(gl.pointer_type(gl.bfloat16)), 16) + place * H
                    for c in range(CHUNKS):
                        parts = piece * moves.box_parts + c * CHUNK + part
                        values = chunks.index((at.slot * BOXES + r) * CHUNKS + c).load(layout)
                        gl.store(target + parts * moves.part + lane, values, mask=(parts < moves.parts) & (lane >= 0))
            barrier()  # all lanes have read the slot before the next copy into it starts
            at = after
        for r in gl.static_range(ROWS):
            row = (begin // PIECES) * ROWS + r
            rank = gl.load(peers.rank_of_row + row)
            if SUMS > 0 and rank >= 0:
                send_sums(peers, partial, rank, row, SUMS)
        barrier()  # all lanes have stored their part of the rows
        fence_system(begin)
        for r in gl.static_range(ROWS):
            row = (begin // PIECES) * ROWS + r
            rank = gl.load(peers.rank_of_row + row)
            if rank >= 0:
                flags = workspace(peers, rank, FACT_FLAGS).to(gl.pointer_type(gl.int32))
                gl.atomic_xchg(flags + gl.load(peers.place_of_row + row), epoch, sem="relaxed", scope="sys")
    return at


@gluon.jit
def send_sums(peers, partial, rank, row, SUMS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    target = workspace(peers, rank, FACT_PARTIALS).to(gl.pointer_type(gl.float32))
    target += gl.load(peers.place_of_row + row).to(gl.int64) * SUMS
    for start in gl.static_range(0, SUMS, 32):
        column = start + gl.arange(0, 32, layout)
        value = gl.load(partial + row.to(gl.int64) * SUMS + column, mask=column < SUMS, other=0.0)
        gl.store(target + column, value, mask=column < SUMS)


@gluon.jit
def await_token(job, moves, peers, token):
    """Wait until all rows of `token` are back. Too long: the rank that was awaited goes into the status word, nobody waits on.

    All lanes poll the same flags, one slot after the other; the flag's acquire orders the reads that follow.
    """
    rank = gl.load(peers.facts + FACT_RANK)
    flags = (gl.load(peers.bases + rank) + gl.load(peers.facts + FACT_FLAGS)).to(gl.pointer_type(gl.int32))
    epoch = gl.load(peers.epoch)
    seen = epoch
    for k in range(moves.top_k):
        route = token * moves.top_k + k
        if gl.load(moves.row_of_route + route) >= 0:
            seen = from_lane_0(load_acquire_system(flags + route))
            if seen - epoch < 0:
                end = clock_ns(seen) + gl.load(peers.facts + FACT_LIMIT)
                waiting = gl.to_tensor(1)
                while waiting != 0:
                    seen = from_lane_0(load_acquire_system(flags + route))
                    stop = (load_acquire_system(peers.given_up) != 0) | (clock_ns(seen) > end)
                    waiting = from_lane_0(((seen - epoch < 0) & (stop == 0)).to(gl.int32))
                if seen - epoch < 0:
                    awaited = gl.load(peers.rank_of_route + route)
                    give_up(job.status, peers.given_up, (awaited << STATUS_RANK_SHIFT) | STATUS_NO_ROWS)
    return seen
