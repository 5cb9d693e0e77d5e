"""The daemon's HTTP edge."""
