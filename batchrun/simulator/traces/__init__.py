"""Traces of online calls: read, change, look at and keep them."""
