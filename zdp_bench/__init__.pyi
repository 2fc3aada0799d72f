from zdp_bench import nn as nn
from zdp_bench.errors import UserError as UserError
from zdp_bench.extras.sharing.loading import load as load
from zdp_bench.library import Private as Private
from zdp_bench.library import check_model as check_model
from zdp_bench.library import clipped_sum as clipped_sum
from zdp_bench.library import make_private as make_private
from zdp_bench.privacy.accounting import tight_epsilon as tight_epsilon
from zdp_bench.privacy.calibration import calibrate_mechanism as calibrate  # noqa: F401
from zdp_bench.privacy.mechanism import Block as Block
from zdp_bench.privacy.mechanism import Mechanism as Mechanism
from zdp_bench.privacy.mechanism import Sampling as Sampling
from zdp_bench.representations import represent as represent

__version__: str
