"""Training scripts to audit, correct and faulty, with small networks.

Each follows the protocol of `zdp-bench audit module:function`: EXAMPLES, CLAIMED, and functions.

    by_hand       DP-SGD written by hand, with full batches: correct, and with two faults
    opacus_loop   an epoch with Opacus: with Poisson batches (correct), and with shuffled batches

The known examples are blank and the networks have no bias, so that only the canary and the noise
move the weights. This is the worst case, which needs the fewest runs.
"""
