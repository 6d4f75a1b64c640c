"""The router: one address in front of prefill and decode workers. It moves bytes and knows no tensors."""
