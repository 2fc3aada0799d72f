"""CPU kernels compiled by numba. `nn`, `gradients` and `privacy` call them; nothing depends on them for its result."""
