"""Attacks that bound ε from below: what an adversary learns from one release, or from a whole run.

An accountant bounds ε from above if the code does what the proof assumes. An attack needs no such
assumption: if it tells two neighbours apart better than (ε, δ) allows, the claim is false, and the
audit flags it with the stated confidence. An attack that fails proves nothing; 'passes' means 'not
caught'.

    one release   The adversary sees many releases of each of two neighbouring sums, and tests along
                  the direction with the least noise, by distances, and by exactly equal numbers;
                  see `release.py`. Clopper-Pearson bounds on its hits and false alarms give the
                  bound on ε. It does not know what is wrong with the mechanism.
    one run       A fair coin puts each of m canaries in the training set or not; the adversary
                  guesses for those it is surest of and abstains for the rest (Steinke, Nasr &
                  Jagielski 2023, "Privacy auditing with one (1) training run"). Gradient canaries
                  are worst-case contributions of exactly the bound, seen by an adversary who knows
                  every other example and reads every release.

    many runs     `step` runs a function of somebody else's on two neighbours, many times each, and
                  tests which is which as for one release.

Every registered algorithm can be audited: the attacks need its mechanism, and run its private
steps.

    release.py   the attack on one release
    recipe.py    the attacks on a recipe: its release, and one run
    foreign.py   `step`, on a function of somebody else's
    script.py    finds that function in a script, for `zdp-bench audit my_script:function`
    examples/    scripts to copy, sound and broken
"""
