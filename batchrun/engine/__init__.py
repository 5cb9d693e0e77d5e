"""Start, watch, restart and call engines."""
