"""The mover warp: dispatch copies token rows into expert order, combine sums the rows of a token in slot order.

Owns rule 4 of docs/numerics.md: products and sums rounded apart, in fp32, slots in order, one rounding at the end. The last
tokens are left to the consumers, whose warps are free when their tiles are done (`combine_rest`).
Read next: `mok/kernels/mega.py`.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mok.kernels.gluon_compat import barrier, record, tma_load, tma_store
from mok.kernels.peer_mover import FACT_DY, FACT_X, await_token, pull, send_back
from mok.kernels.ring import (
    MOVER_SLOT_ELEMENTS,
    MOVER_SLOTS,
    PLAIN_ROWS,
    TRACE_BEGUN,
    TRACE_BROUGHT,
    TRACE_COMBINED,
    TRACE_RETURNED,
    Cursor,
    fence_async_global,
    note_time,
    signal,
    stores_complete,
    wait_for,
)
from mok.kernels.tasks import DX, ROW_BLOCK, TILE_N


@record
class Moves:
    """The mover's tables and slots. One row of H columns travels as `pieces` boxes of [box_parts, part] elements."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    route_of_row: gl.tensor
    expert_of_block: gl.tensor
    row_of_route: gl.tensor
    weights: gl.tensor
    shared: gl.tensor
    shared_scale: gl.tensor
    out: gl.tensor
    shared_counter: gl.tensor
    num_tokens: gl.tensor
    mover_tokens: gl.tensor
    top_k: gl.constexpr
    parts: gl.constexpr
    part: gl.constexpr
    box_parts: gl.constexpr
    has_shared: gl.constexpr
    has_scale: gl.constexpr
    peers: gl.tuple
    has_peers: gl.constexpr


@record
class Groups:
    """Tokens in the order in which their last group of tiles completes."""

    token: gl.tensor
    group: gl.tensor
    target: gl.tensor
    counter: gl.tensor


@record
class Rest:
    """What is summed when all tiles are done: rows [P, H], tokens in order of completion, and the tiles of rows in all."""

    rows: gl.tensor
    token_order: gl.tensor
    total_target: gl.tensor


@record
class Free:
    """A counter for each expert that says when its rows may be written over: `target` signals, times the expert's 64-row blocks
    if `by_block`."""

    counter: gl.tensor
    target: gl.tensor
    expert_start: gl.tensor
    by_block: gl.constexpr


