"""Runs the workers of one engine on the nodes of a Ray cluster."""
