"""What `zdp-bench search` calls.

Raises:
    UserError: Optuna is not installed.
"""

from zdp_bench.errors import UserError

try:
    import optuna as optuna
except ImportError:
    raise UserError("zdp-bench search needs Optuna: `pip install 'zdp-bench[search]'`.") from None

from zdp_bench.extras.search.plan import make_search as make_search
from zdp_bench.extras.search.search import search as search
from zdp_bench.extras.search.space import read_space as read_space
from zdp_bench.extras.search.trials import Launch as Launch
