"""Processes and devices: mesh, collectives, data parallelism."""
