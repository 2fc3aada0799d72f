"""zdp-bench for your own model, loop and data; `import zdp_bench` exports all of it.

build           `make_private`: from a model, an optimiser and a dataset to a `Private`
private         the `Private` itself: steps, ε, report, saved state
examples        a batch out of any torch Dataset; whose the examples are, with `unit=`
keys            keys that seed noise and batches
starts          which private trainings the starting weights went through
model_check     `check_model`: is this model protected by clipping?
sums            `clipped_sum`: the sum of clipped gradients alone
"""

from zdp_bench.library.build import make_private
from zdp_bench.library.model_check import check_model
from zdp_bench.library.private import Private
from zdp_bench.library.sums import clipped_sum

__all__ = ["Private", "check_model", "clipped_sum", "make_private"]
