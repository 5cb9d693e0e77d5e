"""Estimates: how long a step takes, how much KV online requests will want.

Pure: no clock, no random source, no other part of batchrun but its errors.
"""
