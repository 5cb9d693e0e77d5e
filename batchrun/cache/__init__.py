"""The KV cache: which blocks to keep, which to evict first, how much to leave for online bursts."""
