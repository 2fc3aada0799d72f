"""Training scripts to audit, right ones and broken ones, on small networks.

Each shows the protocol of `zdp-bench audit module:function`: EXAMPLES, CLAIMED, and functions.

    by_hand       DP-SGD written by hand, full batches: right, and with two faults
    opacus_loop   an epoch with Opacus, Poisson batches (right) and shuffled ones

The other examples are blank and the networks have no bias, so that only the canary and the noise
move the weights: that is the worst case, and tells most in the fewest runs.
"""
