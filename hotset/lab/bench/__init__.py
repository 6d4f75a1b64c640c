"""Measures an OpenAI-compatible server over HTTP: the load, the requests, their latencies, and the report."""
