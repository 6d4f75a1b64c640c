"""Floor 5: how a request passes from prefill to decode. No HTTP, no sampling, no scheduling."""