@gluon.jit
def target_of(free, expert):
    target = free.target
    if free.by_block:
        target = target * ((gl.load(free.expert_start + expert + 1) - gl.load(free.expert_start + expert)) // ROW_BLOCK)
    return target


@gluon.jit
def fetch_rows(source, moves, unit, slot, boxes, ROWS: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr):
    """Start the copies of one unit into a slot. A padding row has no route: its box lies outside and arrives as zeros."""
    mbarrier.expect(moves.full.index(slot), ROWS * moves.box_parts * moves.part * 2)
    for r in gl.static_range(ROWS):
        route = gl.load(moves.route_of_row + (unit // PIECES) * ROWS + r)
        token = gl.where(route >= 0, route // moves.top_k, -1)
        tma_load(source, [token, (unit % PIECES) * moves.box_parts, 0], moves.full.index(slot), boxes.index(slot * BOXES + r))


@gluon.jit
def dispatch(job, source, destination, moves, at, counter_of_unit, BY_EXPERT: gl.constexpr, free, AFTER: gl.constexpr):
    """Copy token rows into expert order, in units of ROWS rows x one of PIECES boxes, two units in flight.

    Each unit adds 1 to the counter of its 64-row block, or BY_EXPERT to that of its expert. AFTER: nothing is written before
    the expert's counter of `free` has reached its target, when nobody reads what its rows held before.
    """
    BOX: gl.constexpr = moves.box_parts * moves.part
    BOXES: gl.constexpr = MOVER_SLOT_ELEMENTS // BOX  # that a slot holds
    ROWS: gl.constexpr = BOXES if BOXES < 8 else 8
    PIECES: gl.constexpr = (moves.parts + moves.box_parts - 1) // moves.box_parts
    boxes = moves.slots._reinterpret(gl.bfloat16, [MOVER_SLOTS * BOXES, 1, moves.box_parts, moves.part], PLAIN_ROWS)
    units = job.num_rows // ROWS * PIECES
    first = gl.program_id(0)
    free_expert = gl.to_tensor(-1)
    if first < units:
        fetch_rows(source, moves, first, at.slot, boxes, ROWS, PIECES, BOXES)
    for unit in range(first, units, gl.num_programs(0)):
        mbarrier.wait(moves.full.index(at.slot), at.phase)
        block = (unit // PIECES) * ROWS // ROW_BLOCK
        if BY_EXPERT or AFTER:
            expert = gl.load(moves.expert_of_block + block)
        if AFTER:  # noqa: SIM102 (the compiler decides this one, the program the next)
            if expert != free_expert:
                fence_async_global(wait_for(job.counters + free.counter + expert, target_of(free, expert), job.status, True))
                free_expert = expert
        for r in gl.static_range(ROWS):
            tma_store(
                destination,
                [(unit // PIECES) * ROWS + r, (unit % PIECES) * moves.box_parts, 0],
                boxes.index(at.slot * BOXES + r),
            )
        ahead = unit + gl.num_programs(0)
        after = at.next()
        if ahead < units:
            # The other slot's stores were waited for below, one unit ago.
            fetch_rows(source, moves, ahead, after.slot, boxes, ROWS, PIECES, BOXES)
        stores_complete(unit)
        barrier()
        if BY_EXPERT:
            signal(job.counters + counter_of_unit + expert)
        else:
            signal(job.counters + counter_of_unit + block)
        at = after
    return at


@gluon.jit
def fetch_slots(rows, moves, unit, token, slot, boxes, SLOTS: gl.constexpr, ROUNDS: gl.constexpr, BOX_PARTS: gl.constexpr):
    """Start the copies of SLOTS rows of one token, one column chunk; a masked or missing route arrives as zeros."""
    mbarrier.expect(moves.full.index(slot), SLOTS * BOX_PARTS * moves.part * 2)
    chunk = unit // ROUNDS
    for k in gl.static_range(SLOTS):
        index = (unit % ROUNDS) * SLOTS + k
        row = gl.load(moves.row_of_route + token * moves.top_k + index, mask=index < moves.top_k, other=-1)
        tma_load(rows, [row, chunk * BOX_PARTS, 0], moves.full.index(slot), boxes.index(slot * SLOTS + k))


@gluon.jit
def groups_up_to(job, groups, done, index):
    """Wait for every group up to the one that completes token `index` of the sorted order; `done` is the next group."""
    last = gl.load(groups.group + index)
    value = gl.to_tensor(0)
    while done <= last:
        value = wait_for(job.counters + groups.counter + done, gl.load(groups.target + done), job.status, True)
        done += 1
    fence_async_global(value)
    return done


@gluon.jit
def rows_of(job, moves, groups, done, index):
    """Wait for the rows of token `index` of the sorted order: for groups of tiles, or for the ranks that return them."""
    if moves.has_peers:
        fence_async_global(await_token(job, moves, moves.peers[0], gl.load(groups.token + index)))
    else:
        done = groups_up_to(job, groups, done, index)
    return done


@gluon.jit
def combine(job, rows, moves, groups, at, WEIGHTED: gl.constexpr):
    """Sum rows of y_rows (weighted) or dx_rows for this program's share of the first `mover_tokens` tokens.

    out[t, :] = rn_bf16(chain over k of rn(w[t, k] * rows[row_of_route[t, k], :]), then the shared experts' row), fp32.
    A unit is (token, chunk of columns, round of SLOTS routes); the accumulator lives through the rounds of a chunk.
    """
    SLOTS: gl.constexpr = 8 if moves.top_k > 4 else (4 if moves.top_k > 2 else 2)
    ROUNDS: gl.constexpr = (moves.top_k + SLOTS - 1) // SLOTS
    BOX_PARTS: gl.constexpr = MOVER_SLOT_ELEMENTS // SLOTS // moves.part
    CHUNKS: gl.constexpr = (moves.parts + BOX_PARTS - 1) // BOX_PARTS
    LANES: gl.constexpr = 32 if moves.part >= 256 else moves.part // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [1, 1, 1], [2, 1, 0])
    part = gl.arange(0, BOX_PARTS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, moves.part, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    boxes = moves.slots._reinterpret(gl.bfloat16, [MOVER_SLOTS * SLOTS, 1, BOX_PARTS, moves.part], PLAIN_ROWS)
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    units = gl.to_tensor(0)
    done = gl.to_tensor(0)
    if first < moves.mover_tokens:
        wait_for_shared(job, moves)
        units = ((moves.mover_tokens - 1 - first) // stride + 1) * (CHUNKS * ROUNDS)
        done = rows_of(job, moves, groups, done, first)
        fetch_slots(rows, moves, 0, gl.load(groups.token + first), at.slot, boxes, SLOTS, ROUNDS, BOX_PARTS)
    accumulator = gl.zeros([1, BOX_PARTS, moves.part], gl.float32, layout)
    for i in range(units):
        index = first + (i // (CHUNKS * ROUNDS)) * stride
        unit = i % (CHUNKS * ROUNDS)
        after = at.next()
        if i + 1 < units:
            index_ahead = first + ((i + 1) // (CHUNKS * ROUNDS)) * stride
            if (i + 1) % (CHUNKS * ROUNDS) == 0:
                done = rows_of(job, moves, groups, done, index_ahead)
            token_ahead = gl.load(groups.token + index_ahead)
            fetch_slots(rows, moves, (i + 1) % (CHUNKS * ROUNDS), token_ahead, after.slot, boxes, SLOTS, ROUNDS, BOX_PARTS)
        token = gl.load(groups.token + index)
        parts = (unit // ROUNDS) * BOX_PARTS + part
        here = token.to(gl.int64) * (moves.parts * moves.part) + parts * moves.part + lane
        mbarrier.wait(moves.full.index(at.slot), at.phase)
        if unit % ROUNDS == 0:
            accumulator = gl.zeros([1, BOX_PARTS, moves.part], gl.float32, layout)
        for k in gl.static_range(SLOTS):
            value = boxes.index(at.slot * SLOTS + k).load(layout).to(gl.float32)
            if WEIGHTED:
                slot = (unit % ROUNDS) * SLOTS + k
                value = value * route_weight(moves, token, slot)
            accumulator = accumulator + value
        if unit % ROUNDS == ROUNDS - 1:
            if moves.has_shared:
                accumulator = accumulator + shared_row(moves, token, here, parts < moves.parts, WEIGHTED)
            gl.store(moves.out + here, accumulator.to(gl.bfloat16), mask=parts < moves.parts)
        barrier()  # all lanes have read the slot before the next copy into it starts
        at = after


@gluon.jit
def wait_for_shared(job, moves):
    """Until every row of the shared experts is there; their tasks opened the list."""
    if moves.has_shared:
        blocks = (moves.num_tokens + ROW_BLOCK - 1) // ROW_BLOCK
        target = blocks * ((moves.parts * moves.part + TILE_N - 1) // TILE_N)
        wait_for(job.counters + moves.shared_counter, target, job.status, True)


@gluon.jit
def shared_row(moves, token, here, inside, WEIGHTED: gl.constexpr):
    """What the shared experts add to the sum of `token`, in fp32, times its scale if there is one."""
    value = gl.load(moves.shared + here, mask=inside, other=0.0).to(gl.float32)
    if WEIGHTED and moves.has_scale:
        value = value * gl.load(moves.shared_scale + token)
    return value


@gluon.jit
def route_weight(moves, token, slot):
    """The router weight of (token, slot), +0 for a masked or missing route whatever is stored there."""
    route = token * moves.top_k + slot
    row = gl.load(moves.row_of_route + route, mask=slot < moves.top_k, other=-1)
    return gl.load(moves.weights + route, mask=row >= 0, other=0.0)


@gluon.jit
def combine_rest(
    job, moves, rest, WEIGHTED: gl.constexpr, PARTITION: gl.constexpr, PARTITIONS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The tokens that the movers leave, by the partitions of WARPS warps whose tiles are done. The same sums as `combine`.

    A warp sums one token, 1024 columns at a time; all its rows are on their way before the first is added.
    """
    COLUMNS: gl.constexpr = 1024
    SLOTS: gl.constexpr = 8 if moves.top_k > 8 else moves.top_k
    H: gl.constexpr = moves.parts * moves.part
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    of_tokens: gl.constexpr = gl.SliceLayout(1, layout)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    warp = gl.arange(0, WARPS, of_tokens)
    begin = moves.mover_tokens + (gl.program_id(0) * PARTITIONS + PARTITION) * WARPS
    if begin < moves.num_tokens:
        if not moves.has_peers:
            wait_for(job.counters, rest.total_target, job.status, True)
        wait_for_shared(job, moves)
    for first in range(begin, moves.num_tokens, gl.num_programs(0) * PARTITIONS * WARPS):
        exists = first + warp < moves.num_tokens
        token = gl.load(rest.token_order + first + warp, mask=exists, other=0)
        if moves.has_peers:
            for other in range(first, gl.minimum(first + WARPS, moves.num_tokens)):
                await_token(job, moves, moves.peers[0], gl.load(rest.token_order + other))
        for chunk in range((H + COLUMNS - 1) // COLUMNS):
            at = chunk * COLUMNS + columns
            accumulator = gl.zeros([WARPS, COLUMNS], gl.float32, layout)
            for start in range(0, moves.top_k, SLOTS):
                for k in gl.static_range(SLOTS):
                    slot = start + k
                    route = token * moves.top_k + slot
                    row = gl.load(moves.row_of_route + route, mask=exists & (slot < moves.top_k), other=-1)
                    place = row.to(gl.int64)[:, None] * H + at
                    value = gl.load(rest.rows + place, mask=(row >= 0)[:, None] & (at < H), other=0.0).to(gl.float32)
                    if WEIGHTED:
                        value = value * gl.load(moves.weights + route, mask=row >= 0, other=0.0)[:, None]
                    accumulator = accumulator + value
            here = token.to(gl.int64)[:, None] * H + at
            inside = exists[:, None] & (at < H)
            if moves.has_shared:
                value = gl.load(moves.shared + here, mask=inside, other=0.0).to(gl.float32)
                if WEIGHTED and moves.has_scale:
                    value = value * gl.load(moves.shared_scale + token)[:, None]
                accumulator = accumulator + value
            gl.store(moves.out + here, accumulator.to(gl.bfloat16), mask=inside)


@gluon.jit
def note_move(job, EVENT: gl.constexpr):
    """For a traced launch, how far this program's mover is."""
    note_time(job, job.num_tasks + gl.program_id(0), EVENT)


@gluon.jit
def move_forward(job, x, x_rows, y_rows, x_moves, moves, groups):
    """x_moves: how rows of x travel, which may be codes; moves: how rows of y do."""
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), MOVER_SLOTS)
    note_move(job, TRACE_BEGUN)
    if moves.has_peers:
        pull(job, x_rows, moves, moves.peers[0], FACT_X, 1, False, 0, 0, moves.expert_of_block, False, False)
        note_move(job, TRACE_BROUGHT)
        # The tiles of DOWN have written their rows over those of x.
        at = send_back(job, x_rows, moves, moves.peers[0], groups, at, moves.weights, 0)
        note_move(job, TRACE_RETURNED)
    else:
        at = dispatch(job, x, x_rows, x_moves, at, 1, False, 0, False)
        note_move(job, TRACE_BROUGHT)
    combine(job, y_rows, moves, groups, at, True)
    note_move(job, TRACE_COMBINED)


@gluon.jit
def move_backward(
    job, dy, dy_rows, x, x_rows, dx_rows, moves, groups, x_counter, x_free, again_counter, dy_free, sums, LAST: gl.constexpr
):  # fmt: skip
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), MOVER_SLOTS)
    note_move(job, TRACE_BEGUN)
    if moves.has_peers:
        peers = moves.peers[0]
        if job.again:
            pull(job, x_rows, moves, peers, FACT_X, again_counter, False, 0, 0, moves.expert_of_block, False, False)
        pull(
            job, dy_rows, moves, peers, FACT_DY, 1, False, dy_free.counter, dy_free.target, dy_free.expert_start, job.again,
            dy_free.by_block,
        )  # fmt: skip
        if LAST > DX:
            pull(
                job, x_rows, moves, peers, FACT_X, x_counter, True, x_free.counter, x_free.target, x_free.expert_start, True,
                x_free.by_block,
            )  # fmt: skip
        note_move(job, TRACE_BROUGHT)
        at = send_back(job, dy_rows, moves, peers, groups, at, sums.routed, sums.count)
        note_move(job, TRACE_RETURNED)
    else:
        if job.again:
            at = dispatch(job, x, x_rows, moves, at, again_counter, False, 0, False)
        at = dispatch(job, dy, dy_rows, moves, at, 1, False, dy_free, job.again)
        if LAST > DX:
            at = dispatch(job, x, x_rows, moves, at, x_counter, True, x_free, True)
        note_move(job, TRACE_BROUGHT)
    combine(job, dx_rows, moves, groups, at, False)
    note_move(job, TRACE_COMBINED)


@gluon.jit
def move_backward_coded(
    job, x_codes, x_code_rows, dy_codes, dy_code_rows, dy, dy_rows, x, x_rows, dx_rows, code_moves, moves, groups, dy_counter,
    x_counter, x_free, again_counter, LAST: gl.constexpr,
):  # fmt: skip
    """As `move_backward`; tiles multiply codes, moved as `code_moves` say, and only weight gradients read rows of dy and x."""
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), MOVER_SLOTS)
    if job.again:
        at = dispatch(job, x_codes, x_code_rows, code_moves, at, again_counter, False, 0, False)
    at = dispatch(job, dy_codes, dy_code_rows, code_moves, at, 1, False, 0, False)
    if LAST > DX:
        at = dispatch(job, dy, dy_rows, moves, at, dy_counter, True, 0, False)
        at = dispatch(job, x, x_rows, moves, at, x_counter, True, x_free, True)
    combine(job, dx_rows, moves, groups, at, False)
