"""Audit: attacks on one release or on a whole run, which bound ε from below.

An accountant bounds ε from above, provided that the code does what the proof assumes. An attack
needs no such assumption: if it distinguishes two neighbouring data sets better than (ε, δ) allows,
the claim is false, and the audit flags it with the stated confidence. An attack that fails proves
nothing: 'passes' means 'not caught'.

    one release   The adversary sees many releases of each of two neighbouring sums, without knowing
                  what is wrong with the mechanism. It tests the projection on the direction with
                  the least noise, distances, and exactly equal numbers; see `release.py`.
                  Clopper-Pearson bounds on its hits and false alarms bound ε.
    one run       Each of m canaries is included in the training set with probability 1/2. The
                  adversary guesses for the canaries with the most extreme scores, and abstains for
                  the others (Steinke, Nasr & Jagielski 2023, "Privacy auditing with one (1)
                  training run"). Gradient canaries are worst-case contributions, whose norm is
                  exactly the bound. The adversary knows all other examples and sees every release.
    many runs     `step` runs third-party training code many times on each of two neighbouring data
                  sets, and distinguishes them as for one release.

Every registered algorithm can be audited: the attacks need only its mechanism and its private
steps.

    release.py   the attack on one release
    recipe.py    the attacks on a recipe: on its release, and on one run
    foreign.py   `step`, the attack on third-party training code
    script.py    finds the function to attack for `zdp-bench audit my_script:function`
    examples/    scripts to copy, correct and faulty
"""
