"""`zdp-bench search`: Optuna proposes hyper-parameters, and each trial is an ordinary run.

`space` reads what to vary, `plan` what is asked, `study` keeps the trials, `noise` keeps them
within one ε, `score` says how good one was, `search` carries the whole out, and `outcome` says
what it found and spent.

Raises:
    UserError: Optuna is not installed.
"""

from zdp_bench.errors import UserError

try:
    import optuna as optuna
except ImportError:
    raise UserError("zdp-bench search needs Optuna: `pip install 'zdp-bench[search]'`.") from None

from zdp_bench.experiments.search.plan import make_search as make_search
from zdp_bench.experiments.search.search import search as search
from zdp_bench.experiments.search.space import read_space as read_space
from zdp_bench.experiments.search.trials import Launch as Launch
