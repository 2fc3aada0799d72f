"""Attack a private training of one's own, written with whatever library.

foreign.py   runs a function on two neighbours, many times each, and holds it against the ε claimed
script.py    finds the function in a script, for `zdp-bench audit my_script:function`
examples/    scripts to copy, sound and broken
"""
