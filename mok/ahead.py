"""Work done on threads a little ahead of whoever asks for it, in order.

Owns how far ahead that is, which bounds the memory of results that nobody has taken yet. For work that leaves Python for long:
reading, hashing, drawing numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ahead"]

X = TypeVar("X")
Y = TypeVar("Y")


def ahead(work: Callable[[X], Y], items: Iterable[X], threads: int) -> Iterator[Y]:
    """`work` of each item, in order, on `threads` threads; of no more than threads + 1 items before they are asked for.

    The items are taken one by one by the thread that asks. What `work` raises is raised where its result would have come.
    """
    waiting: deque[Future[Y]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
