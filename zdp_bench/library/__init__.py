"""zdp-bench for a model, a loop and data of your own; `import zdp_bench` has all of it.

make_private    arguments -> a `Private`, whose steps are those of a run
private         the `Private` itself: steps, ε, report, saved state
examples        a batch out of any torch Dataset
keys            what noise and batches of a training follow from
model_check     is this model protected by clipping?
clipped_sum     the sum of clipped gradients alone
"""

from zdp_bench.library.clipped_sum import clipped_sum
from zdp_bench.library.make_private import make_private
from zdp_bench.library.model_check import check_model
from zdp_bench.library.private import Private

__all__ = ["Private", "check_model", "clipped_sum", "make_private"]
