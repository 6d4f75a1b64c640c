"""The router: one HTTP address in front of prefill and decode workers. It relays bytes and needs no torch."""
