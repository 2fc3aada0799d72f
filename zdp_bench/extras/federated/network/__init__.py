"""A federation over the network, with TLS: a server and its nodes."""

from zdp_bench.extras.federated import flower  # before anything of Flower's: telemetry off

__all__ = ["flower"]
