"""A federation on Flower: nodes keep their patients to themselves and train one model together (Riess et al. 2024, section 5).

    server:  weights θ  --Message-->  every node:  sample, clip, sum, noise, ledger  --Message-->  server:  mean, optimiser, θ'

A node takes the very steps of a central run (`engine.private_step`: the same Algorithm, Mechanism, noise and ledger) on its own
patients; what leaves it is noisy already, so the server need only be honest about the training, and may be curious. The server
in turn trusts no node's word: it counts what it asked for itself, and drops what is not as it should be. It averages what the
nodes release, weighed by their expected batches, and hands the mean to the recipe's own optimiser as a gradient: adaptive
federated averaging (Reddi et al. 2021, Algorithm 2, with SGD on the nodes; NAdam in the paper's recipe).

    flower.py      the one door to what Flower makes public: telemetry off, a sentence where it is not installed
    network/fleet.py       all that is taken from Flower's private modules: both ends of a connection, and who may speak
    partition.py   whose patients are where, and how many steps that makes
    messages.py    what travels
    node.py        one node: its patients, its noise, its ledger
    client.py      the ClientApp around it
    roster.py      what the server knows of the nodes, and what they have spent
    server.py      the ServerApp: the rounds, and the rule for nodes that die, answer nonsense or come late
    simulation.py  all nodes on one machine
    network/endpoint.py    where the server is, and the files that say who it is and who its nodes are
    network/superlink.py   the server over the network, with TLS
    network/supernode.py   a node over the network

The same two apps run in all three ways: one node after the other in this process, on Ray, over the network.
"""
