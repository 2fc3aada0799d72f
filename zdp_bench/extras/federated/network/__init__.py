"""The federation over the network: TLS endpoints, the server and the nodes."""
