"""The durable store: jobs, append-only results, and the lock that keeps two daemons apart."""
