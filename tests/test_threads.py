"""Work in pieces on several threads."""

from collections.abc import Callable

import numpy as np
import pytest

from zdp_bench.threads import run_parallel


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_parts_cover_everything_once(
    threads: int, count: int, set_threads: Callable[[int], None]
) -> None:
    done = np.zeros(count, dtype=int)
    starts = []

    def work(start: int, stop: int) -> None:
        starts.append(start)
        done[start:stop] += 1

    set_threads(threads)
    run_parallel(work, count)
    assert (done == 1).all()
    assert len(starts) == max(1, min(threads, count))


def test_an_error_on_another_thread_is_raised_here(set_threads: Callable[[int], None]) -> None:
    def work(start: int, stop: int) -> None:
        if start:
            raise ZeroDivisionError

    set_threads(2)
    with pytest.raises(ZeroDivisionError):
        run_parallel(work, 100)
