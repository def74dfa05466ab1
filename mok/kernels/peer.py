"""Rows that travel between GPUs through one another's memory, in plain Triton: flags, bounded waits, pulls and returns.

Owns the protocol of a call over R ranks that share experts, and nothing of what is computed between its two halves:

| step | kernel | meets |
|---|---|---|
| this rank's routes are in its workspace | `publish_ids` | |
| every rank raises its flag everywhere, and waits for all flags | `raise_and_await` | release <-> acquire, system scope |
| the routes of all ranks, in slice order | `gather_ids` | |
| rows of every rank fit, or the call is empty on all of them | `keep_local` | |
| whose token each row holds | `trace_rows` | |
| rows are pulled from the workspaces of their tokens' ranks | `pull_rows`, `pull_weights` | |
| finished rows go to the place (token, slot) of the token's rank | `return_rows` | release, system scope |
| a rank waits until all of its rows are back | `await_rows` | acquire, system scope |

All ranks make the same calls in the same order, so all count the same epochs: a flag holds the epoch of the call it was raised
in and is never cleared. A row can come back only after it was pulled, and a call ends when all rows are back; so a workspace
may be written again then. Routes alone are kept twice, by the parity of the epoch: a rank to which no route went may still read
those of the call before. Memory of other ranks is reached through a table of base addresses; no multicast is used.

Waiting is bounded: who waited too long says so in the status word (`mok/launch/status.py`) and gives the workspace up, after
which nobody waits any more. Knows nothing of torch. Read next: `mok/launch/peer.py`, the launches; `mok/transport/peer.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.tasks import SIZE_ROWS

FLAG_STRIDE = tl.constexpr(8)  # int32 from flag to flag: each has 32 bytes of its own
HEADER = tl.constexpr(8)  # int32 before the routes of one parity: how many tokens there are, and room

STATUS_NO_RANK = tl.constexpr(4)
STATUS_NO_ROWS = tl.constexpr(8)
STATUS_TOO_MANY_ROWS = tl.constexpr(16)
STATUS_RANK_SHIFT = tl.constexpr(5)
STATUS_BLOCKS_SHIFT = tl.constexpr(12)


@triton.jit
def ints(bases, rank, offset):
    """Where in the workspace of `rank` the int32 at `offset` bytes are. Several ranks at once, or one."""
    return (tl.load(bases + rank) + offset).to(tl.pointer_type(tl.int32))


@triton.jit
def floats(bases, rank, offset):
    return (tl.load(bases + rank) + offset).to(tl.pointer_type(tl.float32))


@triton.jit
def values(bases, rank, offset):
    pointer = (tl.load(bases + rank) + offset).to(tl.pointer_type(tl.bfloat16))
    return tl.multiple_of(pointer, 16)


@triton.jit
def clock_ns():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def behind(flags, mask, epoch):
    """Which flags, int32 pointers, have not reached `epoch`; what their owners wrote before is visible for the others."""
    return mask & (tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys") - epoch < 0)


@triton.jit
def wait_until(flags, mask, epoch, given_up, limit_ns):
    """Poll until all flags have reached `epoch`. Returns those that had not when time was up, or the workspace given up."""
    late = behind(flags, mask, epoch)
    waiting = tl.max(late.to(tl.int32), axis=0) != 0
    if waiting:
        end = clock_ns() + limit_ns
        while waiting:
            late = behind(flags, mask, epoch)
            stop = (tl.atomic_add(given_up, 0, sem="relaxed") != 0) | (clock_ns() > end)
            waiting = (tl.max(late.to(tl.int32), axis=0) != 0) & (stop == 0)
    return late


@triton.jit
def give_up(status, given_up, reason, rank):
    """Leave `reason` and the rank that was awaited, unless somebody was first."""
    tl.atomic_cas(status, 0, (rank << STATUS_RANK_SHIFT) | reason)
    tl.atomic_or(given_up, 1)


@triton.jit(do_not_specialize=["rank", "num_tokens", "num_routes"])
def publish_ids(
    ids_N, bases, epoch, status, rank, ids_at, ids_stride, num_tokens, num_routes, num_experts, WIDTH: tl.constexpr
):
    """This rank's routes into its workspace, for the call that comes next; ids out of range as -1, with a mark in `status`.

    Program: WIDTH routes. Reads ids_N (any integer type). Writes int32 [HEADER + N] at ids_at + parity * ids_stride bytes.
    """
    parity = (tl.load(epoch) + 1) & 1
    header = ints(bases, rank, ids_at + parity * ids_stride)
    route = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = route < num_routes
    given = tl.load(ids_N + route, mask=exists, other=-1)
    valid = (given >= 0) & (given < num_experts)
    tl.store(header + HEADER + route, tl.where(valid, given, -1).to(tl.int32), mask=exists)
    if tl.max(((given != -1) & (valid == 0)).to(tl.int32), axis=0) != 0:
        tl.atomic_or(status, 2, sem="relaxed")  # `mok.kernels.plan.STATUS_BAD_IDS`
    if tl.program_id(0) == 0:
        tl.store(header, num_tokens)


@triton.jit
def meet(bases, epoch, given_up, status, rank, num_ranks, limit_ns, RANKS: tl.constexpr):
    """Raise this rank's flag in every workspace, and wait for all flags in its own. One warp or more, one program in all.

    Whatever was written before in this stream is visible to a rank that has seen the flag. RANKS: a power of two that holds
    num_ranks. Writes epoch + 1.
    """
    now = tl.load(epoch) + 1
    tl.debug_barrier()  # all threads have read it
    tl.store(epoch, now)
    peer = tl.arange(0, RANKS)
    real = peer < num_ranks
    base = tl.load(bases + peer, mask=real, other=0)
    tl.atomic_xchg(
        base.to(tl.pointer_type(tl.int32)) + rank * FLAG_STRIDE,
        tl.zeros_like(peer) + now,
        mask=real,
        sem="release",
        scope="sys",
    )
    late = wait_until(ints(bases, rank, 0) + peer * FLAG_STRIDE, real, now, given_up, limit_ns)
    first = tl.min(tl.where(late, peer, RANKS), axis=0)
    if first < RANKS:
        give_up(status, given_up, STATUS_NO_RANK, first)


@triton.jit(do_not_specialize=["rank"])
def raise_and_await(bases, epoch, given_up, status, rank, num_ranks, limit_ns, RANKS: tl.constexpr):
    """See `meet`."""
    meet(bases, epoch, given_up, status, rank, num_ranks, limit_ns, RANKS)


@triton.jit
def gather_ids(
    bases, epoch, all_ids, num_ranks, local_slices, routes_per_slice, ids_at, ids_stride, chunks,
    K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """all_ids[j, r, e] = id of route e of slice j of rank r: the slices of all ranks in the order of the call.

    Program: WIDTH routes of one slice. routes_per_slice: room for those of the rank with the most; -1 beyond a rank's own.
    Example, two ranks of one slice, room for 2 routes: rank 0 has ids (3, 1), rank 1 has (2): all_ids = (3, 1, 2, -1).
    """
    block = tl.program_id(0) // chunks
    j, r = block // num_ranks, block % num_ranks
    parity = tl.load(epoch) & 1
    header = ints(bases, r, ids_at + parity * ids_stride)
    own = tl.load(header) // local_slices * K
    route = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    ids = tl.load(header + HEADER + j * own + route, mask=route < own, other=-1)
    tl.store(all_ids + block.to(tl.int64) * routes_per_slice + route, ids, mask=route < routes_per_slice)


@triton.jit(do_not_specialize=["rank", "own_routes_per_slice"])
def keep_local(
    all_ids, expert_start, local_ids, slot_of_route_N, rank_of_route_N, status, given_up, rank, num_ranks, num_local_experts,
    row_capacity, local_slices, own_routes_per_slice, routes_per_slice, num_all_routes,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """local_ids = ids among this rank's experts, counted from its first, and -1 for those of others; and, of this rank's own
    routes, slot_of_route_N = the route itself or -1 where nothing comes back, rank_of_route_N = who computes it.

    If the experts of some rank get more rows than row_capacity, every rank finds that out here, marks it and goes on with an
    empty call. Program: WIDTH routes. Reads expert_start int32 [E + 1], padded rows of all experts before each.
    """
    peer = tl.arange(0, RANKS)
    real = peer < num_ranks
    last = tl.load(expert_start + (peer + 1) * num_local_experts, mask=real, other=0)
    rows = last - tl.load(expert_start + peer * num_local_experts, mask=real, other=0)
    most = tl.max(rows, axis=0)
    empty = (most > row_capacity) | (tl.load(given_up) != 0)
    if (most > row_capacity) & (tl.program_id(0) == 0):
        fullest = tl.min(tl.where(rows == most, peer, RANKS), axis=0)
        details = (fullest << STATUS_RANK_SHIFT) | (most // BLOCK << STATUS_BLOCKS_SHIFT)
        tl.atomic_cas(status, 0, details | STATUS_TOO_MANY_ROWS)
    route = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    exists = route < num_all_routes
    ids = tl.load(all_ids + route, mask=exists, other=-1)
    ids = tl.where(empty, -1, ids)
    local = ids - rank * num_local_experts
    tl.store(local_ids + route, tl.where((local >= 0) & (local < num_local_experts), local, -1), mask=exists)
    block = route // routes_per_slice
    within = route % routes_per_slice
    own = block // num_ranks * own_routes_per_slice + within
    mine = exists & (block % num_ranks == rank) & (within < own_routes_per_slice)
    tl.store(slot_of_route_N + own, tl.where(ids >= 0, own, -1).to(tl.int32), mask=mine)
    tl.store(rank_of_route_N + own, ids // num_local_experts, mask=mine)


@triton.jit
def trace_rows(
    bases, epoch, route_of_row_P, rank_of_row_P, place_of_row_P, self_of_row_P, num_rows, num_ranks, local_slices,
    routes_per_slice, ids_at, ids_stride, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Whose route each row holds: rank_of_row_P (-1 for padding), place_of_row_P = token * K + slot there; and self_of_row_P,
    the row itself or -1. Program: WIDTH rows. route_of_row_P counts in the order of `gather_ids`."""
    row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = row < num_rows
    route = tl.load(route_of_row_P + row, mask=exists, other=-1)
    used = route >= 0
    block = tl.where(used, route, 0) // routes_per_slice
    rank = block % num_ranks
    parity = tl.load(epoch) & 1
    base = tl.load(bases + rank, mask=used, other=0) + ids_at + parity * ids_stride
    own = tl.load(base.to(tl.pointer_type(tl.int32)), mask=used, other=0) // local_slices * K
    place = block // num_ranks * own + route % routes_per_slice
    tl.store(rank_of_row_P + row, tl.where(used, rank, -1), mask=exists)
    tl.store(place_of_row_P + row, tl.where(used, place, -1), mask=exists)
    tl.store(self_of_row_P + row, tl.where(used, row, -1), mask=exists)


