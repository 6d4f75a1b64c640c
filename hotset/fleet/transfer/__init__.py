"""Floor 8: moves byte spans between processes. It handles addresses and peers, not requests, models or pools."""
