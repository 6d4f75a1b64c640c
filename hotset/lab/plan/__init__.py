"""Predicts what a model needs and delivers on a machine: memory, requests at once, step times and tokens per second."""