@triton.jit
def pull_row(
    bases, offset, rows, rank_of_row_P, place_of_row_P, route_of_row_P, row_of_route_N, row, width,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Bring one row. A token that several experts of this rank want is read once, for the first of its rows, and written to all
    of them; padding rows become zeros."""
    rank = tl.load(rank_of_row_P + row)
    place = tl.load(place_of_row_P + row)
    route = tl.load(route_of_row_P + row)
    target = rows + tl.cast(row, tl.int64) * width
    if rank < 0:
        for start in range(0, width, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            tl.store(target + columns, tl.zeros((COLUMNS,), rows.dtype.element_ty), mask=columns < width)
    else:
        first = route >= 0
        for k in range(K):
            first = first & ((k >= route % K) | (tl.load(row_of_route_N + route // K * K + k) < 0))
        if first:
            source = values(bases, rank, offset) + (place // K).to(tl.int64) * width
            for start in range(0, width, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                row_values = tl.load(source + columns, mask=columns < width)
                for k in range(K):
                    twin = tl.load(row_of_route_N + route // K * K + k)
                    tl.store(rows + twin.to(tl.int64) * width + columns, row_values, mask=(columns < width) & (twin >= 0))


@triton.jit
def pull_rows(
    bases, offset, rows, rank_of_row_P, place_of_row_P, route_of_row_P, row_of_route_N, sizes, width,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """rows[p] = the token of row p, from the workspace of its rank; zeros for padding. Program: one row; see `pull_row`."""
    row = tl.program_id(0)
    if row < tl.load(sizes + SIZE_ROWS):
        pull_row(
            bases, offset, rows, rank_of_row_P, place_of_row_P, route_of_row_P, row_of_route_N, row, width, K, COLUMNS
        )  # fmt: skip


@triton.jit
def pull_weights(bases, offset, weight_of_row_P, rank_of_row_P, place_of_row_P, num_rows, WIDTH: tl.constexpr):
    """weight_of_row_P = the router weight of each row's route; +0 for padding. Program: WIDTH rows."""
    row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    rank = tl.load(rank_of_row_P + row, mask=row < num_rows, other=-1)
    used = rank >= 0
    base = (tl.load(bases + rank, mask=used, other=0) + offset).to(tl.pointer_type(tl.float32))
    place = tl.load(place_of_row_P + row, mask=used, other=0)
    tl.store(weight_of_row_P + row, tl.load(base + place, mask=used, other=0.0), mask=row < num_rows)


@triton.jit
def return_row(
    bases, epoch, rows, partial, rank_of_row_P, place_of_row_P, row, width, returned_at, flags_at, partials_at,
    SUMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Send one finished row to the place of its route, and its SUMS partial sums; then raise its flag."""
    rank = tl.load(rank_of_row_P + row)
    if rank >= 0:
        place = tl.load(place_of_row_P + row)
        target = values(bases, rank, returned_at) + place.to(tl.int64) * width
        for start in range(0, width, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            row_values = tl.load(rows + tl.cast(row, tl.int64) * width + columns, mask=columns < width)
            tl.store(target + columns, row_values, mask=columns < width)
        if SUMS > 0:
            for start in range(0, SUMS, 32):
                column = start + tl.arange(0, 32)
                sums = tl.load(partial + tl.cast(row, tl.int64) * SUMS + column, mask=column < SUMS)
                tl.store(floats(bases, rank, partials_at) + place.to(tl.int64) * SUMS + column, sums, mask=column < SUMS)
        tl.debug_barrier()  # all threads have stored their part of the row
        tl.atomic_xchg(ints(bases, rank, flags_at) + place, tl.load(epoch), sem="release", scope="sys")


@triton.jit
def return_rows(
    bases, epoch, rows, partial, rank_of_row_P, place_of_row_P, sizes, width, returned_at, flags_at, partials_at,
    SUMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every finished row goes home. Program: one row; see `return_row`."""
    row = tl.program_id(0)
    if row < tl.load(sizes + SIZE_ROWS):
        return_row(
            bases, epoch, rows, partial, rank_of_row_P, place_of_row_P, row, width, returned_at, flags_at, partials_at, SUMS,
            COLUMNS,
        )  # fmt: skip


@triton.jit
def await_routes(
    bases, epoch, given_up, status, slot_of_route_N, rank_of_route_N, rank, first_route, num_routes, flags_at, limit_ns,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of WIDTH routes of this rank."""
    route = first_route + tl.arange(0, WIDTH)
    slot = tl.load(slot_of_route_N + route, mask=route < num_routes, other=-1)
    late = wait_until(ints(bases, rank, flags_at) + slot, slot >= 0, tl.load(epoch), given_up, limit_ns)
    if tl.max(late.to(tl.int32), axis=0) != 0:
        missing = tl.load(rank_of_route_N + route, mask=late, other=2147483647)
        give_up(status, given_up, STATUS_NO_ROWS, tl.min(missing, axis=0))


@triton.jit(do_not_specialize=["rank", "num_routes"])
def await_rows(
    bases, epoch, given_up, status, slot_of_route_N, rank_of_route_N, rank, num_routes, flags_at, limit_ns,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Wait until the rows of all routes of this rank are back. Few programs, so that on a GPU that is shared between ranks
    those that wait leave room for those that are waited for."""
    for first in range(tl.program_id(0) * WIDTH, num_routes, tl.num_programs(0) * WIDTH):
        await_routes(
            bases, epoch, given_up, status, slot_of_route_N, rank_of_route_N, rank, first, num_routes, flags_at, limit_ns, WIDTH
        )  # fmt: skip
