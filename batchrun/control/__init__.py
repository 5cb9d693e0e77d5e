"""Driving a deployment from outside, as the command line and Python do."""
