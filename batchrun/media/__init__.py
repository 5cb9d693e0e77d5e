"""Images in requests: what they are, and the addresses that they may come from."""
