"""Ten ways a file can be broken, for any adapter: each must end in one clear sentence."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from zdp_bench.errors import UserError


def refused(load: Callable[[], object], names: str, says: str) -> None:
    """Loading ends in one UserError: a single sentence-like line that names `names` and matches `says`."""
    with pytest.raises(UserError) as caught:
        load()
    sentence = str(caught.value)
    assert "\n" not in sentence, sentence
    assert sentence.endswith("."), sentence
    assert names in sentence, sentence
    assert re.search(says, sentence), sentence
