"""Work cut among threads: every part once, and errors reach the caller."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from zdp_bench.privacy.threads import run_parallel


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("count", "unit"), [(0, 5), (1, 5), (99, 10), (100, 10), (101, 1)])
def test_parts_cover_everything_once_and_begin_at_multiples(
    threads: int, count: int, unit: int, set_threads: Callable[[int], None]
) -> None:
    done = np.zeros(count, dtype=int)
    starts = []

    def work(start: int, stop: int) -> None:
        starts.append(start)
        done[start:stop] += 1

    set_threads(threads)
    run_parallel(work, count, unit, min_parallel=20)
    assert (done == 1).all()
    assert all(start % unit == 0 for start in starts)
    assert len(starts) == (threads if count > 20 else 1)


def test_an_error_on_another_thread_is_raised_here(set_threads: Callable[[int], None]) -> None:
    def work(start: int, stop: int) -> None:
        if start:
            raise ZeroDivisionError

    set_threads(2)
    with pytest.raises(ZeroDivisionError):
        run_parallel(work, 100, 1, min_parallel=0)
