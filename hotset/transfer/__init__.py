"""Floor 3: moves byte spans between processes. Knows addresses and peers; no requests, models or pools."""
