"""A federation on Flower: nodes keep their patients and train one model together.

Riess et al. 2024, section 5:

    server:  weights θ  ──>  every node:  sample, clip, sum, noise, ledger  ──>  server:  mean,
        step, θ'

A node takes the same private steps as a central run (`training.step.private_step`: same Algorithm,
Mechanism, noise and ledger) on its own patients. What leaves it is noisy already, so the server
need only be honest about the training, and may be curious. The server in turn trusts no node: it
counts releases itself and drops malformed messages. It averages the releases, weighted by the
nodes' expected batches, and hands the mean to the recipe's own optimiser as a gradient: adaptive
federated averaging (Reddi et al. 2021, Algorithm 2, with SGD on the nodes; NAdam in the paper's
recipe).

    messages.py      what travels
    node.py          one node: its patients, its noise, its ledger, and the ClientApp around it
    roster.py        what the server knows of the nodes, and what they have spent
    server.py        the rounds, and the rule for nodes that fail, lie or come late
    simulation.py    all nodes on one machine, one after the other
    network.py       the app that Flower's SuperLink and SuperNodes run
"""

import logging
import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # Flower reads it when it is imported
logging.getLogger("flwr").setLevel(logging.ERROR)  # it tells of every message
