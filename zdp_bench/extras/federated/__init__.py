"""Federated training with Flower: nodes keep their patients' data and train one model together.

Riess et al. 2024, section 5. A round:

    server   sends the weights θ
    nodes    sample, clip, sum, write the ledger, add noise, send the sum
    server   averages the sums, takes an optimizer step: θ'

A node takes the same private steps as a central run (`training.step.private_step`: same Algorithm,
Mechanism, noise and ledger) on its own patients. Only noisy sums leave it, so the server may be
curious as long as it conducts the training honestly. The server, in turn, does not trust the nodes:
it counts releases itself and drops malformed messages. It averages the releases, weighted by the
nodes' expected batch sizes, and uses the mean as the gradient of the recipe's optimizer. This is
adaptive federated averaging (Reddi et al. 2021, Algorithm 2, with SGD on the nodes; the paper's
recipe uses NAdam on the server).

    runner.py        the settings, the plan of rounds, and what the core calls
    messages.py      the messages between server and nodes
    node.py          one node: its patients, noise and ledger, and the ClientApp around it
    roster.py        what the server knows about the nodes, and the steps they have taken
    server.py        the rounds, and the rules for nodes that fail, lie or answer late
    simulation.py    all nodes on one machine, one after the other
    network.py       the app that Flower's SuperLink and SuperNodes run
"""

import logging
import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before Flower is imported, because it reads it then
logging.getLogger("flwr").setLevel(logging.ERROR)  # at INFO, it logs every message
