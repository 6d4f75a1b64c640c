"""Floor 9: hands requests over from prefill to decode workers. It contains no HTTP, sampling or scheduling."""
