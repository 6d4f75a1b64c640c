"""Replays recorded selections against hot buffers of other sizes and policies, and simulates traffic."""
