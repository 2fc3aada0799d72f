"""zdp-bench for your own model, loop and data; `import zdp_bench` exports all of it.

build           `make_private`: builds a `Private` from a model, an optimizer and a dataset
arguments       checks of its arguments
private         `Private`: steps, ε, report, saved state
examples        batches of any torch Dataset
units           the owners of examples, with `unit=`
journal         the ledger and the saved state on disk
keys            keys that seed noise and batches
starts          the private trainings that starting weights come from
optimizers      the optimizers of a training, with an optional regulariser
model_check     `check_model`: does clipping protect this model?
sums            `clipped_sum`: the sum of clipped gradients, without noise
"""

from zdp_bench.library.build import make_private
from zdp_bench.library.model_check import check_model
from zdp_bench.library.private import Private
from zdp_bench.library.sums import clipped_sum

__all__ = ["Private", "check_model", "clipped_sum", "make_private"]
